"""What a contract explains: random rounding, and the gates that are derived from it, held by simulation."""

from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
from scipy import stats

from cpu_golden.stages import Stages, exact, folded_sum
from parity.backends import EMULATED
from parity.declared import DeclarationError
from parity.dtypes import cut_off, round_to, stochastic
from parity.interop import to_numpy
from parity.judging.fit import KAPPA, RUNS, Allowance, Fit, K, Look, over_seeds
from parity.judging.judge import explained, gates, judge, measure_contract
from parity.judging.metrics import Scale, explained_by, measure
from parity.judging.rounding import on_unit
from parity.judging.spread import alike, allowances, runs, typical_runs
from parity.op import Array, Contract, Op, outputs
from parity.trial import Trial
from tests.matrix import OPS
from tests.matrix.gla import CHUNK_SIMPLE_GLA
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.moe import GROUPED_DENSE_BWD
from tests.matrix.quantized_gmm import GMM_QUANTIZED
from tests.support.agreement import in_turn

CASE = next(c for c in GMM.cases if c.tier == "smoke" and c.dtype == "float32")
ROWS, TERMS, COLUMNS = 12, 48, 10
U = 2.0**-24


def summed(a, b, order, dtype="float32", rounding=round_to):
    """a @ b in float64, its running sum rounded after every term."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for k in order:
        total = rounding(total + np.outer(a[:, k], b[k]), dtype).astype(np.float64)
    return total


def operands(seed):
    bits = np.random.default_rng(seed)
    return (
        bits.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in ((ROWS, TERMS), (TERMS, COLUMNS))
    )


def allowance(a, b, seed, count=64):
    drawn = [
        summed(a, b, range(TERMS), rounding=partial(stochastic, words=alike(key))) - a @ b
        for key in np.random.SFC64(seed).random_raw(count)
    ]
    return Allowance.of(a @ b, np.stack(drawn), U)


LABELS = {"row": np.arange(ROWS)[:, None], "half": (np.arange(COLUMNS) // 5)[None]}


@pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=pytest.mark.full)])
def test_equal_kernels_that_sum_in_another_order_fit(seeds):
    """No more than one in 1,000 may fail: of 200 none, of 2,000 two."""
    failed, ratios = 0, []
    for seed in range(seeds):
        a, b = operands(seed)
        allowed, orders = allowance(a, b, seed), np.random.default_rng(seed)
        for _ in range(100):
            y = summed(a, b, orders.permutation(TERMS)).astype(np.float32)
            fit = allowed.fit("out", y, LABELS)
            failed += fit.verdict() is not None
            ratios.append(fit.ratio)
    assert failed <= len(ratios) / 1000
    assert np.median(ratios) == pytest.approx(1, abs=0.1)


def test_a_sketch_says_how_an_output_fits_as_a_whole():
    a, b = operands(3)
    allowed = allowance(a, b, 3)
    weighed_alike = Scale(np.sqrt(allowed.smooth + allowed.last) / U, U, 0)
    y = summed(a, b, range(TERMS)[::-1], "tf32").astype(np.float32)
    fit, sketch = allowed.fit("out", y, {}), measure(y, a @ b, weighed_alike)
    of_sketch = allowed.fit_of_sketch("out", sketch, weighed_alike, "float32")
    assert of_sketch.ratio == pytest.approx(fit.ratio, rel=1e-6) and fit.ratio > 1000
    assert of_sketch.freedom == pytest.approx(fit.freedom, rel=1e-6)


def test_an_accumulator_of_three_bits_less_does_not_fit():
    """99 % of such kernels fail: those with all elements wrong, and with one half of the columns."""

    def three_bits_less(x, dtype):
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 2.0**21) * 2.0**-21, exponent)

    for spoilt in (slice(None), slice(5, None)):
        caught = 0
        for seed in range(100):
            a, b = operands(seed)
            y = summed(a, b, range(TERMS)).astype(np.float32)
            y[:, spoilt] = summed(a, b, range(TERMS), rounding=three_bits_less)[:, spoilt]
            caught += allowance(a, b, seed, 16).fit("out", y, LABELS).verdict() is not None
        assert caught >= 99


@pytest.mark.parametrize("shape", [(2, 40, 1, 48), (1, 40, 2, 48), (2, 40, 1), (1, 80, 2), (1500,), (6, 20, 16)])
def test_few_runs_say_of_a_kernel_what_many_do(shape):
    """Four runs, whatever the axes: where one has a single element, its mean is what the runs found there by chance."""
    bits = np.random.default_rng(1)
    golden, ratios = np.zeros(shape), []
    for _ in range(40):
        allowed = Allowance.of(golden, bits.standard_normal((4, *shape)) * np.sqrt(2), U)
        ratios.append(allowed.fit("out", bits.standard_normal(shape).astype(np.float32), {}).ratio)
    assert np.median(ratios) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "tf32", "float32/2", "bf16x2", "float8_e4m3fn", "float8_e5m2"]
)
def test_random_rounding_is_right_on_average_and_to_a_neighbour(dtype):
    values = np.random.default_rng(2).uniform(-4, 4, 50)
    drawn = np.stack([stochastic(values, dtype, alike(key)) for key in np.random.SFC64(1).random_raw(4000)])
    for value, of_value in zip(values, drawn.T, strict=True):
        found = np.unique(of_value)
        assert len(found) <= 2
        assert found[0] <= value <= found[-1]
        assert float(round_to(np.array([value]), dtype)[0]) in found
    spread = np.abs(drawn - values).max(axis=0)
    assert (np.abs(drawn.mean(axis=0) - values) <= 5 * spread / np.sqrt(4000) + 1e-12).all()


def test_random_rounding_leaves_what_is_representable_and_what_is_not_finite():
    words = alike(np.uint64(1))
    values = np.array([0.0, -0.0, 1.0, -1.5, 2.0**-120, 3.0e38, np.inf, -np.inf, 2.0**-14, 2.0**-24])
    np.testing.assert_array_equal(stochastic(values, "float32", words), values.astype(np.float32))
    with_full_nans = np.array([2**63 - 1, 2**64 - 1], np.uint64).view(np.float64)  # as NVIDIA's, of all ones
    not_finite = np.array([np.nan, np.inf, -np.inf, 1.0, *with_full_nans])
    np.testing.assert_array_equal(stochastic(not_finite, "bfloat16", words), not_finite)
    smallest = np.array([2.0**-25])  # half of the smallest subnormal
    drawn = [stochastic(smallest, "float16", alike(key))[0] for key in np.random.SFC64(1).random_raw(4000)]
    assert set(drawn) == {0.0, 2.0**-24}
    assert np.mean(drawn) == pytest.approx(2.0**-25, rel=0.1)


@pytest.mark.parametrize(("off", "fits"), [(1e-38, True), (1e-34, False)])
def test_a_label_may_lose_the_subnormals_that_units_flush(off, fits):
    """All of a label may be as small as what a state has left after steep decays."""
    golden = np.stack([np.ones(64), np.full(64, 1e-33)])
    drawn = np.random.default_rng(0).standard_normal((16, *golden.shape)) * golden * 2.0**-24
    fit = Allowance.of(golden, drawn, U).fit("dg", golden + np.array([[0.0], [off]]), {"step": np.array([[0], [1]])})
    assert (fit.verdict() is None) is fits


def test_equal_values_are_rounded_alike_whatever_their_sign_and_power_of_two():
    """A kernel rounds them so; what is computed once for many elements errs in all of them by the same."""
    values = np.random.default_rng(0).uniform(1, 2, 2000)
    both = np.stack([values, values * -8.0])
    rounded = stochastic(both, "bfloat16", alike(np.uint64(3)))
    np.testing.assert_array_equal(rounded[1], rounded[0] * -8)
    others = stochastic(both, "bfloat16", alike(np.uint64(4)))
    assert abs(np.corrcoef(rounded[0] - values, others[0] - values)[0, 1]) < 0.1
    near = stochastic(np.nextafter(values, 2), "bfloat16", alike(np.uint64(3)))
    assert abs(np.corrcoef(rounded[0] > values, near > values)[0, 1]) < 0.9


def test_runs_are_the_same_for_the_same_case_and_others_for_another_seed():
    def first(case):
        trial = Trial(GMM, case, "gpu")
        drawn = trial.runs()
        return next(drawn)["out"], next(drawn)["out"]

    one, two = first(CASE)
    again, _ = first(CASE)
    assert (one == again).all()
    assert (one != two).any()
    assert (one != first(CASE.with_seed(1))[0]).any()


@pytest.mark.parametrize(("op", "backend"), in_turn({op.name: (op,) for op in OPS if op.at_once}))
def test_runs_drawn_at_once_are_those_drawn_one_by_one(op, backend, monkeypatch):
    """Of a case with states, beside bfloat16 where there is one; the first group is cut in two."""
    case = max((c for c in op.cases if c.tier == "smoke"), key=lambda c: c.dtype == "bfloat16")
    trial = Trial(op, case, backend)
    given, contract, golden = trial.inputs, trial.contract, trial.reference.golden
    monkeypatch.setattr("parity.judging.spread.AT_ONCE", 3 * max(y.size for y in golden.values()))
    for drawn in (runs, typical_runs):
        one_by_one = drawn(replace(op, at_once=False), case, given, contract, golden)
        for ours, expected in zip(islice(drawn(op, case, given, contract, golden), 6), one_by_one, strict=False):
            assert ours.keys() == expected.keys()
            for name, y in expected.items():
                np.testing.assert_array_equal(ours[name], y, err_msg=name)


def test_a_golden_that_has_no_axis_of_runs_is_not_drawn_at_once():
    with pytest.raises(DeclarationError, match=r"golden must have 4 runs of 'lhs', got \["):
        next(Trial(replace(GMM, at_once=True), CASE, "gpu").runs())


@pytest.mark.parametrize(
    ("error", "count"), [(0.0, 4), (1e-8, 4), (1.0, 4), (3e-5, 16), pytest.param(1e-6, 64, marks=pytest.mark.full)]
)
def test_a_verdict_takes_as_many_runs_as_it_needs(error, count, monkeypatch):
    """A pass and an error beyond any doubt need the fewest. error: relative, of a kernel's result."""
    drawn = []
    monkeypatch.setattr(
        "parity.trial.runs", lambda *given, **how: (drawn.append(run) or run for run in runs(*given, **how))
    )
    trial = Trial(GMM, CASE, "gpu")
    golden = trial.reference.golden["out"]
    judged = gates(replace(trial, other=lambda **_: (golden * (1 + error)).astype(np.float32)))
    assert judged.verdict.passed == (error < 1e-7)
    assert len(drawn) == count
    assert judged.load == 0 if error == 0 else 0 < judged.load < 1 if error < 1e-7 else judged.load > 1


