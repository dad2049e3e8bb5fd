"""The recurrent forms of the gated delta rules on the TPU: one step of time after the other.

`recurrent_delta_fwd` and `recurrent_delta_bwd` are what `fused_recurrent_*` of `gated_delta_rule.py` and `kda.py` are
made of; the operations are defined in the modules of these names in `cpu_golden`. Sequences and tiles of rows lie as in
`fused_recurrent`, a state of each head of values; q and k are read by every head that shares them, and normalised
before, where that is asked for. There are no dots: float32 and bfloat16 differ in what is loaded and stored, and in
nothing between.

What the decayed state recalls of k is taken from v at once, and the next step waits for it: a sum over K in each. So
states lie as [K, V], where that sum adds registers, and v, o and what is recalled are rows; q, k and gates by key are
columns. A decay by key multiplies the state before that sum, a decay of all keys multiplies the sum. A state is a plain
float32 matrix after every step, so a call that goes on from it computes the same bits. The backward pass goes through
time first and leaves the state before every visit. Then it goes back, visit by visit, computes states and errors anew
and keeps them.
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
from tpu_kernels._lib.decays import next_state, times
from tpu_kernels._lib.delta import DeltaArrays, backward_of_nothing, key_gradient, normalised, take
from tpu_kernels._lib.recurrent_decode import decode, is_decoding
from tpu_kernels._lib.recurrent_layout import GROUP, Layout, Place, Plan, make_step_plan
from tpu_kernels._lib.recurrent_sums import (
    bit_of,
    column_of,
    fold_registers,
    recalled,
    spread_bits,
    sum_at_once,
    sum_folded,
    sum_rows,
)
from tpu_kernels._lib.recurrent_visits import (
    Refs,
    Visit,
    decay_of,
    for_slabs,
    for_steps,
    groups_of,
    in_state,
    load,
    load_decays,
    load_numbers,
    make_columns,
    store,
    store_numbers,
)
from tpu_kernels._lib.recurrent_walk import Recurrence, step_scratch
from tpu_kernels._lib.scans import forward_of_nothing


class StepPlan(NamedTuple):
    """The problem, and the recurrence of its heads of values."""

    p: DeltaProblem
    steps: Plan


def make_plan(p: DeltaProblem, per_channel: bool, *, backward: bool) -> StepPlan | None:
    """The plan of a checked problem, None where there is nothing to go through."""
    of_values = Problem(p.b, p.t, p.hv, p.k, p.v, p.n, p.scale, p.dtype, p.packed)
    gate = "key" if per_channel else "step"
    steps = make_step_plan(of_values, gate, lanes="value", backward=backward)
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
    if is_decoding(plan.steps, x.initial_state):
        keys = {name: jnp.repeat(given, plan.p.group, axis=2) for name, given in _key_rows(plan, q=x.q, k=x.k).items()}
        rows = {**keys, "v": x.v, "beta": x.beta}
        return decode(rows, _gates(x, plan.steps), x.initial_state, plan.steps, output_final_state, interpret)
    layout = _layout(x, plan, interpret)
    operands = {**_keys(layout, plan, layout.in_time, q=x.q, k=x.k), **_written(layout, x, layout.in_time)}
    scratch = _scratch(layout.plan, parts={"o": layout.plan.values})
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
        rows={"do": steps.values, "dv": steps.values, "error": steps.values, "dbeta": LANES},
        parts={"dq": steps.keys, "dk": steps.keys, "dgate": steps.keys if steps.gate == "key" else LANES},
    )
    scratch["before"] = pltpu.VMEM((steps.tile, *steps.state), jnp.float32)
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

    return {name: layout.by_key(rows, of_key_head) for name, rows in _key_rows(plan, **x).items()}


def _key_rows(plan: StepPlan, **x: jax.Array) -> dict[str, jax.Array]:
    """q or k [B, T, H, K], normalised where that is asked for."""
    return {name: normalised(given)[0] if plan.p.l2norm else given for name, given in x.items()}


def _written(layout: Layout, x: DeltaArrays, place: Place) -> dict[str, Block]:
    """What besides keys is written into a state, or decays it."""
    of_steps = {"v": layout.by_value(x.v, place), "beta": layout.numbers(x.beta, place)}
    return of_steps | layout.gates(_gates(x, layout.plan), place)


def _recurrence() -> Recurrence:
    return Recurrence("recurrent_delta", (15, 45), _load, _advance, _advance_with_o, _advance_with_dq, _backward_steps)


def _scratch(plan: Plan, parts: dict[str, int], rows: dict[str, int] | None = None) -> dict[str, Any]:
    """The state, and what a tile's steps need."""
    decay = plan.keys if plan.gate == "key" else LANES
    rows = {"v": plan.values, "beta": LANES, "kept": decay, "rest": decay, **(rows or {})}
    columns = {"q": plan.keys, "k": plan.keys}
    scratch = {"state": pltpu.VMEM(plan.state, jnp.float32)}
    if plan.gate == "key":
        columns["rest"] = plan.keys
        scratch["kept_bits"] = pltpu.VMEM((plan.tile // GROUP, plan.keys, LANES), jnp.int32)
    return scratch | step_scratch(plan, rows=rows, columns=columns, parts=parts)


# ------------------------------------------------------------------------------------------------ a group's steps


def _load(visit: Visit, refs: Refs, plan: Plan, *names: str) -> None:
    """As `Recurrence`."""
    load(refs, plan, *names)
    load_decays(refs, visit, plan)
    load_numbers(refs, visit, plan, "beta")
    if plan.gate == "key":
        make_columns(refs["rest_columns"], refs["rest_rows"][...], plan)
        for group, rows in enumerate(groups_of(plan)):
            refs["kept_bits"][group] = spread_bits(refs["kept_rows"][rows], LANES)


def _column(refs: Refs, name: str, rows: Any, n: Any) -> jax.Array:
    """What the n-th step of a group has by key, [K, 1]."""
    return column_of(refs[f"{name}_columns"][rows.start // GROUP], n)


def _decay(refs: Refs, rows: Any, n: Any, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Both parts of the decay of a group's n-th step: [K, LANES] and [K, 1] by key, or [1, LANES] of all keys."""
    if plan.gate == "key":
        kept, rest = bit_of(refs["kept_bits"][rows.start // GROUP], n), _column(refs, "rest", rows, n)
    else:
        kept, rest = decay_of(refs, rows.start + n)
    return kept, rest


def _advance(visit: Visit, refs: Refs, rows: Any, plan: Plan, use: Callable[..., None]) -> None:
    """As `Recurrence`: use(slab, step, state before it, state after it, error of what that before recalled)."""
    state = refs["state"]

    def advance(slab: Any) -> None:
        def step(n: Any, before: jax.Array) -> jax.Array:
            row = pl.ds(rows.start + n, 1)
            key, decay = _column(refs, "k", rows, n), _decay(refs, rows, n, plan)
            error = refs["v_rows"][row, slab] - recalled(before, key, decay)
            v_new = refs["beta_rows"][row, :] * error
            after = next_state(before, decay, key * v_new)
            if active():
                where = in_state(visit, rows, n, slab, plan)
                probe("v_new", v_new, where[:1])
                probe("h", after, where)
            use(slab, n, before, after, error)
            return after

        state[:, slab] = for_steps(plan, step, state[:, slab])

    for_slabs(plan, advance)


def _advance_with_o(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """`_advance`, with o."""

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array, error: jax.Array) -> None:
        refs["o_parts"][n, :, slab] = fold_registers(_column(refs, "q", rows, n) * after)

    _advance(visit, refs, rows, plan, use)
    store(refs, visit, rows, "o", plan.p.scale * sum_folded(refs["o_parts"]))


def _advance_with_dq(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """`_advance`, with dq, and with the states before the steps and the errors, which the other gradients need."""
    dq = refs["dq_parts"]
    dq[...] = jnp.zeros_like(dq)

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array, error: jax.Array) -> None:
        row = pl.ds(rows.start + n, 1)
        refs["before"][rows.start + n, :, slab] = before
        refs["error_rows"][row, slab] = error
        dq[n] += _sum_values(refs["do_rows"][row, slab] * after)

    _advance(visit, refs, rows, plan, use)
    store(refs, visit, rows, "dq", plan.p.scale * sum_folded(dq))


def _backward_steps(visit: Visit, refs: Refs, rows: Any, *, plan: Plan) -> None:
    """Take the gradient of the state back through the steps of a group, with all gradients but dq."""
    for name in ("dk_parts", "dgate_parts"):
        refs[name][...] = jnp.zeros_like(refs[name])
    refs["dbeta_rows"][rows, :] = jnp.zeros((GROUP, LANES), jnp.float32)

    def go_back(slab: Any) -> None:
        def step(n: Any, dstate: jax.Array) -> jax.Array:
            row = pl.ds(rows.start + n, 1)
            key, beta, error = _column(refs, "k", rows, n), refs["beta_rows"][row, :], refs["error_rows"][row, slab]
            before = refs["before"][rows.start + n, :, slab]
            dstate += (plan.p.scale * _column(refs, "q", rows, n)) * refs["do_rows"][row, slab]
            dv_new = sum_at_once(key * dstate)
            dv = beta * dv_new
            refs["dv_rows"][row, slab] = dv
            refs["dbeta_rows"][row, :] += dv_new * error
            decay, through = _decay(refs, rows, n, plan), dstate - key * dv
            decayed = times(decay, before)
            refs["dk_parts"][n] += _sum_values((beta * error) * dstate - decayed * dv)
            refs["dgate_parts"][n] += (_sum_values if plan.gate == "key" else fold_registers)(decayed * through)
            previous = times(decay, through)
            if active():
                probe("dh", previous, in_state(visit, rows, n, slab, plan))
            return previous

        refs["dstate"][:, slab] = for_steps(plan, step, refs["dstate"][:, slab], backwards=True)

    for_slabs(plan, go_back)
    store(refs, visit, rows, "dk", sum_folded(refs["dk_parts"]))
    store(refs, visit, rows, "dv", refs["dv_rows"][rows, :])
    store_numbers(refs, visit, rows, "dbeta", sum_rows(refs["dbeta_rows"][rows, :].T))
    dgate = sum_folded(refs["dgate_parts"])
    if plan.gate == "key":
        store(refs, visit, rows, "dgate", dgate)
    else:
        store_numbers(refs, visit, rows, "dgate", sum_rows(dgate.T))


def _sum_values(x: jax.Array) -> jax.Array:
    """Partial sums over V: [K, V] -> [SUBLANES, K]."""
    return fold_registers(x.T)
