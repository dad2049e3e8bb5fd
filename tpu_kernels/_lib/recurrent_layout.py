"""How the arrays of a recurrence lie in HBM, into which tiles they are cut, and the call of its kernels."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Gates, Problem
from tpu_kernels._lib.arguments import Shard
from tpu_kernels._lib.call import Block, bytes_of, call
from tpu_kernels._lib.chip import LANES, sublanes
from tpu_kernels._lib.decays import SMALLEST_EXPONENT, Pair, decay_parts, two_sum
from tpu_kernels._lib.visits import group_metadata

GROUP = sublanes(jnp.bfloat16)  # rows loaded at once: those of a packed 16-bit register
SUBLANES = sublanes(jnp.float32)
TILE = 128  # rows of a block
SLAB = 16384  # most elements of a state [V, K] that go through a group of steps at a time: fewer wait for one another
BLOCK_BYTES = 8 * 2**20  # of VMEM, for the states of all steps of a tile
LEAST_VMEM = 16 * 2**20  # bytes: what a kernel has on v5e if it asks for none
SPARE_VMEM = 4 * 2**20

Place = Callable[..., tuple[Any, Any]]
"""(grid indices, visits) -> the head and the visit that a step of the grid is about."""


class Plan(NamedTuple):
    """All that is static about a recurrence.

    keys, values: the sizes of p's states, rounded up to whole registers. lanes: "key" where states lie as [V, K], whose
    lanes are keys, and "value" where they lie as [K, V]. tile: rows of a block. slab: values at a time. gate: "step"
    (one decay for all keys), "key" or None. unroll: of the loops over a group's steps. relative: whether states are
    taken relative to the decays of a group where these allow it, `relative_states`.
    """

    p: Problem
    keys: int
    values: int
    lanes: str
    tile: int
    slab: int
    gate: str | None
    reverse: bool
    unroll: int
    relative: bool

    @property
    def is_aligned(self) -> bool:
        """Whether every sequence begins and ends with a group of rows, as the caller has them."""
        return not self.p.packed and self.p.t % GROUP == 0

    @property
    def rows(self) -> int:
        """Of all sequences, whole groups of each."""
        if self.p.packed:
            return (pl.cdiv(self.p.b * self.p.t, GROUP) + self.p.n) * GROUP
        return self.p.b * pl.cdiv(self.p.t, GROUP) * GROUP

    @property
    def tiles(self) -> int:
        """Tiles that hold all rows."""
        return pl.cdiv(self.rows, self.tile)

    @property
    def state(self) -> tuple[int, int]:
        """The shape of a state."""
        return (self.values, self.keys) if self.lanes == "key" else (self.keys, self.values)

    def at(self, slab: Any) -> tuple[Any, Any]:
        """Where a slab of a state is."""
        return (slab, slice(None)) if self.lanes == "key" else (slice(None), slab)


def make_plan(p: Problem, gates: Gates, *, backward: bool, interpret: Any, reverse: bool = False) -> Plan | None:
    """The plan of a checked problem, None where there is nothing to go through.

    gates: as in `fused_recurrent.recurrent_fwd`, of which only those that are None matter. A tile has TILE rows, or no
    more than there are; backward, when it keeps the states of all its steps, no more than fit.
    """
    if 0 in (p.b, p.t, p.h, p.k, p.v, p.n):
        return None
    relative = p.dtype == "bfloat16"
    lanes = "value" if relative and not backward else "key"
    keys, values = (
        pl.cdiv(size, width) * width
        for size, width in zip((p.k, p.v), (LANES, GROUP) if lanes == "key" else (GROUP, LANES), strict=True)
    )
    fitting = BLOCK_BYTES // vmem_bytes((values, keys)) if backward else TILE
    tile = min(max(fitting // GROUP * GROUP, GROUP), TILE)
    return Plan(
        p,
        keys,
        values,
        lanes,
        tile=min(tile, pl.cdiv(p.b * p.t, GROUP) * GROUP),
        slab=LANES if lanes == "value" else math.gcd(values, 1 << max(SLAB // keys, SUBLANES).bit_length() - 1),
        gate=gate_of(gates),
        reverse=bool(reverse),
        unroll=1 if interpret else GROUP,
        relative=relative,
    )


def gate_of(gates: Mapping[str, Any]) -> str | None:
    """Whether decays are by "key", one of a "step", or none."""
    given = [name for name, gate in gates.items() if gate is not None]
    return ("key" if "gk" in given else "step") if given else None


def step_decays(gates: Mapping[str, Any], p: Problem) -> Pair:
    """Both parts of each step's decay, [H, B, T]."""
    return decay_parts(*step_gates(gates, p))