def shown_of(sigma, up, down):
    """Mean and variance of what shows of a normal error's square, by summing over its density."""
    x = np.linspace(-12, 12, 48001)
    density = np.exp(-(x**2) / 2)
    over = np.maximum(sigma * x - up, 0) + np.maximum(-sigma * x - down, 0)
    mean, fourth = (float((over**n * density).sum() / density.sum()) for n in (2, 4))
    return mean, fourth - mean**2


ONE = np.eye(1, 80, 7).reshape(20, 4)
"""Of an output of which a single element errs."""


@pytest.mark.parametrize(
    ("shape", "dtype", "worse"), [((20, 18), "float32", 1), ((3, 20, 4), "bfloat16", 6), ((20, 4), "float32", ONE)]
)
def test_a_fit_is_what_its_definition_says(shape, dtype, worse):
    """Of 40 runs, which move elements by more, by less or not at all; to others without an error no label is held."""
    draw, count = np.random.default_rng(len(shape)), 40
    size = np.exp2(draw.integers(-3, 3, shape))
    size[-1] = 0  # nothing is to be seen there
    golden, runs = draw.standard_normal(shape), draw.standard_normal((count, *shape)) * size * 3e-3
    y = round_to(golden + draw.standard_normal(shape) * size * 3e-3 * worse, dtype)
    labels = {"first": np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)), "last": np.arange(shape[-1]) // 2}
    allowed = Allowance.of(golden, runs, 2.0**-10)
    fit = allowed.fit("out", y, {**labels, "all": np.zeros(1, int)})

    own = runs.mean(0) ** 2 + runs.var(0, ddof=1) * (1 / 2 - 1 / count)
    flat = own.reshape(-1, shape[-1])
    smooth = np.full(flat.shape, flat.mean())
    for axis in (0, 1):
        smooth = smooth * (flat.mean(axis, keepdims=True) / flat.mean() if flat.shape[axis] >= 16 else 1)
    smooth, last = smooth.reshape(shape), (2.0**-10 * golden) ** 2 / 3 + (1024 * 2.0**-126) ** 2
    delta, weight = explained_by(y, golden), 1 / (smooth + last)
    sigmas = delta / np.sqrt(np.maximum(own, smooth) + last)
    assert (fit.sigmas, fit.beyond) == (pytest.approx(sigmas.max()), (sigmas > K).sum())
    value = round_to(golden, dtype)
    ends = [(np.nextafter(value, np.array(end, value.dtype)).astype(float) + value) / 2 for end in (np.inf, -np.inf)]
    shown = np.array(
        [
            shown_of(*each)
            for each in zip(np.sqrt(own).flat, (ends[0] - golden).flat, (golden - ends[1]).flat, strict=True)
        ]
    )
    mean, variance = (part.reshape(shape) for part in shown.T)

    def of(part):
        """ratio, degrees of freedom of the error, and of a run, of the elements of a mask."""
        w, model = weight[part], (weight * own)[part]
        alone = model.sum() ** 2 / (model**2).sum()
        sums = np.array([(w * run[part] ** 2).sum() for run in runs])
        together = min(2 * sums.mean() ** 2 / sums.var(ddof=1), alone)
        freedom = 2 * (w * mean[part]).sum() ** 2 / (w**2 * variance[part]).sum() * together / alone
        return np.sqrt((w * delta[part] ** 2).sum() / (w * mean[part]).sum()), freedom, together

    def chance(freedom, below):
        return np.sqrt(max(stats.f.isf(1e-9, freedom, max(below, 1)), 1))

    ratio, freedom, together = of(np.ones(shape, bool))
    assert fit.ratio == pytest.approx(ratio, rel=1e-4)
    assert fit.freedom == pytest.approx((freedom, count * together), rel=1e-4)
    looks, pairs = [("", "", ratio, KAPPA * chance(freedom, 64 * together))], []
    for axis, names in labels.items():
        for name in np.unique(names):
            part = np.broadcast_to(names == name, shape)
            if not own[part].any():
                continue
            (ratio, freedom, together), (others, of_rest, _) = of(part), of(~part)
            looks.append((axis, str(name), ratio, KAPPA * chance(freedom, 64 * together)))
            even = 1.25 * chance(freedom * 64 / 65, of_rest * 64 / 65)
            pairs += [(axis, str(name), ratio, even, others)] * bool(others)
    for found, expected in ((fit.looks, looks), (fit.pairs, pairs)):
        found = [tuple(vars(look).values())[: len(expected[0])] for look in found]
        assert [look[:2] for look in found] == [look[:2] for look in expected]
        np.testing.assert_allclose([look[2:] for look in found], [look[2:] for look in expected], rtol=1e-3)
    assert (fit.verdict() is None) == (dtype != "bfloat16")


