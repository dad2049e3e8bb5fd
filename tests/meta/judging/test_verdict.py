"""The verdicts: what passes, what fails, what cannot be trusted, and when two kernels tie."""

import math
from collections import Counter
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from parity.dtypes import round_to
from parity.judging.metrics import UNDERFLOW, Scale, measure
from parity.judging.passes import PASSES
from parity.judging.verdict import (
    SEEDS,
    TILE,
    Bias,
    Comparison,
    Statistic,
    Verdict,
    agreement,
    compare,
    exactness,
    form,
    held_to,
    holds,
    mistrusted,
    regression,
    wrong_outputs,
)
from parity.op import Contract, Expected

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


def test_a_dtype_holds_a_golden_all_of_whose_values_it_has():
    golden = np.array([1.0, 257.0])
    assert holds("float32", golden) and not holds("bfloat16", golden)
    assert not holds("float32", golden + 1e-12) and not holds("float32", np.array([np.nan]))


def test_bound_is_the_smaller_of_the_two_and_grows_with_what_operands_lose():
    ieee = Contract(dot="ieee", out="float32")
    assert ieee.bound(1) == 3
    assert ieee.bound(10_000) == 800
    assert Contract(dot="bf16x1", out="float32").bound(1) == 3 + 2**17
    assert Contract(dot="bf16x6", out="float32").bound(1) == 8 + 8


@pytest.mark.parametrize(
    ("dot", "lost", "passes"),
    [
        *((exact, 0.0, 1) for exact in ("none", "native", "fp8", "int8", "ieee")),
        *(("bf16x6", 2.0**-21, 6), ("bf16x3", 2.0**-13, 3), ("bf16x2", 2.0**-16, 2), ("bf16x1", 2.0**-7, 1)),
        ("bf16x3x3", 2.0**-22, 6),
        ("tf32", 2.0**-9, 1),
        ("fp8 in 14 digits", 17 * 2.0**-10, 1),
    ],
)
def test_what_the_operands_of_each_dot_lose_is_in_its_bound(dot, lost, passes):
    contract = Contract(dot=dot, out="float32")
    assert contract.bound(1) == passes + 2 + lost / U32  # every pass is one more term of the sum
    assert contract.bound(0) == contract.bound(1)
    assert contract.bound(5) == passes + 4 + 2 + lost / U32
    assert Contract.DOTS.keys() == {
        "none",
        "native",
        "fp8",
        "fp8 in 14 digits",
        "int8",
        "ieee",
        "tf32",
        "bf16x3x3",
        *(f"bf16x{n}" for n in (1, 2, 3, 6)),
    }


@pytest.mark.parametrize("dot", ["bf16x6", "bf16x3"])
def test_passes_lose_of_a_product_what_their_dot_says(dot):
    a, b = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32).astype(np.float64)
    a, b = a[:, None], b[None]
    lost = np.abs(sum(x @ y for x, y in PASSES[dot](a, b, None, 0)) - a @ b) / np.abs(a @ b)
    assert 0 < lost.max() <= Contract.DOTS[dot][0]


def test_agreement_at_the_bound():
    rng = np.random.default_rng(0)
    m = metrics(rng, 1.0, seeds=1)[0]
    assert agreement(m, m.eta_max).passed
    assert agreement(m, m.eta_max * 0.999).outcome == "OUT OF BOUND"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_obviously_wrong_outputs_are_outside_a_sane_bound(dtype):
    golden, magnitude = draw(np.random.default_rng(0))
    assert mistrusted(golden, U32 * magnitude, dtype, 128.0) is None


@pytest.mark.parametrize(
    ("golden", "bound", "name"),
    [
        (np.full((4, 4), 1e-9), 128.0, "all zero"),
        (np.tile([[1.0], [1.0 + 1e-7]], (2, 3)), 128.0, "permuted in its rows"),
    ],
)
def test_a_case_that_lets_a_wrong_output_pass_is_mistrusted(golden, bound, name):
    judged = mistrusted(golden, np.full(golden.shape, U32), "float32", bound)
    assert judged.outcome == "MISTRUSTED"
    assert name in judged.reason