def step_gates(gates: Mapping[str, Any], p: Problem) -> Pair:
    """The logarithm of each step's decay in two pieces, [H, B, T]."""
    g, g_gamma = gates.get("g"), gates.get("g_gamma")
    high = low = jnp.zeros((p.h, p.b, p.t), jnp.float32)
    if g is not None:
        high = jnp.moveaxis(g, 2, 0).astype(jnp.float32)
    if g_gamma is not None:
        high, low = two_sum(high, g_gamma[:, None, None])
        low = jnp.where(jnp.abs(high) < -SMALLEST_EXPONENT, low, 0.0)  # NaN for an infinity
    return high, low


class SequenceVisits(NamedTuple):
    """`GroupMetadata` of sequences, whose offsets are of whole groups of rows, and each sequence's steps, [N]."""

    group_offsets: Any
    group_ids: Any
    tile_ids: Any
    num_visits: Any
    lengths: Any


def order(phase: Any, i: Any, visits: SequenceVisits) -> Any:
    """Which visit in the order of time a step of the backward kernel is about."""
    return jnp.where(phase == 0, i, visits.num_visits[0] - 1 - i)


def nth_visit(i: Any, visits: SequenceVisits, plan: Plan) -> Any:
    """The visit that is the i-th in the order of time."""
    return visits.num_visits[0] - 1 - i if plan.reverse else i


