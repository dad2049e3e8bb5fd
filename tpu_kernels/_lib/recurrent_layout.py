"""How the arrays of a recurrence lie in HBM, into which tiles they are cut, and the call of its kernels."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.debug import Debug
from op_arguments.gla import Problem
from op_arguments.gmm import GroupMetadata
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.decays import SMALLEST_EXPONENT, decay_parts, two_sum
from tpu_kernels._lib.visits import group_metadata

GROUP = 16  # rows loaded at once: those of a packed 16-bit register
TILE = 128  # rows of a block
SLAB = 4096  # most elements of the state that go through a group of steps at a time, in registers
BLOCK_BYTES = 8 * 2**20  # of VMEM, for the states of all steps of a tile
UNROLL = 4  # steps in the program: more go through registers in fewer cycles, and take the compiler longer
SUBLANES = 8
LEAST_VMEM = 16 * 2**20  # bytes: what a kernel has on v5e if it asks for none
SPARE_VMEM = 4 * 2**20


class Plan(NamedTuple):
    """What the kernels are traced for.

    rows: of all sequences. k, v: sizes of the state; keys, values: those rounded up to whole registers. tile: rows of a
    block. slab: rows of the state at a time. gate: "step" (one decay for all keys), "key" or None. scale of q. unroll:
    of the loops over a group's steps. debug: as `tpu_kernels.gmm.gmm`.
    """

    heads: int
    rows: int
    k: int
    v: int
    keys: int
    values: int
    tile: int
    slab: int
    gate: str | None
    scale: float
    reverse: bool
    unroll: int
    debug: Debug

    @property
    def tiles(self) -> int:
        """Tiles that hold all rows."""
        return pl.cdiv(self.rows, self.tile)


def make_plan(p: Problem, gates: dict[str, Any], reverse: bool, interpret: Any, tile: int | None, debug: Debug) -> Plan:
    """The plan for a tile of so many rows, or of as many as may keep all their states; no more than there are."""
    keys, values = pl.cdiv(p.k, LANES) * LANES, pl.cdiv(p.v, GROUP) * GROUP
    given = [name for name, gate in gates.items() if gate is not None]
    if tile is None:
        fitting = BLOCK_BYTES // vmem_bytes((values, keys))
        tile = min(max(fitting // GROUP * GROUP, GROUP), TILE)
    return Plan(
        heads=p.h,
        rows=p.b * p.t,
        k=p.k,
        v=p.v,
        keys=keys,
        values=values,
        tile=min(tile, pl.cdiv(p.b * p.t, GROUP) * GROUP),
        slab=math.gcd(values, 1 << max(SLAB // keys, SUBLANES).bit_length() - 1),
        gate=("key" if "gk" in given else "step") if given else None,
        scale=p.scale,
        reverse=reverse,
        unroll=1 if interpret else UNROLL,
        debug=debug,
    )


def make_visits(p: Problem, plan: Plan, cu_seqlens: jax.Array | None, interpret: Any) -> GroupMetadata:
    return group_metadata(
        jnp.full(p.n, p.t, jnp.int32) if cu_seqlens is None else jnp.diff(cu_seqlens),
        jnp.zeros(1, jnp.int32),
        m=plan.rows,
        tm=plan.tile,
        num_groups=p.n,
        cover="groups",
        interpret=interpret,
    )


class Operand(NamedTuple):
    """An array, or the shape and dtype of one, and its blocks: the shape of one in VMEM, and where they are."""

    array: Any
    block: tuple[int, ...]
    spec: pl.BlockSpec


Place = Callable[..., tuple[Any, Any]]
"""(grid indices, visits) -> the head and the visit that a step of the grid is about."""


def by_rows(array: Any, block: tuple[int, ...], place: Place) -> Operand:
    """[H, B T, ...] in tiles of rows, or [H, tiles, ...]."""

    def index(*arguments: Any) -> tuple[Any, ...]:
        visits = GroupMetadata(*arguments[-4:])
        h, visit = place(*arguments[:-4], visits)
        return h, visits.tile_ids[visit], *[0] * (len(array.shape) - 2)

    squeezed = [None] * (len(array.shape) - len(block))
    return Operand(array, block, pl.BlockSpec((*squeezed, *block), index))


def by_sequence(array: Any, place: Place) -> Operand:
    """States [N, H, V, K]."""

    def index(*arguments: Any) -> tuple[Any, ...]:
        visits = GroupMetadata(*arguments[-4:])
        h, visit = place(*arguments[:-4], visits)
        return visits.group_ids[visit], h, 0, 0

    return Operand(array, array.shape[2:], pl.BlockSpec((None, None, *array.shape[2:]), index))


def rows_of(x: jax.Array, width: int, plan: Plan, place: Place) -> Operand:
    """x [B, T, H, D] as [H, B T, D], D padded with zeros to `width`."""
    x = jnp.moveaxis(x, 2, 0).reshape(plan.heads, plan.rows, x.shape[3])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2])))
    return by_rows(x, (plan.tile, width), place)


def rows_out(dtype: Any, width: int, plan: Plan, place: Place) -> Operand:
    return by_rows(jax.ShapeDtypeStruct((plan.heads, plan.rows, width), dtype), (plan.tile, width), place)


def state_of(state: jax.Array, plan: Plan, place: Place) -> Operand:
    """state [N, H, K, V] as [N, H, V, K], both padded with zeros."""
    state = state.swapaxes(2, 3)
    rest = plan.values - state.shape[2], plan.keys - state.shape[3]
    return by_sequence(jnp.pad(state, ((0, 0), (0, 0), (0, rest[0]), (0, rest[1]))), place)


def state_out(sequences: int, plan: Plan, place: Place) -> Operand:
    shape = (sequences, plan.heads, plan.values, plan.keys)
    return by_sequence(jax.ShapeDtypeStruct(shape, jnp.float32), place)


def state_from(state: jax.Array | None, p: Problem) -> jax.Array | None:
    """The inverse of `state_of`."""
    return None if state is None else state[:, :, : p.v, : p.k].swapaxes(2, 3)


def gate_inputs(gates: dict[str, Any], plan: Plan, place: Place) -> dict[str, Operand]:
    """gk as it is; of gates per step their decays, [H, tiles, 2, groups of a tile, GROUP]."""
    if plan.gate is None:
        return {}
    if plan.gate == "key":
        return {"gk": rows_of(gates["gk"], plan.keys, plan, place)}
    g, g_gamma = gates.get("g"), gates.get("g_gamma")
    high = low = jnp.zeros((plan.heads, plan.rows), jnp.float32)
    if g is not None:
        high = jnp.moveaxis(g, 2, 0).reshape(high.shape).astype(jnp.float32)
    if g_gamma is not None:
        high, low = two_sum(high, g_gamma[:, None])
        low = jnp.where(jnp.abs(high) < -SMALLEST_EXPONENT, low, 0.0)  # NaN for an infinity
    decays = jnp.stack(decay_parts(high, low), axis=1)
    decays = jnp.pad(decays, ((0, 0), (0, 0), (0, plan.tiles * plan.tile - plan.rows)))
    decays = decays.reshape(plan.heads, 2, plan.tiles, plan.tile // GROUP, GROUP).swapaxes(1, 2)
    return {"decays": by_rows(decays, decays.shape[2:], place)}


def gate_out(gates: dict[str, Any], plan: Plan, place: Place) -> Operand:
    if plan.gate == "key":
        return rows_out(gates["gk"].dtype, plan.keys, plan, place)
    shape = (plan.heads, plan.tiles, plan.tile // GROUP, GROUP)
    return by_rows(jax.ShapeDtypeStruct(shape, jnp.float32), shape[2:], place)


def gate_gradients(
    dgate: Any, gates: dict[str, Any], cu_seqlens: jax.Array | None, p: Problem, plan: Plan
) -> dict[str, jax.Array | None]:
    """The gradients of the gates by name, from that of a step's gate."""
    if plan.gate == "key":
        return {"gk": heads_last(dgate, cu_seqlens, p, gates["gk"])}
    dgates: dict[str, jax.Array | None] = dict.fromkeys(gates)
    if plan.gate == "step":
        dgate = dgate.reshape(plan.heads, -1, 1)[:, : plan.rows]
        dgate = heads_last(dgate, cu_seqlens, p, jnp.zeros((p.b, p.t, p.h, 1), jnp.float32))[..., 0]
        for name, gate in gates.items():
            if gate is not None:
                dgates[name] = dgate.astype(gate.dtype) if gate.ndim == 3 else jnp.sum(dgate, axis=(0, 1))
    return dgates