def test_a_verdict_names_the_output_the_label_and_the_ratio():
    looks = (Look("", "", 1.2, 2.1), Look("head", "0", 0.99, 2.2), Look("head", "1", 3.4, 2.2))
    pairs = (Look("head", "0", 0.99, 1.4, 3.4), Look("head", "1", 3.4, 1.4, 0.99))
    fit = Fit("o", 4.0, 0, 1.2, (100.0, 400.0), looks, pairs)
    verdict = fit.verdict()
    assert (verdict.outcome, verdict.reason) == ("OFF CONTRACT", "o: 3.4 × its contract in head 1 (others 0.99)")
    fit = replace(fit, looks=looks[:1])
    assert fit.verdict().outcome == "UNEVEN"
    assert fit.verdict().reason == "o: 3.4 × its contract in head 1 (others 0.99)"
    assert replace(fit, pairs=()).verdict() is None
    assert replace(fit, pairs=(), looks=(Look("", "", 2.2, 2.1),)).verdict().reason == "o: 2.2 × its contract"
    beyond = replace(fit, sigmas=9.5, beyond=3).verdict()
    assert (beyond.outcome, beyond.reason) == ("OUT OF BOUND", f"o: 9.5 σ (bound {K:.3g}), 3 elements beyond")


@pytest.mark.parametrize(("size", "room"), [(2000, 1.2), (20_000, 1.1)])
def test_an_output_of_many_elements_may_err_by_little_more_than_kappa(size, room):
    """What many elements of many runs say leaves chance little."""
    normal = np.random.default_rng(0).standard_normal
    allowed = Allowance.of(np.zeros(size), normal((RUNS[-1], size)), U)
    (look,) = allowed.fit("out", normal(size).astype(np.float32), {}).looks
    assert KAPPA < look.limit < room * KAPPA


