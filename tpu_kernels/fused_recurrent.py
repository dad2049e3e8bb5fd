"""The recurrent forms of gated linear attention on the TPU: one step of time after the other.

`recurrent_fwd` and `recurrent_bwd` are what `fused_recurrent_simple_gla_*` (gates `g`, `g_gamma`) and
`fused_recurrent_gla_*` (gate `gk`) are made of; the operations are defined in `cpu_golden/simple_gla.py` and
`cpu_golden/gla.py`. A head's state stays in VMEM, in float32, and goes through time: S = exp(gate) S + k v^T. It is
kept as [V, K], so that q, k and gates by key are rows, of which a register is made for nothing; v, do, o and dv are
columns. There are no dots: float32 and bfloat16 differ in what is loaded and stored, and in nothing between.

Sequences lie one after the other in the rows of [B T, ...], also those of a batch. Time is in the grid, by the visits
of `tpu_kernels._lib.visits`: pairs of a sequence and a tile that holds rows of it, one for an empty
sequence. Rows of a tile that are not the visit's change nothing.

A slow gate keeps hundreds of steps in a state, and with them hundreds of roundings. So a decay near 1 is kept as its
difference from 1; what an addition to the state loses is its residue, which the next step adds to it; and residues
are dropped every SEGMENT steps of a sequence: there the state is a plain float32 matrix, and a call that goes on from
it computes the same bits.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments import gla
from op_arguments.debug import Debug
from op_arguments.gla import Gates, Problem, check_backward, check_forward
from op_arguments.gmm import GroupMetadata
from tpu_kernels._lib.arguments import Interpret, concrete_values, resolve_interpret
from tpu_kernels._lib.visits import group_metadata

SEGMENT = 16  # steps between plain float32 states: divides every chunk size, so calls may be cut at chunk borders
GROUP = 16  # rows loaded at once: those of a packed 16-bit register
SLAB = 4096  # most elements of the state that go through a group of steps at a time, in registers
TILE = 128  # rows of a block
BLOCK_BYTES = 8 * 2**20  # of VMEM, for the states of all steps of a tile
UNROLL = 4  # steps in the program: more go through registers in fewer cycles, and take the compiler longer
LANES, SUBLANES = 128, 8
LEAST_VMEM = 16 * 2**20  # bytes: what a kernel has on v5e if it asks for none
SPARE_VMEM = 4 * 2**20
FLOPS_FORWARD, FLOPS_BACKWARD = 15, 50

LN2 = float(np.log(2))
LN2_HIGH = 45426 / 65536  # times any exponent of a float32 this is exact
LN2_LOW = LN2 - LN2_HIGH
LARGEST_EXPONENT = 88.72  # of a finite float32
SMALLEST_EXPONENT = -127 * LN2  # of a decay that is zero: TPUs flush subnormals
TAYLOR = tuple(1 / float(np.prod(range(1, n + 1))) for n in range(9, 1, -1))  # of exp, from x^9 down to x^2


class RecurrentOptions(gla.RecurrentOptions, total=False):
    """The options of `recurrent_fwd` and `recurrent_bwd` on the TPU. interpret: as `tpu_kernels.gmm.gmm`."""

    interpret: Interpret
    debug: Debug


class Gradients(NamedTuple):
    """The gradients of the arguments of `recurrent_fwd`; None for those that are None. dgates by the gates' names."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dgates: dict[str, jax.Array | None]
    dh0: jax.Array | None