def test_an_output_whose_last_tile_is_not_finite_would_not_pass_without_it():
    beside = np.pad([[np.nan, 1e-9]], [(TILE, 0), (TILE, 0)], constant_values=1.0)  # 0 would pass for the last one
    golden = beside[:, :-1]
    unit = np.full(golden.shape, U32)
    assert mistrusted(golden + np.eye(TILE + 1), unit, "float32", 128.0) is None
    assert mistrusted(beside + np.eye(*beside.shape), np.full(beside.shape, U32), "float32", 128.0) is None
    assert "permuted" in mistrusted(np.nan_to_num(golden, nan=1 + 1e-7), unit, "float32", 128.0).reason


def test_an_output_that_must_be_zero_is_no_reason_to_mistrust():
    assert mistrusted(np.zeros((4, 4)), np.full((4, 4), 1e-38), "float32", 3.0) is None


def test_a_tile_that_units_may_flush_is_not_the_last_one():
    """As a gradient that went through a reset, exp(-80): zero may stand for it, and says nothing of the case."""
    golden = np.concatenate([np.arange(1.0, 2 * TILE + 1), np.full(TILE, 7e-35)])[:, None]
    unit = np.maximum(U32 * golden, UNDERFLOW)
    assert mistrusted(golden, unit, "float32", 8.0) is None
    dropped = dict(wrong_outputs(golden, 8 * UNDERFLOW))["without its last tile"]
    assert (dropped[:TILE] == golden[:TILE]).all() and not dropped[TILE:].any()
    assert "all zero" in mistrusted(golden[2 * TILE :], unit[2 * TILE :], "float32", 8.0).reason


def test_rows_that_are_the_same_cannot_be_permuted():
    assert "permuted in its rows" not in dict(wrong_outputs(np.array([[1.0, np.nan], [1.0, np.nan]])))


def test_the_wrong_outputs_are_what_they_are_called():
    golden = np.arange(1.0, 2 * TILE * (2 * TILE + 3) + 1).reshape(2 * TILE, 2 * TILE + 3)
    golden[:, -1] = 0  # the last tile is that of the last output other than zero
    wrong = dict(wrong_outputs(golden))
    dropped = golden.copy()
    dropped[TILE:, 2 * TILE :] = 0
    assert list(wrong) == ["all zero", "negated", "without its last tile", "permuted in its rows"]
    assert not wrong["all zero"].any() and (wrong["negated"] == -golden).all()
    assert (wrong["without its last tile"] == dropped).all()
    assert (wrong["permuted in its rows"][1:] == golden[:-1]).all()


def rule(tpu, gpu, dtype="float32", tau=0.0):
    return compare(tpu, gpu, narrow_output=dtype != "float32", tau=tau).verdict


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
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


def test_ties_that_few_seeds_take_for_losses_are_none_on_many():
    """Kernels of equal errors that vary from seed to seed, by a tenth: of eight seeds that spread is little known."""
    rng = np.random.default_rng(12)
    lost = {}
    for seeds in (8, SEEDS):
        errors = np.exp(0.1 * rng.standard_normal((2000, 2, seeds)))
        sides = ([[replace(TEMPLATE, epsilon=float(e)) for e in side] for side in trial] for trial in errors)
        lost[seeds] = sum(rule(*trial).outcome == "LOSS" for trial in sides)
    assert 1 <= lost[8] <= 15  # Student's t of seven degrees of freedom: 5.2 are to be expected
    assert lost[SEEDS] == 0


@pytest.mark.parametrize(("ratio", "outcome"), [(1.019, "TIE"), (1.021, "LOSS"), (1 / 1.019, "WIN")])
def test_a_loss_is_more_than_what_contracts_leave_out(ratio, outcome):
    """However sure it is."""
    tpu = [replace(TEMPLATE, epsilon=ratio * TEMPLATE.epsilon, scored=10**9)] * SEEDS
    assert rule(tpu, [replace(TEMPLATE, scored=10**9)] * SEEDS).outcome == outcome


