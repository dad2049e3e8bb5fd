"""Ops that are compared bit for bit: their verdict, and what the judge makes of it."""

import ml_dtypes
import numpy as np
import pytest

from parity.judge import judge, measure_contract
from parity.verdict import identity
from tests.matrix.quantize import FP8_QUANTIZE

E4M3 = ml_dtypes.float8_e4m3fn
CASE = next(case for case in FP8_QUANTIZE.cases if case.tier == "smoke")


def test_every_code_counts_and_the_first_is_shown():
    golden = np.array([[0.0, 1.0, np.nan], [448, -2, 0.5]]).astype(E4M3)
    assert identity(golden.copy(), golden).passed
    other = golden.copy()
    other[0, 0] = -0.0
    other[1, 1] = -2.25
    told = identity(other, golden)
    assert (told.outcome, told.gate, told.passed) == ("OTHER BITS", "G2", False)
    assert told.reason == "2 of 6 elements differ in their bits, first at [0, 0]: golden 0.0 (0x0), got -0.0 (0x80)"
    integers = np.array([3, -4], np.int8)
    assert identity(np.array([3, 4], np.int8), integers).reason.endswith("golden -4 (0xfc), got 4 (0x4)")


def test_the_code_of_a_nan_counts_and_the_payload_of_a_wide_one_does_not():
    nan = np.array([0x7F, 0xFF], np.uint8).view(E4M3)
    assert not identity(nan[:1], nan[1:]).passed
    wide = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert identity(wide[:1], wide[1:]).passed
    assert not identity(wide[:1], np.float32([1.0])).passed


def kernel(spoil):
    """The golden, with one thing changed in its result."""

    def quantise(x, **arguments):
        return spoil(FP8_QUANTIZE.golden(np.asarray(x), **arguments))

    return quantise


def one_code(result):
    code = result.qvalue.view(np.uint8)
    code[5, 7] ^= 1
    return result


@pytest.mark.parametrize(
    ("spoil", "outcome"),
    [
        (lambda r: r, "EXACT"),
        (one_code, "OTHER BITS"),
        (lambda r: r._replace(scale=np.nextafter(r.scale, np.float32(9))), "OTHER BITS"),
        (lambda r: r._replace(scale=r.scale.astype(np.float16)), "WRONG DTYPE"),
        (lambda r: r._replace(scale=r.scale[:, :1]), "WRONG SHAPE"),
        (lambda r: r._replace(scale=None), "WRONG OUTPUTS"),
    ],
)
def test_the_judge_wants_the_goldens_bits(spoil, outcome):
    pytest.importorskip("jax")
    judged = judge(FP8_QUANTIZE, CASE, "tpu", kernel(spoil))
    assert judged.verdict.outcome == outcome
    assert judged.summary()["passed"] == (outcome == "EXACT")
    if outcome == "OTHER BITS":
        assert judged.verdict.reason.startswith(("1 of 98304", "768 of 768"))


def test_there_is_no_error_to_predict():
    assert measure_contract(FP8_QUANTIZE, CASE, "gpu") == {}