def test_a_label_that_is_better_than_its_contract_is_not_uneven():
    better = Look("head", "1", 0.9, 1.3, 0.3)
    assert Fit("o", 1.0, 0, 0.4, (100.0, 400.0), (), (better,)).verdict() is None
    assert Fit("o", 1.0, 0, 0.4, (100.0, 400.0), (), (replace(better, ratio=1.4),)).verdict().outcome == "UNEVEN"


def test_an_output_of_one_element_is_judged_over_the_seeds():
    """Eight times its contract's error: on any one seed chance could do it, on eight it could not."""
    one = Fit("dg_gamma", 3.0, 0, 8.0, (1.0, 16.0), (Look("", "", 8.0, 29.0),), ())
    assert one.verdict() is None
    assert over_seeds([one]) is None
    off = over_seeds([one] * 8)
    assert (off.outcome, off.reason) == ("OFF CONTRACT", "dg_gamma: 8 × its contract over 8 seeds")
    assert over_seeds([replace(one, ratio=1.5)] * 8) is None
    assert over_seeds([replace(one, freedom=(0.1, 2.0))] * 8) is None  # nothing is to be seen
    assert over_seeds([replace(one, freedom=(1.0, 1.0))] * 8) is None  # the runs themselves say too little


def test_sums_that_are_ties_are_held_to_the_emulated_contract():
    """The last sum of 24 terms of one sign is a tie every other time, where to nearest errs by √2 of what σ says; times
    0.3 it is no number of the result's, which would hide that. A kernel whose terms are cut to 20 bits is caught."""
    terms = np.random.default_rng(0).uniform(1, 1.2, (60, 64, 24)).astype(np.float32).astype(np.float64)
    factor, nearest = float(np.float32(0.3)), partial(round_to, dtype="float32")

    def kernel(rounding, x=terms):
        return factor * folded_sum(x, lambda _, sums: np.asarray(rounding(sums), np.float64))[..., 0]

    golden = factor * terms.sum(axis=-1)
    keys = np.random.SFC64(1).random_raw(RUNS[-1])
    drawn = [kernel(partial(stochastic, dtype="float32", words=alike(key))) - golden for key in keys]
    allowed = Allowance.of(golden, drawn, U)
    right, wrong = (allowed.fit("o", nearest(kernel(nearest, x)), {}) for x in (terms, cut_off(terms, 20)))
    assert over_seeds([right] * 8).outcome == "OFF CONTRACT"
    assert over_seeds([right] * 8, [right] * 8) is None
    assert over_seeds([wrong] * 8, [right] * 8).outcome == "OFF CONTRACT"
    assert right.load == pytest.approx(right.beside(right).load * right.ratio)
    assert wrong.beside(right).verdict() is not None
    assert wrong.beside(replace(right, looks=())) == wrong


