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

That takes 17 operations of the vector unit for each register of a state at each step: 15 for the state and its residue,
2 for o. A state of K = V = 128 has 16 registers, and a core four slots: 68 cycles a step is the floor, of which the
forward pass takes 97 on tpu7x. Back it is three walks, with 15, 18 and 23 operations: 224, of which it takes 285.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Gates, Gradients, Output
from op_arguments.options import options_of
from op_arguments.probe import active, probe
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import jit
from tpu_kernels._lib.decays import Pair, added, decayed, decayed_sum, ordered_two_sum
from tpu_kernels._lib.recurrent_decode import decode, is_decoding
from tpu_kernels._lib.recurrent_layout import GROUP, SUBLANES, Layout, Plan, make_plan
from tpu_kernels._lib.recurrent_sums import column_of, fold_registers, sum_folded, sum_keys_of, sum_rows, sums_of_keys
from tpu_kernels._lib.recurrent_visits import (
    Refs,
    Visit,
    decay_of,
    for_slabs,
    for_steps,
    in_state,
    is_key,
    is_own,
    load,
    load_decays,
    own,
    store,
    store_numbers,
)
from tpu_kernels._lib.recurrent_walk import Recurrence, step_scratch
from tpu_kernels._lib.scans import Arrays, backward_of_nothing, forward_of_nothing, take

SEGMENT = 16  # steps between plain float32 states: divides every chunk size, so calls may be cut at chunk borders


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
    if is_decoding(plan, x.initial_state):
        return decode({"q": x.q, "k": x.k, "v": x.v}, x.gates, x.initial_state, plan, output_final_state, interpret)
    layout = Layout(plan, x.cu_seqlens, interpret)
    operands = {
        "q": layout.by_key(x.q, layout.in_time),
        "k": layout.by_key(x.k, layout.in_time),
        "v": layout.by_value(x.v, layout.in_time),
        **layout.gates(x.gates, layout.in_time),
    }
    scratch = _scratch(plan, rows=("q", "k", "carried"), columns=("v",), of_values="o")
    return _recurrence().forward(layout, x, operands, scratch, output_final_state)


@jit("plan", "interpret")
def _backward(x: Arrays, *, plan: Plan | None, interpret: Interpreted) -> Gradients:
    if plan is None:
        return backward_of_nothing(x)
    layout = Layout(plan, x.cu_seqlens, interpret)
    operands = {
        "q": layout.by_key(x.q, layout.in_second),
        "k": layout.by_key(x.k, layout.in_both),
        "v": layout.by_value(x.v, layout.in_both),
        "do": layout.by_value(x.do, layout.in_second),
        **layout.gates(x.gates, layout.in_both),
    }
    out = {
        "dq": layout.out_by_key(x.q.dtype, layout.in_second),
        "dk": layout.out_by_key(x.k.dtype, layout.in_second),
        "dv": layout.out_by_value(x.v.dtype, layout.in_second),
    }
    scratch = _scratch(
        plan,
        rows=("q", "k", "carried", "carried_back"),
        columns=("v", "do"),
        of_keys=("dq", "dk", "dgate"),
        of_values="dv",
    )
    if plan.gate is not None:
        out["dgate"] = layout.gate_out(x.gates, layout.in_second)
        scratch["decayed"] = pltpu.VMEM((plan.tile, plan.values, plan.keys), jnp.float32)
    found = _recurrence().both_ways(layout, x, operands, out, scratch)
    dq, dk, dv = (layout.public(found[f"d{name}"], getattr(x, name).shape[3]) for name in ("q", "k", "v"))
    dgates = layout.gate_gradients(found.get("dgate"), x.gates)
    return Gradients(dq, dk, dv, dgates, layout.public_state(found.get("dh0")))


def _recurrence() -> Recurrence:
    return Recurrence("fused_recurrent", (15, 50), _load, _advance, _advance_with_o, _advance_with_dq, _backward_step)