def recurrent_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    gates: Gates,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    reverse: bool = False,
    interpret: Interpret = None,
    debug: Debug = None,
) -> tuple[jax.Array, jax.Array | None]:
    """(o, ht): `o_t = scale q_t^T S_t`, and the state after the last step where output_final_state, else None.

    q, k [B, T, H, K], v [B, T, H, V]: all float32 or all bfloat16. gates: natural logs of the decays, `g` [B, T, H]
    and `g_gamma` [H], which add (None: no decay), or `gk` [B, T, H, K]; float32, `g` and `gk` also of q's dtype.
    initial_state [N, H, K, V] float32. cu_seqlens [N + 1] int32 packs N sequences into B = 1 (N = B without).
    reverse: time runs backwards, in each sequence. scale: default K ** -0.5. interpret and debug: as
    `tpu_kernels.gmm.gmm`; sites are kept and state.
    o has v's shape and dtype and is zero beyond the last sequence; ht [N, H, K, V] is float32.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`; values are checked outside tracing only.
    """
    p = check_forward(
        q,
        k,
        v,
        gates=gates,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        offsets=None if cu_seqlens is None else concrete_values(cu_seqlens),
    )
    return _forward(
        q,
        k,
        v,
        dict(gates),
        initial_state,
        cu_seqlens,
        problem=p,
        output_final_state=bool(output_final_state),
        reverse=bool(reverse),
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


def recurrent_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    gates: Gates,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    dht: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    reverse: bool = False,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Gradients:
    """The gradients of `recurrent_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype; dht [N, H, K, V] is float32. Gradients have their arguments' dtypes and are zero beyond
    the last sequence. Held meanwhile, in float32: two states per visit, of one head. Sites of debug: those of
    `recurrent_fwd`, dstate and dgate.
    Raises as `recurrent_fwd`, with `op_arguments.gla.check_backward`.
    """
    p = check_backward(
        q,
        k,
        v,
        do,
        gates=gates,
        scale=scale,
        initial_state=initial_state,
        dht=dht,
        cu_seqlens=cu_seqlens,
        offsets=None if cu_seqlens is None else concrete_values(cu_seqlens),
    )
    return _backward(
        q,
        k,
        v,
        do,
        dict(gates),
        initial_state,
        dht,
        cu_seqlens,
        problem=p,
        reverse=bool(reverse),
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


# ------------------------------------------------------------------------------------------------------ the calls


@partial(jax.jit, static_argnames=("problem", "output_final_state", "reverse", "interpret", "debug"))
def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: dict[str, Any],
    initial_state: jax.Array | None,
    cu_seqlens: jax.Array | None,
    *,
    problem: Problem,
    output_final_state: bool,
    reverse: bool,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> tuple[jax.Array, jax.Array | None]:
    p = problem
    if 0 in (p.b, p.t, p.h, p.k, p.v, p.n):
        return jnp.zeros_like(v), _states(initial_state, p) if output_final_state else None
    plan = _plan(p, gates, reverse, interpret, TILE, debug)
    visits = _visits(p, plan, cu_seqlens, interpret)

    def visit(h: Any, i: Any, visits: GroupMetadata) -> Any:
        return h, _nth_visit(i, visits, plan)

    inputs = {
        "q": _rows_of(q, plan.keys, plan, visit),
        "k": _rows_of(k, plan.keys, plan, visit),
        "v": _rows_of(v, plan.values, plan, visit),
        **_gate_inputs(gates, plan, visit),
    }
    if initial_state is not None:
        inputs["h0"] = _state_of(initial_state, plan, visit)
    outputs = {"o": _rows_out(v.dtype, plan.values, plan, visit)}
    if output_final_state:
        outputs["ht"] = _state_out(p.n, plan, visit)
    found = _call(
        partial(_forward_kernel, plan=plan),
        visits,
        inputs,
        outputs,
        _scratch(plan, columns=("v_columns", "o_columns"), rows=("q_rows", "k_rows")),
        grid=(p.h, visits.num_visits[0]),
        semantics=("parallel", "arbitrary"),
        flops=FLOPS_FORWARD,
        times={},
        plan=plan,
        interpret=interpret,
        name="fused_recurrent_fwd",
    )
    o = _heads_last(found["o"], cu_seqlens, p, v)
    return o, _state_from(found.get("ht"), p)


@partial(jax.jit, static_argnames=("problem", "reverse", "interpret", "debug"))
def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    gates: dict[str, Any],
    initial_state: jax.Array | None,
    dht: jax.Array | None,
    cu_seqlens: jax.Array | None,
    *,
    problem: Problem,
    reverse: bool,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> Gradients:
    p = problem
    if 0 in (p.b, p.t, p.h, p.k, p.v, p.n):
        dgates = {name: None if gate is None else jnp.zeros_like(gate) for name, gate in gates.items()}
        dh0 = None if initial_state is None else _states(dht, p)
        return Gradients(jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), dgates, dh0)
    plan = _plan(p, gates, reverse, interpret, None, debug)
    visits = _visits(p, plan, cu_seqlens, interpret)

    # Phase 0 goes through time, phase 1 back. What only one of them needs stays, in the other, where that one ends or
    # begins, so that nothing is fetched or written for it.
    def visit_of_both(h: Any, phase: Any, i: Any, visits: GroupMetadata) -> Any:
        return h, _nth_visit(_order(phase, i, visits), visits, plan)

    def visit_of_first(h: Any, phase: Any, i: Any, visits: GroupMetadata) -> Any:
        last = visits.num_visits[0] - 1
        return h, _nth_visit(jnp.where(phase == 0, i, last), visits, plan)

    def visit_of_second(h: Any, phase: Any, i: Any, visits: GroupMetadata) -> Any:
        last = visits.num_visits[0] - 1
        return h, _nth_visit(jnp.where(phase == 0, last, last - i), visits, plan)

    inputs = {
        "q": _rows_of(q, plan.keys, plan, visit_of_second),
        "k": _rows_of(k, plan.keys, plan, visit_of_both),
        "v": _rows_of(v, plan.values, plan, visit_of_both),
        "do": _rows_of(do, plan.values, plan, visit_of_second),
        **_gate_inputs(gates, plan, visit_of_both),
    }
    if initial_state is not None:
        inputs["h0"] = _state_of(initial_state, plan, visit_of_first)
    if dht is not None:
        inputs["dht"] = _state_of(dht, plan, visit_of_second)
    outputs = {
        "dq": _rows_out(q.dtype, plan.keys, plan, visit_of_second),
        "dk": _rows_out(k.dtype, plan.keys, plan, visit_of_second),
        "dv": _rows_out(v.dtype, plan.values, plan, visit_of_second),
        # Written and read by the kernel itself. One head's: heads follow one another.
        "kept_states": _Operand(
            jax.ShapeDtypeStruct((visits.group_ids.shape[0], 2, plan.values, plan.keys), jnp.float32),
            (0, 0),
            pl.BlockSpec(memory_space=pl.ANY),
        ),
    }
    scratch = _scratch(
        plan,
        columns=("v_columns", "do_columns", "dv_columns"),
        rows=("q_rows", "k_rows", "dq_rows", "dk_rows", "dgate_rows"),
    )
    scratch["dstate"] = pltpu.VMEM((2, plan.values, plan.keys), jnp.float32)
    if plan.gate is not None:
        outputs["dgate"] = _gate_out(gates, plan, visit_of_second)
        scratch["decayed"] = pltpu.VMEM((plan.tile, plan.values, plan.keys), jnp.float32)
    if initial_state is not None:
        outputs["dh0"] = _state_out(p.n, plan, visit_of_second)
    found = _call(
        partial(_backward_kernel, plan=plan),
        visits,
        inputs,
        outputs,
        scratch,
        grid=(p.h, 2, visits.num_visits[0]),
        semantics=("arbitrary", "arbitrary", "arbitrary"),
        flops=FLOPS_BACKWARD,
        times={"k": 2, "v": 2, "gk": 2, "decays": 2, "kept_states": 2 * p.h},
        plan=plan,
        interpret=interpret,
        name="fused_recurrent_bwd",
    )
    return Gradients(
        _heads_last(found["dq"], cu_seqlens, p, q),
        _heads_last(found["dk"], cu_seqlens, p, k),
        _heads_last(found["dv"], cu_seqlens, p, v),
        _gate_gradients(found.get("dgate"), gates, cu_seqlens, p, plan),
        _state_from(found.get("dh0"), p),
    )


class _Plan(NamedTuple):
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


def _plan(p: Problem, gates: dict[str, Any], reverse: bool, interpret: Any, tile: int | None, debug: Debug) -> _Plan:
    """The plan for a tile of so many rows, or of as many as may keep all their states; no more than there are."""
    keys, values = pl.cdiv(p.k, LANES) * LANES, pl.cdiv(p.v, GROUP) * GROUP
    given = [name for name, gate in gates.items() if gate is not None]
    if tile is None:
        fitting = BLOCK_BYTES // _vmem_bytes((values, keys))
        tile = min(max(fitting // GROUP * GROUP, GROUP), TILE)
    return _Plan(
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


def _visits(p: Problem, plan: _Plan, cu_seqlens: jax.Array | None, interpret: Any) -> GroupMetadata:
    return group_metadata(
        jnp.full(p.n, p.t, jnp.int32) if cu_seqlens is None else jnp.diff(cu_seqlens),
        jnp.zeros(1, jnp.int32),
        m=plan.rows,
        tm=plan.tile,
        num_groups=p.n,
        cover="groups",
        interpret=interpret,
    )


class _Operand(NamedTuple):
    """An array, or the shape and dtype of one, and its blocks: the shape of one in VMEM, and where they are."""

    array: Any
    block: tuple[int, ...]
    spec: pl.BlockSpec


_Place = Callable[..., tuple[Any, Any]]
"""(grid indices, visits) -> the head and the visit that a step of the grid is about."""


def _by_rows(array: Any, block: tuple[int, ...], place: _Place) -> _Operand:
    """[H, B T, ...] in tiles of rows, or [H, tiles, ...]."""

    def index(*arguments: Any) -> tuple[Any, ...]:
        visits = GroupMetadata(*arguments[-4:])
        h, visit = place(*arguments[:-4], visits)
        return h, visits.tile_ids[visit], *[0] * (len(array.shape) - 2)

    squeezed = [None] * (len(array.shape) - len(block))
    return _Operand(array, block, pl.BlockSpec((*squeezed, *block), index))


def _by_sequence(array: Any, place: _Place) -> _Operand:
    """States [N, H, V, K]."""

    def index(*arguments: Any) -> tuple[Any, ...]:
        visits = GroupMetadata(*arguments[-4:])
        h, visit = place(*arguments[:-4], visits)
        return visits.group_ids[visit], h, 0, 0

    return _Operand(array, array.shape[2:], pl.BlockSpec((None, None, *array.shape[2:]), index))


def _rows_of(x: jax.Array, width: int, plan: _Plan, place: _Place) -> _Operand:
    """x [B, T, H, D] as [H, B T, D], D padded with zeros to `width`."""
    x = jnp.moveaxis(x, 2, 0).reshape(plan.heads, plan.rows, x.shape[3])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2])))
    return _by_rows(x, (plan.tile, width), place)


