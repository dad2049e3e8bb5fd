"""Hardware that leaves digits out errs to one side: a site that is rounded toward zero has that in the model."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from parity.backends import EMULATED
from parity.dtypes import FORMATS, OF_POWER, TOWARD_ZERO, cut_off, round_to, stochastic
from parity.judging.judge import gates, measure_contract
from parity.judging.passes import fp8_in_14_digits
from parity.judging.spread import alike
from parity.matrix import find
from parity.op import Contract
from parity.trial import Trial
from tests.matrix import OPS
from tests.matrix.gmm import GMM
from tests.matrix.ops import BF16, F32, MMA_DEPTH
from tests.matrix.quantized_gmm import E4M3, GMM_QUANTIZED, rhs_dtype
from tests.support.interpreter import interpreted

CORE = "parity.backends.emulation.tensor_core"
H200 = "NVIDIA H200"
LONG = dict(M=64, K=1024, N=32, G=2)


def long_sums(dtype, data):
    (case,) = GMM.grid([LONG], dtype=[(dtype, F32)], data=[data])
    return case


def under(case, **contract):
    """A trial of gmm on the GPU under another contract, which has no derived bound."""
    op = replace(GMM, contract=lambda c, backend: Contract(out=F32, **contract), magnitude=None, chain=None)
    return Trial(op, case, "gpu")


def truncating(lhs, rhs, acc, depth, digits=24):
    """`fused_dot` of a tensor core that leaves out what float32 does not hold, or more."""
    total = acc.astype(np.float64)
    for k in range(0, lhs.shape[-1], depth):
        total = cut_off(lhs[..., k : k + depth].astype(np.float64) @ rhs[..., k : k + depth, :] + total, digits)
    return total.astype(np.float32)


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("data", ["normal", "one_signed"])
def test_a_truncating_accumulator_agrees_with_a_contract_that_says_so(data, monkeypatch):
    pytest.importorskip("triton")
    case, contract = long_sums(BF16, data), dict(dot="native", depth=MMA_DEPTH)
    nearest, toward_zero = (under(case, sites={"acc": site}, **contract) for site in (F32, F32 + TOWARD_ZERO))
    assert gates(nearest).verdict.outcome == "AGREES"
    monkeypatch.setattr(f"{CORE}.fused_dot", truncating)
    assert gates(nearest).verdict.outcome in ("OFF CONTRACT", "OUT OF BOUND")
    judged = gates(toward_zero)
    assert judged.verdict.outcome == "AGREES", judged.verdict
    assert judged.fit.ratio == pytest.approx(1, abs=0.02)  # it is the contract's every step
    monkeypatch.setattr(f"{CORE}.fused_dot", partial(truncating, digits=23))
    assert gates(toward_zero).verdict.outcome == "OFF CONTRACT"


@pytest.mark.gpu
@interpreted
def test_operands_that_an_instruction_cuts_off_are_such_sites(monkeypatch):
    pytest.importorskip("triton")
    from parity.backends.emulation import tensor_core

    monkeypatch.setitem(tensor_core.FLOAT32_DOTS, "IEEE", tensor_core.FLOAT32_DOTS["TF32"])
    case = long_sums(F32, "one_signed")
    contract = dict(dot="tf32", depth=tensor_core.TF32_DEPTH)
    nearest, toward_zero = (
        under(case, sites={"lhs": site, "rhs": site, "acc": F32}, **contract) for site in ("tf32", "tf32" + TOWARD_ZERO)
    )
    assert gates(nearest).verdict.outcome in ("OFF CONTRACT", "OUT OF BOUND")
    judged = gates(toward_zero)
    assert judged.verdict.outcome == "AGREES", judged.verdict
    predicted = measure_contract(toward_zero)["out"].epsilon
    assert judged.metrics.epsilon == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_rounding_toward_zero_takes_the_neighbour_that_is_no_larger(dtype):
    digits, smallest = FORMATS[dtype]
    values = np.random.default_rng(0).uniform(-4, 4, 200) * smallest ** np.random.default_rng(1).uniform(0, 1, 200)
    cut = round_to(values, dtype + TOWARD_ZERO).astype(np.float64)
    np.testing.assert_array_equal(stochastic(values, dtype + TOWARD_ZERO, np.zeros), cut)
    np.testing.assert_array_equal(round_to(cut, dtype).astype(np.float64), cut)
    unit = np.maximum(2.0 ** np.floor(np.log2(np.abs(values))), smallest) * 2.0 ** (1 - digits)
    assert ((values - cut) * np.sign(values) >= 0).all() and (np.abs(values - cut) < unit).all()


def judged_there(op, case, fused_dot, monkeypatch):
    """The judgement of a kernel with an H200's sums by its contract there; by that of here it fails."""
    pytest.importorskip("triton")
    here, there = (Trial(op, case, "gpu", device=device) for device in (EMULATED, H200))
    assert gates(here).verdict.outcome == "AGREES"
    monkeypatch.setattr(f"{CORE}.fused_dot", fused_dot)
    assert gates(here).verdict.outcome == "OUT OF BOUND"
    judged = gates(there)
    assert judged.verdict.outcome == "AGREES", judged.verdict
    return judged