def scratch(plan: Plan, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, Any]:
    """The state and its residue; and of a group's steps what is to be summed over K, columns along V, rows along K."""
    rows += ("carried_rows",) if plan.gate is None else ("carried_rows", "kept_rows", "rest_rows")
    return {
        "state": pltpu.VMEM((2, plan.values, plan.keys), jnp.float32),
        "products": pltpu.VMEM((GROUP, plan.slab, LANES), jnp.float32),
        **{name: pltpu.VMEM((plan.values, GROUP), jnp.float32) for name in columns},
        **{name: pltpu.VMEM((GROUP, plan.keys), jnp.float32) for name in rows},
    }


def call(
    kernel: Callable[..., None],
    visits: GroupMetadata,
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    scratch: dict[str, Any],
    *,
    grid: tuple[Any, ...],
    semantics: tuple[Any, ...],
    flops: int,
    times: dict[str, int],
    plan: Plan,
    interpret: bool | pltpu.InterpretParams,
    name: str,
) -> dict[str, jax.Array]:
    """The outputs of a kernel that is called with the visits and with its operands and scratch by name.

    flops: for each element of the state at each step. times: how often an operand is fetched, or written, if not once.
    """

    def named(*refs: Any) -> None:
        kernel(GroupMetadata(*refs[:4]), dict(zip((*inputs, *outputs, *scratch), refs[4:], strict=True)))

    operands = inputs | outputs
    shapes = [x.block for x in operands.values()] * 2 + [x.shape for x in scratch.values()]  # blocks are double
    vmem = sum(map(vmem_bytes, shapes))
    found = pl.pallas_call(
        named,
        out_shape=[x.array for x in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=grid,
            in_specs=[x.spec for x in inputs.values()],
            out_specs=[x.spec for x in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=max(vmem + SPARE_VMEM, LEAST_VMEM)
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops * plan.heads * plan.rows * plan.keys * plan.values,
            transcendentals=0,
            bytes_accessed=sum(nbytes(x.array) * times.get(name, 1) for name, x in operands.items()),
        ),
        interpret=interpret,
        name=name,
    )(*visits, *(x.array for x in inputs.values()))
    return dict(zip(outputs, found, strict=True))


def heads_last(x: jax.Array, cu_seqlens: jax.Array | None, p: Problem, like: jax.Array) -> jax.Array:
    """[H, B T, D'] as `like` [B, T, H, D] is; rows of no sequence, which no kernel wrote, become zero."""
    x = jnp.moveaxis(x[:, :, : like.shape[3]].reshape(p.h, p.b, p.t, like.shape[3]), 0, 2)
    if cu_seqlens is not None:
        x = jnp.where((jnp.arange(p.t) < cu_seqlens[-1])[:, None, None], x, jnp.zeros_like(x))
    return x


def given_or_zero(state: jax.Array | None, p: Problem) -> jax.Array:
    return jnp.zeros((p.n, p.h, p.k, p.v), jnp.float32) if state is None else state


def nbytes(x: Any) -> int:
    return int(np.prod(x.shape)) * x.dtype.itemsize


def vmem_bytes(shape: tuple[int, ...]) -> int:
    """What a float32 array takes in VMEM."""
    *outer, rows, lanes = shape
    return 4 * int(np.prod(outer)) * pl.cdiv(rows, SUBLANES) * SUBLANES * pl.cdiv(lanes, LANES) * LANES
