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

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Gates, Gradients, Output
from op_arguments.gmm import GroupMetadata
from op_arguments.options import options_of
from op_arguments.probe import active, probe
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import Block, jit
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.decays import Pair, decayed_sum
from tpu_kernels._lib.recurrent_layout import GROUP, Layout, Plan, make_plan
from tpu_kernels._lib.recurrent_sums import column_of, fold_lanes, sum_lanes, sum_rows
from tpu_kernels._lib.recurrent_visits import (
    Refs,
    Visit,
    decay_of,
    for_groups,
    for_slabs,
    for_steps,
    in_state,
    is_key,
    is_own,
    load,
    load_decays,
    nth_visit,
    order,
    store,
    store_numbers,
    visit_of,
)
from tpu_kernels._lib.scans import Arrays, backward_of_nothing, forward_of_nothing, take

SEGMENT = 16  # steps between plain float32 states: divides every chunk size, so calls may be cut at chunk borders
FLOPS_FORWARD, FLOPS_BACKWARD = 15, 50


@options_of(take, make_plan)
def recurrent_fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, *, gates: Gates, output_final_state: bool = False, **options: Any
) -> Output:
    """o [B, T, H, V] in v's dtype and the states ht [N, H, K, V] float32 after the last steps, None unless asked for.

    gates as in `take`, other arguments as `gla.fused_recurrent_gla_fwd`'s. o is zero beyond the last sequence.
    Sites shown to a probe: kept and state.
    Raises ValueError or TypeError as `take`.
    """
    arrays, how = take(make_plan, q, k, v, gates, **options)
    return _forward(arrays, output_final_state=bool(output_final_state), **how)


@options_of(take, make_plan)
def recurrent_bwd(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, *, gates: Gates, dht: Any = None, **options: Any
) -> Gradients:
    """The gradients of `recurrent_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype; dht [N, H, K, V] is float32. Gradients have their arguments' dtypes and are zero beyond
    the last sequence. Held meanwhile, in float32: two states per visit, of one head. Sites shown to a probe: those of
    `recurrent_fwd`, dstate and dgate.
    Raises as `recurrent_fwd`.
    """
    arrays, how = take(make_plan, q, k, v, gates, do, dht, **options)
    return _backward(arrays, **how)


# ------------------------------------------------------------------------------------------------------ the calls


@jit("plan", "output_final_state", "interpret")
def _forward(x: Arrays, *, plan: Plan | None, output_final_state: bool, interpret: Interpreted) -> Output:
    if plan is None:
        return forward_of_nothing(x, output_final_state)
    layout = Layout(plan, x.cu_seqlens, interpret)

    def visit(h: Any, i: Any, visits: GroupMetadata) -> Any:
        return h, nth_visit(i, visits, plan)

    operands = {
        "q": layout.by_key(x.q, visit),
        "k": layout.by_key(x.k, visit),
        "v": layout.by_value(x.v, visit),
        **layout.gates(x.gates, visit),
    }
    if x.initial_state is not None:
        operands["h0"] = layout.state(x.initial_state, visit)
    out = {"o": layout.out_by_value(x.v.dtype, visit)}
    if output_final_state:
        out["ht"] = layout.state_out(visit)
    found = layout.call(
        partial(_forward_kernel, plan=plan),
        operands,
        out,
        _scratch(plan, columns=("v_columns", "o_columns"), rows=("q_rows", "k_rows")),
        phases=(),
        flops=FLOPS_FORWARD,
        times={},
        name="fused_recurrent_fwd",
    )
    return Output(layout.public(found["o"], plan.p.v), layout.public_state(found.get("ht")))