def of_a_hopper(lhs, rhs, acc, depth):
    """`fused_dot` of 16 bits as an H200's: a step's products and the sum before are cut off at 2^-25 of the largest."""
    total = acc.astype(np.float64)
    for k in range(0, lhs.shape[-1], depth):
        x, y = lhs[..., k : k + depth].astype(np.float64), rhs[..., k : k + depth, :].astype(np.float64)
        products = x[..., :, :, None] * y[..., None, :, :]
        exponents = (np.frexp(x)[1] - 1)[..., :, :, None] + (np.frexp(y)[1] - 1)[..., None, :, :]
        of_products = np.where(products == 0, -300, exponents).max(-2)
        unit = np.ldexp(1.0, np.maximum(of_products, np.where(total == 0, -300, np.frexp(total)[1] - 1)) - 25)
        total = cut_off((np.trunc(products / unit[..., None, :]).sum(-2) + np.trunc(total / unit)) * unit, 24)
    return total.astype(np.float32)


CANCELLING = [
    "gmm-M300_K200_N160_G6-bf16_f32-tiling64x128x128-short-cancellation-s0",
    "tgmm-M300_K200_N160_G6-bf16_f32-tiling64x128x128-short-cancellation-s0",
]


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("case_id", CANCELLING)
def test_a_hopper_loses_more_of_products_that_cancel(case_id, monkeypatch):
    op, case = find(OPS, case_id)
    judged = judged_there(op, case, of_a_hopper, monkeypatch)
    assert judged.metrics.epsilon == pytest.approx(ON_AN_H200[op.name], rel=1e-6)
    assert judged.fit.sigmas == pytest.approx(1, abs=1e-3)  # every step is the contract's


ON_AN_H200 = {"gmm": 1.38084946e-10, "tgmm": 7.04080126e-10}
"""ε of these cases there (Triton 3.9)."""


def test_what_is_representable_or_not_finite_stays():
    values = np.array([0.0, 1.0, -1.5, 2.0**-120, np.inf, -np.inf, np.nan])
    for dtype in (F32, "bf16x2"):
        np.testing.assert_array_equal(round_to(values, dtype + TOWARD_ZERO), values.astype(np.float32))


def test_two_bfloat16_that_are_cut_off_lose_what_the_second_lacks():
    values = np.random.default_rng(0).uniform(-4, 4, 200)
    cut = round_to(values, "bf16x2" + TOWARD_ZERO).astype(np.float64)
    high = round_to(values, "bfloat16" + TOWARD_ZERO).astype(np.float64)
    np.testing.assert_array_equal(cut - high, round_to(values - high, "bfloat16" + TOWARD_ZERO).astype(np.float64))
    assert ((values - cut) * np.sign(values) >= 0).all() and (np.abs(values - cut) < 2.0**-14 * np.abs(values)).all()


def test_a_contract_refuses_a_site_of_no_dtype():
    with pytest.raises(ValueError, match=r"sites\['acc'\] must be one of .*float32 toward zero.*got 'float31'"):
        Contract(sites={"acc": "float31"})


FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("data", ["normal", "wide", "positive", "tiny"])
@pytest.mark.parametrize("dtype", FP8)
def test_sums_of_fp8_are_those_of_an_h200_bit_for_bit(dtype, data):
    """[16, 128] @ [128, 16] of a larger tl.dot (wgmma), as Triton 3.9 compiles it."""
    with np.load(Path(__file__).with_name("h200_fp8_sums.npz")) as seen:
        lhs, rhs, sums = np.split(seen[f"{dtype} {data}"], [16 * 128, 2 * 16 * 128])
    found = fp8_in_14_digits(lhs.view(FP8[dtype]).reshape(16, 128), rhs.view(FP8[dtype]).reshape(128, 16))
    np.testing.assert_array_equal(found, sums.view(np.float32).reshape(16, 16))


def test_sums_of_fp8_in_14_digits_keep_nan_to_its_row():
    a, b = np.ones((3, 64), FP8["e4m3"]), np.ones((64, 2), FP8["e4m3"])
    a[1, 40] = np.nan
    np.testing.assert_array_equal(fp8_in_14_digits(a, b), [[64, 64], [np.nan, np.nan], [64, 64]])


def test_sums_of_fp8_in_14_digits_may_have_no_columns():
    assert fp8_in_14_digits(np.ones((3, 64), FP8["e4m3"]), np.ones((64, 0), FP8["e4m3"])).shape == (3, 0)


def narrow_sums(lhs, rhs, acc, depth):
    """`fused_dot` of fp8 as a Hopper's."""
    return (acc + fp8_in_14_digits(lhs.astype(FP8["e4m3"]), rhs.astype(FP8["e4m3"]))).astype(np.float32)


FP8_CASES = [
    case
    for case in GMM_QUANTIZED.cases
    if (case.tier, case.dtype, rhs_dtype(case), case.out, case.data) == ("smoke", E4M3, E4M3, BF16, "normal")
]


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.id)
def test_a_hopper_keeps_the_contract_of_narrow_sums(case, monkeypatch):
    judged = judged_there(GMM_QUANTIZED, case, narrow_sums, monkeypatch)
    assert judged.fit.ratio == pytest.approx(1, abs=0.2)  # of the few that are rounded otherwise


def exp_of_hardware(x):
    """exp of float32 as GPUs take it, but for the errors of ex2.approx itself: a power of two of a rounded product."""
    return np.exp2((x * np.float32(np.log2(np.e))).astype(np.float32)) if x.dtype == np.float32 else np.exp(x)


@pytest.mark.gpu
@interpreted
def test_an_exp_that_errs_by_its_argument_is_a_site_of_a_device(monkeypatch):
    """A first step's gate is an exact float32, its exp off by 1.2 |x| ulps, and with it all that it decays."""
    pytest.importorskip("triton")
    from parity.backends.emulation.tensor_core import TensorCoreBuilder

    op, case = find(OPS, "chunk_gla_bwd-B1_T40_H2_K16_V48-f32-steep-h0-ht-chunk32-s0")
    here, there = (Trial(op, case, "gpu", device=device) for device in (EMULATED, H200))
    assert there.contract.sites["decay"] == "float32/2 of a power"
    assert gates(here).verdict.outcome == "AGREES"
    monkeypatch.setattr(TensorCoreBuilder, "create_exp", lambda self, x: self.unary_op(x, exp_of_hardware))
    assert gates(here).verdict.outcome == "OUT OF BOUND"
    assert gates(there).verdict.outcome == "AGREES"


@pytest.mark.parametrize("dtype", ["float32", "float32/4"])
def test_a_power_errs_by_its_exponent_in_float32(dtype):
    values = np.exp(-np.random.default_rng(0).uniform(1, 80, 2**12)) * np.where(np.arange(2**12) % 2, 1, -1)
    exponents = np.abs(np.log2(np.abs(values))).astype(np.float32)
    allowed = np.spacing(exponents) + 2.0 ** -(21 if dtype == "float32/4" else 23)
    words = alike(np.uint64(7))
    for found in (round_to(values, dtype + OF_POWER), stochastic(values, dtype + OF_POWER, words)):
        off = np.abs(found / values - 1)
        assert (off <= allowed).all()
        assert off.max() > 2.0**-19  # of exponents of 64 to 128
    exact = np.array([0.0, 1.0, -0.25, 2.0**-90])
    np.testing.assert_array_equal(stochastic(exact, dtype + OF_POWER, words), exact)
