"""What is static about a scan: its sizes, and into which blocks of chunks and heads it is cut."""

import itertools
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments.gla import Gates, Problem
from tpu_kernels._lib.chip import LANES

MIB = 2**20
VMEM_LIMIT = 56 * MIB  # of the 64 that the smallest of v5e, v5p, v6e and tpu7x has
VMEM_BUDGET = 40 * MIB  # of that for blocks, states and what else is planned here
BLOCK_TOKENS = 512  # of a grid step, where chunks are shorter
HEADS = 8  # of a grid step at most: independent work for the scheduler
# Rows of all heads of a step's chunks at most, by gate: with more a program is longer, and no faster.
ROWS_AT_ONCE = {"constant": 1024, "step": 1024, "channel": 128}
# Rows of the heads at work at once where heads come in groups: what they need stays in registers.
ROWS_OF_GROUP = 128


class Route(NamedTuple):
    """Whether a chunked form runs as one kernel, and why."""

    fused: bool
    explain: str


class Scan(NamedTuple):
    """The static side of a scan.

    gate: "constant" (a decay per head), "step" (and step) or "channel" (and channel of k). split: dots are of bfloat16
    pieces, else of float32 at HIGHEST. n sequences in b rows of `length` steps, packed where n is not b, or laid out in
    t rows for the kernels: `blocks` of `chunks` of `chunk` rows. heads: of a grid step; group: of them, at work at
    once.
    """

    gate: str
    backward: bool
    split: bool
    scale: float
    b: int
    length: int
    h: int
    k: int
    v: int
    n: int
    packed: bool
    t: int
    chunk: int
    chunks: int
    blocks: int
    heads: int
    group: int

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.chunk * self.chunks

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of the states of a grid step's heads."""
        return self.heads, self.v, self.k

    @property
    def masked(self) -> bool:
        """Whether some rows are no steps."""
        return self.packed or self.length != self.blocks * self.rows

    @property
    def gate_pieces(self) -> int:
        """Into how many bfloat16 the gates of steps go for the matrix unit to sum them, or 0: it would take longer.

        dg keeps more bits than o, or than what split dots leave of it.
        """
        sums = self.gate == "step" and self.split and 2 * self.chunk <= LANES
        return 0 if not sums else 3 if self.backward else 2

    @property
    def step_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of a number per step and head, a chunk in whole registers of lanes."""
        return self.b, self.h, self.blocks, self.chunks, max(self.chunk, LANES)


def chunk_route(
    gates: Gates, p: Problem, *, packed: bool = False, chunk_size: int = 64, backward: bool = False
) -> Route:
    """Whether the blocks and states of the fused kernel fit VMEM.

    gates: as in `chunk_fwd`, of which only those that are None matter; packed: whether there are cu_seqlens.
    """
    scan = plan(gates, p, packed=packed, chunk_size=chunk_size, backward=backward, fused=True)
    need = vmem_bytes(scan, p, backward, fused=True)
    blocks = f"{scan.blocks} blocks of {scan.rows} steps and {scan.heads} heads"
    what = f"the {'backward' if backward else 'forward'} pass in {blocks} needs {need / MIB:.1f} MiB of VMEM"
    return Route(need <= VMEM_BUDGET, f"{what}, and may have {VMEM_BUDGET // MIB}")


def plan(gates: Gates, p: Problem, *, packed: bool, chunk_size: int, backward: bool, fused: bool) -> Scan:
    """The blocks of a scan: those of the most heads and of about BLOCK_TOKENS that fit VMEM, or else the least.

    A chunk is as long as the largest power of two in chunk_size.
    """
    gate = "channel" if "gk" in gates else "constant" if gates["g"] is None else "step"
    chunk = chunk_size & -chunk_size
    count = p.t // chunk + p.n if packed else pl.cdiv(p.t, chunk)
    most_rows = ROWS_AT_ONCE[gate] // (1 if p.dtype == "bfloat16" else 2)
    # The more heads in a step, the less is waited for at a chunk's end. Each of two cores has a part of b or the heads.
    wide = fused and not backward and gate != "channel" and p.dtype == "bfloat16" and 2 * chunk <= ROWS_OF_GROUP
    wide &= p.h % (2 * HEADS) == 0 and p.b * p.h > 2 * HEADS
    most_heads = 2 * HEADS if wide else min(HEADS, p.h, max(most_rows // chunk, 1))
    # Decays that are there already leave registers to spare, if few heads work at once.
    at_once = ROWS_OF_GROUP // chunk if wide and gate == "constant" else most_heads
    heads = [n for n in range(most_heads, 0, -1) if p.h % n == 0]
    # Longer blocks have fewer states at their starts, shorter ones fewer in them. A loop of one chunk is none to XLA's
    # CPU compiler: without the loop it fuses, and so rounds, an interpreted kernel in another way.
    wanted = BLOCK_TOKENS // chunk // (2 if wide else 1)
    chunks = sorted({max(min(wanted * 2**n // 8, count), 2) for n in range(8)}, key=lambda size: abs(size - wanted))

    def scan_of(heads: int, chunks: int) -> Scan:
        blocks = pl.cdiv(count, chunks)
        rows = blocks * chunks * chunk if packed or blocks == 1 else p.t
        group = next(n for n in range(min(at_once, heads), 0, -1) if heads % n == 0)
        sizes = p.b, p.t, p.h, p.k, p.v, p.n, packed, rows, chunk, chunks, blocks, heads, group
        return Scan(gate, backward, False, p.scale, *sizes)

    scans = [scan_of(*choice) for choice in itertools.product(heads, chunks)]
    need = partial(vmem_bytes, p=p, backward=backward, fused=fused)
    return next((scan for scan in scans if need(scan) <= VMEM_BUDGET), min(scans, key=need))


def vmem_bytes(scan: Scan, p: Problem, backward: bool, fused: bool) -> int:
    """What the blocks, twice buffered, and the scratch of the largest kernel of a scan take of VMEM."""
    size = jnp.dtype(p.dtype).itemsize
    k, v, c = (pl.cdiv(n, LANES) * LANES for n in (scan.k, scan.v, scan.chunk))
    state = scan.v * k * 4
    channels = k * 4 * (2 if backward else 1) if scan.gate == "channel" else 0
    row = (2 * k + 2 * v + (2 * k + v if backward else 0)) * size + channels
    kept = 0 if fused else 2 * scan.chunks * state * (2 if backward else 1)
    if fused and backward:
        kept = (scan.chunks + scan.blocks + 1) * state
    values = 8 * (scan.chunk * (2 * c + k + v)) * 4  # of the chunk that is in registers, which spill to VMEM
    return scan.heads * (2 * scan.rows * row + kept + state + scan.chunk * c * 4) + values
