"""The recurrent forms of the gated delta rules on the TPU: one step of time after the other.

`recurrent_delta_fwd` and `recurrent_delta_bwd` are what `fused_recurrent_*` of `gated_delta_rule.py` and `kda.py` are
made of; the operations are defined in the modules of these names in `cpu_golden`. Sequences, tiles of rows and states
[V, K] lie as in `fused_recurrent`, a state of each head of values; q and k are read by every head that shares them, and
normalised before, where that is asked for. There are no dots: float32 and bfloat16 differ in what is loaded and stored,
and in nothing between.

The decay meets the key where a state is read, and the state where it is written: Sᵀ k of the decayed state is
Sᵀ (exp(g) k). What the state recalls is taken from v at once, so nothing of a step may wait for the next: a sum over K
of all rows of the state is made in each. A state is a plain float32 matrix after every step, so a call that goes on
from it computes the same bits. The backward pass goes through time first and leaves the state before every visit; then
back, visit by visit, whose states and errors it computes anew and keeps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.delta_rule import DeltaGrads, DeltaProblem, DeltaTensors
from op_arguments.gla import Output, Problem
from op_arguments.options import options_of
from op_arguments.probe import active, probe
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import Block, jit
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.decays import next_state
from tpu_kernels._lib.delta import DeltaArrays, backward_of_nothing, key_gradient, normalised, take
from tpu_kernels._lib.recurrent_layout import GROUP, Layout, Place, Plan, make_step_plan
from tpu_kernels._lib.recurrent_sums import column_of, sum_keys, sum_rows, with_column
from tpu_kernels._lib.recurrent_visits import (
    Refs,
    Visit,
    for_slabs,
    for_steps,
    in_state,
    load,
    load_decays,
    load_numbers,
    store,
    store_numbers,
)
from tpu_kernels._lib.recurrent_walk import Recurrence, group_scratch
from tpu_kernels._lib.scans import forward_of_nothing


class StepPlan(NamedTuple):
    """The problem, and the recurrence of its heads of values."""

    p: DeltaProblem
    steps: Plan


def make_plan(p: DeltaProblem, per_channel: bool, *, backward: bool) -> StepPlan | None:
    """The plan of a checked problem, None where there is nothing to go through."""
    of_values = Problem(p.b, p.t, p.hv, p.k, p.v, p.n, p.scale, p.dtype, p.packed)
    steps = make_step_plan(of_values, "key" if per_channel else "step", backward=backward)
    return None if steps is None else StepPlan(p, steps)


@options_of(take, make_plan)
def recurrent_delta_fwd(
    x: DeltaTensors, per_channel: bool, *, output_final_state: bool = False, **options: Any
) -> Output:
    """o [B, T, HV, V] in v's dtype and the states ht [N, HV, K, V] float32 after the last steps, None unless asked for.

    per_channel: whether g is that of `kda`; other arguments as `gated_delta_rule.fused_recurrent_gated_delta_rule_fwd`.
    o is zero beyond the last sequence. Sites shown to a probe: kept, v_new and h.
    Raises ValueError or TypeError as `take`.
    """
    arrays, how = take(make_plan, x, per_channel, **options)
    return _forward(arrays, output_final_state=bool(output_final_state), **how)


@options_of(take, make_plan)
def recurrent_delta_bwd(
    x: DeltaTensors, do: jax.Array, per_channel: bool, *, dht: Any = None, **options: Any
) -> DeltaGrads:
    """The gradients of `recurrent_delta_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    Gradients have their arguments' dtypes and are zero beyond the last sequence. Held meanwhile, in float32: a state
    per visit, of one head, and dq and dk of each head of values. Sites shown to a probe: those of
    `recurrent_delta_fwd`, and dh.
    Raises as `recurrent_delta_fwd`.
    """
    arrays, how = take(make_plan, x, per_channel, do, dht, **options)
    return _backward(arrays, **how)


# ------------------------------------------------------------------------------------------------------ the calls


@jit("plan", "output_final_state", "interpret")
def _forward(x: DeltaArrays, *, plan: StepPlan | None, output_final_state: bool, interpret: Interpreted) -> Output:
    if plan is None:
        return forward_of_nothing(x, output_final_state)
    layout = _layout(x, plan, interpret)
    operands = {**_keys(layout, plan, layout.in_time, q=x.q, k=x.k), **_written(layout, x, layout.in_time)}
    scratch = _scratch(layout.plan, columns=("v_columns",), rows=("q_rows", "k_rows"))
    return _recurrence().forward(layout, x, operands, scratch, output_final_state)


@jit("plan", "interpret")
def _backward(x: DeltaArrays, *, plan: StepPlan | None, interpret: Interpreted) -> DeltaGrads:
    if plan is None:
        return backward_of_nothing(x)
    layout = _layout(x, plan, interpret)
    steps = layout.plan
    operands = {
        **_keys(layout, plan, layout.in_second, q=x.q),
        **_keys(layout, plan, layout.in_both, k=x.k),
        **_written(layout, x, layout.in_both),
        "do": layout.by_value(x.do, layout.in_second),
    }
    of_keys = x.q.dtype if plan.p.group == 1 and not plan.p.l2norm else jnp.float32
    gates = _gates(x, steps)
    out = {name: layout.out_by_key(of_keys, layout.in_second) for name in ("dq", "dk")} | {
        "dv": layout.out_by_value(x.v.dtype, layout.in_second),
        "dgate": layout.gate_out(gates, layout.in_second),
        "dbeta": layout.numbers_out(layout.in_second),
    }
    scratch = _scratch(
        steps,
        columns=("v_columns", "do_columns", "dv_columns"),
        rows=("q_rows", "k_rows"),
    ) | {
        **{f"{name}_rows": pltpu.VMEM((GROUP, steps.keys), jnp.float32) for name in ("dq", "dk", "recalled", "dgate")},
        "dbeta_rows": pltpu.VMEM((GROUP, LANES), jnp.float32),
        "before": pltpu.VMEM((steps.tile, steps.values, steps.keys), jnp.float32),
        "errors": pltpu.VMEM((steps.tile // GROUP, steps.values, GROUP), jnp.float32),
    }
    found = _recurrence().both_ways(layout, x, operands, out, scratch)
    dq, dk = (key_gradient(layout.public(found[f"d{n}"], plan.p.k), getattr(x, n), plan.p) for n in ("q", "k"))
    (dg,) = layout.gate_gradients(found["dgate"], gates).values()
    dbeta = layout.public_numbers(found["dbeta"]).astype(x.beta.dtype)
    return DeltaGrads(dq, dk, layout.public(found["dv"], plan.p.v), dg, dbeta, layout.public_state(found.get("dh0")))


def _layout(x: DeltaArrays, plan: StepPlan, interpret: Interpreted) -> Layout:
    """An interpreter's loops are not unrolled: it would compile every step."""
    return Layout(plan.steps._replace(unroll=1) if interpret else plan.steps, x.cu_seqlens, interpret)


def _gates(x: DeltaArrays, steps: Plan) -> dict[str, jax.Array]:
    return {"gk" if steps.gate == "key" else "g": x.g}


def _keys(layout: Layout, plan: StepPlan, place: Place, **x: jax.Array) -> dict[str, Block]:
    """q or k [B, T, H, K], normalised where that is asked for; a head of values reads that of its keys."""

    def of_key_head(*step: Any) -> Any:
        h, visit = place(*step)
        return h // plan.p.group, visit

    return {
        name: layout.by_key(normalised(given)[0] if plan.p.l2norm else given, of_key_head) for name, given in x.items()
    }


def _written(layout: Layout, x: DeltaArrays, place: Place) -> dict[str, Block]:
    """What besides keys is written into a state, or decays it."""
    of_steps = {"v": layout.by_value(x.v, place), "beta": layout.numbers(x.beta, place)}
    return of_steps | layout.gates(_gates(x, layout.plan), place)


def _recurrence() -> Recurrence:
    return Recurrence("recurrent_delta", (15, 45), _load, _advance, _advance_with_dq, _backward_steps)


def _scratch(plan: Plan, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, Any]:
    """The state, and what a tile's steps need."""
    return {
        "state": pltpu.VMEM((plan.values, plan.keys), jnp.float32),
        "beta_rows": pltpu.VMEM((plan.tile, LANES), jnp.float32),
        **group_scratch(plan, columns, (*rows, "kept_rows", "rest_rows", "decayed_rows")),
    }


# ------------------------------------------------------------------------------------------------ a group's steps


def _load(visit: Visit, refs: Refs, plan: Plan, *names: str) -> None:
    """As `Recurrence`."""
    load(refs, visit, plan, *names)
    load_decays(refs, visit, plan)
    load_numbers(refs, visit, plan, "beta")
    refs["decayed_rows"][...] = _decayed(refs, ..., refs["k_rows"][...])


def _advance(visit: Visit, refs: Refs, rows: Any, plan: Plan, use: Callable[..., None]) -> None:
    """As `Recurrence`: use(slab, step, state before it, state after it, error of what that before recalled)."""
    state, group = refs["state"], rows.start // GROUP

    def advance(slab: Any) -> None:
        v = refs["v_columns"][group, slab, :]

        def step(n: Any, before: jax.Array) -> jax.Array:
            row = pl.ds(rows.start + n, 1)
            error = column_of(v, n) - sum_keys(refs["decayed_rows"][row, :] * before)
            v_new = refs["beta_rows"][row, :1] * error
            decay = refs["kept_rows"][row, :], refs["rest_rows"][row, :]
            after = next_state(before, *decay, refs["k_rows"][row, :] * v_new)
            if active():
                where = in_state(visit, rows, n, slab, plan)
                probe("v_new", v_new, where[:, :1])
                probe("h", after, where)
            use(slab, n, before, after, error)
            return after

        state[slab, :] = for_steps(plan, step, state[slab, :])

    for_slabs(plan, advance)


def _advance_with_dq(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """`_advance`, with dq, and with the states before the steps and the errors, which the other gradients need."""
    dq, group = refs["dq_rows"], rows.start // GROUP
    dq[...] = jnp.zeros_like(dq)

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array, error: jax.Array) -> None:
        refs["before"][rows.start + n, slab, :] = before
        refs["errors"][group, slab, :] = with_column(refs["errors"][group, slab, :], n, error)
        dq[pl.ds(n, 1), :] += sum_rows(column_of(refs["do_columns"][group, slab, :], n) * after)

    _advance(visit, refs, rows, plan, use)
    store(refs, visit, rows, "dq", plan.p.scale * dq[...])


def _backward_steps(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """Take the gradient of the state back through the steps of a group, with all gradients but dq."""
    group = rows.start // GROUP
    for name in ("dk_rows", "recalled_rows", "dgate_rows", "dbeta_rows"):
        refs[name][...] = jnp.zeros_like(refs[name])

    def go_back(slab: Any) -> None:
        do, errors = refs["do_columns"][group, slab, :], refs["errors"][group, slab, :]

        def step(n: Any, dstate: jax.Array) -> jax.Array:
            row, sums = pl.ds(rows.start + n, 1), pl.ds(n, 1)
            key, beta, before = (
                refs["k_rows"][row, :],
                refs["beta_rows"][row, :1],
                refs["before"][rows.start + n, slab, :],
            )
            dstate += column_of(do, n) * (plan.p.scale * refs["q_rows"][row, :])
            error = column_of(errors, n)
            dv_new = sum_keys(key * dstate)
            dv = beta * dv_new
            refs["dv_columns"][group, slab, :] = with_column(refs["dv_columns"][group, slab, :], n, dv)
            refs["dbeta_rows"][sums, :] += sum_rows(dv_new * error)
            refs["dk_rows"][sums, :] += sum_rows((beta * error) * dstate)
            refs["recalled_rows"][sums, :] += sum_rows(dv * before)
            through = dstate - key * dv
            refs["dgate_rows"][sums, :] += sum_rows(before * through)
            previous = refs["kept_rows"][row, :] * through + refs["rest_rows"][row, :] * through
            if active():
                probe("dh", previous, in_state(visit, rows, n, slab, plan))
            return previous

        refs["dstate"][slab, :] = for_steps(plan, step, refs["dstate"][slab, :], backwards=True)

    for_slabs(plan, go_back)
    store(refs, visit, rows, "dk", refs["dk_rows"][...] - _decayed(refs, rows, refs["recalled_rows"][...]))
    store(refs, visit, rows, "dv", refs["dv_columns"][group].T)
    store_numbers(refs, visit, rows, "dbeta", refs["dbeta_rows"][...].T[:1, :])
    dgate = _decayed(refs, rows, refs["dgate_rows"][...])
    if plan.gate == "key":
        store(refs, visit, rows, "dgate", dgate)
    else:
        store_numbers(refs, visit, rows, "dgate", sum_rows(dgate.T))


def _decayed(refs: Refs, rows: Any, x: jax.Array) -> jax.Array:
    """Rows x [·, K] of a tile times their steps' decays."""
    return refs["kept_rows"][rows] * x + refs["rest_rows"][rows] * x