def test_a_narrow_output_is_judged_by_its_misround_rate():
    rng = np.random.default_rng(4)
    worse, better = metrics(rng, 40, "bfloat16"), metrics(rng, 20, "bfloat16")
    assert worse[0].epsilon == pytest.approx(better[0].epsilon, rel=1e-3)  # ε sees nothing but the output's rounding
    assert "misround rate" in rule(worse, better, "bfloat16").reason
    assert "ε" in rule(better, worse).reason


def test_a_perfectly_rounded_reference_does_not_fail_a_nearly_perfect_kernel():
    rng = np.random.default_rng(3)
    assert rule(metrics(rng, 1e-4), metrics(rng, 0)).passed


def test_one_seed_without_any_error_does_not_decide():
    rng = np.random.default_rng(11)
    tpu, gpu = metrics(rng, 4), metrics(rng, 4)
    exact = replace(tpu[0], epsilon=0.0, floor=0.0)
    judged = compare([exact, *tpu[1:]], gpu, narrow_output=False)
    assert judged.verdict.outcome == "TIE"
    assert 1e-4 < judged.low < judged.ratio < 1 < judged.high < 1e4
    assert compare([exact] * 8, gpu, narrow_output=False).verdict.outcome == "WIN"
    assert compare(gpu, [exact] * 8, narrow_output=False).verdict.outcome == "LOSS"


def test_one_seed_at_the_floor_excuses_no_loss():
    rng = np.random.default_rng(12)
    worse, better = metrics(rng, 40), metrics(rng, 20)
    worse[3] = replace(worse[3], floor=worse[3].epsilon)
    assert rule(worse, better).outcome == "LOSS"
    floor = [replace(m, floor=m.epsilon / 1.04) for m in worse]
    assert rule(floor, better).gate == "G6"  # all at the floor: no loss, but a tail


def test_a_longer_tail_and_a_bias_are_seen():
    rng = np.random.default_rng(7)
    fine = metrics(rng, 4)
    tailed = [replace(m, eta_q999=m.eta_q999 * 2) for m in fine]
    biased = [replace(m, bias=0.05) for m in fine]
    assert (rule(tailed, fine).outcome, rule(tailed, fine).gate) == ("TAIL", "G6")
    assert rule(fine, tailed).passed
    assert (rule(biased, fine).outcome, rule(biased, fine).gate) == ("BIAS", "G7")
    assert rule(biased, biased).passed


LARGE = pytest.param((72, 128), 8, marks=pytest.mark.full)


@pytest.mark.parametrize(("shape", "seeds"), [((2, 4), 2), ((2, 4), 8), ((64, 64), 2), LARGE])
def test_the_largest_of_few_errors_is_no_tail(shape, seeds):
    rng = np.random.default_rng(5)
    outcomes = [rule(*(metrics(rng, 4, seeds=seeds, shape=shape) for _ in "ab")).outcome for _ in range(100)]
    assert not {"TAIL", "LOSS"} & {*outcomes}
    ours, theirs = metrics(rng, 4, seeds=8), metrics(rng, 4, seeds=8)
    heavy = [replace(m, eta_q999=m.eta_q999 * 3) for m in ours]
    assert rule(heavy, theirs).outcome == rule(heavy[:2], theirs[:2]).outcome == "TAIL"


def test_a_bias_counts_from_six_standard_errors_on_and_beyond_a_references_by_more_than_four():
    assert [Bias(ours).exceeds(Bias(0)) for ours in (5.9, 6.0, 6.1)] == [False, False, True]
    assert [Bias(ours).exceeds(Bias(7)) for ours in (10.9, 11.0, 11.1)] == [False, False, True]
    assert [Bias(ours, 3).exceeds(Bias(0)) for ours in (17.9, 18.0, 18.1)] == [False, False, True]
    assert [Bias(27).exceeds(Bias(7, noise)) for noise in (4.9, 5.0, 5.1)] == [True, False, False]


def by_rows(rng, error, common=0.0):
    """Measurements of a kernel whose error is the same in all elements of a row, and has a part common to all rows."""
    measured = []
    for seed in range(8):
        golden, magnitude = draw(np.random.default_rng(seed))
        rows = rng.standard_normal((len(golden), 1)) * error + common
        y = round_to(golden + rows * U32 * magnitude, "float32")
        measured.append(measure(y, golden, Scale(magnitude, U32, 256)))
    return measured