def _rows_out(dtype: Any, width: int, plan: _Plan, place: _Place) -> _Operand:
    return _by_rows(jax.ShapeDtypeStruct((plan.heads, plan.rows, width), dtype), (plan.tile, width), place)


def _state_of(state: jax.Array, plan: _Plan, place: _Place) -> _Operand:
    """state [N, H, K, V] as [N, H, V, K], both padded with zeros."""
    state = state.swapaxes(2, 3)
    rest = plan.values - state.shape[2], plan.keys - state.shape[3]
    return _by_sequence(jnp.pad(state, ((0, 0), (0, 0), (0, rest[0]), (0, rest[1]))), place)


def _state_out(sequences: int, plan: _Plan, place: _Place) -> _Operand:
    shape = (sequences, plan.heads, plan.values, plan.keys)
    return _by_sequence(jax.ShapeDtypeStruct(shape, jnp.float32), place)


def _state_from(state: jax.Array | None, p: Problem) -> jax.Array | None:
    """The inverse of `_state_of`."""
    return None if state is None else state[:, :, : p.v, : p.k].swapaxes(2, 3)


def _gate_inputs(gates: dict[str, Any], plan: _Plan, place: _Place) -> dict[str, _Operand]:
    """gk as it is; of gates per step their decays, [H, tiles, 2, groups of a tile, GROUP]."""
    if plan.gate is None:
        return {}
    if plan.gate == "key":
        return {"gk": _rows_of(gates["gk"], plan.keys, plan, place)}
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
    return {"decays": _by_rows(decays, decays.shape[2:], place)}


