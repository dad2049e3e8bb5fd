"""What is static about a gated delta rule in chunks: its sizes, and into which blocks of chunks and heads it is cut."""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments.delta_rule import DeltaProblem
from op_arguments.gla import Problem
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.chunk_plan import (
    BLOCK_TOKENS,
    Scan,
    block_lengths,
    first_fitting,
    rows_of,
    vmem_budget,
    vmem_limit,
)

# Rows of all heads of a step's chunks at most: the more heads, the less is waited for, and the longer is a program. A
# backward pass with a decay per channel has half of them, or it would be of 1.4 MB.
ROWS_AT_ONCE = 512
CORES, FEW_HEADS = 2, 4  # each core has a part of b or the heads, but of few heads one may have all
CHUNK_VALUES = 48  # matrices of a chunk and head that a backward step has at a time


class DeltaPlan(NamedTuple):
    """The problem, and the scan of its value heads.

    fused: the backward pass is one kernel, its states in VMEM. holds: there k and v stay as well, read once.
    """

    p: DeltaProblem
    scan: Scan
    backward: bool
    holds: bool = False

    @property
    def fused(self) -> bool:
        """See the class."""
        return self.scan.fused

    @property
    def of_keys(self) -> Any:
        """The dtype in which a kernel stores dq and dk.

        It is float32 where XLA still sums them over heads or takes them through the norm.
        """
        return self.p.dtype if self.p.group == 1 and not self.p.l2norm else jnp.float32

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a solved chunk that a fused backward pass keeps in VMEM for the way back."""
        c, v = self.scan.chunk, self.p.v
        shapes = {"raw": (c, c), "t": (c, c), "error": (c, v), "v_new": (c, v)}
        return {name: (self.scan.heads, *shape) for name, shape in shapes.items()}

    @property
    def vmem_bytes(self) -> int:
        """What the blocks, twice buffered, and the scratch of the largest kernel take of VMEM."""
        scan, size = self.scan, jnp.dtype(self.p.dtype).itemsize
        k, v, c = (pl.cdiv(n, LANES) * LANES for n in (self.p.k, self.p.v, scan.chunk))
        state = self.p.v * k * 4
        row = 2 * (k + v) * size  # q, k, v and o or do
        if self.backward:
            row += 2 * k * jnp.dtype(self.of_keys).itemsize + v * size
        row += k * 4 * (2 if self.backward else 1) if scan.gate == "channel" else 0
        kept = 1
        if self.backward:
            kept = scan.chunks + scan.blocks + 2 if scan.fused else 2 * scan.chunks + 2
        values = CHUNK_VALUES * scan.chunk * max(c, k, v) * 4
        if self.backward and scan.fused:
            values += scan.rows * 4 * sum(pl.cdiv(shape[-1], LANES) * LANES for shape in self.kept.values())
        if self.holds:
            values += scan.blocks * scan.rows * (k + v) * size
        return scan.heads * (2 * scan.rows * row + kept * state + values)


def make_plan(p: DeltaProblem, per_channel: bool, *, backward: bool, chunk_size: int = 64) -> DeltaPlan | None:
    """The plan of a checked problem, None where there is nothing to multiply.

    A chunk is as long as the largest power of two in chunk_size. Blocks are those of the most heads and of about
    BLOCK_TOKENS that fit VMEM; where none does, the backward pass has its states in HBM. k and v are held where there
    is room beside all that.
    Raises ValueError where no plan fits, which is on v4 alone: elsewhere all sizes that are accepted do.
    """
    if 0 in (p.b, p.t, p.hv, p.k, p.v, p.n):
        return None
    chunk = chunk_size & -chunk_size
    most = max(ROWS_AT_ONCE // chunk // (2 if backward and per_channel else 1), 1)
    if p.b == 1:
        most = min(most, max(p.hv // CORES, FEW_HEADS))
    heads = [n for n in range(most, 0, -1) if p.hv % n == 0 and (n % p.group == 0 or p.group % n == 0)]
    of_values = Problem(p.b, p.t, p.hv, p.k, p.v, p.n, p.scale, p.dtype, p.packed)

    def plan_of(fused: bool, heads: int, chunks: int) -> DeltaPlan:
        scan = Scan(
            of_values,
            "channel" if per_channel else "step",
            False,  # pairs of steps i, j are at [i, j], of the backward pass too
            fused,
            **rows_of(of_values, chunk, chunks),
            heads=heads,
            group=heads,
            split=p.dtype != "float32",
            by_key=not backward and not per_channel,
        )
        return DeltaPlan(p, scan, backward)

    lengths = block_lengths(of_values, chunk, max(BLOCK_TOKENS // chunk, 2))
    routes = [True, False] if backward else [True]
    plan = first_fitting([plan_of(*choice) for choice in itertools.product(routes, heads, lengths)])
    if plan.vmem_bytes > vmem_budget():
        needs = f"needs {plan.vmem_bytes} bytes of VMEM for blocks and states, and may have {vmem_budget()}"
        raise ValueError(f"K, V or chunk_size must be smaller: a pass {needs}")
    holding = plan._replace(holds=backward and plan.fused and plan.scan.blocks > 1)
    # A tenth is left over: the compiler has been seen to take 1.3 MB more than is planned here.
    return holding if holding.vmem_bytes <= vmem_limit() * 9 // 10 else plan