class Layout:
    """How arrays lie for the kernels: rows as [H, plan.rows, ·], states as [N, H, *plan.state], padded with zeros.

    Each sequence has whole groups of rows: its first step in time is the first of a group, the rows that its last group
    lacks are zeros. visits: pairs of a sequence and a tile that holds rows of it. Blocks are fetched, or written, where
    a `place` says.
    """

    def __init__(self, plan: Plan, cu_seqlens: jax.Array | None, interpret: bool | pltpu.InterpretParams) -> None:
        self.plan, self._interpret = plan, interpret
        lengths = jnp.full(plan.p.n, plan.p.t, jnp.int32)
        if cu_seqlens is not None:
            # Bad offsets go unseen under tracing; clipped, they give wrong numbers, but no access beyond the arrays.
            cu_seqlens = lax.cummax(jnp.clip(cu_seqlens, 0, plan.p.t))
            lengths = jnp.diff(cu_seqlens)
        whole = (lengths + GROUP - 1) // GROUP * GROUP
        if not plan.is_aligned:
            self._source, self._target = _places(plan, lengths, whole)
        visits = group_metadata(
            Shard(whole, jnp.zeros(1, jnp.int32)),
            m=plan.rows,
            tm=plan.tile,
            num_groups=plan.p.n,
            cover="groups",
            interpret=interpret,
        )
        self.visits = SequenceVisits(**visits._asdict(), lengths=lengths)

    # A backward pass goes through time in its first phase, and back in the second. What only one of them needs stays,
    # in the other, where that one ends or begins, so that nothing is fetched or written for it.
    def in_time(self, h: Any, i: Any, visits: SequenceVisits) -> Any:
        """The place of a forward pass."""
        return h, nth_visit(i, visits, self.plan)

    def in_both(self, h: Any, phase: Any, i: Any, visits: SequenceVisits) -> Any:
        """The place of a backward pass, of what both phases need."""
        return h, nth_visit(order(phase, i, visits), visits, self.plan)

    def in_first(self, h: Any, phase: Any, i: Any, visits: SequenceVisits) -> Any:
        """The place of a backward pass, of what the first phase needs."""
        last = visits.num_visits[0] - 1
        return h, nth_visit(jnp.where(phase == 0, i, last), visits, self.plan)

    def in_second(self, h: Any, phase: Any, i: Any, visits: SequenceVisits) -> Any:
        """The place of a backward pass, of what the second phase needs."""
        last = visits.num_visits[0] - 1
        return h, nth_visit(jnp.where(phase == 0, last, last - i), visits, self.plan)

    def by_key(self, x: jax.Array, place: Place) -> Block:
        """x [B, T, H, K] as an operand."""
        return self._rows(self._heads_first(x, self.plan.keys), place)

    def by_value(self, x: jax.Array, place: Place) -> Block:
        """x [B, T, H, V] as an operand."""
        return self._rows(self._heads_first(x, self.plan.values), place)

    def out_by_key(self, dtype: Any, place: Place) -> Block:
        """A result with K numbers per step."""
        return self._rows(jax.ShapeDtypeStruct((self.plan.p.h, self.plan.rows, self.plan.keys), dtype), place)

    def out_by_value(self, dtype: Any, place: Place) -> Block:
        """A result with V numbers per step."""
        return self._rows(jax.ShapeDtypeStruct((self.plan.p.h, self.plan.rows, self.plan.values), dtype), place)

    def state(self, state: jax.Array, place: Place) -> Block:
        """state [N, H, K, V] as an operand."""
        state = self._turned(state)
        rest = [(0, whole - size) for whole, size in zip(self.plan.state, state.shape[2:], strict=True)]
        return self._states(jnp.pad(state, [(0, 0), (0, 0), *rest]), place)

    def state_out(self, place: Place) -> Block:
        """A state of each sequence."""
        plan = self.plan
        return self._states(jax.ShapeDtypeStruct((plan.p.n, plan.p.h, *plan.state), jnp.float32), place)

    def gates(self, gates: Mapping[str, Any], place: Place) -> dict[str, Block]:
        """gk as it is, or both parts of each step's decay, [H, tiles, 2, groups of a tile, GROUP].

        Where states are relative, both pieces of each step's gate too.
        """
        plan = self.plan
        if plan.gate is None:
            return {}
        if plan.gate == "key":
            return {"gk": self.by_key(gates["gk"], place)}
        found = {"decays": step_decays(gates, plan.p)} | ({"gates": step_gates(gates, plan.p)} if plan.relative else {})
        pairs = {name: jnp.stack(pair, axis=1).reshape(plan.p.h, 2, -1) for name, pair in found.items()}
        laid_out = {name: self._in_groups(pair).swapaxes(1, 2) for name, pair in pairs.items()}
        return {name: self._tiles(x, x.shape[2:], place) for name, x in laid_out.items()}

    def _in_groups(self, x: jax.Array) -> jax.Array:
        """[..., B T] as [..., tiles, groups of a tile, GROUP]."""
        plan, x = self.plan, self._laid_out(x, axis=-1)
        x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, plan.tiles * plan.tile - plan.rows)))
        return x.reshape(*x.shape[:-1], plan.tiles, plan.tile // GROUP, GROUP)

    def gate_out(self, gates: Mapping[str, Any], place: Place) -> Block:
        """The gradient of the gate of each step, of each key or one for all."""
        plan = self.plan
        return self.out_by_key(gates["gk"].dtype, place) if plan.gate == "key" else self.numbers_out(place)

    def numbers_out(self, place: Place) -> Block:
        """A result of one float32 number per step, as [H, tiles, groups of a tile, GROUP]."""
        plan = self.plan
        shape = (plan.p.h, plan.tiles, plan.tile // GROUP, GROUP)
        return self._tiles(jax.ShapeDtypeStruct(shape, jnp.float32), shape[2:], place)

    def public_numbers(self, x: jax.Array) -> jax.Array:
        """Numbers of the kernels as [B, T, H]; as `public`."""
        return self.public(x.reshape(self.plan.p.h, -1, 1)[:, : self.plan.rows], 1)[..., 0]

    def public(self, x: jax.Array, width: int) -> jax.Array:
        """Rows [H, plan.rows, ·] of the kernels as [B, T, H, width]; zero for the caller's rows of no sequence."""
        plan, x = self.plan, x[:, :, :width]
        if not plan.is_aligned:
            x = jnp.take(x, self._target, axis=1, mode="fill", fill_value=0)
        return jnp.moveaxis(x.reshape(plan.p.h, plan.p.b, plan.p.t, width), 0, 2)

    def public_state(self, state: jax.Array | None) -> jax.Array | None:
        """States of the kernels as [N, H, K, V]."""
        return None if state is None else self._turned(state)[:, :, : self.plan.p.k, : self.plan.p.v]

    def _turned(self, state: jax.Array) -> jax.Array:
        """Between [N, H, K, V] and how states lie here."""
        return state.swapaxes(2, 3) if self.plan.lanes == "key" else state

    def gate_gradients(self, dgate: Any, gates: Mapping[str, Any]) -> dict[str, jax.Array | None]:
        """The gradients of the gates by name, from that of a step's gate."""
        plan = self.plan
        if plan.gate == "key":
            return {"gk": self.public(dgate, plan.p.k)}
        dgates: dict[str, jax.Array | None] = dict.fromkeys(gates)
        if plan.gate == "step":
            dgate = self.public_numbers(dgate)
            for name, gate in gates.items():
                if gate is not None:
                    dgates[name] = dgate.astype(gate.dtype) if gate.ndim == 3 else jnp.sum(dgate, axis=(0, 1))
        return dgates

    def call(
        self,
        kernel: Callable[..., None],
        operands: Mapping[str, Block],
        out: Mapping[str, Block],
        scratch: Mapping[str, Any],
        *,
        phases: tuple[int, ...],
        flops: int,
        times: Mapping[str, int],
        name: str,
    ) -> dict[str, jax.Array]:
        """The arrays `out` of `kernel(visits, refs by name)`, for each head, phase and visit.

        flops: for each element of the state at each step. times: how often an array is fetched, or written, if not
        once. Heads are independent where there is one phase.
        """
        plan, blocks = self.plan, {**operands, **out}
        buffers = [[size for size in block.shape if size is not None] for block in blocks.values() if block.shape] * 2
        vmem = sum(map(vmem_bytes, [*buffers, *(memory.shape for memory in scratch.values())]))
        results: dict[str, jax.Array] = call(
            lambda visits, *trees: kernel(visits, {name: ref for tree in trees for name, ref in tree.items()}),
            name=name,
            grid=(plan.p.h, *phases, self.visits.num_visits[0]),
            parallel=0 if phases else 1,
            scalars=(self.visits,),
            operands=dict(operands),
            out=dict(out),
            scratch=dict(scratch),
            cost=pl.CostEstimate(
                flops=flops * plan.p.h * plan.rows * plan.keys * plan.values,
                transcendentals=0,
                bytes_accessed=sum(bytes_of(block.array) * times.get(name, 1) for name, block in blocks.items()),
            ),
            interpret=self._interpret,
            vmem_limit=max(vmem + SPARE_VMEM, LEAST_VMEM),
            sized_by="K and V",
        )
        return results

    def _heads_first(self, x: jax.Array, width: int) -> jax.Array:
        x = self._laid_out(jnp.moveaxis(x, 2, 0).reshape(x.shape[2], -1, x.shape[3]), axis=1)
        return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2])))

    def _laid_out(self, x: jax.Array, axis: int) -> jax.Array:
        """The caller's rows along an axis as they lie here, zeros between sequences."""
        return x if self.plan.is_aligned else jnp.take(x, self._source, axis=axis, mode="fill", fill_value=0)

    def _rows(self, array: Any, place: Place) -> Block:
        return self._tiles(array, (self.plan.tile, array.shape[2]), place)

    def _tiles(self, array: Any, block: tuple[int, ...], place: Place) -> Block:
        """[H, B T, ·] in tiles of rows, or [H, tiles, ...]."""

        def index(*step: Any) -> tuple[Any, ...]:
            visits: SequenceVisits = step[-1]
            h, visit = place(*step)
            return h, visits.tile_ids[visit], *[0] * (len(array.shape) - 2)

        return Block(array, (*[None] * (len(array.shape) - len(block)), *block), index)

    def _states(self, array: Any, place: Place) -> Block:
        def index(*step: Any) -> tuple[Any, ...]:
            visits: SequenceVisits = step[-1]
            h, visit = place(*step)
            return visits.group_ids[visit], h, 0, 0

        return Block(array, (None, None, *array.shape[2:]), index)


def _places(plan: Plan, lengths: jax.Array, whole: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The caller's row of each row here, [plan.rows], and the row here of each of the caller's, [B T].

    One beyond the last stands for none. lengths, whole: [N], steps of each sequence, and rows of the groups they fill.
    """
    ends = jnp.cumsum(lengths)
    row = jnp.arange(plan.p.b * plan.p.t, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, row, side="right"), plan.p.n - 1)
    ends_here = jnp.cumsum(whole)
    if plan.reverse:
        place = ends_here[sequence] - (ends[sequence] - row)
    else:
        place = (ends_here - whole)[sequence] + row - (ends - lengths)[sequence]
    target = jnp.where(row < ends[-1], place, plan.rows)
    return jnp.full(plan.rows, row.size).at[target].set(row, mode="drop"), target


def vmem_bytes(shape: Sequence[int]) -> int:
    """What a float32 array takes in VMEM."""
    *outer, rows, lanes = shape
    return 4 * int(np.prod(outer)) * pl.cdiv(rows, SUBLANES) * SUBLANES * pl.cdiv(lanes, LANES) * LANES