def _gate_out(gates: dict[str, Any], plan: _Plan, place: _Place) -> _Operand:
    if plan.gate == "key":
        return _rows_out(gates["gk"].dtype, plan.keys, plan, place)
    shape = (plan.heads, plan.tiles, plan.tile // GROUP, GROUP)
    return _by_rows(jax.ShapeDtypeStruct(shape, jnp.float32), shape[2:], place)


def _gate_gradients(
    dgate: Any, gates: dict[str, Any], cu_seqlens: jax.Array | None, p: Problem, plan: _Plan
) -> dict[str, jax.Array | None]:
    """The gradients of the gates by name, from that of a step's gate."""
    if plan.gate == "key":
        return {"gk": _heads_last(dgate, cu_seqlens, p, gates["gk"])}
    dgates: dict[str, jax.Array | None] = dict.fromkeys(gates)
    if plan.gate == "step":
        dgate = dgate.reshape(plan.heads, -1, 1)[:, : plan.rows]
        dgate = _heads_last(dgate, cu_seqlens, p, jnp.zeros((p.b, p.t, p.h, 1), jnp.float32))[..., 0]
        for name, gate in gates.items():
            if gate is not None:
                dgates[name] = dgate.astype(gate.dtype) if gate.ndim == 3 else jnp.sum(dgate, axis=(0, 1))
    return dgates


def _scratch(plan: _Plan, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, Any]:
    """The state and its residue; and of a group's steps what is to be summed over K, columns along V, rows along K."""
    rows += ("carried_rows",) if plan.gate is None else ("carried_rows", "kept_rows", "rest_rows")
    return {
        "state": pltpu.VMEM((2, plan.values, plan.keys), jnp.float32),
        "products": pltpu.VMEM((GROUP, plan.slab, LANES), jnp.float32),
        **{name: pltpu.VMEM((plan.values, GROUP), jnp.float32) for name in columns},
        **{name: pltpu.VMEM((GROUP, plan.keys), jnp.float32) for name in rows},
    }


def _call(
    kernel: Callable[..., None],
    visits: GroupMetadata,
    inputs: dict[str, _Operand],
    outputs: dict[str, _Operand],
    scratch: dict[str, Any],
    *,
    grid: tuple[Any, ...],
    semantics: tuple[Any, ...],
    flops: int,
    times: dict[str, int],
    plan: _Plan,
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
    vmem = sum(map(_vmem_bytes, shapes))
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
            bytes_accessed=sum(_nbytes(x.array) * times.get(name, 1) for name, x in operands.items()),
        ),
        interpret=interpret,
        name=name,
    )(*visits, *(x.array for x in inputs.values()))
    return dict(zip(outputs, found, strict=True))


