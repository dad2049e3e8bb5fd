# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""The emulated tensor core: each dot has the error of the format it stands for, and nothing of it outlasts its context.

The kernels here are interpreted (the root conftest sets TRITON_INTERPRET where there is no GPU).
"""

from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton
import triton.language as tl
from triton.runtime import interpreter

from parity.backends.emulation import tensor_core
from parity.backends.emulation.tensor_core import emulated
from tests.support.interpreter import interpreted

pytestmark = interpreted

U = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8}


@triton.jit
def dot_kernel(lhs, rhs, acc, m, n, k, PRECISION: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    i, j, depth = tl.arange(0, TM)[:, None], tl.arange(0, TN)[None, :], tl.arange(0, TK)
    a = tl.load(lhs + i * k + depth[None, :])
    b = tl.load(rhs + depth[:, None] * n + j)
    out = acc + i * n + j
    tl.store(out, tl.dot(a, b, tl.load(out), input_precision=PRECISION, out_dtype=acc.dtype.element_ty))


@triton.jit
def elementwise_kernel(x, y, out, OP: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    a, b = tl.load(x + i), tl.load(y + i)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "div":
        c = a / b
    elif OP == "neg":
        c = -a
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "less":
        c = a < b
    elif OP == "fma":
        c = tl.fma(a, b, a)
    elif OP == "scale":
        c = a * 3.0
    else:
        c = a
    tl.store(out + i, c.to(out.dtype.element_ty))


@triton.jit
def scaled_dot_kernel(lhs, lhs_scale, rhs, out, LHS: tl.constexpr, RHS: tl.constexpr):
    i, j, k = tl.arange(0, 16), tl.arange(0, 32), tl.arange(0, 64)
    a = tl.load(lhs + i[:, None] * 64 + k)
    b = tl.load(rhs + k[:, None] * 32 + j)
    scale = tl.load(lhs_scale + i[:, None] * 2 + tl.arange(0, 2))
    sums = tl.dot_scaled(a, scale, tl.constexpr(LHS), b, None, tl.constexpr(RHS))
    tl.store(out + i[:, None] * 32 + j, sums)


@triton.jit
def multiply_add_kernel(x, y, z, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


@triton.jit
def sums_kernel(x, total, row, running, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(x + i * N + j)
    tl.store(total + tl.arange(0, 1), tl.sum(tile, axis=None, keep_dims=True).reshape(1))
    tl.store(row + tl.arange(0, M), tl.sum(tile, axis=1))
    # Without a dtype, Triton before 3.9 sums bfloat16 in float32.
    tl.store(running + i * N + j, tl.cumsum(tile, axis=1, dtype=tile.dtype))


def dot(lhs, rhs, acc=None, precision="ieee"):
    (m, k), n = lhs.shape, rhs.shape[1]
    out = torch.zeros(m, n) if acc is None else acc.clone()
    dot_kernel[(1,)](lhs.contiguous(), rhs.contiguous(), out, m, n, k, PRECISION=precision, TM=m, TN=n, TK=k)
    return out


def elementwise(op, x, y=None, dtype=None):
    out = torch.empty(x.shape, dtype=dtype or x.dtype)
    elementwise_kernel[(1,)](x, x if y is None else y, out, OP=op, SIZE=x.numel())
    return out


def multiply_add(x, y, z):
    out = torch.empty_like(x)
    multiply_add_kernel[(1,)](x, y, z, out, SIZE=x.numel())
    return out


def operands(dtype, m=64, k=128, n=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))


def rms_error(got, lhs, rhs):
    """Root mean square of the error over the magnitude of each sum."""
    a, b = lhs.double(), rhs.double()
    return float(((got.double() - a @ b) / (a.abs() @ b.abs())).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_narrow_dot_has_only_the_error_of_a_float32_sum(dtype):
    lhs, rhs = operands(dtype)
    with emulated():
        got = dot(lhs, rhs)
    assert rms_error(got, lhs, rhs) < U["float32"]


@pytest.mark.parametrize(
    ("dtype", "low", "high", "sums"), [(torch.bfloat16, -8, 9, torch.float32), (torch.int8, -128, 128, torch.int32)]
)
def test_integers_are_exact(dtype, low, high, sums):
    generator = torch.Generator().manual_seed(1)
    lhs, rhs = (torch.randint(low, high, shape, generator=generator).to(dtype) for shape in ((32, 64), (64, 32)))
    with emulated():
        got = dot(lhs, rhs, torch.zeros(32, 32, dtype=sums))
    assert torch.equal(got.double(), lhs.double() @ rhs.double())


def test_each_precision_has_its_own_error():
    lhs, rhs = operands(torch.float32)
    with emulated():
        error = {
            p: rms_error(dot(lhs, rhs, precision=p), lhs, rhs) for p in ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
        }
    # Truncation leaves a uniform error in [0, 2 u) per operand; over a sum of K it averages out by sqrt(K).
    assert 0.02 * U["tf32"] < error["tf32"] < U["tf32"]
    assert 0.02 * U["bfloat16"] ** 2 < error["bf16x3"] < U["bfloat16"] ** 2
    assert error["ieee"] < 4 * U["float32"]
    assert error["tf32x3"] < 4 * U["float32"]
    assert error["bf16x6"] < 4 * U["float32"]


def test_tf32_operands_are_truncated_and_split_operands_rounded():
    x = torch.tensor([1 + 2.0**-11, 1 + 2.0**-10 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-10 - 2.0**-23])
    truncated, rounded = tensor_core.truncate_to_tf32(x.numpy()), tensor_core.round_to_tf32(x.numpy())
    assert truncated.tolist() == [1, 1 + 2.0**-10, -1, 1]
    assert rounded.tolist() == [1 + 2.0**-10, 1 + 2 * 2.0**-10, -1 - 2.0**-10, 1 + 2.0**-10]


def test_split_dots_keep_infinities():
    lhs, rhs = torch.ones(16, 16), torch.ones(16, 16)
    lhs[0, 0] = float("inf")
    with emulated():
        for precision in ("tf32x3", "bf16x3", "bf16x6"):
            got = dot(lhs, rhs, precision=precision)
            assert torch.isinf(got[0]).all()
            assert (got[1:] == 16).all()


def test_ieee_sums_in_order_of_k_from_the_accumulator():
    lhs, rhs, acc = torch.zeros(16, 16), torch.ones(16, 16), torch.full((16, 16), 2.0**24)
    lhs[0, :2] = 1.0  # each is half an ulp of the accumulator and is lost, tie to even; together they would not be
    lhs[1, 0], lhs[1, 1] = -(2.0**24), 1.0
    lhs[2, 0], lhs[2, 1] = 1.0, -(2.0**24)
    with emulated():
        got = dot(lhs, rhs, acc)[:3, 0]
    assert got.tolist() == [2.0**24, 1.0, 0.0]


def test_ieee_does_not_round_the_product():
    x = 1 + 2.0**-12
    lhs, rhs, acc = torch.zeros(16, 16), torch.full((16, 16), x), torch.full((16, 16), -1.0)
    lhs[:, 0] = x
    with emulated():
        assert (dot(lhs, rhs, acc) == 2.0**-11 + 2.0**-24).all()


@pytest.mark.parametrize(("dtype", "depth"), [(torch.bfloat16, 16), (torch.float16, 16), (torch.float32, 8)])
def test_an_instruction_adds_its_depth_with_one_rounding(dtype, depth):
    k = 2 * depth
    acc = torch.full((16, 16), 2.0**24)
    together, apart = torch.zeros(16, k), torch.zeros(16, k)
    together[:, :2] = 1.0
    apart[:, depth - 1 : depth + 1] = 1.0
    ones = torch.ones(k, 16, dtype=dtype)
    with emulated():
        assert (dot(together.to(dtype), ones, acc, "tf32") == 2.0**24 + 2).all()
        assert (dot(apart.to(dtype), ones, acc, "tf32") == 2.0**24).all()


def test_cast_to_bfloat16_rounds_to_nearest_even_at_every_tie():
    upper = np.arange(2**16, dtype=np.uint32) << 16
    finite = upper[np.isfinite(upper.view(np.float32))]
    patterns = (finite[:, None] + np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).ravel()
    x = torch.from_numpy(np.resize(patterns, 2**19).view(np.float32))
    with emulated():
        got = elementwise("copy", x, dtype=torch.bfloat16)
    assert torch.equal(got.view(torch.int16), x.bfloat16().view(torch.int16))


def test_cast_to_bfloat16_keeps_what_is_not_finite():
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 3.4e38])
    with emulated():
        got = elementwise("copy", x, dtype=torch.bfloat16)
    assert torch.equal(got[[0, 1, 3]], x[[0, 1, 3]].bfloat16())
    assert got[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_other_casts_to_and_from_bfloat16(dtype):
    values = torch.tensor([0, 1, -3, 255, 257, 1000, -777, 2047]).to(dtype)
    with emulated():
        assert torch.equal(elementwise("copy", values, dtype=torch.bfloat16), values.bfloat16())
        back = elementwise("copy", values.bfloat16(), dtype=dtype)
    assert torch.equal(back, values.bfloat16().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_a_sum_adds_pairs_and_a_running_one_goes_step_by_step(dtype):
    x = (100 * torch.randn(4, 64, generator=torch.Generator().manual_seed(5))).to(dtype)
    total, row, running = torch.empty(1, dtype=dtype), torch.empty(4, dtype=dtype), torch.empty_like(x)
    with emulated():
        sums_kernel[(1,)](x, total, row, running, M=4, N=64)
    step = x[:, 0].clone()
    for n in range(1, 64):
        step = step + x[:, n]
    assert torch.equal(row, paired(x)) and torch.equal(running[:, -1], step)
    assert torch.equal(total, paired(x.reshape(1, -1)))


def paired(x):
    """The sums of the rows of x, neighbours added until one column is left."""
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x[:, 0]


def test_cast_from_float64_rounds_once():
    tie = 1 + 2.0**-8
    x = torch.tensor([tie + 2.0**-40, tie, tie - 2.0**-40, -tie - 2.0**-40], dtype=torch.float64)
    with emulated():
        got = elementwise("copy", x, dtype=torch.bfloat16)
    assert got.tolist() == [1 + 2.0**-7, 1, 1, -1 - 2.0**-7]


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "neg", "maximum", "less", "fma", "scale"])
def test_elementwise_bfloat16(op):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(256, generator=generator).bfloat16() for _ in range(2))
    a, b = x.double(), y.double()
    exact = {
        "add": a + b, "sub": a - b, "mul": a * b, "div": a / b, "neg": -a, "maximum": torch.maximum(a, b),
        "less": (a < b).double(), "fma": a * b + a, "scale": a * 3,
    }[op]  # fmt: skip
    nearest = torch.from_numpy(exact.numpy().astype(np.float32)).bfloat16()
    with emulated():
        got = elementwise(op, x, y)
    assert torch.equal(got, nearest)


@pytest.mark.parametrize("formats", [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_a_scaled_dot_multiplies_codes_by_their_blocks_scales(formats):
    """An operand without scales is multiplied as it is. The sum has one order, whatever the machine's BLAS does."""
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    lhs, rhs = (x.to(dtypes[name]) for x, name in zip(operands(torch.float32, 16, 64, 32), formats, strict=True))
    scale = torch.tensor([[0, 127], [200, 120]], dtype=torch.uint8).repeat(8, 1)
    factors = torch.exp2(scale.double() - 127).repeat_interleave(32, dim=1)
    expected = (lhs.double() * factors) @ rhs.double()
    size = (lhs.double() * factors).abs() @ rhs.double().abs()
    out = torch.empty(16, 32)
    with emulated():
        scaled_dot_kernel[(1,)](lhs.view(torch.uint8), scale, rhs.view(torch.uint8), out, *formats)
    assert ((out.double() - expected).abs() <= 65 * 2.0**-24 * size).all()

    chain = torch.zeros(16, 32)
    for products in ((lhs.double() * factors).T[:, :, None] * rhs.double()[:, None]).unbind():
        chain = (chain.double() + products).float()
    assert torch.equal(out, chain)


