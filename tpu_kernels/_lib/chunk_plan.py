"""What is static about a scan: its sizes, and into which blocks of chunks and heads it is cut."""

import itertools
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments.gla import Gates, Precision, Problem, check_chunk_size, check_fused, check_precision
from tpu_kernels._lib.chip import LANES, has_wide_mxu, vmem_capacity

MIB = 2**20
BLOCK_TOKENS = 1024  # of a grid step, where chunks are shorter
HEADS = 8  # of a grid step at most: independent work for the scheduler
UNROLL = (4, 2, 1)  # chunks in a turn of the loop that makes just states
# Rows of all heads of a step's chunks at most, by gate: with more a program is longer, and no faster.
ROWS_AT_ONCE = {"constant": 1024, "step": 1024, "channel": 512}
# Rows of the heads at work at once where heads come in groups, by gate: what they need stays in registers.
ROWS_OF_GROUP = {"constant": 256, "step": 128, "channel": 128}

Plan = TypeVar("Plan", bound=Any)
"""Of whose `vmem_bytes` there may be too many."""


def vmem_limit() -> int:
    """The bytes of VMEM that a scan asks for: 56 MiB, 14 on v4."""
    return vmem_capacity() * 7 // 8


def vmem_budget() -> int:
    """Of these the bytes for blocks, states and what else is planned here: 40 MiB, 10 on v4."""
    return vmem_capacity() * 63 // 100


class Route(NamedTuple):
    """Whether a chunked form runs as one kernel, and why."""

    fused: bool
    explain: str