def _heads_last(x: jax.Array, cu_seqlens: jax.Array | None, p: Problem, like: jax.Array) -> jax.Array:
    """[H, B T, D'] as `like` [B, T, H, D] is; rows of no sequence, which no kernel wrote, become zero."""
    x = jnp.moveaxis(x[:, :, : like.shape[3]].reshape(p.h, p.b, p.t, like.shape[3]), 0, 2)
    if cu_seqlens is not None:
        x = jnp.where((jnp.arange(p.t) < cu_seqlens[-1])[:, None, None], x, jnp.zeros_like(x))
    return x


def _states(state: jax.Array | None, p: Problem) -> jax.Array:
    return jnp.zeros((p.n, p.h, p.k, p.v), jnp.float32) if state is None else state


def _nbytes(x: Any) -> int:
    return int(np.prod(x.shape)) * x.dtype.itemsize


def _vmem_bytes(shape: tuple[int, ...]) -> int:
    """What a float32 array takes in VMEM."""
    *outer, rows, lanes = shape
    return 4 * int(np.prod(outer)) * pl.cdiv(rows, SUBLANES) * SUBLANES * pl.cdiv(lanes, LANES) * LANES


# --------------------------------------------------------------------------------------- visits, groups and slabs


_Refs = dict[str, Any]
Pair = tuple[jax.Array, jax.Array]


class _Visit(NamedTuple):
    """Rows [start, end) of a tile, and which step of its sequence the tile's row 0 is; whether it is the first visit of
    its sequence, and the last."""

    start: Any
    end: Any
    step: Any
    first: Any
    last: Any

    def step_of(self, rows: Any, plan: _Plan) -> jax.Array:
        """Which step of its sequence each row of a group is, [GROUP, K]; any for rows that are not the visit's."""
        row = rows.start + lax.broadcasted_iota(jnp.int32, (GROUP, plan.keys), 0)
        return self.step - row if plan.reverse else self.step + row


def _visit(i: Any, visits: GroupMetadata, plan: _Plan) -> _Visit:
    """The i-th visit in the order of time."""
    last = visits.num_visits[0] - 1

    def sequence_of(i: Any) -> Any:
        return visits.group_ids[_nth_visit(jnp.clip(i, 0, last), visits, plan)]

    sequence = sequence_of(i)
    tile_row = visits.tile_ids[_nth_visit(i, visits, plan)] * plan.tile
    start, end = visits.group_offsets[sequence] - tile_row, visits.group_offsets[sequence + 1] - tile_row
    return _Visit(
        jnp.maximum(start, 0),
        jnp.minimum(end, plan.tile),
        step=end - 1 if plan.reverse else -start,
        first=(i == 0) | (sequence_of(i - 1) != sequence),
        last=(i == last) | (sequence_of(i + 1) != sequence),
    )


def _order(phase: Any, i: Any, visits: GroupMetadata) -> Any:
    """Which visit in the order of time a step of the backward kernel is about."""
    return jnp.where(phase == 0, i, visits.num_visits[0] - 1 - i)


def _nth_visit(i: Any, visits: GroupMetadata, plan: _Plan) -> Any:
    """The visit that is the i-th in the order of time."""
    return visits.num_visits[0] - 1 - i if plan.reverse else i


def _own(visit: _Visit, rows: Any, x: jax.Array, other: jax.Array | None = None, axis: int = 0) -> jax.Array:
    """Elements of a group's x (its steps along `axis`) that are the visit's; elsewhere `other`, in its dtype, or 0."""
    own = _is_own(visit, rows.start, x.shape, axis)
    return jnp.where(own, x, 0.0) if other is None else jnp.where(own, x.astype(other.dtype), other)


