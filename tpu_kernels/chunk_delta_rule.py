"""The gated delta rule a chunk at a time: the scan behind `gated_delta_rule` and `kda`, both directions.

With S the state at a chunk's start, D the decay from step j to step i and decays counted inside the chunk,

    A = beta · strict_lower(k kᵀ · D)        v_new = (I + A)⁻¹ beta (v - decay_from_start · k S)
    o = scale · [decay_from_start · (q S) + tril(q kᵀ · D) v_new]      S' = whole · S + (k · decay_to_end)ᵀ v_new

(Yang et al. 2024, arXiv:2412.06464; Kimi Linear, arXiv:2510.26692); the formulas of the gradients are those of
`cpu_golden/chunk_delta_rule.py`. What is between the chunks of a sequence is as in `chunk_scan`: kernels see each
head's rows by themselves and states as [V, K], a grid step takes a block of chunks of up to eight value heads, and the
state stays in VMEM along T. With one gate for all channels the forward pass has [K, V]: the matrix unit loads states as
they lie, where it would take twice as long to turn them. The inverse comes from substitution (`_lib/triangular.py`), in
float32 whatever q and k are.

The forward pass is one kernel. So is the backward pass where its states fit VMEM: it walks the blocks twice, forward
over k, v, beta and gates alone to keep the state at the start of each block, then in reverse. There each block's chunks
are solved again for their states, and what that gives stays in VMEM for their gradients; k and v are read once where
all of them fit as well. Elsewhere the states of all chunks go to HBM.

Bfloat16 operands enter dots as they are, and what is float32 beside them as the sum of two bfloat16, or of three, which
are all of it: in the inverse, in products with it, which magnify what is left out, in what is read of a state, and in
sums for gates. Beside float32 operands three are taken always. Any T, and K and V up to 256.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.delta_rule import DeltaGrads, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import jit
from tpu_kernels._lib.chunk_block import ChunkBlock
from tpu_kernels._lib.chunk_decays import Decay, Refs, decayed, probe_decays, read_state, written_by
from tpu_kernels._lib.chunk_dots import WHOLE, dot, f32, iota, ones
from tpu_kernels._lib.chunk_layout import Layout, block_of
from tpu_kernels._lib.chunk_layout import call as pallas_call
from tpu_kernels._lib.delta import DeltaArrays, backward_of_nothing, key_gradient, normalised, take
from tpu_kernels._lib.delta_pairs import gradients, of_steps, scores
from tpu_kernels._lib.delta_plan import DeltaPlan, make_plan
from tpu_kernels._lib.recurrent_sums import sum_rows
from tpu_kernels._lib.scans import forward_of_nothing
from tpu_kernels._lib.triangular import inverse


@options_of(take, make_plan)
def chunk_delta_fwd(x: DeltaTensors, per_channel: bool, *, output_final_state: bool = False, **options: Any) -> Output:
    """o [B, T, HV, V] in v's dtype and the states ht [N, HV, K, V] float32 after the last steps, None unless asked for.

    per_channel: whether g is that of `kda`; other arguments as `gated_delta_rule.chunk_gated_delta_rule_fwd`'s. o is
    zero beyond the last sequence. Sites shown to a probe: c or exponent, decay, raw, A, T, error, v_new, P and h.
    Raises ValueError or TypeError as `take`.
    """
    arrays, how = take(make_plan, x, per_channel, **options)
    return forward(arrays, output_final_state=bool(output_final_state), **how)


@options_of(take, make_plan)
def chunk_delta_bwd(
    x: DeltaTensors, do: jax.Array, per_channel: bool, *, dht: Any = None, **options: Any
) -> DeltaGrads:
    """The gradients of `chunk_delta_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    Gradients have their arguments' dtypes and are zero beyond the last sequence. Sites shown to a probe: those of
    `chunk_delta_fwd`, dv_new, dupdate, dP, dA and dh.
    Raises as `chunk_delta_fwd`.
    """
    arrays, how = take(make_plan, x, per_channel, do, dht, **options)
    return backward(arrays, **how)


# ------------------------------------------------------------------------------------------------------- passes


@jit("plan", "output_final_state", "interpret")
def forward(x: DeltaArrays, *, plan: DeltaPlan | None, output_final_state: bool, interpret: Interpreted) -> Output:
    """o [B, T, HV, V] in v's dtype and, with output_final_state, ht [N, HV, K, V] float32, of checked arrays."""
    if plan is None:
        return forward_of_nothing(x, output_final_state)
    scan = plan.scan
    layout = Layout(scan, x.cu_seqlens, _gate(x, plan))
    operands = {**layout.rows(q=x.q), **_before(layout, x)}
    outputs = {"o": layout.rows_out(scan.p.v, x.v.dtype)}
    if output_final_state:
        outputs["ht"] = layout.state_out()
    results = pallas_call(
        scan,
        partial(_forward_kernel, plan),
        "chunk_delta_fwd",
        operands,
        outputs,
        {"state": pltpu.VMEM(scan.state, jnp.float32)},
        prefetch=layout.prefetch,
        interpret=interpret,
        work=(6, 3),
    )
    return Output(layout.public(results["o"]), layout.turned(results["ht"]) if output_final_state else None)


@jit("plan", "interpret")
def backward(x: DeltaArrays, *, plan: DeltaPlan | None, interpret: Interpreted) -> DeltaGrads:
    """The gradients of checked arrays, in their shapes and dtypes."""
    if plan is None:
        return backward_of_nothing(x)
    p, scan = plan.p, plan.scan
    layout = Layout(scan, x.cu_seqlens, _gate(x, plan))
    call = partial(pallas_call, scan, prefetch=layout.prefetch, interpret=interpret)
    before = _before(layout, x)
    after = {**layout.rows(q=x.q, do=x.do), **layout.states(dht=x.dht)}
    out = {name: layout.rows_out(scan.p.k, plan.of_keys) for name in ("dq", "dk")}
    out |= {"dv": layout.rows_out(scan.p.v, x.v.dtype), "dbeta": layout.steps()}
    out["dgate"] = layout.rows_out(scan.p.k, jnp.float32) if scan.gate == "channel" else layout.steps()
    if x.initial_state is not None:
        out["dh0"] = layout.state_out()
    scratch = {"dstate": pltpu.VMEM(scan.state, jnp.float32)}
    if plan.fused:
        scratch |= {
            "states": pltpu.VMEM((scan.chunks + 1, *scan.state), jnp.float32),
            "checkpoints": pltpu.VMEM((max(scan.blocks - 1, 1), *scan.state), jnp.float32),
            "kept": {name: pltpu.VMEM((scan.chunks, *shape), jnp.float32) for name, shape in plan.kept.items()},
        }
        if plan.holds:
            before |= {name: before[name]._replace(held=True) for name in ("k", "v")}
        kernel = partial(_backward_kernel, plan)
        results = call(kernel, "chunk_delta_bwd", {**before, **after}, out, scratch, work=(20, 10), walk="twice")
    else:
        kept = {"states": layout.chunk_states()}
        state = {"state": scratch["dstate"]}
        states = call(partial(_states_kernel, plan), "chunk_delta_states", before, kept, state, work=(5, 2))["states"]
        operands = {**before, **after, "states": layout.chunk_states(states)}
        operands.pop("h0", None)
        kernel = partial(_gradients_kernel, plan)
        results = call(kernel, "chunk_delta_grads", operands, out, scratch, work=(20, 8), walk="back")
    dq, dk, dv = (layout.public(results[name]) for name in ("dq", "dk", "dv"))
    dg = layout.public(results["dgate"]) if scan.gate == "channel" else layout.public_steps(results["dgate"])
    dbeta = layout.public_steps(results["dbeta"])
    return DeltaGrads(
        key_gradient(dq, x.q, p),
        key_gradient(dk, x.k, p),
        dv,
        dg.astype(x.g.dtype),
        dbeta.astype(x.beta.dtype),
        layout.turned(results["dh0"]) if x.initial_state is not None else None,
    )


def _gate(x: DeltaArrays, plan: DeltaPlan) -> dict[str, jax.Array | None]:
    return {"gk" if plan.scan.gate == "channel" else "g": x.g}


def _before(layout: Layout, x: DeltaArrays) -> dict[str, Any]:
    """The operands that states are made of."""
    rows = layout.rows(k=x.k, v=x.v)
    return {**rows, **layout.gates, **layout.numbers(beta=x.beta), **layout.states(h0=x.initial_state)}


# ------------------------------------------------------------------------------------------------------ kernels


def _forward_kernel(plan: DeltaPlan, refs: Refs, scan: Any) -> None:
    """o and ht."""
    block, state = _Block(plan, refs, pl.program_id(2)), refs["state"]

    def body(i: Any) -> None:
        s = block.solved(i, state[...], with_q=True)
        read = read_state(s.q, state[...], s.decay, "decay_from_start", scan, WHOLE)
        block.store(i, "o", plan.p.scale * (read + dot(s.p, s.v_new, (1, 0), scan)))
        state[...] = block.probe(i, "h", _next_state(s, state[...], scan))

    block.for_chunks(body, lambda i: block.load_state("h0", i, state), lambda i: block.store_state("ht", i, state))


def _states_kernel(plan: DeltaPlan, refs: Refs, scan: Any) -> None:
    """The states at the start of each chunk."""
    block, state = _Block(plan, refs, pl.program_id(2)), refs["state"]

    def body(i: Any) -> None:
        refs["states"][i] = state[...]
        state[...] = block.probe(i, "h", _next_state(block.solved(i, state[...]), state[...], scan))

    block.for_chunks(body, lambda i: block.load_state("h0", i, state))


def _backward_kernel(plan: DeltaPlan, refs: Refs, scan: Any) -> None:
    """All gradients: there, to keep the state at the start of each block, and back."""
    step, last = pl.program_id(2), scan.blocks - 1
    index = block_of(step, scan.blocks, "twice", early=True)
    block, states, checkpoints = _Block(plan, refs, index), refs["states"], refs["checkpoints"]

    @pl.when(index > 0)
    def _() -> None:
        states[0] = checkpoints[jnp.maximum(index - 1, 0)]

    def forward(i: Any) -> None:
        solved = block.solved(i, states[i])
        block.keep(i, solved)
        states[i + 1] = block.probe(i, "h", _next_state(solved, states[i], scan))

    block.for_chunks(forward, lambda i: block.load_state("h0", i, states.at[i]))

    @pl.when(step < last)
    def _() -> None:
        checkpoints[jnp.minimum(index, max(last - 1, 0))] = states[scan.chunks]

    pl.when(step >= last)(lambda: _back(block, lambda i, state: block.kept(i)))


def _gradients_kernel(plan: DeltaPlan, refs: Refs, scan: Any) -> None:
    """All gradients, from the states at the start of each chunk."""
    block = _Block(plan, refs, block_of(pl.program_id(2), scan.blocks, "back", early=False))
    _back(block, partial(block.solved, with_q=True))


def _back(block: "_Block", solved: Callable[[Any, jax.Array], "_Solved"]) -> None:
    """Store the gradients of a block's chunks, the last first, from `states`.

    solved: (i, state at its start) -> chunk i, solved.
    """
    dstate = block.refs["dstate"]

    def body(i: Any) -> None:
        state = block.refs["states"][i]
        block.store_gradients(i, solved(i, state), state, dstate)

    block.for_chunks(
        body,
        lambda i: block.load_state("dht", i, dstate),
        lambda i: block.store_state("dh0", i, dstate),
        reverse=True,
    )


# ------------------------------------------------------------------------------------------- one chunk, all heads


class _Solved(NamedTuple):
    """A chunk's tensors, and what follows from them and the state at its start up to v_new.

    beta [heads, C, 1]; raw, A without beta, t = (I + A)⁻¹ and p, the scores of q, [heads, C, C]; error, what v lacks of
    it in the state, and v_new [heads, C, V].
    """

    q: Any
    k: jax.Array
    beta: jax.Array
    decay: Decay
    raw: jax.Array
    t: jax.Array
    p: Any
    error: jax.Array
    v_new: jax.Array


class _Block(ChunkBlock):
    """A grid step's block of chunks of a delta rule."""

    def __init__(self, plan: DeltaPlan, refs: Refs, index: Any) -> None:
        super().__init__(refs, plan.scan, index)
        self.plan = plan

    def keys(self, i: Any, name: str) -> jax.Array:
        """q or k [heads, C, K] of chunk i, a row for each value head, normalised where asked."""
        x, scan = self.load(i, name), self.scan
        if self.plan.p.l2norm:
            x, _ = normalised(x)
        if x.shape[0] == scan.heads:
            return x
        shared = jnp.broadcast_to(x[:, None], (x.shape[0], scan.heads // x.shape[0], *x.shape[1:]))
        return shared.reshape(scan.heads, *x.shape[1:])

    def beta(self, i: Any) -> jax.Array:
        """[heads, C, 1] of chunk i."""
        row = self.refs["beta"][:, pl.ds(i, 1), : self.scan.chunk]
        return jnp.sum(jnp.where(self._is_same(), row, 0.0), axis=2, keepdims=True)

    def _is_same(self) -> jax.Array:
        shape = (self.scan.heads, self.scan.chunk, self.scan.chunk)
        return iota(shape, 1) == iota(shape, 2)

    def row_of(self, column: jax.Array) -> jax.Array:
        """[heads, C, 1] as [heads, 1, C]."""
        return jnp.sum(jnp.where(self._is_same(), column, 0.0), axis=1, keepdims=True)

    def solved(self, i: Any, state: jax.Array, *, with_q: bool = False) -> _Solved:
        """Chunk i, from the state at its start; q and its scores only with_q."""
        scan, probe = self.scan, partial(self.probe, i)
        k, beta, decay = self.keys(i, "k"), self.beta(i), self.decay(i)
        queries = [self.keys(i, "q")] if with_q else []
        probe_decays(decay, probe)
        *of_q, of_k = scores([*queries, k], k, decay, scan)
        row, column = (iota(of_k.shape, axis) for axis in (1, 2))
        raw = probe("raw", jnp.where(row > column, of_k, 0.0), 1, 2)
        t = probe("T", inverse(probe("A", beta * raw, 1, 2), scan), 1, 2)
        recalled = read_state(k, state, decay, "decay_from_start", scan, WHOLE)
        error = probe("error", f32(self.load(i, "v")) - recalled, 1)
        v_new = probe("v_new", _solution(t, raw, beta, beta * error, scan), 1)
        q, p = (queries[0], probe("P", of_q[0], 1, 2)) if with_q else (None, None)
        return _Solved(q, k, beta, decay, raw, t, p, error, v_new)

    def keep(self, i: Any, solved: _Solved) -> None:
        """Store the solved chunk i in VMEM, for `kept`."""
        for name, ref in self.refs["kept"].items():
            ref[i] = getattr(solved, name)

    def kept(self, i: Any) -> _Solved:
        """Chunk i as `solved` with_q returns it, from what `keep` stored: only the scores of q are computed."""
        q, k, decay = self.keys(i, "q"), self.keys(i, "k"), self.decay(i)
        (p,) = scores([q], k, decay, self.scan)
        found = {name: ref[i] for name, ref in self.refs["kept"].items()}
        return _Solved(q=q, k=k, beta=self.beta(i), decay=decay, p=self.probe(i, "P", p, 1, 2), **found)

    def store_gradients(self, i: Any, s: _Solved, state: jax.Array, dstate: Any) -> None:
        """Store the gradients of chunk i, from the state at its start and the gradient of that at its end, a ref."""
        scan, scale, probe = self.scan, self.plan.p.scale, partial(self.probe, i)
        do, dend = self.load(i, "do"), dstate[...]
        q, k, decay, (row, column) = s.q, s.k, s.decay, (iota(s.raw.shape, axis) for axis in (1, 2))
        from_start, to_end = (decay.columns(way, scan.p.k) for way in ("decay_from_start", "decay_to_end"))
        from_end = read_state(k, dend, decay, "decay_to_end", scan, WHOLE)
        dv_new = probe("dv_new", scale * dot(s.p, do, (0, 0), scan) + from_end, 1)
        dupdate = probe("dupdate", _solution(s.t, s.raw, s.beta, dv_new, scan, transposed=True), 1)
        dv = s.beta * dupdate
        self.store(i, "dv", dv)
        dp = probe("dP", jnp.where(row >= column, scale * dot(do, s.v_new, (1, 1), scan), 0.0), 1, 2)
        da = probe("dA", jnp.where(row > column, -dot(dupdate, s.v_new, (1, 1), scan), 0.0), 1, 2)
        of_error = jnp.sum(dupdate * s.error, axis=2, keepdims=True)
        self.store(i, "dbeta", self.row_of(of_error + jnp.sum(da * s.raw, axis=2, keepdims=True)))
        read = scale * from_start * dot(do, state, (1, 0), scan, WHOLE)
        recalled = -from_start * dot(dv, state, (1, 0), scan, WHOLE)
        written = to_end * dot(s.v_new, dend, (1, 0), scan, WHOLE)
        dq, dk, dgate = gradients((q, k), (s.p, s.raw), (dp, s.beta * da), decay, scan)
        self.store(i, "dq", dq + read)
        self.store(i, "dk", written + recalled + dk)
        of_rows = f32(q) * read + f32(k) * recalled, f32(k) * written
        self.store(i, "dgate", self._gate_gradient(dgate, *of_rows, decay, state * dend))
        change = dot(do, f32(q) * (scale * from_start), (0, 0), scan)
        change -= written_by(k, dv, decay, "decay_from_start", scan)
        dstate[...] = probe("dh", decayed(dend, decay, change))

    def _gate_gradient(
        self, pairs: jax.Array, read: jax.Array, written: jax.Array, decay: Decay, states: jax.Array
    ) -> jax.Array:
        """The gradients of the gates of a chunk, [heads, C, K] or, with one for all channels, [heads, 1, C].

        pairs: of `gradients`. read, written [heads, C, K]: by row, what reads the state before the chunk, and what is
        written into that after it. states [heads, V, K]: what passes the chunk, but for its decay.
        """
        scan = self.scan
        through = reduce(jnp.add, decay.whole) * sum_rows(states)
        if decay.per_channel:
            row, column = (iota((scan.heads, scan.chunk, scan.chunk), axis) for axis in (1, 2))
            later = dot(ones(column >= row), read, (1, 0), scan, WHOLE)
            return pairs + through + later + dot(ones(column < row), written, (1, 0), scan, WHOLE)
        read, written = (jnp.sum(x, axis=2, keepdims=True) for x in (read, written))
        return jnp.sum(through, axis=2, keepdims=True) + of_steps(pairs, read, written, scan)


def _solution(
    t: jax.Array, raw: jax.Array, beta: jax.Array, given: jax.Array, scan: Any, *, transposed: bool = False
) -> jax.Array:
    """x of (I + A) x = given, or of the transpose of I + A, [heads, C, V]; t: the inverse, A = beta · raw.

    In a recurrence it is refined once: what t and A have lost is in what x leaves of given, and goes.
    """
    axes = (0, 0) if transposed else (1, 0)
    x = dot(t, given, axes, scan, WHOLE)
    if not scan.precise:
        return x
    product = dot(raw, beta * x, axes, scan) if transposed else beta * dot(raw, x, axes, scan)
    return x + dot(t, (given - x) - product, axes, scan)


def _next_state(s: _Solved, state: jax.Array, scan: Any) -> jax.Array:
    """The state at the end of a chunk."""
    return decayed(state, s.decay, written_by(s.k, s.v_new, s.decay, "decay_to_end", scan))