def spoilt(trial, **changes):
    """A kernel that is the golden in a contract's steps, changed, rounded to nearest at its sites."""
    contract = trial.contract
    sites = {**contract.sites, **changes}

    def kernel(**arguments):
        def rounding(site, x):
            return round_to(x, sites[site]).astype(np.float64) if site in sites else x

        given = {name: to_numpy(x) if hasattr(x, "shape") else x for name, x in arguments.items()}
        for name in trial.op.route(trial.case):
            given.pop(name)
        steps = {**trial.op.steps(trial.case, contract), **on_unit(contract)}
        result = trial.op.golden(**given, stages=Stages(rounding, **steps))
        if hasattr(result, "_asdict"):
            rounded = {name: round_to(x, contract.dtype(name)) for name, x in outputs(result).items()}
            return result._replace(**rounded)
        return round_to(result, contract.out)

    return replace(trial, other=kernel)


FORWARD = CHUNK_SIMPLE_GLA[0]
LINEAR = next(c for c in FORWARD.cases if c.tier == "smoke" and c.dtype == "float32")


@pytest.mark.parametrize(
    ("site", "dtype"),
    [("state", "float16"), ("acc", "float16"), ("A", "tf32")],
)
def test_a_site_of_less_precision_is_off_contract(site, dtype):
    trial = Trial(FORWARD, LINEAR, "gpu")
    assert judge(spoilt(trial)).verdict.outcome == "AGREES"
    judged = judge(spoilt(trial, **{site: dtype}))
    assert judged.verdict.outcome in ("OUT OF BOUND", "OFF CONTRACT")
    assert judged.twin is None or judged.twin.verdict.passed


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
@pytest.mark.parametrize("op", [GMM, TGMM, GMM_QUANTIZED, GROUPED_DENSE_BWD], ids=lambda op: op.name)
def test_what_an_element_may_err_is_within_the_derived_bound(op, backend):
    """Of long sums, whose bound is rigorous: k σ is 2 to 200 times less. Of two or three roundings it is the larger."""
    trial = Trial(op, next(c for c in op.cases if c.tier == "smoke"), backend)
    drawn = list(islice(trial.runs(), RUNS[0]))
    for name, allowed in allowances(drawn, trial.reference.golden, trial.contract.roundoff).items():
        scale = trial.scale(name)
        summed = scale.magnitude > 0
        share = (K * allowed.sigma / (trial.bound * scale.unit))[summed]
        assert share.max() <= 1
        assert 1 / 300 < np.median(share) < 1 / 10