class Scan(NamedTuple):
    """All that is static about a scan.

    gate: "constant" (a decay per head), "step" (and step) or "channel" (and channel of k). fused: one kernel does all.
    split: what dots take of a float32 is two bfloat16, else three, all of it. precise: as what goes step by step is:
    decays of gates per step or channel come from a series, and what a delta rule solves is corrected once. The
    sequences of p are laid out in t rows for the kernels: `blocks` of `chunks` of `chunk` rows. heads: of a grid step;
    group: of them, at work at once. unroll: chunks in a turn of the loop that makes just states. spread: whether the
    matrix unit makes columns of decays per step and takes two chunks at once: it has the time where it is 256 wide.
    by_key: whether states are [K, V], else [V, K].
    """

    p: Problem
    gate: str
    backward: bool
    fused: bool
    t: int
    chunk: int
    chunks: int
    blocks: int
    heads: int
    group: int
    split: bool = False
    precise: bool = False
    unroll: int = 1
    spread: bool = False
    by_key: bool = False

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.chunk * self.chunks

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of the states of a grid step's heads."""
        return (self.heads, self.p.k, self.p.v) if self.by_key else (self.heads, self.p.v, self.p.k)

    @property
    def masked(self) -> bool:
        """Whether some rows are no steps."""
        return self.p.packed or self.p.t != self.blocks * self.rows

    @property
    def at_once(self) -> int:
        """Chunks of which the backward pass makes what they write into states in one dot: side by side they fill lanes.

        Not of other sequences, as 0 · NaN is NaN. Not all of a block: without its loop, XLA's CPU compiler would round
        an interpreted kernel in another way.
        """
        several = self.backward and self.spread and not self.p.packed
        return 2 if several and self.chunks > 2 and self.chunks % 2 == 0 else 1

    @property
    def gate_terms(self) -> int:
        """Into how many bfloat16 the gates of steps go for the matrix unit to sum them, or 0: it would take longer.

        dg keeps more bits than o, or than what split dots leave of it.
        """
        sums = self.gate == "step" and self.split and 2 * self.chunk <= LANES
        return 0 if not sums else 3 if self.backward else 2

    @property
    def step_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of a number per step and head, a chunk in whole registers of lanes."""
        return self.p.b, self.p.h, self.blocks, self.chunks, max(self.chunk, LANES)

    @property
    def vmem_bytes(self) -> int:
        """What the blocks, twice buffered, and the scratch of the largest kernel take of VMEM."""
        size, passes = jnp.dtype(self.p.dtype).itemsize, 2 if self.backward else 1
        k, v, c = (pl.cdiv(n, LANES) * LANES for n in (self.p.k, self.p.v, self.chunk))
        state = self.p.v * k * 4
        channels = k * 4 * passes if self.gate == "channel" else 0
        row = (2 * k + 2 * v + (2 * k + v if self.backward else 0)) * size + channels
        kept = 0 if self.fused else 2 * self.chunks * state * passes
        if self.fused and self.backward:
            kept = (self.chunks + self.blocks + 1) * state
        values = 8 * (self.chunk * (2 * c + k + v)) * 4  # of the chunk that is in registers, which spill to VMEM
        return self.heads * (2 * self.rows * row + kept + state + self.chunk * c * 4) + values

    @property
    def route(self) -> Route:
        """Whether the largest kernel fits VMEM."""
        blocks = f"{self.blocks} blocks of {self.rows} steps and {self.heads} heads"
        what = f"the {'backward' if self.backward else 'forward'} pass in {blocks}"
        needs = f"needs {self.vmem_bytes / MIB:.1f} MiB of VMEM, and may have {vmem_budget() // MIB}"
        return Route(self.vmem_bytes <= vmem_budget(), f"{what} {needs}")


def make_scan(
    p: Problem,
    gates: Gates,
    *,
    backward: bool,
    interpret: Any,
    chunk_size: int = 64,
    precision: Precision = "ieee",
    fused: bool | None = None,
) -> Scan | None:
    """The scan of a checked problem, None where there is nothing to multiply.

    gates: as in `chunk_scan.chunk_fwd`, of which only those that are None matter. fused: as asked for, None for one
    kernel where its blocks and states fit VMEM.
    Raises ValueError or TypeError as `op_arguments.gla.check_chunk_size`, `check_precision` and `check_fused`.
    """
    check_chunk_size(chunk_size)
    check_precision(precision, p.dtype)
    if 0 in (p.b, p.t, p.h, p.k, p.v, p.n):
        check_fused(fused, None)
        return None
    blocks = partial(plan, gates, p, chunk_size=chunk_size, backward=backward)
    scan = blocks(fused=True)
    if not check_fused(fused, None if scan.route.fused else scan.route.explain):
        scan = blocks(fused=False)
    # The next chunk's product does not wait for the state. XLA's CPU compiler would round each in its own way.
    unroll = 1 if interpret else next(n for n in UNROLL if scan.chunks % n == 0)
    split = p.dtype != "float32" or precision != "ieee"
    spread = split and scan.gate != "channel" and 2 * scan.chunk <= LANES and has_wide_mxu()
    return scan._replace(split=split, unroll=unroll, spread=spread, by_key=spread and not backward)


def chunk_route(gates: Gates, p: Problem, *, chunk_size: int = 64, backward: bool = False) -> Route:
    """Whether the blocks and states of the fused kernel fit VMEM; arguments as `make_scan`."""
    return plan(gates, p, chunk_size=chunk_size, backward=backward, fused=True).route


def plan(gates: Gates, p: Problem, *, chunk_size: int, backward: bool, fused: bool) -> Scan:
    """The blocks of a scan: those of the most heads and of about BLOCK_TOKENS that fit VMEM, or else the least.

    A chunk is as long as the largest power of two in chunk_size.
    """
    gate = "channel" if "gk" in gates else "constant" if gates["g"] is None else "step"
    chunk = chunk_size & -chunk_size
    most_rows = ROWS_AT_ONCE[gate] // (1 if p.dtype == "bfloat16" else 2)
    # The more heads in a step, the less is waited for at a chunk's end. Each of two cores has a part of b or the heads.
    wide = fused and not backward and gate != "channel" and p.dtype == "bfloat16" and 2 * chunk <= ROWS_OF_GROUP[gate]
    wide &= p.h % (2 * HEADS) == 0 and p.b * p.h > 2 * HEADS
    most_heads = 2 * HEADS if wide else min(HEADS, p.h, max(most_rows // chunk, 1))
    # Decays that are there already leave registers to spare, if few heads work at once. Of decays per channel there are
    # so many that more heads would spill.
    grouped = gate == "channel" or (wide and gate == "constant")
    at_once = max(ROWS_OF_GROUP[gate] // chunk, 1) if grouped else most_heads
    heads = [n for n in range(most_heads, 0, -1) if p.h % n == 0]
    lengths = block_lengths(p, chunk, BLOCK_TOKENS // chunk // (2 if wide else 1))

    def scan_of(heads: int, chunks: int) -> Scan:
        group = next(n for n in range(min(at_once, heads), 0, -1) if heads % n == 0)
        return Scan(p, gate, backward, fused, **rows_of(p, chunk, chunks), heads=heads, group=group)

    return first_fitting([scan_of(*choice) for choice in itertools.product(heads, lengths)])


def block_lengths(p: Problem, chunk: int, wanted: int) -> list[int]:
    """Numbers of chunks that a block may have, those nearest to `wanted` first.

    Longer blocks have fewer states at their starts, shorter ones fewer in them. A loop of one chunk is none to XLA's
    CPU compiler: without the loop it fuses, and so rounds, an interpreted kernel in another way.
    """
    count = _chunks_of(p, chunk)
    return sorted({max(min(wanted * 2**n // 8, count), 2) for n in range(8)}, key=lambda size: abs(size - wanted))


def rows_of(p: Problem, chunk: int, chunks: int) -> dict[str, Any]:
    """Into which rows the sequences are laid out, by fields of a Scan: in blocks of so many chunks of so many rows."""
    blocks = pl.cdiv(_chunks_of(p, chunk), chunks)
    t = blocks * chunks * chunk if p.packed or blocks == 1 else p.t
    return {"t": t, "chunk": chunk, "chunks": chunks, "blocks": blocks}


def first_fitting(plans: list[Plan]) -> Plan:
    """The first that fits VMEM, or else the least."""
    fitting = (plan for plan in plans if plan.vmem_bytes <= vmem_budget())
    return next(fitting, min(plans, key=lambda plan: plan.vmem_bytes))


def _chunks_of(p: Problem, chunk: int) -> int:
    """The chunks of a sequence, or of all that are packed, at most."""
    return p.t // chunk + p.n if p.packed else pl.cdiv(p.t, chunk)