def test_elements_that_err_together_are_no_bias_and_one_beneath_them_is_still_seen():
    rng = np.random.default_rng(8)
    together = [by_rows(rng, 400) for _ in range(12)]
    sizes = [Bias.of(m).size for m in together]
    assert max(sizes) > 11 > 5 > min(sizes)  # elements that err each on its own would be biased, beside others
    assert {rule(ours, theirs).outcome for ours in together[:6] for theirs in together[6:]} <= {"TIE", "WIN", "LOSS"}
    assert all(5 < Bias.of(m).noise < 14 for m in together)  # √64, of 8 seeds
    shifted = by_rows(rng, 300, common=250)  # as large an ε
    assert (rule(shifted, together[0]).outcome, rule(shifted, together[0]).gate) == ("BIAS", "G7")
    assert rule(together[0], shifted).passed
    assert rule(shifted, shifted).passed


def test_comparing_needs_paired_seeds():
    one = metrics(np.random.default_rng(0), 1, seeds=1)
    with pytest.raises(ValueError, match="paired seeds, at least one, got 1 and 0"):
        compare(one, [], narrow_output=False)


@pytest.mark.parametrize(
    ("outcome", "held", "passed"),
    [
        ("LOSS", "EXPECTED LOSS", True),
        ("TIE", "UNEXPECTED PASS", False),
        ("WIN", "UNEXPECTED PASS", False),
        ("TAIL", "TAIL", False),
        ("UNFIT", "UNFIT", False),
        ("OUT OF BOUND", "OUT OF BOUND", False),
    ],
)
def test_a_declared_loss_passes_and_nothing_else_does(outcome, held, passed):
    expected = Expected(lambda case: True, "LOSS", "six passes against one FMA")
    decided = Verdict(outcome, "G5", "ε 1.3×")
    judged = held_to(expected, Comparison(decided))
    assert (judged.outcome, judged.gate, judged.passed) == (held, "G5", passed)
    assert ("six passes" in judged.reason) == (judged is not decided)
    assert held_to(None, Comparison(decided)) is decided


def test_a_loss_that_is_declared_of_one_output_is_no_excuse_for_another():
    expected, lost = Expected(lambda case: True, "LOSS", "short sums", output="ht"), Verdict("LOSS", "G5", "ε 1.3×")
    of = [held_to(expected, Comparison(lost, output=name)).outcome for name in ("ht", "o")]
    assert of == ["EXPECTED LOSS", "LOSS"]


@pytest.mark.parametrize(("high", "held"), [(1.3, "EXPECTED LOSS"), (1.1, "UNEXPECTED PASS")])
def test_a_tie_that_reaches_the_declared_ratio_is_no_pass(high, held):
    expected = Expected(lambda case: True, "LOSS", "short sums", ratio=1.2)
    assert held_to(expected, Comparison(Verdict("TIE", "G5", ""), 1.05, 0.9, high)).outcome == held


@pytest.mark.parametrize(
    ("outcome", "low", "held"), [("LOSS", 1.2, "EXPECTED LOSS"), ("LOSS", 1.4, "LOSS"), ("TIE", 0.9, "TIE")]
)
def test_a_loss_is_expected_as_far_as_contracts_explain_it(outcome, low, held):
    expected = Expected(lambda case: True, "LOSS", "longer chunks", explained=True)
    judged = held_to(expected, Comparison(Verdict(outcome, "G5", "ε 1.3×"), 1.3, low, 1.5, explained=1.3))
    assert judged.outcome == held
    assert ("at most 1.3× by contract: longer chunks" in judged.reason) == (outcome == "LOSS")