@pytest.mark.parametrize(
    ("op", "expected"),
    [pytest.param(op, e, id=f"{op.name} {n}") for op in (GMM, TGMM) for n, e in enumerate(op.expected)],
)
def test_a_declared_loss_is_one_that_the_contracts_explain(op, expected):
    case = next(case for case in op.cases if case.tier != "full" and expected.where(case))
    tpu, gpu = (Trial(op, case, backend, device=EMULATED) for backend in ("tpu", "gpu"))
    magnitude = tpu.scale("out").magnitude
    summed = magnitude > 0
    sizes = [np.mean(explained(trial)["out"].variance[summed] / magnitude[summed] ** 2) for trial in (tpu, gpu)]
    assert 1.03 < np.sqrt(sizes[0] / sizes[1]) < 1.5


def test_an_op_without_a_magnitude_is_judged_by_its_sites():
    bare = replace(GMM, magnitude=None, chain=None)
    agreed = judge(Trial(bare, CASE, "gpu"))
    assert (agreed.verdict.outcome, agreed.bound) == ("AGREES", K)
    assert 0.05 < agreed.load < 1
    off = gates(spoilt(Trial(bare, CASE, "gpu"), acc="float16"))
    assert off.verdict.outcome == "OUT OF BOUND"


ON_GRID = 1.5 + 2.0**-45
"""So near a number of every grid that no run errs."""


def scaled_by(value, root):
    """An op that multiplies x [M, N] by a function's result, and a case of it. root: the site's ulps, "/n"."""

    def scaled(x, stages=exact):
        return stages("out", stages("root", np.full((len(x), 1), value)) * x.astype(np.float64))

    op = Op(
        "scaled", scaled, "none:none", "none:none", lambda case: {"x": Array((case.M, case.N), case.dtype)},
        lambda case, backend: Contract(sites={"root": f"float32{root}", "out": "float32"}),
        axes=lambda case, inputs: {"out": {"row": np.arange(case.M)[:, None]}},
    )  # fmt: skip
    (case,) = op.grid([dict(M=32, N=64)], dtype=["float32"])
    return op, case


