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

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from gpu_reference._lib.autograd import Gradients, Output
from gpu_reference._lib.chunk_backward import Outs, backward_launch
from gpu_reference._lib.chunk_forward import forward_launch, states_launch
from gpu_reference._lib.chunk_plan import Scan, is_fused, plan
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted, check_devices
from gpu_reference._lib.layout import Inputs
from gpu_reference._lib.operands import values
from gpu_reference._lib.rows import contiguous, empty_rows, empty_states, fill_state, gate_gradients, sum_of_tiles
from op_arguments import dtype_name
from op_arguments.gla import Problem, check_backward, check_forward, check_precision


def chunk_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Mapping[str, Tensor | None],
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
) -> Output:
    """(o, ht): `o_t = scale q_t^T S_t`, and the state after the last step where output_final_state, else None.

    q, k [B, T, H, K], v [B, T, H, V]: all float32 or all bfloat16, of any strides. gates: natural logs of the decays,
    `g` [B, T, H] and `g_gamma` [H], which add (None: no decay), or `gk` [B, T, H, K]; float32, `g` and `gk` also of
    q's dtype. initial_state [N, H, K, V] float32. cu_seqlens [N + 1] int32 packs N sequences into B = 1 (N = B
    without). scale: default K ** -0.5. chunk_size: rows between the states that are kept where not fused.
    precision of dots of float32: "ieee" or "bf16x3" (operands in two bfloat16 parts, three products). fused: in one
    pass over each sequence; None: as `chunk_route`. Sites shown to a probe: c, decay, kept, A and state.
    o has v's shape and dtype and is zero beyond the last sequence; ht [N, H, K, V] is float32.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`, ValueError for tensors on several devices, and
    RuntimeError for CPU tensors where Triton's interpreter is off.
    """
    p = check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, values(cu_seqlens), chunk_size)
    check_precision(precision, p.dtype)
    tensors = {"q": q, "k": k, "v": v, **gates, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    device = check_devices(tensors)
    fused = is_fused(p, chunk_size, fused, device, per_channel="gk" in gates)
    return _forward(
        *(q, k, v, dict(gates), initial_state, cu_seqlens, p, chunk_size, precision),
        fused=fused,
        output_final_state=output_final_state,
    )


def chunk_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gates: Mapping[str, Tensor | None],
    scale: float | None = None,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
) -> Gradients:
    """The gradients of `chunk_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype; dht [N, H, K, V] is float32. Gradients have their arguments' dtypes and are zero beyond
    the last sequence. Held meanwhile, in float32: a state for each block of rows (where not fused, two), and where K
    has several tiles a copy of dv for each. Sites: those of `chunk_fwd`, dA, dgate and dstate; A and a
    scalar gate's dgate where K has one tile.
    Raises as `chunk_fwd`, with `op_arguments.gla.check_backward`.
    """
    p = check_backward(q, k, v, do, gates, scale, initial_state, dht, cu_seqlens, values(cu_seqlens), chunk_size)
    check_precision(precision, p.dtype)
    tensors = {"q": q, "k": k, "v": v, "do": do, **gates, "initial_state": initial_state, "dht": dht}
    device = check_devices(tensors | {"cu_seqlens": cu_seqlens})
    fused = is_fused(p, chunk_size, fused, device, per_channel="gk" in gates, backward=True, precision=precision)
    return _backward(q, k, v, do, dict(gates), initial_state, dht, cu_seqlens, p, chunk_size, precision, fused=fused)


@bfloat16_as_float32_where_interpreted(lambda q, *_, **options: Output(q.dtype, None))
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor | None],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    p: Problem,
    chunk_size: int,
    precision: str,
    *,
    fused: bool,
    output_final_state: bool,
) -> Output:
    p = p._replace(dtype=dtype_name(q.dtype))
    o = empty_rows((p.b, p.t, p.h, p.v), q, q.dtype, cu_seqlens)
    ht = empty_states(p, p.n, q) if output_final_state else None
    if 0 in (p.b * p.t, p.h, p.k, p.v):
        return Output(o.zero_(), fill_state(ht, initial_state))
    scan = plan(p, gates, cu_seqlens, chunk_size, precision, fused=fused)
    inputs = Inputs(q.contiguous(), k.contiguous(), v.contiguous())
    first_states, last_states = contiguous(initial_state), ht
    if not fused:
        first_states, last_states = empty_states(p, scan.slots, q), None
        states_launch(scan, inputs.k, inputs.v, initial_state, first_states, ht).run(q.device)
    forward_launch(scan, inputs, first_states, o, last_states).run(q.device)
    return Output(o, ht)


def _dtypes_of_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, gates: dict[str, Any], *_: Any, **__: Any) -> Any:
    narrow = {name: None if gate is None else gate.dtype for name, gate in gates.items()}
    return Gradients(q.dtype, q.dtype, q.dtype, narrow, None)


@bfloat16_as_float32_where_interpreted(_dtypes_of_gradients)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    gates: dict[str, Tensor | None],
    initial_state: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    p: Problem,
    chunk_size: int,
    precision: str,
    *,
    fused: bool,
) -> Gradients:
    p = p._replace(dtype=dtype_name(q.dtype))
    scan = plan(p, gates, cu_seqlens, chunk_size, precision, fused=fused, backward=True)
    outs = _empty_outs(scan, q, cu_seqlens)
    dh0 = None if initial_state is None else empty_states(p, p.n, q)
    if 0 in (p.b * p.t, p.h, p.k, p.v):
        for gradient in outs:
            if gradient is not None:
                gradient.zero_()
        fill_state(dh0, dht)
    else:
        inputs = Inputs(q.contiguous(), k.contiguous(), v.contiguous(), do.contiguous())
        states = empty_states(p, scan.slots, q)
        states_launch(scan, inputs.k, inputs.v, initial_state, states, None).run(q.device)
        if fused:
            dstates = empty_states(p, p.n, q) if dh0 is None else dh0
            fill_state(dstates, dht)
        else:
            dstates = torch.empty_like(states)
            states_launch(scan, inputs.q, inputs.do, dht, dstates, dh0, reverse=True).run(q.device)
        backward_launch(scan, inputs, states, dstates, outs).run(q.device)
    dgates = gate_gradients(outs.dgate, gates)
    return Gradients(outs.dq, outs.dk, sum_of_tiles(outs.dv).to(q.dtype), dgates, dh0)


def _empty_outs(scan: Scan, q: Tensor, cu_seqlens: Tensor | None) -> Outs:
    """What the kernel fills. A program has a tile of K, and sums over K need those of the others: they are left apart,
    and added in order."""
    p, gates = scan.p, scan.gates
    tiles = max(triton.cdiv(p.k, scan.block.keys), 1)
    dq, dk = (empty_rows((p.b, p.t, p.h, p.k), q, q.dtype, cu_seqlens) for _ in range(2))
    dv = empty_rows((tiles, p.b, p.t, p.h, p.v), q, q.dtype if tiles == 1 else torch.float32, cu_seqlens)
    dgate = None
    if gates.gk is not None:
        dgate = empty_rows((p.b, p.t, p.h, p.k), q, gates.gk.dtype, cu_seqlens)
    elif gates.g is not None or gates.g_gamma is not None:
        dgate = empty_rows((tiles, p.b, p.t, p.h), q, torch.float32, cu_seqlens)
    return Outs(dq, dk, dv, dgate)
