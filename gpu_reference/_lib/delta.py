"""What both forms of gated delta rule are given, allocate for their kernels to fill, and make of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.layout import Layout
from gpu_reference._lib.operands import values
from gpu_reference._lib.rows_norm import norm_gradient_launch, norm_launch
from op_arguments.delta_rule import DeltaGrads, DeltaProblem, DeltaTensors, check_delta_forward, check_delta_gradients
from op_arguments.gla import CHUNK_STEP, ScanOptions


class DeltaOptions(ScanOptions, total=False):
    """What a forward pass takes; see `op_arguments.delta_rule.DeltaFwd`."""

    use_qk_l2norm_in_kernel: bool


class DeltaInputs(NamedTuple):
    """The tensors of a gated delta rule: q, k [B, T, H, K], v and in the backward pass do [B, T, HV, V], beta and g
    [B, T, HV], or instead of g gk [B, T, HV, K]. g_gamma is there for what `simple_gla` shares."""

    q: Any
    k: Any
    v: Any
    beta: Any
    g: Any = None
    gk: Any = None
    do: Any = None
    g_gamma: Any = None

    @property
    def gate(self) -> Any:
        """Whichever there is."""
        return self.g if self.gk is None else self.gk


class Delta(NamedTuple):
    """A checked gated delta rule: its Problem, and its tensors as kernels take them, contiguous on one device.

    Where q and k are normalised, those of `inputs` are float32 and normal, and rstd [B, T, H] are what their rows were
    multiplied by. initial_state and dht, the gradient of the final one, are [N, HV, K, V] float32 or None.
    """

    p: DeltaProblem
    inputs: DeltaInputs
    layout: Layout
    initial_state: Any
    dht: Any
    rstd: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        device: torch.device = self.inputs.v.device
        return device

    @property
    def arguments(self) -> dict[str, Any]:
        """What every kernel takes."""
        return {"inputs": self.inputs, "layout": self.layout, "group": self.p.group, "scale": self.p.scale}

    @property
    def is_empty(self) -> bool:
        """Whether there is no row, head or channel."""
        return 0 in (self.p.b * self.p.t, self.p.hv, self.p.k, self.p.v)

    def empty_rows(self, *columns: int, parts: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> Tensor:
        """[*parts, B, T, HV, *columns] in v's dtype or another, zero where there may be rows of no sequence."""
        make = torch.empty if self.layout.cu_seqlens is None else torch.zeros
        shape = (*parts, self.p.b, self.p.t, self.p.hv, *columns)
        return make(shape, dtype=dtype or self.inputs.v.dtype, device=self.device)

    def empty_states(self, count: int) -> Tensor:
        """[count, HV, K, V] float32."""
        return torch.empty(count, self.p.hv, self.p.k, self.p.v, dtype=torch.float32, device=self.device)

    def normalised(self) -> "Delta":
        """This with q and k normalised where that is asked for."""
        if not self.p.l2norm or self.is_empty:
            return self
        normal, rstd = [], []
        for x in self.inputs[:2]:
            normal.append(torch.empty_like(x, dtype=torch.float32))
            rstd.append(torch.empty(x.shape[:-1], dtype=torch.float32, device=self.device))
            norm_launch(x, normal[-1], rstd[-1]).run(self.device)
        return self._replace(inputs=self.inputs._replace(q=normal[0], k=normal[1]), rstd=(rstd[0], rstd[1]))

    def of_keys(self, grads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """dq and dk [B, T, H, K] of what was given, in v's dtype, from [parts, B, T, HV, K] of each head of values."""
        shape = (self.p.b, self.p.t, self.p.h, self.p.k)
        found = []
        for index, grad in enumerate(grads):
            total = sum_in_order(grad)
            if self.p.group > 1:
                total = sum_in_order(total.view(*shape[:3], self.p.group, self.p.k).movedim(3, 0))
            if self.rstd is not None:
                given = torch.empty(shape, dtype=torch.float32, device=self.device)
                norm_gradient_launch(self.inputs[index], self.rstd[index], total.contiguous(), given).run(self.device)
                total = given
            found.append(total.to(self.inputs.v.dtype))
        return found[0], found[1]

    def empty_gradients(self) -> DeltaGrads:
        """Those of nothing: zero, and dh0 is dht."""
        x = self.inputs
        dq, dk, dv, dg, dbeta = (torch.zeros_like(tensor) for tensor in (x.q, x.k, x.v, x.gate, x.beta))
        dh0 = None
        if self.initial_state is not None:
            dh0 = torch.zeros_like(self.initial_state) if self.dht is None else self.dht.clone()
        return DeltaGrads(dq, dk, dv, dg, dbeta, dh0)


def forward_delta(
    x: DeltaTensors,
    per_channel: bool,
    chunk_size: int = CHUNK_STEP,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Delta:
    """The Delta of a forward pass; the recurrent form leaves chunk_size out.

    Raises as `op_arguments.delta_rule.check_delta_forward`, and as `check_devices`.
    """
    p = check_delta_forward(
        x, per_channel, scale, initial_state, cu_seqlens, values(cu_seqlens), use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
    )  # fmt: skip
    inputs = DeltaInputs(x.q, x.k, x.v, x.beta, **{"gk" if per_channel else "g": x.g})
    return _delta_of(p, inputs, cu_seqlens, initial_state, None)


def backward_delta(
    x: DeltaTensors,
    do: Tensor,
    per_channel: bool,
    chunk_size: int = CHUNK_STEP,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Delta:
    """As `forward_delta`, of a backward pass."""
    p = check_delta_forward(
        x, per_channel, scale, initial_state, cu_seqlens, values(cu_seqlens), use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
    )  # fmt: skip
    check_delta_gradients(p, do, dht)
    inputs = DeltaInputs(x.q, x.k, x.v, x.beta, do=do, **{"gk" if per_channel else "g": x.g})
    return _delta_of(p, inputs, cu_seqlens, initial_state, dht)


def dtypes_of_gradients(delta: Delta, *_: Any, **__: Any) -> DeltaGrads:
    """The dtypes of the gradients, None of that which has but one."""
    x = delta.inputs
    return DeltaGrads(x.q.dtype, x.k.dtype, x.v.dtype, x.gate.dtype, x.beta.dtype, None)


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first axis, in order: `torch.sum` may choose another order for another batch size."""
    total, *others = parts.unbind()
    for part in others:
        total = total + part
    return total


def _delta_of(
    p: DeltaProblem, inputs: DeltaInputs, cu_seqlens: Tensor | None, initial_state: Tensor | None, dht: Tensor | None
) -> Delta:
    others = {"initial_state": initial_state, "dht": dht, "cu_seqlens": cu_seqlens}
    check_devices({**inputs._asdict(), **others})
    layout = Layout(_contiguous(cu_seqlens), p.n, p.t, p.b * p.t, p.hv, p.k, p.v)
    return Delta(p, DeltaInputs(*map(_contiguous, inputs)), layout, _contiguous(initial_state), _contiguous(dht))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