@jit("plan", "interpret")
def _backward(x: Arrays, *, plan: Plan | None, interpret: Interpreted) -> Gradients:
    if plan is None:
        return backward_of_nothing(x)
    layout = Layout(plan, x.cu_seqlens, interpret)

    # Phase 0 goes through time, phase 1 back. What only one of them needs stays, in the other, where that one ends or
    # begins, so that nothing is fetched or written for it.
    def visit_of_both(h: Any, phase: Any, i: Any, visits: GroupMetadata) -> Any:
        return h, nth_visit(order(phase, i, visits), visits, plan)

    def visit_of_first(h: Any, phase: Any, i: Any, visits: GroupMetadata) -> Any:
        last = visits.num_visits[0] - 1
        return h, nth_visit(jnp.where(phase == 0, i, last), visits, plan)

    def visit_of_second(h: Any, phase: Any, i: Any, visits: GroupMetadata) -> Any:
        last = visits.num_visits[0] - 1
        return h, nth_visit(jnp.where(phase == 0, last, last - i), visits, plan)

    operands = {
        "q": layout.by_key(x.q, visit_of_second),
        "k": layout.by_key(x.k, visit_of_both),
        "v": layout.by_value(x.v, visit_of_both),
        "do": layout.by_value(x.do, visit_of_second),
        **layout.gates(x.gates, visit_of_both),
    }
    if x.initial_state is not None:
        operands["h0"] = layout.state(x.initial_state, visit_of_first)
    if x.dht is not None:
        operands["dht"] = layout.state(x.dht, visit_of_second)
    kept = jax.ShapeDtypeStruct((layout.visits.group_ids.shape[0], 2, plan.values, plan.keys), jnp.float32)
    out = {
        "dq": layout.out_by_key(x.q.dtype, visit_of_second),
        "dk": layout.out_by_key(x.k.dtype, visit_of_second),
        "dv": layout.out_by_value(x.v.dtype, visit_of_second),
        # Written and read by the kernel itself. One head's: heads follow one another.
        "kept_states": Block(kept, space=pl.ANY),
    }
    scratch = _scratch(
        plan,
        columns=("v_columns", "do_columns", "dv_columns"),
        rows=("q_rows", "k_rows", "dq_rows", "dk_rows", "dgate_rows"),
    )
    scratch["dstate"] = pltpu.VMEM((2, plan.values, plan.keys), jnp.float32)
    if plan.gate is not None:
        out["dgate"] = layout.gate_out(x.gates, visit_of_second)
        scratch["decayed"] = pltpu.VMEM((plan.tile, plan.values, plan.keys), jnp.float32)
    if x.initial_state is not None:
        out["dh0"] = layout.state_out(visit_of_second)
    found = layout.call(
        partial(_backward_kernel, plan=plan),
        operands,
        out,
        scratch,
        phases=(2,),
        flops=FLOPS_BACKWARD,
        times={"k": 2, "v": 2, "gk": 2, "decays": 2, "kept_states": 2 * plan.p.h},
        name="fused_recurrent_bwd",
    )
    dq, dk, dv = (layout.public(found[f"d{name}"], getattr(x, name).shape[3]) for name in ("q", "k", "v"))
    dgates = layout.gate_gradients(found.get("dgate"), x.gates)
    return Gradients(dq, dk, dv, dgates, layout.public_state(found.get("dh0")))


def _scratch(plan: Plan, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, Any]:
    """The state and its residue; and of a group's steps what is to be summed over K, columns along V, rows along K."""
    rows += ("carried_rows",) if plan.gate is None else ("carried_rows", "kept_rows", "rest_rows")
    return {
        "state": pltpu.VMEM((2, plan.values, plan.keys), jnp.float32),
        "products": pltpu.VMEM((GROUP, plan.slab, LANES), jnp.float32),
        **{name: pltpu.VMEM((plan.values, GROUP), jnp.float32) for name in columns},
        **{name: pltpu.VMEM((GROUP, plan.keys), jnp.float32) for name in rows},
    }


# ----------------------------------------------------------------------------------------------------- the kernels


def _forward_kernel(visits: GroupMetadata, refs: Refs, *, plan: Plan) -> None:
    visit = visit_of(pl.program_id(1), visits, plan)
    pl.when(visit.first)(lambda: _begin(refs["state"], refs.get("h0")))
    for_groups(visit, plan, partial(_advance_with_o, visit, refs, plan=plan))
    if "ht" in refs:

        @pl.when(visit.last)
        def _() -> None:
            refs["ht"][...] = refs["state"][0]


def _backward_kernel(visits: GroupMetadata, refs: Refs, *, plan: Plan) -> None:
    phase = pl.program_id(1)
    i = order(phase, pl.program_id(2), visits)
    visit = visit_of(i, visits, plan)
    state, dstate, kept = refs["state"], refs["dstate"], refs["kept_states"].at[i]

    @pl.when(phase == 0)
    def _() -> None:
        pl.when(visit.first)(lambda: _begin(state, refs.get("h0")))
        pltpu.sync_copy(state, kept)

        @pl.when(~visit.last)
        def _() -> None:
            for_groups(visit, plan, lambda rows: _advance(visit, refs, rows, plan, _nothing, _nothing))

    @pl.when(phase == 1)
    def _() -> None:
        pl.when(visit.last)(lambda: _begin(dstate, refs.get("dht")))
        pltpu.sync_copy(kept, state)
        for_groups(visit, plan, partial(_advance_with_dq, visit, refs, plan=plan))
        for_groups(visit, plan, partial(_backward_step, visit, refs, plan=plan), backwards=True)
        if "dh0" in refs:

            @pl.when(visit.first)
            def _() -> None:
                refs["dh0"][...] = dstate[0]