def _scratch(
    plan: Plan, *, rows: tuple[str, ...], columns: tuple[str, ...], of_values: str, of_keys: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The state and its residue, and what a tile's steps need; partial sums of values are a slab's."""
    rows += () if plan.gate is None else ("kept", "rest")
    return {
        "state": pltpu.VMEM((2, *plan.state), jnp.float32),
        f"{of_values}_parts": pltpu.VMEM((plan.values // plan.slab, GROUP, SUBLANES, plan.slab), jnp.float32),
        **step_scratch(
            plan,
            rows=dict.fromkeys(rows, plan.keys),
            columns=dict.fromkeys(columns, plan.values),
            parts=dict.fromkeys(of_keys, plan.keys),
        ),
    }


# ------------------------------------------------------------------------------------------------ a group's steps


def _load(visit: Visit, refs: Refs, plan: Plan, *names: str) -> None:
    """As `Recurrence`."""
    load(refs, visit, plan, *names)
    load_decays(refs, visit, plan)
    refs["carried_rows"][...] = _carried(visit, plan, 0)
    if "carried_back_rows" in refs:
        refs["carried_back_rows"][...] = _carried(visit, plan, SEGMENT - 1)


def _advance(visit: Visit, refs: Refs, rows: Any, plan: Plan, use: Callable[..., None]) -> None:
    """As `Recurrence`: use(slab, step, decayed state before it, state after it)."""
    state, group = refs["state"], rows.start // GROUP

    def advance(slab: Any) -> None:
        v = refs["v_columns"][group, slab, :]

        def step(n: Any, pair: Pair) -> Pair:
            row, decay = pl.ds(rows.start + n, 1), decay_of(refs, rows.start + n)
            before = pair[0] * sum(decay) if decay else pair[0]
            pair = decayed_sum(pair, refs["carried_rows"][row, :], decay, column_of(v, n) * refs["k_rows"][row, :])
            if active():
                probe("state", pair[0], in_state(visit, rows, n, slab, plan))
            use(slab, n, before, pair[0])
            return pair

        state[0, slab, :], state[1, slab, :] = for_steps(plan, step, (state[0, slab, :], state[1, slab, :]))

    for_slabs(plan, advance)


def _advance_with_o(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """`_advance`, with o."""

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        sum_keys_of(refs["o_parts"], slab, n, after * refs["q_rows"][pl.ds(rows.start + n, 1), :])

    _advance(visit, refs, rows, plan, use)
    store(refs, visit, rows, "o", plan.p.scale * sums_of_keys(refs["o_parts"]))


def _advance_with_dq(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """`_advance`, with dq, and with the decayed states that the gradients of gates need."""
    dq, group = refs["dq_parts"], rows.start // GROUP
    dq[...] = jnp.zeros_like(dq)

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        if "decayed" in refs:
            refs["decayed"][rows.start + n, slab, :] = before
        dq[n] += fold_registers(column_of(refs["do_columns"][group, slab, :], n) * after)

    _advance(visit, refs, rows, plan, use)
    store(refs, visit, rows, "dq", plan.p.scale * sum_folded(dq))


def _backward_step(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """Take the gradient of the state back through the steps of a group, with dk, dv and the gradients of gates."""
    dstate, dk, group = refs["dstate"], refs["dk_parts"], rows.start // GROUP
    for name in ("dk_parts", "dgate_parts"):
        refs[name][...] = jnp.zeros_like(refs[name])

    def go_back(slab: Any) -> None:
        v, do = refs["v_columns"][group, slab, :], refs["do_columns"][group, slab, :]

        def step(n: Any, pair: Pair) -> Pair:
            row = pl.ds(rows.start + n, 1)
            term = column_of(do, n) * (plan.p.scale * refs["q_rows"][row, :])
            whole = added(pair, refs["carried_back_rows"][row, :], term)
            pair = ordered_two_sum(*whole)
            if active():
                probe("dstate", pair[0], in_state(visit, rows, n, slab, plan))
            dk[n] += fold_registers(column_of(v, n) * pair[0])
            sum_keys_of(refs["dv_parts"], slab, n, pair[0] * refs["k_rows"][row, :])
            if plan.gate is None:
                return pair
            refs["dgate_parts"][n] += fold_registers(pair[0] * refs["decayed"][rows.start + n, slab, :])
            return decayed(whole, decay_of(refs, rows.start + n))

        pair = dstate[0, slab, :], dstate[1, slab, :]
        dstate[0, slab, :], dstate[1, slab, :] = for_steps(plan, step, pair, backwards=True)

    for_slabs(plan, go_back)
    store(refs, visit, rows, "dk", sum_folded(dk))
    store(refs, visit, rows, "dv", sums_of_keys(refs["dv_parts"]))
    if plan.gate is None:
        return
    dgate = sum_folded(refs["dgate_parts"])
    if plan.gate == "key":
        if active():
            probe("dgate", dgate, is_own(visit, rows.start, dgate.shape, 0) & is_key(plan, dgate.shape))
        store(refs, visit, rows, "dgate", dgate)
    else:
        dgate = sum_rows(dgate.T)
        if active():
            probe("dgate", dgate, is_own(visit, rows.start, dgate.shape, 1))
        store_numbers(refs, visit, rows, "dgate", dgate)


def _carried(visit: Visit, plan: Plan, first: int) -> jax.Array:
    """1 where a step adds the residue, [tile, K]; 0 at the `first` of a segment, and where it is not the visit's."""
    step = visit.step_of(plan)
    return own(visit, pl.ds(0, plan.tile), jnp.where(step % SEGMENT == first, 0.0, 1.0))
