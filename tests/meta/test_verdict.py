"""The verdicts: what passes, what fails, what cannot be trusted, and when two kernels tie."""

from dataclasses import replace

import numpy as np
import pytest

from parity.dtypes import round_to
from parity.metrics import Scale, measure
from parity.op import Contract
from parity.verdict import agreement, compare, exactness, form, mistrusted

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


def rule(tpu, gpu, dtype="float32", contract=None, tau=0.0):
    return compare(tpu, gpu, contract or gpu, narrow_output=dtype != "float32", tau=tau).verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_kernels_tie(dtype):
    rng = np.random.default_rng(1)
    outcomes = [rule(metrics(rng, 4, dtype), metrics(rng, 4, dtype), dtype).outcome for _ in range(60)]
    assert outcomes.count("LOSS") == 0
    assert outcomes.count("TIE") >= 58


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worse_kernel_loses_and_a_better_one_wins(dtype):
    rng = np.random.default_rng(2)
    worse, better = metrics(rng, 40, dtype), metrics(rng, 20, dtype)
    assert rule(worse, better, dtype).outcome == "LOSS"
    assert rule(better, worse, dtype).outcome == "WIN"
    assert rule(worse, better, dtype, tau=1.2).passed


def test_a_narrow_output_is_judged_by_its_misround_rate():
    rng = np.random.default_rng(4)
    worse, better = metrics(rng, 40, "bfloat16"), metrics(rng, 20, "bfloat16")
    assert worse[0].epsilon == pytest.approx(better[0].epsilon, rel=1e-3)  # ε sees nothing but the output's rounding
    assert "misround rate" in rule(worse, better, "bfloat16").reason
    assert "ε" in rule(better, worse).reason


def test_a_perfectly_rounded_reference_does_not_fail_a_nearly_perfect_kernel():
    rng = np.random.default_rng(3)
    assert rule(metrics(rng, 1e-4), metrics(rng, 0)).passed


def test_a_tf32_reference_cannot_make_a_one_pass_kernel_pass():
    rng = np.random.default_rng(5)
    one_bf16_pass, tf32, ieee = metrics(rng, 2**16), metrics(rng, 2**13), metrics(rng, 4)
    assert rule(one_bf16_pass, one_bf16_pass).passed
    for reference in (tf32, one_bf16_pass):
        judged = rule(one_bf16_pass, reference, contract=ieee)
        assert (judged.outcome, judged.gate) == ("UNFIT", "G4")


def test_a_reference_too_good_to_be_true_is_unfit_as_well():
    rng = np.random.default_rng(6)
    assert rule(metrics(rng, 4), metrics(rng, 4), contract=metrics(rng, 40)).outcome == "UNFIT"


def test_a_longer_tail_and_a_bias_are_seen():
    rng = np.random.default_rng(7)
    fine = metrics(rng, 4)
    tailed = [replace(m, eta_q999=m.eta_q999 * 1.6) for m in fine]
    biased = [replace(m, bias=0.05) for m in fine]
    assert (rule(tailed, fine).outcome, rule(tailed, fine).gate) == ("TAIL", "G6")
    assert rule(fine, tailed).passed
    assert (rule(biased, fine).outcome, rule(biased, fine).gate) == ("BIAS", "G7")
    assert rule(biased, biased).passed


def test_comparing_needs_paired_seeds():
    one = metrics(np.random.default_rng(0), 1, seeds=1)
    with pytest.raises(ValueError, match="paired seeds, at least one, got 1, 0 and 1"):
        compare(one, [], one, narrow_output=False)


TEMPLATE = metrics(np.random.default_rng(0), 1, seeds=1)[0]


def simulated(rng, trials, size, scale, seeds=8):
    """For many trials, what `measure` would say of kernels whose errors are normal with standard deviation `scale`."""
    errors = rng.standard_normal((trials, seeds, size), dtype=np.float32) * np.float32(scale)
    rms = np.sqrt(np.mean(errors.astype(np.float64) ** 2, axis=-1))
    quantile = np.quantile(np.abs(errors), 0.999, axis=-1, method="higher")
    mean = errors.mean(axis=-1, dtype=np.float64)
    return [
        [
            replace(TEMPLATE, elements=size, scored=size, epsilon=e, floor=e / 100, eta_q999=10 * q, bias=b / e)
            for e, q, b in zip(*trial, strict=True)
        ]
        for trial in zip(rms.tolist(), quantile.tolist(), mean.tolist(), strict=True)
    ]


@pytest.mark.parametrize("size", [256, 4096])
def test_equal_kernels_are_failed_in_at_most_one_of_200_trials(size):
    rng = np.random.default_rng(size)
    trials = 2000
    failed = 0
    for _ in range(trials // 100):
        for tpu, gpu in zip(simulated(rng, 100, size, 1), simulated(rng, 100, size, 1), strict=True):
            failed += not rule(tpu, gpu).passed
    assert failed <= trials * 0.005


@pytest.mark.parametrize(("size", "worse"), [(256, 1.25), (4096, 1.10)])
def test_a_slightly_worse_kernel_is_caught_in_99_of_100_trials(size, worse):
    rng = np.random.default_rng(size + 1)
    trials = 500
    caught = 0
    for _ in range(trials // 100):
        for tpu, gpu in zip(simulated(rng, 100, size, worse), simulated(rng, 100, size, 1), strict=True):
            caught += rule(tpu, gpu).outcome == "LOSS"
    assert caught >= trials * 0.99
