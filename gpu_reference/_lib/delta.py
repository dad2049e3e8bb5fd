"""What both forms of gated delta rule are given, allocate for their kernels to fill, and make of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_reference._lib.layout import Inputs
from gpu_reference._lib.operands import values
from gpu_reference._lib.rows_norm import norm_gradient_launch, norm_launch
from gpu_reference._lib.scans import Scan, fill_state, scan_of, sum_in_order
from op_arguments.delta_rule import DeltaGrads, DeltaProblem, DeltaTensors, check_delta_forward, check_delta_gradients
from op_arguments.gla import CHUNK_STEP, Problem, ScanOptions


class DeltaOptions(ScanOptions, total=False):
    """What a forward pass takes; see `op_arguments.delta_rule.DeltaFwd`."""

    use_qk_l2norm_in_kernel: bool


class Delta(NamedTuple):
    """A checked gated delta rule: its Problem, and the Scan of its heads of values.

    Where q and k are normalised, those of the scan are float32 and normal, and rstd [B, T, H] are what their rows were
    multiplied by.
    """

    p: DeltaProblem
    scan: Scan
    rstd: tuple[Tensor, Tensor] | None = None

    def normalised(self) -> "Delta":
        """This with q and k normalised where that is asked for."""
        if not self.p.l2norm or self.scan.is_empty:
            return self
        normal, rstd = [], []
        for x in self.scan.inputs[:2]:
            normal.append(torch.empty_like(x, dtype=torch.float32))
            rstd.append(torch.empty(x.shape[:-1], dtype=torch.float32, device=self.scan.device))
            norm_launch(x, normal[-1], rstd[-1]).run(self.scan.device)
        inputs = self.scan.inputs._replace(q=normal[0], k=normal[1])
        return self._replace(scan=self.scan._replace(inputs=inputs), rstd=(rstd[0], rstd[1]))

    def of_keys(self, grads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """dq and dk [B, T, H, K] of what was given, in v's dtype, from [parts, B, T, HV, K] of each head of values."""
        shape = (self.p.b, self.p.t, self.p.h, self.p.k)
        x, found = self.scan.inputs, []
        for index, grad in enumerate(grads):
            total = sum_in_order(grad)
            if self.p.group > 1:
                total = sum_in_order(total.view(*shape[:3], self.p.group, self.p.k).movedim(3, 0))
            if self.rstd is not None:
                given = torch.empty(shape, dtype=torch.float32, device=self.scan.device)
                norm_gradient_launch(x[index], self.rstd[index], total.contiguous(), given).run(self.scan.device)
                total = given
            found.append(total.to(x.v.dtype))
        return found[0], found[1]

    def empty_gradients(self) -> DeltaGrads:
        """Those of nothing: zero, and dh0 is dht."""
        x, dh0 = self.scan.inputs, None
        dq, dk, dv, dg, dbeta = (torch.zeros_like(tensor) for tensor in (x.q, x.k, x.v, x.gate, x.beta))
        if self.scan.initial_state is not None:
            dh0 = torch.empty_like(self.scan.initial_state)
            fill_state(dh0, self.scan.dht)
        return DeltaGrads(dq, dk, dv, dg, dbeta, dh0)


def take(
    x: DeltaTensors,
    per_channel: bool,
    *gradients: Any,
    chunk_size: int = CHUNK_STEP,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Delta:
    """The checked Delta of a call; gradients: do and dht, those of o and ht, of a backward pass. The recurrent form
    leaves chunk_size out.

    Raises as `check_delta_forward` and `check_delta_gradients` of `op_arguments.delta_rule`, and as `check_devices`.
    """
    p = check_delta_forward(
        x, per_channel, scale, initial_state, cu_seqlens, values(cu_seqlens), use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
    )  # fmt: skip
    if gradients:
        check_delta_gradients(p, *gradients)
    do, dht = gradients or (None, None)
    inputs = Inputs(x.q, x.k, x.v, do, beta=x.beta, **{"gk" if per_channel else "g": x.g})
    of_values = Problem(p.b, p.t, p.hv, p.k, p.v, p.n, p.scale, p.dtype, p.packed)
    scan = scan_of(of_values, inputs, cu_seqlens, initial_state, dht, chunk_size)
    return Delta(p, scan._replace(layout=scan.layout._replace(group=p.group)))


def dtypes_of_gradients(delta: Delta, *_: Any, **__: Any) -> DeltaGrads:
    """The dtypes of the gradients, None of that which has but one."""
    x = delta.scan.inputs
    return DeltaGrads(x.q.dtype, x.k.dtype, x.v.dtype, x.gate.dtype, x.beta.dtype, None)
