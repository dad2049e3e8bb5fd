"""Gated linear attention a chunk at a time: the scan behind `simple_gla` and `gla`, both directions, every gate.

With S the state at a chunk's start and decays counted inside the chunk, the recurrence S_t = a_t S_{t-1} + k_t v_tᵀ,
o_t = scale · q_tᵀ S_t becomes a few matrix products per chunk (Yang et al. 2024, arXiv:2312.06635; Dao & Gu 2024,
arXiv:2405.21060):

    o = scale · [decay_from_start · (q S) + A v]        A_ij = Σ_K q_i k_j · decay from step j to step i, for i >= j
    S' = whole · S + (k · decay_to_end)ᵀ v

What differs between gates is how many decays a step has, one or one per channel of k, and so how A is formed:
`StepDecay` and `ChannelDecay`. Kernels see q, k, v as [B, H, T, ·] and states as [V, K], so that what decays channels
is a row of lanes; a grid step takes a block of chunks of a few heads, and the state stays in VMEM along T.

**Fused**: the forward pass is one kernel, and so is the backward pass. That walks the blocks twice: forward, over k and
v alone, to keep the state at the start of each block in VMEM; then in reverse, where the states of a block's chunks are
made again and the gradient of the state is carried. **Unfused**: the states (and their gradients) of all chunks go to
HBM, and another kernel makes the outputs (or gradients) of each block on its own.

Packed sequences are laid out anew so that each begins with a chunk; rows without a step are masked as they are loaded.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Gates, Gradients, Output
from op_arguments.options import options_of
from op_arguments.probe import active, probe
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import jit
from tpu_kernels._lib.chunk_decays import (
    ChannelDecay,
    ConstantDecay,
    Decay,
    Load,
    Refs,
    StepDecay,
    gammas_of,
    prepare_decays,
    probe_decays,
    read_state,
)
from tpu_kernels._lib.chunk_dots import dot, f32, iota
from tpu_kernels._lib.chunk_layout import Layout, block_of
from tpu_kernels._lib.chunk_layout import call as pallas_call
from tpu_kernels._lib.chunk_plan import Scan, make_scan
from tpu_kernels._lib.scans import Arrays, backward_of_nothing, forward_of_nothing, take

OF_HEADS = {"q", "k", "v", "o", "state", "decay_from_start", "decay_to_end", "between"}
"""The refs of the forward pass with a decay per head of which each head has a part, along the first axis."""


@options_of(take, make_scan)
def chunk_fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, *, gates: Gates, output_final_state: bool = False, **options: Any
) -> Output:
    """o [B, T, H, V] in v's dtype and the states ht [N, H, K, V] float32 after the last steps, None unless asked for.

    gates as in `take`, other arguments as `gla.chunk_gla_fwd`'s. o is zero beyond the last sequence.
    Sites shown to a probe: c (of `g`), exponent (of `gk`), decay, A and state.
    Raises ValueError or TypeError as `take` and `make_scan`.
    """
    arrays, how = take(make_scan, q, k, v, gates, **options)
    return _forward(arrays, output_final_state=bool(output_final_state), **how)


@options_of(take, make_scan)
def chunk_bwd(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, *, gates: Gates, dht: Any = None, **options: Any
) -> Gradients:
    """The gradients of `chunk_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    Gradients have their arguments' dtypes and are zero beyond the last sequence.
    Sites shown to a probe: those of `chunk_fwd`, dA, dgate and dstate.
    Raises as `chunk_fwd`.
    """
    arrays, how = take(make_scan, q, k, v, gates, do, dht, **options)
    return _backward(arrays, **how)


# ------------------------------------------------------------------------------------------------------- passes


@jit("plan", "output_final_state", "interpret")
def _forward(x: Arrays, *, plan: Scan | None, output_final_state: bool, interpret: Interpreted) -> Output:
    if plan is None:
        return forward_of_nothing(x, output_final_state)
    layout = Layout(plan, x.cu_seqlens, x.gates)
    call = partial(pallas_call, plan, prefetch=layout.prefetch, interpret=interpret)
    before = {**layout.rows(k=x.k, v=x.v), **layout.gates, **layout.states(h0=x.initial_state)}
    ends = {"ht": layout.state_out()} if output_final_state else {}
    state = {"state": pltpu.VMEM(plan.state, jnp.float32)}
    outputs = {"o": layout.rows_out(plan.p.v, x.q.dtype)}
    if plan.fused:
        results = call(
            _forward_kernel, "chunk_fwd", {**before, **layout.rows(q=x.q)}, {**outputs, **ends}, state, work=(2, 2)
        )
    else:
        kept = {"states": layout.chunk_states()}
        results = call(_forward_kernel, "chunk_states", before, {**kept, **ends}, state, work=(0, 1))
        operands = {**layout.rows(q=x.q, k=x.k, v=x.v), **layout.gates}
        operands["states"] = layout.chunk_states(results["states"])
        results |= call(_outputs_kernel, "chunk_outputs", operands, outputs, {}, work=(2, 1))
    return Output(layout.public(results["o"]), results["ht"].swapaxes(2, 3) if output_final_state else None)


@jit("plan", "interpret")
def _backward(x: Arrays, *, plan: Scan | None, interpret: Interpreted) -> Gradients:
    if plan is None:
        return backward_of_nothing(x)
    layout = Layout(plan, x.cu_seqlens, x.gates)
    call = partial(pallas_call, plan, prefetch=layout.prefetch, interpret=interpret)
    before = {**layout.rows(k=x.k, v=x.v), **layout.gates, **layout.states(h0=x.initial_state)}
    after = {**layout.rows(q=x.q, do=x.do), **layout.states(dht=x.dht)}
    starts = {} if x.initial_state is None else {"dh0": layout.state_out()}
    grads = {name: layout.rows_out(of.shape[3], of.dtype) for name, of in (("dq", x.q), ("dk", x.k), ("dv", x.v))}
    if any(gate is not None for gate in x.gates.values()):
        grads["dgate"] = layout.rows_out(plan.p.k, jnp.float32) if plan.gate == "channel" else layout.steps()
    dstate = {"dstate": pltpu.VMEM(plan.state, jnp.float32)}
    if plan.fused:
        scratch = dstate | {
            "states": pltpu.VMEM((plan.chunks + 1, *plan.state), jnp.float32),
            "checkpoints": pltpu.VMEM((max(plan.blocks - 1, 1), *plan.state), jnp.float32),
        }
        results = call(
            _backward_kernel, "chunk_bwd", {**before, **after}, {**grads, **starts}, scratch, work=(5, 6), walk="twice"
        )
    else:
        kept = {"states": layout.chunk_states()}
        states = call(_forward_kernel, "chunk_states", before, kept, {"state": dstate["dstate"]}, work=(0, 1))["states"]
        outputs = {"dstates": layout.chunk_states(), **starts}
        results = call(
            _dstates_kernel, "chunk_dstates", {**after, **layout.gates}, outputs, dstate, work=(0, 1), walk="back"
        )
        operands = {**layout.rows(q=x.q, k=x.k, v=x.v, do=x.do), **layout.gates}
        operands |= {"states": layout.chunk_states(states), "dstates": layout.chunk_states(results["dstates"])}
        results |= call(_gradients_kernel, "chunk_grads", operands, grads, {}, work=(5, 3))
    dq, dk, dv = (layout.public(results[name]) for name in ("dq", "dk", "dv"))
    dh0 = results["dh0"].swapaxes(2, 3) if starts else None
    return Gradients(dq, dk, dv, _gate_gradients(layout, x.gates, results.get("dgate")), dh0)


def _gate_gradients(
    layout: Layout, gates: dict[str, jax.Array | None], dgate: jax.Array | None
) -> dict[str, jax.Array | None]:
    """The gradient of each gate, from that of the log decay of each step."""
    if dgate is None:
        return dict.fromkeys(gates)
    steps = layout.public(dgate) if layout.scan.gate == "channel" else layout.public_steps(dgate)

    def of(name: str, gate: jax.Array | None) -> jax.Array | None:
        if gate is None:
            return None
        return steps.sum((0, 1)) if name == "g_gamma" else steps.astype(gate.dtype)

    return {name: of(name, gate) for name, gate in gates.items()}


# ------------------------------------------------------------------------------------------------------ kernels


class _Block:
    """A grid step's block of chunks: what its refs hold of one of them, for all heads of the step at once."""

    def __init__(self, refs: Refs, scan: Scan, index: Any) -> None:
        self.refs, self.scan, self.index = refs, scan, index
        self.batch, self.first_head = pl.program_id(0), pl.program_id(1) * scan.heads
        prepare_decays(refs, scan, self.first_head)

    def groups(self) -> "Iterator[_Block]":
        """The block of each group of heads."""
        if self.scan.group == self.scan.heads:
            yield self
            return
        for head in range(0, self.scan.heads, self.scan.group):
            group = copy(self)
            heads = pl.ds(head, self.scan.group)
            group.refs = {name: ref.at[heads] if name in OF_HEADS else ref for name, ref in self.refs.items()}
            group.scan = self.scan._replace(heads=self.scan.group)
            group.first_head = self.first_head + head
            yield group

    def rows(self, i: Any) -> Any:
        """The rows of chunk i in the block."""
        return pl.ds(pl.multiple_of(i * self.scan.chunk, self.scan.chunk), self.scan.chunk)

    def live(self, i: Any) -> Any:
        """How many rows of chunk i are steps; they are its first."""
        chunk = self._chunk(i)
        if self.scan.p.packed:
            return self.refs["live"][chunk]
        return jnp.clip(self.scan.p.t - chunk * self.scan.chunk, 0, self.scan.chunk)

    def load(self, i: Any, name: str) -> jax.Array:
        """The rows [heads, C, ·] of chunk i, zero where they are no steps: there may be NaN, and 0 * NaN is NaN."""
        x = self.refs[name][:, self.rows(i), :]
        return jnp.where(iota(x.shape, 1) < self.live(i), x, jnp.zeros_like(x)) if self.scan.masked else x

    def store(self, i: Any, name: str, x: jax.Array) -> None:
        """Store the rows [heads, C, ·] of chunk i, or a number per step as [heads, 1, C], if asked for."""
        if name not in self.refs:
            return
        ref = self.refs[name]
        if x.shape[1] == self.scan.chunk:
            ref[:, self.rows(i), :] = x.astype(ref.dtype)
        else:
            ref[:, pl.ds(i, 1), : self.scan.chunk] = x

    def decay(self, i: Any) -> Decay:
        """The decays of chunk i."""
        scan, refs = self.scan, self.refs
        if scan.gate == "channel":
            return ChannelDecay(self.load(i, "gk"), scan)
        if scan.gate == "constant":
            live = self.live(i) if scan.masked else scan.chunk
            return ConstantDecay(refs, gammas_of(refs, scan, self.first_head), live, scan)
        return StepDecay(refs, i, scan)

    def probe(self, i: Any, site: str, x: Any, *axes: int, where: Any = True) -> Any:
        """In place of x, a value (or a pair that sums to it) of chunk i at a site of the golden.

        It is one `where` that says so, at the steps of the chunk along `axes`.
        """
        if not active():
            return x
        live, shape = self.live(i), jnp.shape(x[0] if isinstance(x, tuple) else x)
        where = jnp.broadcast_to(where, shape) & (live > 0)
        for axis in axes:
            where &= iota(shape, axis) < live
        return probe(site, x, where, chunk_size=self.scan.chunk)

    def for_chunks(
        self,
        body: Callable[[Any], None],
        enter: Callable[[Any], None] | None = None,
        leave: Callable[[Any], None] | None = None,
        *,
        reverse: bool = False,
        unroll: int = 1,
    ) -> None:
        """body(i) for each chunk i; enter(i) before that of the first of a sequence and leave(i) after its last.

        In reverse the other way round. unroll: chunks in a turn of the loop.
        """
        last = self.scan.chunks - 1
        enters, leaves = (self._is_last, self._is_first) if reverse else (self._is_first, self._is_last)

        def at(i: Any, is_there: Callable[[Any], Any], action: Callable[[Any], None] | None) -> None:
            if action:
                pl.when(is_there(i))(lambda: action(i))

        def step(n: Any, _: None) -> None:
            i = last - n if reverse else n
            if self.scan.p.packed:
                at(i, enters, enter)
            body(i)
            if self.scan.p.packed:
                at(i, leaves, leave)

        begin, end = (last, 0) if reverse else (0, last)
        if not self.scan.p.packed:
            at(begin, enters, enter)
        lax.fori_loop(0, last + 1, step, None, unroll=unroll)
        if not self.scan.p.packed:
            at(end, leaves, leave)

    def load_state(self, name: str, i: Any, state: Any) -> None:
        """Copy the states `name` of the sequence of chunk i, zero where there are none, to the ref `state`."""
        if name in self.refs:
            pltpu.sync_copy(self._states(name, i), state)
        else:
            state[...] = jnp.zeros(self.scan.state, jnp.float32)

    def store_state(self, name: str, i: Any, state: Any) -> None:
        """The reverse of `load_state`."""
        if name in self.refs:
            pltpu.sync_copy(state, self._states(name, i))

    def _states(self, name: str, i: Any) -> Any:
        sequence = self.refs["sequence"][self._chunk(i)] if self.scan.p.packed else self.batch
        return self.refs[name].at[sequence, pl.ds(self.first_head, self.scan.heads)]

    def _chunk(self, i: Any) -> Any:
        return self.index * self.scan.chunks + i

    def _is_first(self, i: Any) -> Any:
        chunk = self._chunk(i)
        if not self.scan.p.packed:
            return chunk == 0
        sequence = self.refs["sequence"]
        return (chunk == 0) | (sequence[jnp.maximum(chunk - 1, 0)] != sequence[chunk])

    def _is_last(self, i: Any) -> Any:
        chunk, last = self._chunk(i), self.scan.blocks * self.scan.chunks - 1
        if not self.scan.p.packed:
            return chunk == last
        sequence = self.refs["sequence"]
        return (chunk == last) | (sequence[jnp.minimum(chunk + 1, last)] != sequence[chunk])


def _forward_kernel(refs: Refs, scan: Scan) -> None:
    """o, or the states at the start of each chunk, and ht."""
    block, state = _Block(refs, scan, pl.program_id(2)), refs["state"]

    def body(i: Any) -> None:
        if "o" not in refs:
            refs["states"][i] = state[...]
            advance(block, i, block.decay(i))
            return
        # The matrix unit makes the scores of a group of heads while the group before waits for its own.
        waiting: list[Callable[[], None]] = []
        for group in block.groups():
            decay = group.decay(i)
            waiting.append(partial(finish, group, i, decay, _scores(group, i, decay)))
            if len(waiting) > 1:
                waiting.pop(0)()
        waiting.pop()()

    def finish(group: _Block, i: Any, decay: Decay, scores: jax.Array) -> None:
        meanwhile = partial(advance, group, i, decay)
        group.store(i, "o", _output(scores, group, i, decay, group.refs["state"], meanwhile))

    def advance(group: _Block, i: Any, decay: Decay) -> None:
        load, scan, state, probe = partial(group.load, i), group.scan, group.refs["state"], partial(group.probe, i)
        state[...] = probe("state", _next_state(load, state[...], decay, scan))

    block.for_chunks(body, lambda i: block.load_state("h0", i, state), lambda i: block.store_state("ht", i, state))


def _outputs_kernel(refs: Refs, scan: Scan) -> None:
    """o from the states at the start of each chunk."""
    block = _Block(refs, scan, pl.program_id(2))

    def body(i: Any) -> None:
        decay = block.decay(i)
        block.store(i, "o", _output(_scores(block, i, decay), block, i, decay, refs["states"].at[i]))

    block.for_chunks(body)


def _backward_kernel(refs: Refs, scan: Scan) -> None:
    """All gradients: there, `scan.unroll` chunks at a time, to keep the state at the start of each block, and back."""
    step, last = pl.program_id(2), scan.blocks - 1
    index = block_of(step, scan.blocks, "twice", early=True)
    block, states, checkpoints, dstate = _Block(refs, scan, index), refs["states"], refs["checkpoints"], refs["dstate"]

    @pl.when(index > 0)
    def _() -> None:
        states[0] = checkpoints[jnp.maximum(index - 1, 0)]

    def forward(i: Any) -> None:
        probe = partial(block.probe, i)
        states[i + 1] = probe("state", _next_state(partial(block.load, i), states[i], block.decay(i), scan))

    block.for_chunks(forward, lambda i: block.load_state("h0", i, states.at[i]), unroll=scan.unroll)

    @pl.when(step < last)
    def _() -> None:
        checkpoints[jnp.minimum(index, max(last - 1, 0))] = states[scan.chunks]

    @pl.when(step >= last)
    def _() -> None:
        def back(i: Any) -> None:
            load, decay, probe = partial(block.load, i), block.decay(i), partial(block.probe, i)
            probe_decays(decay, probe)
            decay.store_gradients(load, partial(block.store, i), states.at[i], dstate, scan, probe)
            dstate[...] = probe("dstate", _previous_dstate(load, dstate[...], decay, scan))

        _for_chunks_back(block, back)


def _dstates_kernel(refs: Refs, scan: Scan) -> None:
    """The gradients of the states at the end of each chunk, and dh0."""
    block, dstate = _Block(refs, scan, block_of(pl.program_id(2), scan.blocks, "back", early=False)), refs["dstate"]

    def body(i: Any) -> None:
        refs["dstates"][i] = dstate[...]
        probe = partial(block.probe, i)
        dstate[...] = probe("dstate", _previous_dstate(partial(block.load, i), dstate[...], block.decay(i), scan))

    _for_chunks_back(block, body)


def _gradients_kernel(refs: Refs, scan: Scan) -> None:
    """The other gradients from the states at the start of each chunk and their gradients at its end."""
    block = _Block(refs, scan, pl.program_id(2))

    def body(i: Any) -> None:
        states = refs["states"].at[i], refs["dstates"].at[i]
        decay, probe = block.decay(i), partial(block.probe, i)
        probe_decays(decay, probe)
        decay.store_gradients(partial(block.load, i), partial(block.store, i), *states, scan, probe)

    block.for_chunks(body)


def _for_chunks_back(block: _Block, body: Callable[[Any], None]) -> None:
    dstate = block.refs["dstate"]
    block.for_chunks(
        body,
        lambda i: block.load_state("dht", i, dstate),
        lambda i: block.store_state("dh0", i, dstate),
        reverse=True,
    )


# ------------------------------------------------------------------------------------------- one chunk, all heads
# What is needed twice is loaded twice: of all heads it would not fit the registers in between.


def _scores(block: _Block, i: Any, decay: Decay) -> jax.Array:
    """A [heads, C, C] of chunk i."""
    load, scan, probe = partial(block.load, i), block.scan, partial(block.probe, i)
    probe_decays(decay, probe)
    return probe("A", decay.scores(load, scan), 1, 2)


def _output(
    scores: jax.Array,
    block: _Block,
    i: Any,
    decay: Decay,
    state: Any,
    meanwhile: Callable[[], None] = lambda: None,
) -> jax.Array:
    """o [heads, C, V] float32 of chunk i, from its scores and the ref of the state at its start.

    meanwhile() comes before the last product, which has to wait for the scores; it may change the state.
    """
    read = read_state(block.load(i, "q"), state[...], decay, decay.decay_from_start, block.scan)
    meanwhile()
    return block.scan.p.scale * (read + dot(scores, block.load(i, "v"), (1, 0), block.scan))


def _next_state(load: Load, state: jax.Array, decay: Decay, scan: Scan) -> jax.Array:
    """The state [heads, V, K] at the end of a chunk."""
    return _decayed(state, decay, dot(load("v"), f32(load("k")) * decay.decay_to_end(scan.p.k), (0, 0), scan))


def _previous_dstate(load: Load, dstate: jax.Array, decay: Decay, scan: Scan) -> jax.Array:
    """The gradient [heads, V, K] of the state at the start of a chunk, from that at its end."""
    weighted = f32(load("q")) * (scan.p.scale * decay.decay_from_start(scan.p.k))
    return _decayed(dstate, decay, dot(load("do"), weighted, (0, 0), scan))


def _decayed(state: jax.Array, decay: Decay, term: jax.Array) -> jax.Array:
    """The state, or its gradient, decayed by a whole chunk, and term."""
    return reduce(lambda rest, part: part * state + rest, reversed(decay.whole), term)