@pytest.mark.parametrize(
    ("value", "root", "ulps", "right"),
    [(ON_GRID, "/4", 0, True), (ON_GRID, "/4", 4, True), (ON_GRID, "/4", 64, False), (ON_GRID, "", 4, False),
     (1.5, "/4", 0, True), (1.5, "/4", 4, False)],
)  # fmt: skip
def test_a_function_may_be_off_by_its_ulps_wherever_a_value_lies(value, root, ulps, right):
    """But for one that float32 holds, as exp(0)."""
    op, case = scaled_by(value, root)
    factor = np.float32(1.5 + ulps * 2.0**-23)
    for seed in range(8):
        judged = gates(Trial(op, case.with_seed(seed), "gpu", other=lambda x: factor * to_numpy(x)))
        assert judged.verdict.passed == right, judged.verdict


def test_a_value_on_the_grid_errs_in_runs_off_it_alone():
    trial = Trial(*scaled_by(ON_GRID, "/4"), "gpu")
    on, off = (np.std([run["out"] for run in islice(trial.runs(off_grid=off), 8)]) for off in (False, True))
    assert off > 2 * on  # of the results' own rounding


RARELY = 1 / 100
"""How often a run rounds a number near a step beyond it."""


def steps_of(x, stages=exact):
    """Whether x is below 1: on the diagonal just so, and everywhere else by a number that float32 holds."""
    near = 1 - 2.0**-24 * (1 - RARELY - np.arange(len(x)) * 2.0**-20)
    return (stages("near", np.where(np.eye(len(x)), near, x.astype(np.float64))) < 1).astype(np.float64)


@pytest.mark.parametrize("place", ["where a run does", "where none does"])
def test_a_kernel_may_jump_where_one_run_of_many_does(place):
    op = Op(
        "steps", steps_of, "none:none", "none:none", lambda case: {"x": Array((case.M, case.N), case.dtype)},
        lambda case, backend: Contract(sites={"near": "float32"}),
    )  # fmt: skip
    (case,) = op.grid([dict(M=256, N=256)], dtype=["float32"])
    trial = Trial(op, case, "gpu")
    jumps = sum(np.diagonal(run["out"] != 0).astype(int) for run in islice(trial.runs(), RUNS[-1]))
    once = int(np.flatnonzero(jumps == 1)[0])
    found = trial.reference.golden["out"].astype(np.float32)
    index = (once, once if place == "where a run does" else once - 1)
    found[index] = 1 - found[index]
    judged = gates(replace(trial, other=lambda x: found))
    assert judged.verdict.outcome == ("AGREES" if place == "where a run does" else "OUT OF BOUND"), judged.verdict


def test_a_contract_without_sites_is_judged_by_its_derived_bound():
    silent = replace(GMM, contract=lambda case, backend: replace(GMM.contract(case, backend), sites={}, functions={}))
    judged = gates(Trial(silent, CASE, "gpu"))
    assert (judged.verdict.outcome, judged.fit) == ("AGREES", None)
    assert judged.verdict.reason == f"η = {judged.eta_max:.3g} (bound {judged.bound:.3g})"


def test_a_magnitude_that_is_not_derived_is_a_size_of_errors_over_the_roundoff():
    trial = Trial(replace(GMM, magnitude=None, chain=None), CASE, "gpu")
    given, contract, golden = trial.inputs, trial.contract, trial.reference.golden
    drawn = list(islice(typical_runs(trial.op, CASE, given, contract, golden), RUNS[0]))
    size = allowances(drawn, golden, contract.roundoff)["out"].size
    np.testing.assert_allclose(trial.scale("out").magnitude * contract.roundoff, size, rtol=1e-12)
    assert 0.8 < np.sqrt(np.mean(explained(trial)["out"].variance / size**2)) < 1.2


def test_a_verdict_by_the_contract_draws_no_unit_of_epsilon(monkeypatch):
    trial = Trial(replace(GMM, magnitude=None, chain=None), CASE.with_seed(1), "gpu")
    drawn = []
    monkeypatch.setattr("parity.judging.reference.typical_runs", lambda *given: drawn.append(1) or typical_runs(*given))
    judged = judge(trial)
    assert judged.verdict.passed and not drawn
    epsilon = [judged.outputs["out"].epsilon, judged.summary()["epsilon"]]
    assert len(set(epsilon)) == len(drawn) == 1 and 0 < epsilon[0] < trial.contract.roundoff