def _is_own(visit: _Visit, first: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Where the tile's rows along an axis, from `first` on, are the visit's."""
    row = first + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (visit.start <= row) & (row < visit.end)


def _is_key(plan: _Plan, shape: tuple[int, ...]) -> jax.Array:
    """Where lanes are no padding."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) < plan.k


def _in_state(visit: _Visit, rows: Any, n: Any, slab: Any, plan: _Plan) -> jax.Array:
    """Where a slab of the state is no padding; nowhere unless a group's n-th step is the visit's."""
    shape = plan.slab, plan.keys
    is_value = slab.start + lax.broadcasted_iota(jnp.int32, shape, 0) < plan.v
    return is_value & _is_key(plan, shape) & _is_own(visit, rows.start + n, (1, 1), 0)


def _for_groups(visit: _Visit, plan: _Plan, body: Callable[[Any], None], backwards: bool = False) -> None:
    """body(rows) for each group that has rows of the visit, in the order of time or backwards."""
    groups = plan.tile // GROUP

    def group(n: Any, _: Any) -> None:
        nth = groups - 1 - n if backwards != plan.reverse else n
        first = pl.multiple_of(nth * GROUP, GROUP)
        pl.when((visit.start < first + GROUP) & (first < visit.end))(lambda: body(pl.ds(first, GROUP)))

    lax.fori_loop(0, groups, group, None)


def _for_slabs(plan: _Plan, body: Callable[[Any], None]) -> None:
    """body(slab) for each slab of the state's rows."""
    lax.fori_loop(
        0, plan.values // plan.slab, lambda n, _: body(pl.ds(pl.multiple_of(n * plan.slab, plan.slab), plan.slab)), None
    )


def _for_steps(plan: _Plan, body: Callable[[Any, Pair], Pair], pair: Pair, backwards: bool = False) -> Pair:
    """body(row of its group, pair) for each step of a group, in the order of time or backwards."""

    def step(n: Any, pair: Pair) -> Pair:
        return body(GROUP - 1 - n if backwards != plan.reverse else n, pair)

    return lax.fori_loop(0, GROUP, step, pair, unroll=plan.unroll)


def _load(refs: _Refs, visit: _Visit, rows: Any, *names: str) -> None:
    """Rows of a group in float32, zero where they are not the visit's: of q and k as rows, of v and do as columns."""
    for name in names:
        x = _own(visit, rows, refs[name][rows, :].astype(jnp.float32))
        if name in ("q", "k"):
            refs[f"{name}_rows"][...] = x
        else:
            refs[f"{name}_columns"][...] = x.T


def _store(refs: _Refs, visit: _Visit, rows: Any, name: str, x: jax.Array) -> None:
    """Those rows of a group that are the visit's."""
    refs[name][rows, :] = _own(visit, rows, x, refs[name][rows, :])


def _load_decays(refs: _Refs, visit: _Visit, rows: Any, plan: _Plan) -> None:
    """The decays of a group's steps as `decay_parts` has them, none where a row is not the visit's."""
    own = partial(_own, visit, rows)
    if "gk" in refs:
        decays = decay_parts(own(refs["gk"][rows, :].astype(jnp.float32)))
    elif "decays" in refs:
        line, shape = pl.ds(rows.start // GROUP, 1), refs["kept_rows"].shape[::-1]
        kept, rest = (jnp.broadcast_to(refs["decays"][n, line, :], shape) for n in range(2))
        decays = own(kept.T, jnp.ones(shape[::-1], jnp.float32)), own(rest.T)
    else:
        return
    refs["kept_rows"][...], refs["rest_rows"][...] = decays
    if plan.debug:
        _, rest = decays
        plan.debug("kept", rest, _is_own(visit, rows.start, rest.shape, 0) & _is_key(plan, rest.shape))


def _decay_of(refs: _Refs, n: Any) -> list[jax.Array]:
    """kept and rest of a group's n-th step, [1, K]; or nothing."""
    return [refs[name][pl.ds(n, 1), :] for name in ("kept_rows", "rest_rows") if name in refs]


# ----------------------------------------------------------------------------------------------------- the kernels


def _forward_kernel(visits: GroupMetadata, refs: _Refs, *, plan: _Plan) -> None:
    visit = _visit(pl.program_id(1), visits, plan)
    pl.when(visit.first)(lambda: _begin(refs["state"], refs.get("h0")))
    _for_groups(visit, plan, partial(_advance_with_o, visit, refs, plan=plan))
    if "ht" in refs:

        @pl.when(visit.last)
        def _() -> None:
            refs["ht"][...] = refs["state"][0]


def _backward_kernel(visits: GroupMetadata, refs: _Refs, *, plan: _Plan) -> None:
    phase = pl.program_id(1)
    i = _order(phase, pl.program_id(2), visits)
    visit = _visit(i, visits, plan)
    state, dstate, kept = refs["state"], refs["dstate"], refs["kept_states"].at[i]

    @pl.when(phase == 0)
    def _() -> None:
        pl.when(visit.first)(lambda: _begin(state, refs.get("h0")))
        pltpu.sync_copy(state, kept)

        @pl.when(~visit.last)
        def _() -> None:
            _for_groups(visit, plan, lambda rows: _advance(visit, refs, rows, plan, _nothing, _nothing))

    @pl.when(phase == 1)
    def _() -> None:
        pl.when(visit.last)(lambda: _begin(dstate, refs.get("dht")))
        pltpu.sync_copy(kept, state)
        _for_groups(visit, plan, partial(_advance_with_dq, visit, refs, plan=plan))
        _for_groups(visit, plan, partial(_retreat, visit, refs, plan=plan), backwards=True)
        if "dh0" in refs:

            @pl.when(visit.first)
            def _() -> None:
                refs["dh0"][...] = dstate[0]


def _advance(
    visit: _Visit, refs: _Refs, rows: Any, plan: _Plan, use: Callable[..., None], end: Callable[[Any], None]
) -> None:
    """Take the state through the steps of a group, slab by slab: use(slab, step, decayed state before it, state after
    it), and then end(slab)."""
    _load(refs, visit, rows, "k", "v")
    _load_decays(refs, visit, rows, plan)
    refs["carried_rows"][...] = _unless(visit.step_of(rows, plan) % SEGMENT == 0)
    state = refs["state"]

    def advance(slab: Any) -> None:
        v = refs["v_columns"][slab, :]

        def step(n: Any, pair: Pair) -> Pair:
            row, decay = pl.ds(n, 1), _decay_of(refs, n)
            before = pair[0] * sum(decay) if decay else pair[0]
            pair = _step(pair, refs["carried_rows"][row, :], decay, _at(v, n) * refs["k_rows"][row, :])
            if plan.debug:
                plan.debug("state", pair[0], _in_state(visit, rows, n, slab, plan))
            use(slab, n, before, pair[0])
            return pair

        state[0, slab, :], state[1, slab, :] = _for_steps(plan, step, (state[0, slab, :], state[1, slab, :]))
        end(slab)

    _for_slabs(plan, advance)


def _advance_with_o(visit: _Visit, refs: _Refs, rows: Any, *, plan: _Plan) -> None:
    """`_advance`, with o."""
    _load(refs, visit, rows, "q")

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        refs["products"][n] = _fold_lanes(after * refs["q_rows"][pl.ds(n, 1), :])

    def end(slab: Any) -> None:
        refs["o_columns"][slab, :] = _sum_lanes(refs["products"])

    _advance(visit, refs, rows, plan, use, end)
    _store(refs, visit, rows, "o", plan.scale * refs["o_columns"][...].T)


def _advance_with_dq(visit: _Visit, refs: _Refs, rows: Any, *, plan: _Plan) -> None:
    """`_advance`, with dq, and with the decayed states that the gradients of gates need."""
    _load(refs, visit, rows, "do")
    dq = refs["dq_rows"]
    dq[...] = jnp.zeros_like(dq)

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        if "decayed" in refs:
            refs["decayed"][rows.start + n, slab, :] = before
        dq[pl.ds(n, 1), :] += _sum_rows(_at(refs["do_columns"][slab, :], n) * after)

    _advance(visit, refs, rows, plan, use, _nothing)
    _store(refs, visit, rows, "dq", plan.scale * dq[...])


def _retreat(visit: _Visit, refs: _Refs, rows: Any, *, plan: _Plan) -> None:
    """Take the gradient of the state back through the steps of a group, with dk, dv and the gradients of gates."""
    _load(refs, visit, rows, "q", "k", "v", "do")
    _load_decays(refs, visit, rows, plan)
    refs["carried_rows"][...] = _unless(visit.step_of(rows, plan) % SEGMENT == SEGMENT - 1)
    dstate, dk = refs["dstate"], refs["dk_rows"]
    for name in ("dk_rows", "dgate_rows"):
        refs[name][...] = jnp.zeros_like(refs[name])

    def retreat(slab: Any) -> None:
        v, do = refs["v_columns"][slab, :], refs["do_columns"][slab, :]

        def step(n: Any, pair: Pair) -> Pair:
            row = pl.ds(n, 1)
            term = _at(do, n) * (plan.scale * refs["q_rows"][row, :])
            pair = _step(pair, refs["carried_rows"][row, :], [], term)
            if plan.debug:
                plan.debug("dstate", pair[0], _in_state(visit, rows, n, slab, plan))
            dk[row, :] += _sum_rows(_at(v, n) * pair[0])
            refs["products"][n] = _fold_lanes(pair[0] * refs["k_rows"][row, :])
            if plan.gate is None:
                return pair
            refs["dgate_rows"][row, :] += _sum_rows(pair[0] * refs["decayed"][rows.start + n, slab, :])
            return _step(pair, 1.0, _decay_of(refs, n), None)

        pair = dstate[0, slab, :], dstate[1, slab, :]
        dstate[0, slab, :], dstate[1, slab, :] = _for_steps(plan, step, pair, backwards=True)
        refs["dv_columns"][slab, :] = _sum_lanes(refs["products"])

    _for_slabs(plan, retreat)
    _store(refs, visit, rows, "dk", dk[...])
    _store(refs, visit, rows, "dv", refs["dv_columns"][...].T)
    if plan.gate == "key":
        dgate = refs["dgate_rows"][...]
        if plan.debug:
            plan.debug("dgate", dgate, _is_own(visit, rows.start, dgate.shape, 0) & _is_key(plan, dgate.shape))
        _store(refs, visit, rows, "dgate", dgate)
    elif plan.gate == "step":
        line = pl.ds(rows.start // GROUP, 1)
        dgate = _sum_rows(refs["dgate_rows"][...].T)
        if plan.debug:
            plan.debug("dgate", dgate, _is_own(visit, rows.start, dgate.shape, 1))
        refs["dgate"][line, :] = _own(visit, rows, dgate, refs["dgate"][line, :], axis=1)


def _nothing(*_: Any) -> None: ...


def _begin(state: Any, given: Any) -> None:
    """A sequence's first state, which has no residue."""
    state[0] = jnp.zeros(state.shape[1:], jnp.float32) if given is None else given[...]
    state[1] = jnp.zeros(state.shape[1:], jnp.float32)


# ------------------------------------------------------------------------------------------------------- one step


def _step(pair: Pair, carried: Any, decay: list[jax.Array], term: jax.Array | None) -> Pair:
    """decay state + term, rounded to float32, and its residue. pair: the state and its residue, of which `carried`
    (1 or 0) is added; decay: kept and rest as `decay_parts` has them, or none."""
    state, residue = pair
    residue = carried * residue
    if not decay:
        return two_sum(state, residue if term is None else residue + term)
    kept, rest = decay
    total, left = two_sum(kept * state, jnp.zeros_like(state) if term is None else term)
    # There is no fused multiply-add: what a product loses is the smaller, the nearer the decay is to 1.
    return two_sum(total, left + (rest * state + (kept + rest) * residue))


def two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """a + b rounded, and exactly what that left out (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B)."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)


def decay_parts(gate: jax.Array, low: jax.Array | float = 0.0) -> Pair:
    """exp(gate + low) as a sum: 1 or 0, whichever is nearer (1 beyond it), and the float32 that is left; at most the
    largest float32, which times a state of zero is zero.

    Of exact operations and a short series, in place of the processor's exp: a decay near 1 whose error is 2^-25 has
    lost as many of its 24 bits after n steps as n has.
    """
    gate = jnp.clip(gate, SMALLEST_EXPONENT, LARGEST_EXPONENT)
    exponent = jnp.clip(jnp.floor(gate / LN2 + 0.5), -127.0, 127.0)
    x = (gate - exponent * LN2_HIGH) - exponent * LN2_LOW + low
    series = jnp.full_like(x, TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        series = series * x + coefficient
    series = x + x * x * series  # exp(x) - 1
    power = lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)  # 0 for 2^-127
    kept = jnp.where(gate + low > -LN2, 1.0, 0.0)
    return kept, (power - kept) + power * series


def _sum_rows(x: jax.Array) -> jax.Array:
    """[R, K] -> [1, K], pairwise; the few that an odd factor of R leaves one by one."""
    while x.shape[0] > 1 and x.shape[0] % 2 == 0:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return sum((x[n : n + 1] for n in range(1, x.shape[0])), start=x[:1])


def _sum_lanes(products: Any) -> jax.Array:
    """[GROUP, R, LANES] -> [R, GROUP], pairwise: the sums of the n-th matrix along its lanes are column n.

    Two matrices at a time are made into one, in which they take turns: a lane whose number has a 0 as that bit has the
    sum of the first's lane and of the lane after it, the other the same of the second. What a sum adds first must not
    depend on n, the row of a group that a step happens to have.
    """
    lane = lax.broadcasted_iota(jnp.int32, products.shape[1:], 1)
    sums = [products[n] for n in range(GROUP)]
    distance = 1
    while len(sums) > 1:
        first = lane & distance == 0
        sums = [
            jnp.where(first, a, b) + jnp.where(first, pltpu.roll(a, LANES - distance, 1), pltpu.roll(b, distance, 1))
            for a, b in zip(sums[::2], sums[1::2], strict=True)
        ]
        distance *= 2
    (total,) = sums
    while distance < LANES:
        total += pltpu.roll(total, distance, 1)
        distance *= 2
    return total[:, :GROUP]


def _fold_lanes(x: jax.Array) -> jax.Array:
    """[R, K] -> [R, LANES], sums over K in steps of LANES."""
    parts = [x[:, first : first + LANES] for first in range(0, x.shape[1], LANES)]
    while len(parts) > 1:
        parts = [parts[n] + parts[n + 1] if n + 1 < len(parts) else parts[n] for n in range(0, len(parts), 2)]
    return parts[0]


def _at(x: jax.Array, n: Any) -> jax.Array:
    """Column n of x [R, GROUP]."""
    lane = lax.broadcasted_iota(jnp.int32, (1, GROUP), 1)
    return jnp.sum(jnp.where(lane == n, x, 0.0), axis=1, keepdims=True)


def _unless(condition: jax.Array) -> jax.Array:
    return jnp.where(condition, 0.0, 1.0)
