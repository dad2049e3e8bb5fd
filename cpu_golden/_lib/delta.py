"""A gated delta rule as the call of a scan: what the chunked and the recurrent form share.

Heads of keys are repeated for each value head that shares them, and their gradients summed.
"""

from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import values
from cpu_golden._lib.sequences import Backward, Call, Forward, Sequence, Staged, sequences_of, states_of
from cpu_golden.stages import Stages, exact, tree_sum
from op_arguments import delta_rule
from op_arguments.delta_rule import DeltaGrads, DeltaProblem, DeltaTensors
from op_arguments.gla import CHUNK_STEP, Output
from op_arguments.options import options_of


class DeltaSequenceGrads(NamedTuple):
    """The gradients of the `Sequence` of a delta rule."""

    dq: Array
    dk: Array
    dv: Array
    dgate: Array
    dbeta: Array
    dstate: Array


class ChunkFwd(delta_rule.ChunkDeltaFwd, Staged, total=False):
    """The options of `chunk_…_fwd`."""


class ChunkBwd(delta_rule.ChunkDeltaBwd, Staged, total=False):
    """The options of `chunk_…_bwd`."""


class StepFwd(delta_rule.DeltaFwd, Staged, total=False):
    """The options of `fused_recurrent_…_fwd`, one step at a time."""


class StepBwd(delta_rule.DeltaBwd, Staged, total=False):
    """The options of `fused_recurrent_…_bwd`, one step at a time."""


class Normalised(NamedTuple):
    """Rows of q or k of length 1, and the reciprocals of the lengths that they had."""

    x: Array
    rstd: Array


def take(
    x: DeltaTensors,
    per_channel: bool,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **steps: Any,
) -> tuple[DeltaProblem, Call, list[Normalised]]:
    """The problem, the checked call of its forward pass, or of the backward pass but for do and dht, and q and k where
    they are normalised.

    Raises as `check_delta_forward`.
    """
    offsets = values(cu_seqlens)
    p = delta_rule.check_delta_forward(
        x, per_channel, scale, initial_state, cu_seqlens, offsets, use_qk_l2norm_in_kernel,
        chunk_size=steps.get("chunk_size", CHUNK_STEP), exact=True,
    )  # fmt: skip
    stages = steps.get("stages", exact)
    q, k, v, g, beta = (stages.each_run(np.asarray(tensor, np.float64)) for tensor in x)
    normal = [normalised(tensor, stages) for tensor in (q, k) if p.l2norm]
    q, k = (np.repeat(keys, p.group, axis=-2) for keys in ([of.x for of in normal] if normal else (q, k)))
    gate = g if per_channel else g[..., None]
    states = states_of(initial_state, (p.n, p.hv, p.k, p.v), stages)
    sequences = Sequence(q, k, v, gate, states, p.scale, beta[..., None])
    return p, Call(sequences, list(sequences_of(p.t, offsets)), steps), normal


@options_of(take)
def forward(
    scan: Forward, x: DeltaTensors, per_channel: bool, *, output_final_state: bool = False, **options: Any
) -> Output:
    """Every sequence by `scan`; arguments as the public functions take them, checked here.

    Sites: those of the scan, and of `normalised`.
    """
    _, call, _ = take(x, per_channel, **options)
    o, states = call.forward(scan)
    return Output(o, states if output_final_state else None)


@options_of(take)
def backward(
    scan: Backward, x: DeltaTensors, do: Array, per_channel: bool, *, dht: Array | None = None, **options: Any
) -> DeltaGrads:
    """The gradients of `forward`'s arguments; dh0 only where there is an initial_state.

    Sites: those of the scan, of `normalised` and `_of_given`, heads (the sums over the value heads of a head of keys).
    """
    p, call, normal = take(x, per_channel, **options)
    stages = options.get("stages", exact)
    delta_rule.check_delta_gradients(p, do, dht, exact=True)
    (dq, dk, dv, dgate, dbeta), dstates = call.backward(scan, do, dht)
    dq, dk = (_of_key_heads(grad, p, stages) for grad in (dq, dk))
    if normal:
        dq, dk = (_of_given(grad, of, stages) for grad, of in zip((dq, dk), normal, strict=True))
    dg = dgate if per_channel else dgate[..., 0]
    dh0 = None if options.get("initial_state") is None else dstates
    return DeltaGrads(stages("dq", dq), stages("dk", dk), dv, dg, dbeta[..., 0], dh0)


def normalised(x: Array, stages: Stages) -> Normalised:
    """x · rstd and rstd = (Σx² + 1e-6)^-½ of each row. Sites: square, norm (sums of these), rstd, normed."""
    squares = tree_sum(stages("square", x * x), stages.renamed(sum="norm"))
    rstd = stages("rstd", 1 / np.sqrt(stages("norm", squares + delta_rule.NORM_EPS)))
    return Normalised(stages("normed", x * rstd), rstd)


def _of_given(grad: Array, normal: Normalised, stages: Stages) -> Array:
    """The gradient of what was normalised. Sites: projected (sums, and what is left of the gradient), normed."""
    along = tree_sum(stages("projected", grad * normal.x), stages.renamed(sum="projected"))
    return stages("normed", normal.rstd * stages("projected", grad - normal.x * along))


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
