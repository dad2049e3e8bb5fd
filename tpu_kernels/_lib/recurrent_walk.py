"""The two walks of a recurrence through time: forwards for o, and forwards and back for the gradients.

A kernel goes through the visits of a sequence with its state in VMEM. What happens in the steps of a group of rows is
the `Recurrence`'s.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Output
from tpu_kernels._lib.call import Block
from tpu_kernels._lib.recurrent_layout import GROUP, SUBLANES, Layout, Plan, SequenceVisits, order
from tpu_kernels._lib.recurrent_visits import Refs, for_groups, visit_of


class Recurrence(NamedTuple):
    """What a recurrence does in the steps of a group of rows, and what that costs.

    name: its kernels are `name`_fwd and `name`_bwd. flops: of the forward and of the backward pass, for each element of
    the state at each step. load(visit, refs, plan, *names) brings the operands of these names, and what all steps need,
    into the scratch of a visit. advance(visit, refs, rows, plan=plan) takes the state through the steps, with_o does
    that with o, with_dq with dq, and go_back takes the gradient of the state back through the steps.
    """

    name: str
    flops: tuple[int, int]
    load: Callable[..., None]
    advance: Callable[..., None]
    with_o: Callable[..., None]
    with_dq: Callable[..., None]
    go_back: Callable[..., None]

    def forward(
        self, layout: Layout, x: Any, operands: dict[str, Block], scratch: dict[str, Any], output_final_state: bool
    ) -> Output:
        """o and the states after the last steps, None unless asked for; x: the arrays of the call."""
        plan = layout.plan
        if x.initial_state is not None:
            operands["h0"] = layout.state(x.initial_state, layout.in_time)
        out = {"o": layout.out_by_value(x.v.dtype, layout.in_time)}
        if output_final_state:
            out["ht"] = layout.state_out(layout.in_time)
        found = layout.call(
            partial(_forward_kernel, plan=plan, recurrence=self),
            operands,
            out,
            scratch,
            phases=(),
            flops=self.flops[0],
            times={},
            name=f"{self.name}_fwd",
        )
        return Output(layout.public(found["o"], plan.p.v), layout.public_state(found.get("ht")))

    def both_ways(
        self, layout: Layout, x: Any, operands: dict[str, Block], out: dict[str, Block], scratch: dict[str, Any]
    ) -> dict[str, jax.Array]:
        """The arrays `out`, and dh0 where there is an initial state; x: the arrays of the call.

        Phase 0 goes through time and keeps the state before every visit, phase 1 goes back.
        """
        plan = layout.plan
        if x.initial_state is not None:
            operands["h0"] = layout.state(x.initial_state, layout.in_first)
            out["dh0"] = layout.state_out(layout.in_second)
        if x.dht is not None:
            operands["dht"] = layout.state(x.dht, layout.in_second)
        # Written and read by the kernel itself. One head's: heads follow one another.
        kept = jax.ShapeDtypeStruct((layout.visits.group_ids.shape[0], *plan.state), jnp.float32)
        out["kept_states"] = Block(kept, space=pl.ANY)
        scratch["dstate"] = pltpu.VMEM(plan.state, jnp.float32)
        return layout.call(
            partial(_backward_kernel, plan=plan, recurrence=self),
            operands,
            out,
            scratch,
            phases=(2,),
            flops=self.flops[1],
            times={"k": 2, "v": 2, "gk": 2, "decays": 2, "gates": 2, "kept_states": 2 * plan.p.h},
            name=f"{self.name}_bwd",
        )


def step_scratch(
    plan: Plan, *, rows: Mapping[str, int], columns: Mapping[str, int], parts: Mapping[str, int]
) -> dict[str, Any]:
    """Scratch for what steps have, by name and size: rows and columns of a tile's, and partial sums of a group's.

    A partial sum is added over registers and not yet over the rows of one.
    """
    shapes = {
        **{f"{name}_rows": (plan.tile, size) for name, size in rows.items()},
        **{f"{name}_columns": (plan.tile // GROUP, size, GROUP) for name, size in columns.items()},
        **{f"{name}_parts": (GROUP, SUBLANES, size) for name, size in parts.items()},
    }
    return {name: pltpu.VMEM(shape, jnp.float32) for name, shape in shapes.items()}


def _forward_kernel(visits: SequenceVisits, refs: Refs, *, plan: Plan, recurrence: Recurrence) -> None:
    visit = visit_of(pl.program_id(1), visits, plan)
    pl.when(visit.first)(lambda: _begin(refs["state"], refs.get("h0")))
    recurrence.load(visit, refs, plan, "q", "k", "v")
    for_groups(visit, plan, partial(recurrence.with_o, visit, refs, plan=plan))
    if "ht" in refs:

        @pl.when(visit.last)
        def _() -> None:
            refs["ht"][...] = refs["state"][...]


def _backward_kernel(visits: SequenceVisits, refs: Refs, *, plan: Plan, recurrence: Recurrence) -> None:
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
            recurrence.load(visit, refs, plan, "k", "v")
            for_groups(visit, plan, partial(recurrence.advance, visit, refs, plan=plan))

    @pl.when(phase == 1)
    def _() -> None:
        pl.when(visit.last)(lambda: _begin(dstate, refs.get("dht")))
        pltpu.sync_copy(kept, state)
        recurrence.load(visit, refs, plan, "q", "k", "v", "do")
        for_groups(visit, plan, partial(recurrence.with_dq, visit, refs, plan=plan))
        for_groups(visit, plan, partial(recurrence.go_back, visit, refs, plan=plan), backwards=True)
        if "dh0" in refs:

            @pl.when(visit.first)
            def _() -> None:
                refs["dh0"][...] = dstate[...]


def _begin(state: Any, given: Any) -> None:
    """A sequence's first state."""
    state[...] = jnp.zeros(state.shape, jnp.float32) if given is None else given[...]
