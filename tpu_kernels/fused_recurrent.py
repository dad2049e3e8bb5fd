"""The recurrent forms of gated linear attention on the TPU: step by step, or 16 steps at once.

`recurrent_fwd` and `recurrent_bwd` are what `fused_recurrent_simple_gla_*` (gates `g`, `g_gamma`) and
`fused_recurrent_gla_*` (gate `gk`) are made of; the operations are defined in `cpu_golden/simple_gla.py` and
`cpu_golden/gla.py`. A head's state stays in VMEM, in float32, and goes through time: S = exp(gate) S + k v^T.

Sequences lie one after the other in whole groups of 16 rows. Time is in the grid, by the visits of
`tpu_kernels._lib.visits`: pairs of a sequence and a tile that holds rows of it, one for an empty sequence.

A slow gate keeps hundreds of steps in a state, and with them hundreds of roundings. So a decay near 1 is kept as its
difference from 1; what an addition to the state loses is its residue, which the next step adds to it; and residues
are dropped at the end of every group: there the state is a plain float32 matrix, and a call that goes on from it
computes the same bits. bfloat16 is taken relative to the decays of a group where these allow it: there sums have no
decay, and the matrix unit makes what they add (`_lib/relative_states.py`), of a whole group at once where no state
between its steps is needed. Other groups, and float32, which has no exact products there, go step by step, without
dots.

States lie as [V, K]: q, k and gates by key are rows, of which a register is made for nothing, v, do, o and dv are
columns. Of bfloat16 forward they lie as [K, V], as the matrix unit reads them for o.
docs/compilers.md has what bounds the kernels.
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
from tpu_kernels._lib.call import jit, rarely
from tpu_kernels._lib.decays import Pair, added, decayed, decayed_sum, ordered_two_sum
from tpu_kernels._lib.recurrent_decode import decode, is_decoding
from tpu_kernels._lib.recurrent_layout import GROUP, SUBLANES, Layout, Plan, make_plan
from tpu_kernels._lib.recurrent_sums import (
    column_by_product,
    column_of,
    fold_registers,
    row_of,
    sum_folded,
    sum_keys_of,
    sum_rows,
    sums_of_keys,
)
from tpu_kernels._lib.recurrent_visits import (
    Refs,
    Visit,
    by_key,
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
from tpu_kernels._lib.relative_states import (
    added_product,
    decay_to,
    last_decay,
    load_relative,
    outer,
    read_in_group,
    relative_scratch,
    stands_apart,
    times_pair,
    written_in_group,
)
from tpu_kernels._lib.scans import Arrays, backward_of_nothing, forward_of_nothing, take


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
    if is_decoding(plan.p, plan.keys, x.initial_state):
        return decode({"q": x.q, "k": x.k, "v": x.v}, x.gates, x.initial_state, plan.p, output_final_state, interpret)
    layout = Layout(plan, x.cu_seqlens, interpret)
    operands = {
        "q": layout.by_key(x.q, layout.in_time),
        "k": layout.by_key(x.k, layout.in_time),
        "v": layout.by_value(x.v, layout.in_time),
        **layout.gates(x.gates, layout.in_time),
    }
    scratch = _scratch(plan, of_values="o")
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
    scratch = _scratch(plan, columns=("do",), of_keys=("dq", "dk", "dgate"), of_values="dv")
    if plan.gate is not None:
        out["dgate"] = layout.gate_out(x.gates, layout.in_second)
        scratch["decayed"] = pltpu.VMEM((plan.tile, plan.values, plan.keys), jnp.float32)
    found = _recurrence().both_ways(layout, x, operands, out, scratch)
    dq, dk, dv = (layout.public(found[f"d{name}"], getattr(x, name).shape[3]) for name in ("q", "k", "v"))
    dgates = layout.gate_gradients(found.get("dgate"), x.gates)
    return Gradients(dq, dk, dv, dgates, layout.public_state(found.get("dh0")))


def _recurrence() -> Recurrence:
    steps = (_either(body) for body in (_advance, _advance_with_o, _advance_with_dq, _backward_step))
    return Recurrence("fused_recurrent", (15, 50), _load, *steps)


def _scratch(
    plan: Plan, *, of_values: str, columns: tuple[str, ...] = (), of_keys: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The state, and what a tile's steps need; partial sums of values are a slab's where they are sums over lanes."""
    rows = dict.fromkeys(("q", "k", "whole") if plan.gate is None else ("q", "k", "whole", "kept", "rest"), plan.keys)
    parts = dict.fromkeys(of_keys, plan.keys)
    if plan.lanes == "key":
        columns += ("v",)
        of_slabs = {f"{of_values}_parts": (plan.values // plan.slab, GROUP, SUBLANES, plan.slab)}
    else:
        rows["v"], parts[of_values], of_slabs = plan.values, plan.values, {}
    return {
        **(relative_scratch(plan, backward=bool(of_keys)) if plan.relative else {}),
        "state": pltpu.VMEM(plan.state, jnp.float32),
        **{name: pltpu.VMEM(shape, jnp.float32) for name, shape in of_slabs.items()},
        **step_scratch(plan, rows=rows, columns=dict.fromkeys(columns, plan.values), parts=parts),
    }


# ------------------------------------------------------------------------------------------------ a group's steps


def _load(visit: Visit, refs: Refs, plan: Plan, *names: str) -> None:
    """As `Recurrence`."""
    load(refs, plan, *names)
    if plan.relative:
        load_relative(refs, plan, *names)
    else:
        _load_decays(visit, refs, pl.ds(0, plan.tile), plan)


def _load_decays(visit: Visit, refs: Refs, rows: Any, plan: Plan) -> None:
    """Load the decays of these rows in two parts, and in one, which is 0 where a row is not the visit's.

    A residue is multiplied by the latter: after a sequence's last step it is dropped.
    """
    load_decays(refs, visit, plan, rows)
    ones = jnp.ones((rows.size, plan.keys), jnp.float32)
    whole = ones if plan.gate is None else refs["kept_rows"][rows, :] + refs["rest_rows"][rows, :]
    refs["whole_rows"][rows, :] = own(visit, rows, whole)


def _either(body: Callable[..., None]) -> Callable[..., None]:
    """body with `relative` chosen for each group: true unless the group stands apart, or the plan says no."""

    def taken(visit: Visit, refs: Refs, rows: Any, plan: Plan, *args: Any) -> None:
        if not plan.relative:
            body(visit, refs, rows, plan, *args, relative=False)
            return
        apart = stands_apart(refs, rows)

        @pl.when(~apart)
        def _() -> None:
            if active():
                load_decays(refs, visit, plan, rows)  # shows them
            body(visit, refs, rows, plan, *args, relative=True)

        @rarely(apart)
        def _() -> None:
            _load_decays(visit, refs, rows, plan)
            body(visit, refs, rows, plan._replace(unroll=1), *args, relative=False)

    return taken


def _advance(visit: Visit, refs: Refs, rows: Any, plan: Plan, *, relative: bool) -> None:
    """As `Recurrence`: all steps at once where states are relative."""
    if relative:
        for_slabs(plan, lambda slab: _take_group(visit, refs, rows, plan, slab))
    else:
        _walk(visit, refs, rows, plan, lambda *_: None, relative=False)


def _take_group(visit: Visit, refs: Refs, rows: Any, plan: Plan, slab: Any) -> None:
    """Take a slab of the state through all steps of a group at once."""
    at = plan.at(slab)
    high, low = times_pair(written_in_group(refs["state"][at], refs, rows, slab, plan), last_decay(refs, rows, plan))
    refs["state"][at] = high + low
    if active():
        probe("state", high + low, in_state(visit, rows, 0 if plan.reverse else GROUP - 1, slab, plan))


def _walk(visit: Visit, refs: Refs, rows: Any, plan: Plan, use: Callable[..., None], *, relative: bool) -> None:
    """Take the state through the steps of a group: use(slab, step, state before it, which has decayed, state after it).

    relative: both are relative to the decays of the group up to the step.
    """
    state, group = refs["state"], rows.start // GROUP

    def advance(slab: Any) -> None:
        at, v = plan.at(slab), _values(refs, "v", rows, slab, plan)

        def step(n: Any, carry: tuple[Pair, jax.Array]) -> tuple[Pair, jax.Array]:
            pair, before = carry
            if relative:
                pair = added_product(pair, *(outer(v, refs["k_pieces"][i, group], n) for i in range(2)))
                after = pair[0] + pair[1]
            else:
                k, whole, *decay = (by_key(refs, name, rows.start + n, plan) for name in ("k", "whole", *decays))
                before = before * whole
                written = k * (column_of if plan.lanes == "key" else row_of)(v, n)
                pair = decayed_sum(pair, decay, whole, written)
                after = pair[0]
            if active():
                seen = sum(part * after for part in decay_to(refs, rows.start + n, plan)) if relative else after
                probe("state", seen, in_state(visit, rows, n, slab, plan))
            use(slab, n, before, after)
            return pair, after

        before = state[at]
        _, after = for_steps(plan, step, ((before, jnp.zeros_like(before)), before))
        if relative:
            _take_group(visit, refs, rows, plan, slab)  # for the bits that a call has which goes on from there
        else:
            state[at] = after

    decays = () if plan.gate is None else ("kept", "rest")
    for_slabs(plan, advance)


def _values(refs: Refs, name: str, rows: Any, slab: Any, plan: Plan) -> jax.Array:
    """A slab's values of a group's steps: columns [slab, GROUP] where keys are lanes, else rows [GROUP, slab]."""
    if plan.lanes == "key":
        return refs[f"{name}_columns"][rows.start // GROUP, slab, :]
    return refs[f"{name}_rows"][rows, slab]


def _advance_with_o(visit: Visit, refs: Refs, rows: Any, plan: Plan, *, relative: bool) -> None:
    """`_advance`, with o."""
    if relative:

        def take(slab: Any) -> None:
            found = plan.p.scale * read_in_group(refs["state"][:, slab], refs, rows, slab, plan)
            refs["o"][rows, slab] = found.astype(refs["o"].dtype)
            _take_group(visit, refs, rows, plan, slab)

        for_slabs(plan, take)
        return
    parts = refs["o_parts"]

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        products = by_key(refs, "q", rows.start + n, plan) * after
        if plan.lanes == "key":
            sum_keys_of(parts, slab, n, products)
        else:
            parts[n, :, slab] = fold_registers(products)

    _walk(visit, refs, rows, plan, use, relative=relative)
    found = sums_of_keys(parts) if plan.lanes == "key" else sum_folded(parts)
    store(refs, visit, rows, "o", plan.p.scale * found)


def _advance_with_dq(visit: Visit, refs: Refs, rows: Any, plan: Plan, *, relative: bool) -> None:
    """`_advance`, with dq, and with the decayed states that the gradients of gates need."""
    dq = refs["dq_parts"]
    dq[...] = jnp.zeros_like(dq)

    def use(slab: Any, n: Any, before: jax.Array, after: jax.Array) -> None:
        if "decayed" in refs:
            refs["decayed"][rows.start + n, slab, :] = before
        dq[n] += fold_registers(_column(_values(refs, "do", rows, slab, plan), n, plan, relative) * after)

    _walk(visit, refs, rows, plan, use, relative=relative)
    found = plan.p.scale * sum_folded(dq)
    store(refs, visit, rows, "dq", found * refs["down_rows"][rows, :] if relative else found)


def _column(x: jax.Array, n: Any, plan: Plan, relative: bool) -> jax.Array:
    """Column n of x [R, GROUP], in every lane that it is multiplied in."""
    return column_by_product(x.astype(jnp.bfloat16), n, plan.keys) if relative else column_of(x, n)


def _backward_step(visit: Visit, refs: Refs, rows: Any, plan: Plan, *, relative: bool) -> None:
    """Take the gradient of the state back through the steps of a group, with dk, dv and the gradients of gates."""
    dstate, dk, group = refs["dstate"], refs["dk_parts"], rows.start // GROUP
    for name in ("dk_parts", "dgate_parts"):
        refs[name][...] = jnp.zeros_like(refs[name])

    def go_back(slab: Any) -> None:
        v, do = (_values(refs, name, rows, slab, plan) for name in ("v", "do"))

        def step(n: Any, pair: Pair) -> Pair:
            row = pl.ds(rows.start + n, 1)
            if relative:
                pair = added_product(pair, *(outer(do, refs["q_pieces"][i, group], n) for i in range(2)))
                after = pair[0] + pair[1]
            else:
                whole = added(pair, 1.0, column_of(do, n) * (plan.p.scale * refs["q_rows"][row, :]))
                pair = ordered_two_sum(*whole)
                after = pair[0]
            if active():
                seen = after * refs["up_rows"][row, :] if relative else after
                probe("dstate", seen, in_state(visit, rows, n, slab, plan))
            dk[n] += fold_registers(_column(v, n, plan, relative) * after)
            k = refs["k_relative_rows" if relative else "k_rows"][row, :]
            sum_keys_of(refs["dv_parts"], slab, n, after * k)
            if plan.gate is None:
                return pair
            refs["dgate_parts"][n] += fold_registers(after * refs["decayed"][rows.start + n, slab, :])
            return pair if relative else decayed(whole, decay_of(refs, rows.start + n))

        pair = dstate[slab, :], jnp.zeros_like(dstate[slab, :])
        if relative:
            pair = times_pair(pair, last_decay(refs, rows, plan))
        pair = for_steps(plan, step, pair, backwards=True)
        dstate[slab, :] = pair[0] + pair[1] if relative else pair[0]

    for_slabs(plan, go_back)
    found = sum_folded(dk)
    store(refs, visit, rows, "dk", found * refs["up_rows"][rows, :] if relative else found)
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