def test_kernels_that_err_as_much_have_the_same_epsilon():
    """The TPU splits what is decayed of k, the GPU of v: in σ of the GPU's own runs the TPU's error was 2.2 times."""
    case = next(c for c in FORWARD.cases if (c.data, c.dtype) == ("wide", "bfloat16"))
    epsilon = {
        backend: [measure_contract(Trial(FORWARD, case.with_seed(n), backend))["ht"].epsilon for n in range(8)]
        for backend in ("tpu", "gpu")
    }
    assert abs(np.mean(np.log(epsilon["tpu"]) - np.log(epsilon["gpu"]))) < 0.1


@pytest.mark.parametrize(("backend", "of"), [("tpu", "tpu"), ("gpu", "gpu"), ("gpu", "tpu")])
def test_the_runs_of_a_trial_are_of_its_own_contract(backend, of, monkeypatch):
    op = next(op for op in CHUNK_SIMPLE_GLA if op.name.endswith("_fwd"))
    case = next(c for c in op.cases if c.tier == "smoke")
    trial, contract = Trial(op, case, backend), op.contract(case, of)
    monkeypatch.setitem(vars(trial), "contract", contract)
    assert (trial.reference.chain, trial.scale("o").fan_in) == (0, 0)
    drawn = runs(op, case, trial.inputs, contract, trial.reference.golden)
    for ours, expected in islice(zip(trial.runs(), drawn, strict=False), RUNS[0] + 1):
        for name, y in expected.items():
            np.testing.assert_array_equal(ours[name], y, err_msg=name)


def test_what_shows_of_an_error_is_the_same_up_and_down():
    """Of an output of bfloat16, whose two neighbours are where a golden may go; those of -golden are the same two.

    Rounding at random makes twice the variance of rounding to nearest.
    """
    rng = np.random.default_rng(0)
    golden, noise = rng.uniform(1.0, 2.0, (64, 64)), 2.0**-9 * rng.standard_normal((9, 64, 64))
    runs, y = 2**0.5 * noise[1:], round_to(golden + noise[0], "bfloat16")
    up, down = (
        Allowance.of(sign * golden, sign * runs, 2.0**-24).fit("o", (sign * y).astype(y.dtype), {}) for sign in (1, -1)
    )
    assert up == down
    assert 0.9 < up.ratio < 1.1


def test_a_rounded_output_has_the_freedom_that_its_errors_scatter_with():
    """ν = 2 · mean² / variance of Σ δ², of bfloat16 outputs whose error hardly reaches the next number."""
    rng = np.random.default_rng(0)
    golden = rng.uniform(1.0, 2.0, (32, 32))
    noise = 2.0**-9 * rng.standard_normal((432, 32, 32))
    allowed = Allowance.of(golden, 2**0.5 * noise[:32], 2.0**-24)
    ys = (round_to(golden + e, "bfloat16") for e in noise[32:])
    sums = [float(np.sum(explained_by(y, golden) ** 2 / allowed.smooth)) for y in ys]
    fit = allowed.fit("o", round_to(golden + noise[-1], "bfloat16"), {})
    assert fit.freedom[0] == pytest.approx(2 * np.mean(sums) ** 2 / np.var(sums), rel=0.3)


def test_what_an_element_may_err_follows_its_row_and_column():
    """Of 32 runs: a product of a row's and a column's variance is found again, a constant would be off by 100."""
    sizes = np.outer(np.geomspace(1, 10, 40), np.geomspace(1, 10, 32))
    allowed = Allowance.of(np.zeros(sizes.shape), sizes * np.random.default_rng(0).standard_normal((32, 40, 32)), U)
    assert np.abs(np.log2(allowed.smooth / (sizes**2 / 2))).max() < 0.5


def test_an_element_that_no_run_moves_may_be_flushed_and_no_more():
    allowed = Allowance.of(np.zeros((4, 4)), np.zeros((8, 4, 4)), U)
    for error, beyond in ((2.0**-126, 0), (2.0**-100, 16)):
        assert allowed.fit("out", np.full((4, 4), error, np.float32), {}).beyond == beyond
