"""Pallas kernels: on a TPU where JAX has one, else interpreted with an emulated MXU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from parity.backends import EMULATED, check_unwritten, to_numpy_tree
from parity.backends.emulation import mxu
from parity.interop import to_jax, to_numpy
from parity.op import Backend, Inputs


class TpuRunner:
    """Runs Pallas kernels; see `parity.backends.Runner`."""

    name: Backend = "tpu"

    def __init__(self) -> None:
        self.real = jax.default_backend() == "tpu"
        self._device = jax.devices("tpu" if self.real else "cpu")[0]
        if not self.real and self._fuses_products():
            warnings.warn(
                "TPU kernels are emulated with fused multiply-adds, which no TPU has, so verdicts on float32 may be "
                "wrong: call parity.backends.prepare_environment before JAX is used",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def device_kind(self) -> str:
        """What JAX calls the TPU, or `emulated`."""
        return self._device.device_kind if self.real else EMULATED

    def _fuses_products(self) -> bool:
        """Whether a product and a sum are rounded once, together."""
        x = np.float32(1 + 2**-12)
        with jax.default_device(self._device):
            left = jax.jit(lambda a, b, c: a * b + c)(x, x, -np.float32(1 + 2**-11))  # of x², 2^-24 is rounded off
        return bool(left)

    def describe(self) -> str:
        """The device, or what stands in for it."""
        return self.device_kind if self.real else "emulated (Pallas interpreted, MXU passes)"

    def run(self, kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> Any:
        """See `parity.backends.Runner.run`."""
        with jax.default_device(self._device):
            arrays = {name: to_jax(x) for name, x in inputs.items() if x is not None}
            with nullcontext() if self.real else mxu.emulated():
                result = to_numpy_tree(kernel(**arrays, **arguments), to_numpy)
            check_unwritten(inputs, arrays, to_numpy)
        return result


def make_runner() -> TpuRunner:
    """The runner of this process."""
    return TpuRunner()