def _advance(
    visit: Visit, refs: Refs, rows: Any, plan: Plan, use: Callable[..., None], end: Callable[[Any], None]
) -> None:
    """Take the state through the steps of a group, slab by slab: use(slab, step, decayed state before it, state after
    it), and then end(slab)."""
    load(refs, visit, rows, "k", "v")
    load_decays(refs, visit, rows, plan)
    refs["carried_rows"][...] = _unless(visit.step_of(rows, plan) % SEGMENT == 0)
    state = refs["state"]

    def advance(slab: Any) -> None:
        v = refs["v_columns"][slab, :]

        def step(n: Any, pair: Pair) -> Pair:
            row, decay = pl.ds(n, 1), decay_of(refs, n)
            before = pair[0] * sum(decay) if decay else pair[0]
            pair = decayed_sum(pair, refs["carried_rows"][row, :], decay, column_of(v, n) * refs["k_rows"][row, :])
            if active():
                probe("state", pair[0], in_state(visit, rows, n, slab, plan))
            use(slab, n, before, pair[0])
            return pair

        state[0, slab, :], state[1, slab, :] = for_steps(plan, step, (state[0, slab, :], state[1, slab, :]))
        end(slab)

    for_slabs(plan, advance)


def _advance_with_o(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """`_advance`, with o."""
    load(refs, visit, rows, "q")

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        refs["products"][n] = fold_lanes(after * refs["q_rows"][pl.ds(n, 1), :])

    def end(slab: Any) -> None:
        refs["o_columns"][slab, :] = sum_lanes(refs["products"])

    _advance(visit, refs, rows, plan, use, end)
    store(refs, visit, rows, "o", plan.p.scale * refs["o_columns"][...].T)


def _advance_with_dq(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """`_advance`, with dq, and with the decayed states that the gradients of gates need."""
    load(refs, visit, rows, "do")
    dq = refs["dq_rows"]
    dq[...] = jnp.zeros_like(dq)

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        if "decayed" in refs:
            refs["decayed"][rows.start + n, slab, :] = before
        dq[pl.ds(n, 1), :] += sum_rows(column_of(refs["do_columns"][slab, :], n) * after)

    _advance(visit, refs, rows, plan, use, _nothing)
    store(refs, visit, rows, "dq", plan.p.scale * dq[...])


def _backward_step(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """Take the gradient of the state back through the steps of a group, with dk, dv and the gradients of gates."""
    load(refs, visit, rows, "q", "k", "v", "do")
    load_decays(refs, visit, rows, plan)
    refs["carried_rows"][...] = _unless(visit.step_of(rows, plan) % SEGMENT == SEGMENT - 1)
    dstate, dk = refs["dstate"], refs["dk_rows"]
    for name in ("dk_rows", "dgate_rows"):
        refs[name][...] = jnp.zeros_like(refs[name])

    def go_back(slab: Any) -> None:
        v, do = refs["v_columns"][slab, :], refs["do_columns"][slab, :]

        def step(n: Any, pair: Pair) -> Pair:
            row = pl.ds(n, 1)
            term = column_of(do, n) * (plan.p.scale * refs["q_rows"][row, :])
            pair = decayed_sum(pair, refs["carried_rows"][row, :], [], term)
            if active():
                probe("dstate", pair[0], in_state(visit, rows, n, slab, plan))
            dk[row, :] += sum_rows(column_of(v, n) * pair[0])
            refs["products"][n] = fold_lanes(pair[0] * refs["k_rows"][row, :])
            if plan.gate is None:
                return pair
            refs["dgate_rows"][row, :] += sum_rows(pair[0] * refs["decayed"][rows.start + n, slab, :])
            return decayed_sum(pair, 1.0, decay_of(refs, n), None)

        pair = dstate[0, slab, :], dstate[1, slab, :]
        dstate[0, slab, :], dstate[1, slab, :] = for_steps(plan, step, pair, backwards=True)
        refs["dv_columns"][slab, :] = sum_lanes(refs["products"])

    for_slabs(plan, go_back)
    store(refs, visit, rows, "dk", dk[...])
    store(refs, visit, rows, "dv", refs["dv_columns"][...].T)
    if plan.gate == "key":
        dgate = refs["dgate_rows"][...]
        if active():
            probe("dgate", dgate, is_own(visit, rows.start, dgate.shape, 0) & is_key(plan, dgate.shape))
        store(refs, visit, rows, "dgate", dgate)
    elif plan.gate == "step":
        dgate = sum_rows(refs["dgate_rows"][...].T)
        if active():
            probe("dgate", dgate, is_own(visit, rows.start, dgate.shape, 1))
        store_numbers(refs, visit, rows, "dgate", dgate)


def _nothing(*_: Any) -> None: ...


def _begin(state: Any, given: Any) -> None:
    """A sequence's first state, which has no residue."""
    state[0] = jnp.zeros(state.shape[1:], jnp.float32) if given is None else given[...]
    state[1] = jnp.zeros(state.shape[1:], jnp.float32)


# ------------------------------------------------------------------------------------------------------- one step


def _unless(condition: jax.Array) -> jax.Array:
    return jnp.where(condition, 0.0, 1.0)
