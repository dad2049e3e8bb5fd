"""Kernels that were written for a compiled Triton alone, in its interpreter."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.language.extra.libdevice import rsqrt  # noqa: E402

from parity.backends.emulation import tensor_core  # noqa: E402
from parity.backends.emulation.foreign import FUNCTIONS  # noqa: E402
from tests.support.interpreter import interpreted  # noqa: E402

pytestmark = interpreted


@triton.jit
def _norm(x_ptr, y_ptr, rows, columns, eps, block: tl.constexpr):
    eps = eps.to(tl.float32)
    for row in range(rows):
        at = row.to(tl.int64) * columns + tl.arange(0, block)
        x = tl.load(x_ptr + at, mask=tl.arange(0, block) < columns, other=0.0).to(tl.float32)
        y = x * rsqrt(tl.sum(x * x) / columns + eps)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=tl.arange(0, block) < columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_arguments_loop_indices_and_libdevice_are_as_compiled(dtype):
    x = torch.arange(1.0, 31).reshape(3, 10).to(dtype)
    y = torch.empty_like(x)
    with tensor_core.emulated():
        _norm[(1,)](x, y, 3, 10, 1e-6, 16)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    unit = 2.0**-22 if dtype == torch.float32 else 2.0**-8
    assert ((y.double() - expected).abs() <= unit * expected).all()
    assert "range" not in globals() and not hasattr(rsqrt, "cache_info")


@triton.jit
def _unary(x_ptr, y_ptr, name: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(y_ptr + at, getattr(libdevice, name)(tl.load(x_ptr + at)))


@triton.jit
def _binary(x_ptr, y_ptr, name: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, getattr(libdevice, name)(x, x - 3))


BINARY = ("pow", "atan2", "hypot")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_errs_by_no_more_ulps_than_is_documented_and_by_that_many(name):
    x = np.linspace(0.125, 7.9, 1024, dtype=np.float32)
    y = torch.empty(1024)
    with tensor_core.emulated():
        (_binary if name in BINARY else _unary)[(1,)](torch.from_numpy(x), y, name, 1024)
    function, ulps = FUNCTIONS[name]
    operands = [x, x - np.float32(3)] if name in BINARY else [x]
    exact = function(*(operand.astype(np.float64) for operand in operands))
    off = np.abs(y.numpy() - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert off.max() <= max(ulps / 2, 0.5)
    assert ulps < 2 or off.max() > ulps / 4


@triton.jit
def _fused(x_ptr, y_ptr, block: tl.constexpr):
    at = tl.arange(0, block)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, libdevice.fma(x, x, -1.0))
    tl.store(y_ptr + block + at, libdevice.fma(x, 0.000000059604644775390625, 1.0))


def test_libdevice_fma_rounds_once():
    x = 1 + 2.0**-23 * torch.arange(8)
    y = torch.empty(16)
    with tensor_core.emulated():
        _fused[(1,)](x, y, 8)
    exact = x.double() * x.double() - 1
    assert (y[:8] == exact.float()).all() and not (y[:8] == x * x - 1).all()
    assert y[8:].tolist() == [1.0] + [1 + 2.0**-23] * 7  # 1 + 2⁻²⁴ + n 2⁻⁴⁷: a tie, or beyond it


@pytest.mark.parametrize(
    ("name", "dtype", "says"),
    [
        ("tgamma", torch.float32, "libdevice.tgamma must be one that is emulated: sqrt, rsqrt"),
        ("exp", torch.bfloat16, "libdevice.exp must get tensors all of fp32 or all of fp64, got .*bf16"),
    ],
)
def test_what_cannot_run_is_refused_by_name(name, dtype, says):
    with tensor_core.emulated(), pytest.raises(Exception, match=says):
        _unary[(1,)](torch.ones(8, dtype=dtype), torch.ones(8, dtype=dtype), name, 8)


@triton.autotune([triton.Config({"step": 1}), triton.Config({"step": 2})], key=["block"])
@triton.jit
def _tuned(y_ptr, block: tl.constexpr, step: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, block), tl.full((block,), step, tl.float32))


def test_an_autotuned_kernel_runs_in_its_last_configuration():
    y = torch.zeros(8)
    with tensor_core.emulated():
        _tuned[(1,)](y, 8)
    assert y.tolist() == [2.0] * 8
