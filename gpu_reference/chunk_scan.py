"""The chunked forms of gated linear attention on the GPU, in Triton: blocks of steps at a time, by matrix products.

`chunk_fwd` and `chunk_bwd` are what `chunk_*` and `fused_chunk_*` of `gpu_reference/simple_gla.py` (gates `g`,
`g_gamma`) and `gpu_reference/gla.py` (gate `gk`) are made of; the operations are defined in `cpu_golden/simple_gla.py`
and `cpu_golden/gla.py`. With c the gates summed since a block of rows began, S the state before it and dS the gradient
of the state after it, all three kernels compute one block as

    A_ij = q_i . (exp(c_i - c_j) k_j) for j <= i        dA_ij likewise from do_i . v_j
    o    = scale (A v + exp(c) q S)                     dq = dA k + scale exp(c) do S^T
    S'   = exp(c_last) S + (exp(c_last - c) k)^T v      dk = dA^T q + exp(c_last - c) v dS^T
    dS'  = exp(c_last) dS + (scale exp(c) q)^T do       dv = A^T do + exp(c_last - c) k dS

`_states_kernel` goes through a sequence and leaves its states (backwards: their gradients) behind; the others go
through a *segment* from the state that it begins (ends) with. The fused forms have a whole sequence for a segment, and
take its state along; the others have a chunk (backwards: a block), whose state `_states_kernel` has left, and do all at
once. So both routes are the same arithmetic. A program of the forward pass has all of K and a tile of V; one of the
backward pass has a tile of K and goes through those of V, and what is summed over K (dv and the gradient of a scalar
gate) is left apart for each tile and added in order.

The gradient of step t's gate is the sum over all pairs j < t <= i of a key and a query, each counted where it is found:
in A, in q dq and k dk of what passes through S and dS, or in S dS. No sum is longer than a block, and nothing is
subtracted but, with a gate per channel, the k dk of A from its q dq.

Nothing is read back from the device. The offsets in a CUDA tensor are not checked; those out of order are clamped.
"""

from typing import Any

import torch
from torch import Tensor

from gpu_reference._lib.chunk_backward import backward_launch
from gpu_reference._lib.chunk_forward import forward_launch, states_launch
from gpu_reference._lib.chunk_plan import plan_of
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted
from gpu_reference._lib.scans import Scan, dtypes_of_gradients, fill_state, take
from op_arguments.gla import Gates, Gradients, Output
from op_arguments.options import options_of


@options_of(take)
def chunk_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, gates: Gates, output_final_state: bool = False, **options: Any
) -> Output:
    """(o, ht): `o_t = scale q_t^T S_t`, and the state after the last step where output_final_state, else None.

    q, k [B, T, H, K], v [B, T, H, V]: all float32 or all bfloat16, of any strides; K is at most 512, or 1024 where they
    are bfloat16 and there is no gk. gates as in `take`. chunk_size: rows between the states that are kept where not
    fused. precision of dots of float32: "ieee" or "bf16x3" (operands in two bfloat16 parts, three products). fused: in
    one pass over each sequence; None: as `chunk_route`. Other options: `ScanOptions`. Sites shown to a probe: c, decay,
    kept, A and state.
    o has v's shape and dtype and is zero beyond the last sequence; ht [N, H, K, V] is float32.
    Raises ValueError or TypeError as `take`, ValueError for a larger K, and RuntimeError for CPU tensors where Triton's
    interpreter is off.
    """
    return _forward(take(q, k, v, gates, **options), output_final_state)


@options_of(take)
def chunk_bwd(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, gates: Gates, dht: Any = None, **options: Any
) -> Gradients:
    """The gradients of `chunk_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype; K is any. Gradients have their arguments' dtypes and are zero beyond the last sequence.
    Held meanwhile, in float32: a state for each block of rows (where not fused, two), and where K has several tiles a
    copy of dv for each. Sites: those of `chunk_fwd`, dA, dgate and dstate; A and a scalar gate's dgate where K has one
    tile.
    Raises as `chunk_fwd`.
    """
    return _backward(take(q, k, v, gates, do, dht, **options))


@bfloat16_as_float32_where_interpreted(lambda scan, *_: Output(scan.inputs.q.dtype, None))
def _forward(scan: Scan, output_final_state: bool) -> Output:
    plan = plan_of(scan)
    if scan.is_empty:
        return scan.forward_of_nothing(output_final_state)
    o, ht = scan.empty_output(output_final_state)
    first_states, last_states = scan.initial_state, ht
    if not plan.fused:
        first_states, last_states = scan.empty_states(plan.slots), None
        states_launch(plan, scan.initial_state, first_states, ht).run(scan.device)
    forward_launch(plan, first_states, o, last_states).run(scan.device)
    return Output(o, ht)


@bfloat16_as_float32_where_interpreted(dtypes_of_gradients)
def _backward(scan: Scan) -> Gradients:
    plan = plan_of(scan, backward=True)
    outs = scan.empty_outs(plan.block.keys)
    dh0 = None if scan.initial_state is None else scan.empty_states(scan.p.n)
    if scan.is_empty:
        for gradient in outs:
            if gradient is not None:
                gradient.zero_()
        fill_state(dh0, scan.dht)
        return scan.gradients(outs, dh0)
    states = scan.empty_states(plan.slots)
    states_launch(plan, scan.initial_state, states, None).run(scan.device)
    if plan.fused:
        dstates = scan.empty_states(scan.p.n) if dh0 is None else dh0
        fill_state(dstates, scan.dht)
    else:
        dstates = torch.empty_like(states)
        states_launch(plan, scan.dht, dstates, dh0, reverse=True).run(scan.device)
    backward_launch(plan, states, dstates, outs).run(scan.device)
    return scan.gradients(outs, dh0)
