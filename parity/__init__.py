"""kernel-parity: judge TPU and GPU kernels of the same operation against one float64 golden."""

from parity.debugging import capture
from parity.interop import jax_to_torch, torch_to_jax
from parity.judging.magnitude import abs_of
from parity.op import Array, Case, Contract, Expected, Gates, Given, Groups, Offsets, Op, Scales
from parity.runners.plugin import cases

__all__ = [
    "Array",
    "Case",
    "Contract",
    "Expected",
    "Gates",
    "Given",
    "Groups",
    "Offsets",
    "Op",
    "Scales",
    "abs_of",
    "capture",
    "cases",
    "jax_to_torch",
    "torch_to_jax",
]
