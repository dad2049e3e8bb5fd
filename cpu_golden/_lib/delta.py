"""Every sequence of a gated delta rule by a scan: what the chunked and the recurrent form share.

A *scan* computes one `DeltaSequence` (of each of B batch rows) of float64 tensors with the value heads first, q and k
[B, HV, T, K], v and do [B, HV, T, V], gate [B, HV, T, K] or [B, HV, T, 1], beta [B, HV, T, 1], state and dstate
[B, HV, K, V]; all with an axis of runs before these where `Stages.runs` says so. Heads of keys are repeated for each
value head that shares them, and their gradients summed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import values
from cpu_golden._lib.scans import Staged, heads_first, heads_last, read, sequences_of
from cpu_golden.stages import Stages, exact, tree_sum
from op_arguments import delta_rule
from op_arguments.delta_rule import DeltaGrads, DeltaProblem, DeltaTensors
from op_arguments.gla import CHUNK_STEP, Output
from op_arguments.options import options_of


class DeltaSequence(NamedTuple):
    """What a scan is given: tensors, the state that it starts from, and for a backward pass the gradients of o and of
    the final state."""

    q: Array
    k: Array
    v: Array
    gate: Array
    beta: Array
    state: Array
    scale: float
    do: Any = None
    dstate: Any = None

    def read(self, stages: Stages) -> "DeltaSequence":
        """What a kernel reads of it. Sites: q, k, v, beta, initial_state, and of a backward pass do, dht."""
        fields = ("q", "k", "v", "beta", "do", "state", "dstate")
        return self._replace(**read(self, stages, fields))

    def chunk(self, rows: slice, state: Array) -> "DeltaSequence":
        """These rows of it, and the state before them."""
        steps = {name: getattr(self, name)[..., rows, :] for name in ("q", "k", "v", "gate", "beta")}
        return self._replace(**steps, state=state, do=None if self.do is None else self.do[..., rows, :])


class DeltaSequenceGrads(NamedTuple):
    """The gradients of a `DeltaSequence`."""

    dq: Array
    dk: Array
    dv: Array
    dgate: Array
    dbeta: Array
    dstate: Array


Forward = Callable[..., tuple[Array, Array]]
"""A scan (DeltaSequence, **steps) -> o [B, HV, T, V] and the final state."""
Backward = Callable[..., DeltaSequenceGrads]
"""A scan (DeltaSequence, **steps) -> its gradients."""


class ChunkFwd(delta_rule.ChunkDeltaFwd, Staged, total=False):
    """The options of `chunk_…_fwd`."""


class ChunkBwd(delta_rule.ChunkDeltaBwd, Staged, total=False):
    """The options of `chunk_…_bwd`."""


class StepFwd(delta_rule.DeltaFwd, Staged, total=False):
    """The options of `fused_recurrent_…_fwd`, one step at a time."""


class StepBwd(delta_rule.DeltaBwd, Staged, total=False):
    """The options of `fused_recurrent_…_bwd`, one step at a time."""


class Call(NamedTuple):
    """A checked call: q, k, v, g (of rank 4) and beta [B, T, HV, 1] in float64, q and k normalised where asked;
    the reciprocal roots of q and k; states before the first steps; the steps and the states of every sequence; and what
    else the scan takes."""

    p: DeltaProblem
    x: DeltaTensors
    rstd: tuple[Array, Array] | None
    states: Array
    sequences: list[tuple[Array, slice]]
    steps: dict[str, Any]


def take(
    x: DeltaTensors,
    per_channel: bool,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **steps: Any,
) -> Call:
    """The checked call of a forward pass, or of the backward pass but for do and dht.

    Raises as `check_delta_forward`.
    """
    offsets = values(cu_seqlens)
    p = delta_rule.check_delta_forward(
        x, per_channel, scale, initial_state, cu_seqlens, offsets, use_qk_l2norm_in_kernel,
        chunk_size=steps.get("chunk_size", CHUNK_STEP), exact=True,
    )  # fmt: skip
    stages = steps.get("stages", exact)
    q, k, v, g, beta = (stages.each_run(np.asarray(tensor, np.float64)) for tensor in x)
    rstd = None
    if p.l2norm:
        (q, of_q), (k, of_k) = normalised(q, stages), normalised(k, stages)
        rstd = of_q, of_k
    wide = DeltaTensors(q, k, v, g if per_channel else g[..., None], beta[..., None])
    states = np.zeros((p.n, p.hv, p.k, p.v)) if initial_state is None else initial_state.astype(np.float64)
    return Call(p, wide, rstd, np.array(stages.each_run(states)), list(sequences_of(p.t, offsets)), steps)


@options_of(take)
def forward(
    scan: Forward, x: DeltaTensors, per_channel: bool, *, output_final_state: bool = False, **options: Any
) -> Output:
    """Every sequence by `scan`; arguments as the public functions take them, checked here.

    Sites: those of the scan, and of `normalised`.
    """
    call = take(x, per_channel, **options)
    o = np.zeros(call.x.v.shape)
    for rows, n in call.sequences:
        o_n, call.states[..., n, :, :, :] = scan(_sequence(call, rows, n), **call.steps)
        o[..., rows, :, :] = heads_last(o_n)
    return Output(o, call.states if output_final_state else None)


@options_of(take)
def backward(
    scan: Backward, x: DeltaTensors, do: Array, per_channel: bool, *, dht: Array | None = None, **options: Any
) -> DeltaGrads:
    """The gradients of `forward`'s arguments; dh0 only where there is an initial_state.

    Sites: those of the scan, of `normalised` and `_of_given`, heads (the sums over the value heads of a head of keys).
    """
    call = take(x, per_channel, **options)
    p, stages = call.p, options.get("stages", exact)
    delta_rule.check_delta_gradients(p, do, dht, exact=True)
    dstates = np.zeros(call.states.shape) if dht is None else np.array(stages.each_run(dht.astype(np.float64)))
    do = stages.each_run(do)
    of_keys = (*call.x.v.shape[:-1], p.k)
    dq, dk, dv, dg, dbeta = grads = [np.zeros(shape) for shape in (of_keys, of_keys, *(of.shape for of in call.x[2:]))]
    for rows, n in call.sequences:
        given = _sequence(call, rows, n)._replace(do=heads_first(do, rows), dstate=dstates[..., n, :, :, :])
        *of_rows, dstates[..., n, :, :, :] = scan(given, **call.steps)
        for grad, grad_n in zip(grads, of_rows, strict=True):
            grad[..., rows, :, :] = heads_last(grad_n)
    dq, dk = (_of_key_heads(grad, p, stages) for grad in (dq, dk))
    if call.rstd is not None:
        dq, dk = (_of_given(*of, stages) for of in zip((dq, dk), call.x[:2], call.rstd, strict=True))
    dh0 = None if options.get("initial_state") is None else dstates
    of_gate = dg if per_channel else dg[..., 0]
    return DeltaGrads(stages("dq", dq), stages("dk", dk), dv, of_gate, dbeta[..., 0], dh0)


def normalised(x: Array, stages: Stages) -> tuple[Array, Array]:
    """x · rstd and rstd = (Σx² + 1e-6)^-½ of each row. Sites: square, norm (sums of these), rstd, normed."""
    squares = tree_sum(stages("square", x * x), stages.renamed(sum="norm"))
    rstd = stages("rstd", 1 / np.sqrt(stages("norm", squares + delta_rule.NORM_EPS)))
    return stages("normed", x * rstd), rstd


def _of_given(grad: Array, x: Array, rstd: Array, stages: Stages) -> Array:
    """The gradient of what was normalised to x. Sites: projected (sums, and what is left of the gradient), normed."""
    along = tree_sum(stages("projected", grad * x), stages.renamed(sum="projected"))
    return stages("normed", rstd * stages("projected", grad - x * along))


def _sequence(call: Call, rows: Array, n: slice) -> DeltaSequence:
    q, k = (np.repeat(heads_first(tensor, rows), call.p.group, axis=-3) for tensor in call.x[:2])
    v, g, beta = (heads_first(tensor, rows) for tensor in call.x[2:])
    return DeltaSequence(q, k, v, g, beta, call.states[..., n, :, :, :], call.p.scale)


def _of_key_heads(grad: Array, p: DeltaProblem, stages: Stages) -> Array:
    """The gradient of heads of keys, from that of each value head."""
    if p.hv == p.h:
        return grad
    if p.group == 0:
        return np.zeros((*grad.shape[:-2], p.h, p.k))
    shared = grad.reshape(*grad.shape[:-2], p.h, p.group, p.k)
    total = shared[..., 0, :]
    for member in range(1, p.group):
        total = stages("heads", total + shared[..., member, :])
    return total
