"""Ops that are compared bit for bit: their verdict, what the judge makes of it, and how a difference is explained."""

import ml_dtypes
import numpy as np
import pytest

from parity.cli import main
from parity.cli.explain import of_bits
from parity.debugging.bits import explain_bits
from parity.judging.judge import judge, measure_contract
from parity.judging.verdict import identity
from parity.trial import Trial
from tests.matrix import OPS
from tests.matrix.quantize import FP8_QUANTIZE
from tests.meta.faults.planting import ROOT, Fault, having, plant, smoke

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
    zeros = f"golden {E4M3(0)} (0x0), got {E4M3(-0.0)} (0x80)"  # which older ml_dtypes write as 0 and -0
    assert told.reason == f"2 of 6 elements differ in their bits, first at [0, 0]: {zeros}"
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
    judged = judge(Trial(FP8_QUANTIZE, CASE, "tpu", kernel(spoil)))
    assert judged.verdict.outcome == outcome
    assert judged.bound == 0
    assert judged.summary()["passed"] == (outcome == "EXACT")
    if outcome == "OTHER BITS":
        assert judged.verdict.reason.startswith(("1 of 98304", "768 of 768"))


def test_there_is_no_error_to_predict():
    assert measure_contract(Trial(FP8_QUANTIZE, CASE, "gpu")) == {}


OP = {op.name: op for op in OPS}
FULL = pytest.mark.full
wide = having(dtype="float32")
CONVERTED = "y.astype(target.dtype)"
LARGEST_OF = "exponent = (largest >> 23) - (FORMAT.exponent + 2)"
STORE = "        tl.store(rowwise.qvalue + position, codes.reshape(TILE_ROWS, TILE_COLUMNS), mask=in_tile)\n"
ACROSS = """
        blocks = bits.reshape(TILE_ROWS // BLOCK, BLOCK, TILE_COLUMNS)
        codes, _ = _mxfp8_codes(blocks, in_tile, 1, ROUND_UP, FORMAT, "columnwise_")
"""
FLOAT32 = "y = near * (1 + jnp.clip(beyond, -(2.0**-12), 2.0**-12))"
UPWARDS = FLOAT32.replace("y = ", "y = float_of((bits_of(") + ") + (1 << 20) - 1) & -1 << 20)"


def planted(backend, op, old, new, change, says, *marks, where=smoke):
    fault = Fault(says, backend, (op,), old, new, where)
    return pytest.param(
        fault, change, says, id=f"{backend}-{op}-{change}", marks=[getattr(pytest.mark, backend), *marks]
    )


PLANTED = [
    planted("tpu", "mxfp8_quantize", CONVERTED, "float_of(bits_of(y.astype(jnp.float32)) + 1).astype(target.dtype)",
            "ties away from zero at qvalue",
            "rounded otherwise: ties away from zero at qvalue, 100% explained; in rounding ties of qvalue"),
    planted("tpu", "mxfp8_quantize", "return float_of((254 +", "return float_of((253 +",
            "twice the value at scale", "a logic fault everywhere of", FULL),
    planted("tpu", "fp8_quantize", FLOAT32, UPWARDS, "rounded away from zero at qvalue",
            "rounded otherwise: rounded away from zero at qvalue", FULL, where=wide),
    planted("gpu", "mxfp8_quantize", LARGEST_OF, LARGEST_OF.replace("exponent + 2", "exponent + 1"),
            "twice the value at scale", "a logic fault everywhere of", FULL),
    planted("gpu", "mxfp8_dual_quantize", STORE, ACROSS + STORE,
            "columnwise_spread in the place of the value at rowwise_spread",
            "of rowwise: columnwise_spread in the place of the value at rowwise_spread, 100% explained"),
    planted("tpu", "swizzle_scales", "split.swapaxes(-4, -2)", "split.swapaxes(-4, -3)", "None",
            "a logic fault all over of out: the golden's own numbers, at other places"),
    planted("tpu", "fp8_dequantize", "wide = q[rows, columns].astype(short)", "wide = -q[rows, columns].astype(short)",
            "None", "a logic fault all over of out: signs differ", FULL),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "change", "says"), PLANTED)
def test_a_difference_is_explained_by_the_change_that_makes_it(fault, change, says, tmp_path):
    pytest.importorskip("jax" if fault.backend == "tpu" else "triton")
    op = OP[fault.ops[0]]
    case = next(case for case in op.cases if fault.where(case))
    found = explain_bits(Trial(op, case, fault.backend, getattr(plant(fault, tmp_path), op.name)))
    assert (str(found.change), not found.judged.verdict.passed) == (change, True), found.conclusion
    assert says in found.conclusion
    assert found.explained > 0.9 or change == "None"
    shown = of_bits(found).plain
    assert shown.startswith(found.judged.verdict.outcome) and f"\n{found.conclusion}\n" in shown
    worst = found.differences[0].worst
    assert f"[{', '.join(map(str, worst.index))}]: golden {worst.golden}  got {worst.got}\n" in shown


def told(spoil, case=CASE):
    return explain_bits(Trial(FP8_QUANTIZE, case, "tpu", kernel(spoil)))


def test_one_wrong_code_is_found_in_its_block():
    pytest.importorskip("jax")
    found = told(one_code)
    (difference,) = found.differences
    assert (difference.output, difference.wrong, difference.worst.index) == ("qvalue", 1, (5, 7))
    assert found.conclusion == (
        "not explained by rounding: a logic fault in block [5, 0] of qvalue: those off by 1 code, away from zero"
    )
    shown = of_bits(found).plain
    assert "every bit is the golden's in scale" in shown
    assert f"worst qvalue[5, 7]: golden {E4M3(-112)} (0xee)  got {E4M3(-120)} (0xef)" in shown
    assert "share by tile, worst at (0, 0) of 8 x 8" in shown


@pytest.mark.parametrize(
    ("spoil", "looks"),
    [
        (lambda r: r._replace(scale=2 * r.scale), "all of them 2 times the golden's"),
        (lambda r: r._replace(scale=np.nextafter(r.scale, np.float32(9))), "all of them off by 1 code, away from zero"),
        (lambda r: r._replace(scale=np.roll(r.scale, 1, 0)), "the golden's own numbers, at other places"),
        (lambda r: r._replace(scale=np.full_like(r.scale, np.nan)), "NaN in one and not in the other"),
    ],
)
def test_what_differences_have_in_common_is_said(spoil, looks):
    pytest.importorskip("jax")
    found = told(spoil)
    assert [(d.output, d.looks) for d in found.differences] == [("scale", looks)]
    assert looks in of_bits(found).plain and found.same == ("qvalue",)


def test_what_has_another_form_is_told_as_the_verdict_has_it():
    pytest.importorskip("jax")
    found = told(lambda r: r._replace(scale=r.scale[:, :1]))
    assert found.conclusion == "not explained by rounding: a logic fault: golden [256, 3], got [256, 1]"
    assert of_bits(found).plain.startswith("WRONG SHAPE")


@pytest.mark.gpu
def test_a_case_with_the_goldens_bits_is_explained_on_the_command_line(capsys):
    pytest.importorskip("triton")
    assert main(["--root", str(ROOT), "explain", CASE.id, "--backend", "gpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("EXACT  G2") and "no difference: every bit is the golden's" in out
