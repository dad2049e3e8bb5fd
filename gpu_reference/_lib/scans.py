"""What both forms of scan are given, allocate for their kernels to fill, and make of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_reference._lib.decays import Gates
from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.layout import Inputs, Layout, Outs
from gpu_reference._lib.operands import values
from gpu_reference._lib.tiles import cdiv
from op_arguments.gla import Gradients, Output, Problem, check_forward, check_gradients, check_precision


class Scan(NamedTuple):
    """A checked scan: its Problem, and its tensors as kernels take them, contiguous on one device.

    initial_state and dht, the gradient of the final one, are [N, H, K, V] float32 or None. The chunked forms alone have
    a chunk_size, a precision and, unless it is theirs to choose, `fused`.
    """

    p: Problem
    inputs: Inputs
    layout: Layout
    initial_state: Any
    dht: Any
    chunk_size: int
    precision: str = "ieee"
    fused: bool | None = None

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        device: torch.device = self.inputs.v.device
        return device

    @property
    def arguments(self) -> dict[str, Any]:
        """What every kernel takes."""
        return {"inputs": self.inputs, "layout": self.layout, "scale": self.p.scale}

    @property
    def is_empty(self) -> bool:
        """Whether there is no row, head or channel."""
        return 0 in (self.p.b * self.p.t, self.p.h, self.p.k, self.p.v)

    @property
    def gates(self) -> Gates:
        """Those among its inputs."""
        return Gates(self.inputs.g, self.inputs.g_gamma, self.inputs.gk)

    @property
    def is_gated(self) -> bool:
        """Whether there is any gate."""
        return any(gate is not None for gate in self.gates)

    def empty_rows(self, *columns: int, parts: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> Tensor:
        """[*parts, B, T, H, *columns] in v's dtype or another, zero where there may be rows of no sequence."""
        make = torch.empty if self.layout.cu_seqlens is None else torch.zeros
        shape = (*parts, self.p.b, self.p.t, self.p.h, *columns)
        return make(shape, dtype=dtype or self.inputs.v.dtype, device=self.device)

    def empty_states(self, count: int) -> Tensor:
        """[count, H, K, V] float32."""
        return torch.empty(count, self.p.h, self.p.k, self.p.v, dtype=torch.float32, device=self.device)

    def empty_output(self, output_final_state: bool) -> Output:
        """What a forward pass fills."""
        return Output(self.empty_rows(self.p.v), self.empty_states(self.p.n) if output_final_state else None)

    def forward_of_nothing(self, output_final_state: bool) -> Output:
        """Zeros, and the states as they are."""
        o, ht = self.empty_output(output_final_state)
        fill_state(ht, self.initial_state)
        return Output(o.zero_(), ht)

    def empty_outs(self, tile: int) -> Outs:
        """What a backward pass fills whose programs have `tile` channels of K.

        Sums over K (dv and the gradient of a scalar gate) need those of other programs: they are left apart, and added
        in order.
        """
        tiles = max(cdiv(self.p.k, tile), 1)
        dv = self.empty_rows(self.p.v, parts=(tiles,), dtype=None if tiles == 1 else torch.float32)
        dgate = None
        if self.gates.gk is not None:
            dgate = self.empty_rows(self.p.k, dtype=self.gates.gk.dtype)
        elif self.is_gated:
            dgate = self.empty_rows(parts=(tiles,), dtype=torch.float32)
        return Outs(self.empty_rows(self.p.k), self.empty_rows(self.p.k), dv, dgate)

    def gradients(self, outs: Outs, dh0: Tensor | None) -> Gradients:
        """The gradients of the arguments, from what the kernels have filled."""
        dv = sum_in_order(outs.dv).to(self.inputs.q.dtype)
        return Gradients(outs.dq, outs.dk, dv, _gate_gradients(outs.dgate, self.gates), dh0)


def take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Any],
    *gradients: Any,
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Scan:
    """The checked Scan of a call; gradients: do and dht, those of o and ht, of a backward pass.

    gates: natural logs of the decays, `g` [B, T, H] and `g_gamma` [H], which add (None: no decay), or `gk`
    [B, T, H, K]; float32, `g` and `gk` also of q's dtype.
    Raises as `check_forward`, `check_gradients` and `check_precision` of `op_arguments.gla`, and as `check_devices`.
    """
    p = check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, values(cu_seqlens), chunk_size)
    if gradients:
        check_gradients(p, *gradients)
    check_precision(precision, p.dtype)
    do, dht = gradients or (None, None)
    scan = scan_of(p, Inputs(q, k, v, do, **gates), cu_seqlens, initial_state, dht, chunk_size)
    return scan._replace(precision=precision, fused=fused)


def scan_of(
    p: Problem, inputs: Inputs, cu_seqlens: Tensor | None, initial_state: Tensor | None, dht: Tensor | None, chunk: int
) -> Scan:
    """The Scan of tensors that are checked but for their devices. Raises as `check_devices`."""
    others = {"initial_state": initial_state, "dht": dht, "cu_seqlens": cu_seqlens}
    check_devices({**inputs._asdict(), **others})
    layout = Layout(_contiguous(cu_seqlens), p.n, p.t, p.b * p.t, p.h, p.k, p.v)
    return Scan(p, Inputs(*map(_contiguous, inputs)), layout, _contiguous(initial_state), _contiguous(dht), chunk)


def dtypes_of_gradients(scan: Scan, *_: Any, **__: Any) -> Gradients:
    """The dtypes of `Scan.gradients`, None of those that have but one."""
    dtype = scan.inputs.q.dtype
    narrow = {name: None if gate is None else gate.dtype for name, gate in scan.gates._asdict().items()}
    return Gradients(dtype, dtype, dtype, narrow, None)


def fill_state(into: Tensor | None, state: Tensor | None) -> None:
    """Fill `into`, unless it is None, with a state (None: zero)."""
    if into is not None:
        _ = into.zero_() if state is None else into.copy_(state)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first axis, in order: `torch.sum` may choose another order for another batch size."""
    total, *others = parts.unbind()
    for nth, part in enumerate(others):
        total = torch.add(total, part, out=total if nth else None)
    return total


def _gate_gradients(dgate: Tensor | None, gates: Gates) -> dict[str, Tensor | None]:
    """By the gates' names: of gk as it is, of g and g_gamma from the parts [tiles of K, B, T, H] of each step's."""
    if gates.gk is not None:
        return {"gk": dgate}
    if dgate is None:
        return {"g": None, "g_gamma": None}
    step = sum_in_order(dgate)
    return {
        "g": None if gates.g is None else step.to(gates.g.dtype),
        "g_gamma": None if gates.g_gamma is None else step.sum((0, 1), dtype=torch.float64).float(),
    }
