"""Gated linear attention a chunk at a time: the scan behind `simple_gla` and `gla`, both directions, every gate.

With S the state at a chunk's start and decays counted inside the chunk, the recurrence S_t = a_t S_{t-1} + k_t v_tᵀ,
o_t = scale · q_tᵀ S_t becomes a few matrix products per chunk (Yang et al. 2024, arXiv:2312.06635; Dao & Gu 2024,
arXiv:2405.21060):

    o = scale · [decay_from_start · (q S) + A v]        A_ij = Σ_K q_i k_j · decay from step j to step i, for i >= j
    S' = whole · S + (k · decay_to_end)ᵀ v

What differs between gates is how many decays a step has, one or one per channel of k, and so how A is formed:
`StepDecay` and `ChannelDecay`. Kernels see each head's rows by themselves and states as [V, K], so that what decays
channels is a row of lanes; a grid step takes a block of chunks of a few heads, and the state stays in VMEM along T.

**Fused**: the forward pass is one kernel, and so is the backward pass. That walks the blocks twice: forward, over k and
v alone, to keep the state at the start of each block in VMEM; then in reverse, where the states of a block's chunks are
made again and the gradient of the state is carried. **Unfused**: the states (and their gradients) of all chunks go to
HBM, and another kernel makes the outputs (or gradients) of each block on its own.

Packed sequences are laid out anew so that each begins with a chunk; rows without a step are masked as they are loaded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Gates, Gradients, Output
from op_arguments.options import options_of
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import jit
from tpu_kernels._lib.chunk_block import ChunkBlock
from tpu_kernels._lib.chunk_decays import (
    Decay,
    Load,
    Refs,
    decayed,
    probe_decays,
    read_state,
    written_by,
    written_by_each,
)
from tpu_kernels._lib.chunk_dots import dot
from tpu_kernels._lib.chunk_layout import Layout, block_of
from tpu_kernels._lib.chunk_layout import call as pallas_call
from tpu_kernels._lib.chunk_plan import Scan, make_scan
from tpu_kernels._lib.scans import Arrays, backward_of_nothing, forward_of_nothing, take


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
    return Output(layout.public(results["o"]), layout.turned(results["ht"]) if output_final_state else None)


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
    dh0 = layout.turned(results["dh0"]) if starts else None
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


def _forward_kernel(refs: Refs, scan: Scan) -> None:
    """o, or the states at the start of each chunk, and ht."""
    block, state = ChunkBlock(refs, scan, pl.program_id(2)), refs["state"]

    def body(i: Any) -> None:
        if "o" not in refs:
            refs["states"][i] = state[...]
            advance(block, i, block.decay(i))
            return
        # The matrix unit makes the scores of a group of heads while the group before waits for its own.
        waiting: list[Callable[[], None]] = []
        for group in block.groups():
            decay = group.decay(i)
            decay.spread("decay_to_end", "decay_from_start")
            waiting.append(partial(finish, group, i, decay, _scores(group, i, decay)))
            if len(waiting) > 1:
                waiting.pop(0)()
        waiting.pop()()

    def finish(group: ChunkBlock, i: Any, decay: Decay, scores: jax.Array) -> None:
        meanwhile = partial(advance, group, i, decay)
        group.store(i, "o", _output(scores, group, i, decay, group.refs["state"], meanwhile))

    def advance(group: ChunkBlock, i: Any, decay: Decay) -> None:
        load, scan, state, probe = partial(group.load, i), group.scan, group.refs["state"], partial(group.probe, i)
        state[...] = probe("state", _next_state(load, state[...], decay, scan))

    block.for_chunks(body, lambda i: block.load_state("h0", i, state), lambda i: block.store_state("ht", i, state))


def _outputs_kernel(refs: Refs, scan: Scan) -> None:
    """o from the states at the start of each chunk."""
    block = ChunkBlock(refs, scan, pl.program_id(2))

    def body(i: Any) -> None:
        decay = block.decay(i)
        block.store(i, "o", _output(_scores(block, i, decay), block, i, decay, refs["states"].at[i]))

    block.for_chunks(body)


def _backward_kernel(refs: Refs, scan: Scan) -> None:
    """All gradients: there, `scan.unroll` chunks at a time, to keep the state at the start of each block, and back."""
    step, last = pl.program_id(2), scan.blocks - 1
    index = block_of(step, scan.blocks, "twice", early=True)
    block, states, checkpoints, dstate = (
        ChunkBlock(refs, scan, index),
        refs["states"],
        refs["checkpoints"],
        refs["dstate"],
    )

    @pl.when(index > 0)
    def _() -> None:
        states[0] = checkpoints[jnp.maximum(index - 1, 0)]

    def written(i: Any) -> list[tuple[Decay, jax.Array]]:
        decays = [block.decay(i + n) for n in range(scan.at_once)]
        k, v = (block.load(i, name, scan.at_once) for name in ("k", "v"))
        return list(zip(decays, written_by_each(k, v, decays, scan), strict=True))

    def forward(i: Any, decay: Decay, term: jax.Array) -> None:
        states[i + 1] = block.probe(i, "state", decayed(states[i], decay, term))

    def enter(i: Any) -> None:
        block.load_state("h0", i, states.at[i])

    block.for_chunks(forward, enter, before=written, at_once=scan.at_once, unroll=scan.unroll)

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
    block, dstate = ChunkBlock(refs, scan, block_of(pl.program_id(2), scan.blocks, "back", early=False)), refs["dstate"]

    def body(i: Any) -> None:
        refs["dstates"][i] = dstate[...]
        probe = partial(block.probe, i)
        dstate[...] = probe("dstate", _previous_dstate(partial(block.load, i), dstate[...], block.decay(i), scan))

    _for_chunks_back(block, body)


def _gradients_kernel(refs: Refs, scan: Scan) -> None:
    """The other gradients from the states at the start of each chunk and their gradients at its end."""
    block = ChunkBlock(refs, scan, pl.program_id(2))

    def body(i: Any) -> None:
        states = refs["states"].at[i], refs["dstates"].at[i]
        decay, probe = block.decay(i), partial(block.probe, i)
        probe_decays(decay, probe)
        decay.store_gradients(partial(block.load, i), partial(block.store, i), *states, scan, probe)

    block.for_chunks(body)


def _for_chunks_back(block: ChunkBlock, body: Callable[[Any], None]) -> None:
    dstate = block.refs["dstate"]
    block.for_chunks(
        body,
        lambda i: block.load_state("dht", i, dstate),
        lambda i: block.store_state("dh0", i, dstate),
        reverse=True,
    )


# ------------------------------------------------------------------------------------------- one chunk, all heads
# What is needed twice is loaded twice: of all heads it would not fit the registers in between.


def _scores(block: ChunkBlock, i: Any, decay: Decay) -> jax.Array:
    """A [heads, C, C] of chunk i."""
    load, scan, probe = partial(block.load, i), block.scan, partial(block.probe, i)
    probe_decays(decay, probe)
    return probe("A", decay.scores(load, scan), 1, 2)


def _output(
    scores: jax.Array,
    block: ChunkBlock,
    i: Any,
    decay: Decay,
    state: Any,
    meanwhile: Callable[[], None] = lambda: None,
) -> jax.Array:
    """o [heads, C, V] float32 of chunk i, from its scores and the ref of the state at its start.

    meanwhile() comes before the last product, which has to wait for the scores; it may change the state.
    """
    read = read_state(block.load(i, "q"), state[...], decay, "decay_from_start", block.scan)
    meanwhile()
    return block.scan.p.scale * (read + dot(scores, block.load(i, "v"), (1, 0), block.scan))


def _next_state(load: Load, state: jax.Array, decay: Decay, scan: Scan) -> jax.Array:
    """The state [heads, V, K] at the end of a chunk."""
    return decayed(state, decay, written_by(load("k"), load("v"), decay, "decay_to_end", scan))


def _previous_dstate(load: Load, dstate: jax.Array, decay: Decay, scan: Scan) -> jax.Array:
    """The gradient [heads, V, K] of the state at the start of a chunk, from that at its end."""
    return decayed(dstate, decay, written_by(load("q"), load("do"), decay, "decay_from_start", scan, scan.p.scale))
