"""The verdicts: what passes, what fails, what cannot be trusted, and when two kernels tie."""

import numpy as np
import pytest

from parity.dtypes import round_to
from parity.metrics import Scale, measure
from parity.op import Contract
from parity.verdict import agreement, exactness, form, mistrusted, parity

U32 = 2.0**-24


def draw(rng, shape=(64, 64), terms=256):
    """A golden sum of `terms` normal products and its magnitude."""
    golden = rng.standard_normal(shape) * np.sqrt(terms)
    return golden, np.full(shape, terms * 2 / np.pi)


def kernel(rng, golden, magnitude, error, dtype="float32"):
    """The output of a kernel whose compute error is `error` roundoffs of the magnitude, rms."""
    return round_to(golden + rng.standard_normal(golden.shape) * error * U32 * magnitude, dtype)


def metrics(rng, error, dtype="float32", seeds=8, shape=(64, 64)):
    """Measurements of such a kernel on paired seeds, whose goldens depend on the seed alone."""
    measured = []
    for seed in range(seeds):
        golden, magnitude = draw(np.random.default_rng(seed), shape)
        y = kernel(rng, golden, magnitude, error, dtype)
        measured.append(measure(y, golden, Scale(magnitude, U32, 256)))
    return measured


@pytest.mark.parametrize(
    ("y", "outcome"),
    [
        (np.zeros((2, 3), np.float32), "WRONG SHAPE"),
        (np.zeros((2, 2), np.float64), "WRONG DTYPE"),
        (np.array([[np.nan, 0], [0, 0]], np.float32), "NON-FINITE"),
    ],
)
def test_form(y, outcome):
    judged = form(y, y, np.zeros((2, 2)), "float32")
    assert (judged.outcome, judged.gate, judged.passed) == (outcome, "G1", False)


def test_form_wants_two_runs_bit_equal_and_the_goldens_own_infinities():
    y = np.zeros((2, 2), np.float32)
    assert form(y, y.copy(), np.zeros((2, 2)), "float32") is None
    assert form(y, -y, np.zeros((2, 2)), "float32").outcome == "NOT REPEATABLE"
    golden = np.array([[np.inf, 0], [0, 0]])
    assert form(y, y, golden, "float32").outcome == "NON-FINITE"
    assert form(golden.astype(np.float32), golden.astype(np.float32), golden, "float32") is None


def test_exactness():
    golden = np.arange(6.0).reshape(2, 3)
    assert exactness(golden.astype(np.float32), golden).passed
    assert exactness((golden + (golden == 4)).astype(np.float32), golden).outcome == "LOGIC FAULT"
    with pytest.raises(ValueError, match="golden must be exact in float32"):
        exactness(golden.astype(np.float32), golden + 1e-12)


def test_bound_is_the_smaller_of_the_two_and_grows_with_what_operands_lose():
    ieee = Contract(dot="ieee", out="float32")
    assert ieee.bound(1) == 3
    assert ieee.bound(10_000) == 800
    assert Contract(dot="bf16x1", out="float32").bound(1) == 3 + 2**17
    assert Contract(dot="bf16x6", out="float32").bound(1) == 8 + 8


def test_agreement_at_the_bound():
    rng = np.random.default_rng(0)
    m = metrics(rng, 1.0, seeds=1)[0]
    assert agreement(m, m.eta_max).passed
    assert agreement(m, m.eta_max * 0.999).outcome == "OUT OF BOUND"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_obviously_wrong_outputs_are_outside_a_sane_bound(dtype):
    golden, magnitude = draw(np.random.default_rng(0))
    assert mistrusted(golden, Scale(magnitude, U32, 256), dtype, 128.0) is None


@pytest.mark.parametrize(
    ("golden", "bound", "name"),
    [
        (np.full((4, 4), 1e-9), 128.0, "all zero"),
        (np.tile([[1.0], [1.0 + 1e-7]], (2, 3)), 128.0, "permuted in its rows"),
    ],
)
def test_a_case_that_lets_a_wrong_output_pass_is_mistrusted(golden, bound, name):
    judged = mistrusted(golden, Scale(np.ones_like(golden), U32, 1), "float32", bound)
    assert judged.outcome == "MISTRUSTED"
    assert name in judged.reason


def test_an_output_that_must_be_zero_is_no_reason_to_mistrust():
    assert mistrusted(np.zeros((4, 4)), Scale(np.zeros((4, 4)), U32, 1), "float32", 3.0) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_kernels_tie(dtype):
    rng = np.random.default_rng(1)
    outcomes = [
        parity(metrics(rng, 4, dtype), metrics(rng, 4, dtype), narrow_output=dtype == "bfloat16").verdict.outcome
        for _ in range(60)
    ]
    assert outcomes.count("LOSS") == 0
    assert outcomes.count("TIE") >= 58


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worse_kernel_loses_and_a_better_one_wins(dtype):
    rng = np.random.default_rng(2)
    worse, better = metrics(rng, 40, dtype), metrics(rng, 20, dtype)
    narrow = dtype == "bfloat16"
    assert parity(worse, better, narrow_output=narrow).verdict.outcome == "LOSS"
    assert parity(better, worse, narrow_output=narrow).verdict.outcome == "WIN"
    assert parity(worse, better, narrow_output=narrow, tau=1.2).verdict.outcome == "TIE"


def test_a_perfectly_rounded_reference_does_not_fail_a_nearly_perfect_kernel():
    rng = np.random.default_rng(3)
    assert parity(metrics(rng, 1e-4), metrics(rng, 0), narrow_output=False).verdict.passed


def test_parity_needs_paired_seeds():
    one = metrics(np.random.default_rng(0), 1, seeds=1)
    with pytest.raises(ValueError, match="paired seeds"):
        parity(one, [], narrow_output=False)