def test_a_multiply_add_of_float32_is_rounded_once():
    """The product is a tie of float32, which an addend beyond float64's last bit decides; and random ones, in the
    normal range and below."""
    x = torch.full((4,), 1 + 2.0**-12)
    addend = torch.tensor([2.0**-80, -(2.0**-80), 0.0, -0.0])
    with emulated():
        got = multiply_add(torch.cat([x, -x]), torch.cat([x, x]), torch.cat([addend, -addend]))
    up, down = 1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11
    assert got.tolist() == [up, down, down, down, -up, -down, -down, -down]

    rng = np.random.default_rng(0)
    for scale in (1.0, 2.0**-100):
        operands = (scale * rng.normal(size=(3, 64))).astype(np.float32)
        operands[1] /= scale
        operands[2] *= 2.0 ** rng.integers(-40, 40, 64)
        with emulated():
            got = multiply_add(*map(torch.from_numpy, operands))
        for *terms, result in zip(*operands.tolist(), got.tolist(), strict=True):
            a, b, c = map(Fraction, terms)
            error = abs(Fraction(result) - (a * b + c))
            assert error <= Fraction(float(np.spacing(np.float32(abs(result))))) / 2


def interpreter_state():
    builder = interpreter.interpreter_builder
    return type(builder), builder.options, dict(vars(interpreter.InterpreterBuilder))


def test_nothing_outlasts_the_context():
    before = interpreter_state()
    with emulated():
        assert interpreter_state() != before
        with emulated():
            pass
        assert type(interpreter.interpreter_builder) is tensor_core.TensorCoreBuilder
    assert interpreter_state() == before

    with pytest.raises(RuntimeError, match="inside"), emulated():
        raise RuntimeError("inside")
    assert interpreter_state() == before


def test_nothing_is_changed_where_triton_compiles(monkeypatch):
    """Its compiler uses the same language."""
    before, language = interpreter_state(), {**vars(tl.tensor), **vars(tl.core)}
    monkeypatch.setattr(tl, "cdiv", lambda: None)  # not an interpreted function
    with emulated():
        assert interpreter_state() == before and {**vars(tl.tensor), **vars(tl.core)} == language


def test_outside_the_context_the_interpreter_is_as_it_was():
    lhs, rhs = operands(torch.float32)
    plain = dot(lhs, rhs, precision="tf32")
    with emulated():
        assert not torch.equal(dot(lhs, rhs, precision="tf32"), plain)
    assert torch.equal(dot(lhs, rhs, precision="tf32"), plain)