@pytest.mark.parametrize(
    "bad",
    [
        dict(verdict="UNFIT"),
        dict(verdict="OUT OF BOUND"),
        dict(verdict=""),
        dict(reason=""),
        dict(verdict="TAIL", explained=True),
    ],
)
def test_what_cannot_be_expected(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Expected(**dict(where=lambda case: True, verdict="LOSS", reason="because") | bad)


TEMPLATE = metrics(np.random.default_rng(0), 1, seeds=1)[0]


def test_an_output_that_nothing_was_rounded_in_is_compared_by_its_error():
    exact, rounded = (replace(TEMPLATE, epsilon=e, floor=e) for e in (0.0, 1e-3))
    assert [Statistic.of(m, True).name for m in ([rounded], [exact], [rounded, exact])] == ["misround rate", "ε", "ε"]
    assert not Statistic.of([rounded], False).narrow


@pytest.mark.parametrize(
    ("ratio", "floor", "grown"),
    # Of 4096 elements, once: 4 · 1.26 / 64 is 0.079, and e to that 1.082.
    [
        (1.2, 0.1, True),
        (1.09, 0.1, True),
        (1.07, 0.1, False),
        (0.5, 0.1, False),
        (1.2, 1.15, False),
        (1.2, 1.14, True),
        (1.05 * 2, 2, False),
    ],
)
def test_an_error_that_has_grown_beyond_sampling_and_its_floor_is_a_regression(ratio, floor, grown):
    then = replace(TEMPLATE, scored=4096, epsilon=1e-8, floor=1e-9)
    found = regression(replace(then, epsilon=ratio * 1e-8, floor=floor * 1e-8), then, narrow_output=False)
    assert (found is not None) == grown
    if found:
        assert (found.outcome, found.gate, found.reason) == ("REGRESSION", "G5", f"ε is {ratio}× what the ledger has")


def test_of_a_narrow_output_the_misround_rate_must_not_grow():
    then = replace(TEMPLATE, scored=4096, epsilon=1e-3, floor=1e-3, misrounded=0.1)
    for rate, grown in ((0.2, True), (0.1, False), (0.05, False)):
        found = regression(replace(then, misrounded=rate), then, narrow_output=True)
        assert (found is not None) == grown
        assert regression(replace(then, misrounded=rate), then, narrow_output=False) is None


def test_the_logarithm_of_a_rate_counts_half_an_element_more():
    counted = replace(TEMPLATE, scored=15, misrounded=0.2, epsilon=0.5)
    assert Statistic(narrow=True).log(counted) == pytest.approx(np.log(3.5 / 16), rel=1e-12)
    assert Statistic(narrow=False).log(counted) == np.log(0.5)


def test_the_noise_of_two_counts_is_that_of_each_and_half_an_element():
    few, many = (replace(TEMPLATE, scored=15, misrounded=rate) for rate in (0.1, 0.5))
    assert Statistic(narrow=True).noise(few, many) == pytest.approx(np.sqrt(1 / 2 + 1 / 8), rel=1e-12)


# --- how often the rule errs ---

TRIALS = 2000


def simulated(rng, size, scale, trials=TRIALS, seeds=8):
    """For many trials, what `measure` would say of kernels whose errors are normal with standard deviation `scale`.

    Not element by element: mean and rms are drawn from their exact joint distribution, the quantile from its own.
    """
    mean = rng.standard_normal((trials, seeds)) / np.sqrt(size)
    rms = np.sqrt(mean**2 + rng.chisquare(size - 1, (trials, seeds)) / size)
    rank = math.ceil(0.999 * (size - 1)) + 1
    quantile = np.vectorize(NormalDist().inv_cdf)((1 + rng.beta(rank, size + 1 - rank, (trials, seeds))) / 2)
    return [
        [
            replace(TEMPLATE, scored=size, epsilon=e, floor=e / 100, eta_q999=10 * q, bias=b)
            for e, q, b in zip(*trial, strict=True)
        ]
        for trial in zip((rms * scale).tolist(), (quantile * scale).tolist(), (mean / rms).tolist(), strict=True)
    ]


def test_the_simulation_draws_what_normal_errors_have():
    rng = np.random.default_rng(8)
    errors = rng.standard_normal((TRIALS, 1, 256)) * 3
    measured = {
        "epsilon": np.sqrt(np.mean(errors**2, axis=-1)),
        "bias": errors.mean(axis=-1) / np.sqrt(np.mean(errors**2, axis=-1)),
        "eta_q999": 10 * np.quantile(np.abs(errors), 0.999, axis=-1, method="higher"),
    }
    drawn = simulated(rng, 256, 3, seeds=1)
    for name, values in measured.items():
        got = np.array([getattr(m, name) for (m,) in drawn])
        assert got.mean() == pytest.approx(values.mean(), abs=5 * values.std() / np.sqrt(TRIALS / 2)), name
        assert got.std() == pytest.approx(values.std(), rel=0.15), name


@pytest.mark.parametrize("size", [256, 4096])
def test_equal_kernels_are_failed_in_at_most_one_of_200_trials(size):
    rng = np.random.default_rng(size)
    pairs = zip(simulated(rng, size, 1), simulated(rng, size, 1), strict=True)
    assert sum(not rule(tpu, gpu).passed for tpu, gpu in pairs) <= TRIALS / 200


@pytest.mark.parametrize(("size", "worse"), [(256, 1.25), (4096, 1.10)])
def test_a_slightly_worse_kernel_is_caught_in_99_of_100_trials(size, worse):
    rng = np.random.default_rng(size + 1)
    pairs = zip(simulated(rng, size, worse), simulated(rng, size, 1), strict=True)
    assert sum(rule(tpu, gpu).outcome == "LOSS" for tpu, gpu in pairs) >= TRIALS * 0.99


@pytest.mark.parametrize(("size", "rate"), [(256, 0.01), (256, 0.2), (4096, 0.001), (4096, 0.05)])
def test_equal_narrow_kernels_are_failed_in_at_most_one_of_200_trials(size, rate):
    rng = np.random.default_rng(int(size / rate))
    rounded = replace(TEMPLATE, scored=size, floor=TEMPLATE.epsilon, bias=0.0)

    def kernel():
        return [replace(rounded, misrounded=n / size) for n in rng.binomial(size, rate, 8).tolist()]

    assert sum(not rule(kernel(), kernel(), "bfloat16").passed for _ in range(TRIALS)) <= TRIALS / 200


# --- the rule, written a second time ---


def by_the_book(tpu, gpu, narrow_output, tau):
    """G5 to G7 as numerics.md has them (with what the docstrings of `parity.judging.verdict` add), on arrays.

    Arguments are dicts of arrays [trials, seeds] by the names of `Metrics`; returns outcomes, ratio and margin of ln T.
    """
    seeds = tpu["E"].shape[1]
    z = 4 if seeds < 64 else stats.t.isf(1e-7, seeds - 1)

    def narrow(*sides):  # T = ρ where √(E² - F²) < 0.05 F, on all that are compared
        return narrow_output & np.all([s["E"] ** 2 - s["F"] ** 2 < (0.05 * s["F"]) ** 2 for s in sides], axis=(0, 2))

    def log_ratio(a, b, narrow):
        count = {id(s): s["rho"] * s["N"] + 0.5 for s in (a, b)}
        by_rate = np.log(count[id(a)] / (a["N"] + 1)) - np.log(count[id(b)] / (b["N"] + 1))
        logs = np.where(narrow[:, None], by_rate, np.log(np.maximum(a["E"], 2**-40) / np.maximum(b["E"], 2**-40)))
        noise = np.where(narrow[:, None], np.sqrt(1 / count[id(a)] + 1 / count[id(b)]), 1.26 / np.sqrt(a["N"]))
        spread = np.sqrt(((logs - logs.mean(1, keepdims=True)) ** 2).sum(1) / max(seeds - 1, 1))
        return logs.mean(1), z * np.maximum(spread, noise.max(1)) / np.sqrt(seeds)

    ratio_by, floored = narrow(tpu, gpu), np.all(tpu["E"] <= 1.05 * tpu["F"], axis=1)
    ratio, margin = log_ratio(tpu, gpu, ratio_by)
    q999 = np.log(np.maximum(tpu["q999"], 1)) - np.log(np.maximum(gpu["q999"], 1))
    wander = q999.std(1, ddof=1) if seeds > 1 else np.zeros(len(q999))
    wander = z * np.maximum(wander, 2.7 * np.sqrt(2 / tpu["N"].min(1))) / np.sqrt(seeds)
    bias = [np.abs(s["bias"].mean(1)) * np.sqrt(s["N"].sum(1)) for s in (tpu, gpu)]
    spread = [np.sqrt(s["bias"].var(1, ddof=1) * s["N"].mean(1)) if seeds > 1 else 0 for s in (tpu, gpu)]
    noise = [np.maximum(s, 1) for s in spread]
    # The first gate that fails decides.
    outcomes = np.select(
        [
            (ratio > np.log(1 + tau) + np.maximum(margin, np.log(1.02))) & ~(floored & ~ratio_by),
            q999.mean(1) > np.log(1.5 * (1 + tau)) + wander,
            (bias[0] > 6 * noise[0]) & (bias[0] > bias[1] + 4 * np.maximum(*noise)),
            ratio < -margin,
        ],
        ["LOSS", "TAIL", "BIAS", "WIN"],
        "TIE",
    )
    return outcomes, ratio_by, ratio, margin


def random_sides(rng, trials, seeds):
    """TPU and GPU of random kernels: near each other and far apart, at their floors and far above."""
    shape = (trials, seeds)

    def per_trial(low, high):
        return np.exp(rng.uniform(np.log(low), np.log(high), (trials, 1)))

    elements = np.broadcast_to(np.round(per_trial(20, 1e5)), shape)
    floor = 1e-8 * per_trial(0.1, 10) * np.exp(0.05 * rng.standard_normal(shape))
    near, rate = rng.random((trials, 1)) < 0.6, per_trial(1e-3, 0.5)
    sides = []
    for _ in range(2):
        excess = np.where(near, per_trial(0.01, 0.07), per_trial(0.5, 5)) * np.exp(
            per_trial(0.003, 0.3) * rng.standard_normal(shape)
        )
        sides.append(
            {
                "N": elements,
                "F": floor,
                "E": floor * np.sqrt(1 + excess**2) * (rng.random(shape) > 0.01),
                "rho": rng.binomial(elements.astype(int), np.minimum(rate * per_trial(0.5, 2), 1)) / elements,
                "q999": per_trial(0.5, 4) * np.exp(0.1 * rng.standard_normal(shape)),
                "bias": rng.choice([0, 1], (trials, 1), p=[0.6, 0.4]) * per_trial(0.01, 1)
                + per_trial(0.5, 3) * rng.standard_normal(shape) / np.sqrt(elements),
            }
        )
    return sides


def as_metrics(side, trial):
    names = {"N": "scored", "F": "floor", "E": "epsilon", "rho": "misrounded", "q999": "eta_q999", "bias": "bias"}
    rows = zip(*(side[key][trial].tolist() for key in names), strict=True)
    return [replace(TEMPLATE, **dict(zip(names.values(), row, strict=True))) for row in rows]


def test_5000_verdicts_are_what_an_independent_implementation_says():
    rng = np.random.default_rng(9)
    seen = Counter()
    for seeds in (1, 2, 3, 4, 6, 8, 8, 8, 16, 64):
        trials, narrow_output, tau = 500, rng.random(500) < 0.5, rng.choice([0.0, 0.3], 500)
        sides = random_sides(rng, trials, seeds)
        outcomes, by_rate, ratios, margins = by_the_book(*sides, narrow_output, tau)
        for t in range(trials):
            got = compare(
                *(as_metrics(side, t) for side in sides), narrow_output=bool(narrow_output[t]), tau=float(tau[t])
            )
            assert got.verdict.outcome == outcomes[t], (seeds, t, got)
            ends = (ratios[t], ratios[t] - margins[t], ratios[t] + margins[t])
            assert (got.ratio, got.low, got.high) == pytest.approx(np.exp(ends), rel=1e-9)
            seen[outcomes[t], bool(by_rate[t])] += 1
    assert seen.total() == 5000
    # Each verdict, by ε and by the misround rate.
    assert len(seen) == 10, seen
    assert min(seen.values()) >= 20, seen
