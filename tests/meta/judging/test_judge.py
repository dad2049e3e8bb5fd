"""What the judge does beside the verdicts, on an op that has one line: how often kernels run, on which seeds, what of
several outputs decides, and which element is shown."""

import itertools
import pickle
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from parity.declared import DeclarationError
from parity.dtypes import round_to
from parity.judging.fit import RUNS
from parity.judging.judge import compare, explained, judge, twin_of
from parity.judging.magnitude import abs_of
from parity.judging.reference import reference
from parity.judging.verdict import SEEDS, Comparison, Verdict
from parity.op import Array, Case, Contract, Expected, Op
from parity.report import text
from parity.trial import Trial

U32 = 2.0**-24
SHAPE = (6, 8)


class Pair(NamedTuple):
    """Two outputs."""

    a: Any
    b: Any


def third(x, stages=lambda site, value: value):
    return stages("out", x.astype(np.float64) / 3)


def both(x, stages=lambda site, value: value):
    return Pair(third(x, stages), -third(x, stages))


def op(golden=third, **changes):
    fields = dict(
        name="third", golden=golden, tpu="on:tpu", gpu="on:gpu", defaults={},
        inputs=lambda case: {"x": Array(SHAPE, "float32", sum_over=1)},
        arguments=lambda case: {},
        contract=lambda case, backend: Contract("ieee", "float32"),
        chain=lambda case, inputs: 1,
        magnitude=abs_of("x"),
        unread=lambda case, inputs: {"x": np.zeros(SHAPE, bool)},
    )  # fmt: skip
    return Op(**fields | changes)


CASE = Case("third", (("M", SHAPE[0]), ("N", SHAPE[1])), "float32", "float32")


def kernel(x, **arguments):
    return round_to(third(x), "float32")


@pytest.fixture
def device(monkeypatch):
    """Kernels are NumPy's, by the name of their backend in `kernels`; what ran is in `ran`."""
    kept = SimpleNamespace(real=False, kernels=dict.fromkeys(("on:tpu", "on:gpu"), kernel), ran=[])

    def run(function, inputs, arguments):
        kept.ran.append((function, inputs["x"].tobytes(), arguments))
        return function(**inputs, **arguments)

    for module in ("parity.judging.judge", "parity.trial"):
        monkeypatch.setattr(f"{module}.runner", lambda backend: SimpleNamespace(real=kept.real, run=run))
    monkeypatch.setattr("parity.trial.load_kernel", lambda target: kept.kernels[target])
    return kept


@pytest.mark.parametrize(
    ("real", "data", "tier", "seed", "dtype"),
    [*itertools.product((False, True), ("normal", "integers"), ("smoke", "default", "full"), (0, 1), ["float32"]),
     (False, "normal", "smoke", 0, "bfloat16"), (True, "normal", "smoke", 0, "bfloat16")],
)  # fmt: skip
def test_a_kernel_runs_twice_where_runs_may_differ_and_interpreted_in_a_sample(device, real, data, tier, seed, dtype):
    """Of the smoke tier, in the first dtype that this has."""
    device.real = real
    case = Case(CASE.op, CASE.dims, dtype, "float32", data=data, tier=tier, seed=seed)
    of_multiples = op(lambda x, stages=None: 3 * third(x))  # exact, of integers as well
    of_multiples = of_multiples.with_cases([replace(CASE, tier="smoke"), case])
    assert judge(Trial(of_multiples, case, "tpu", lambda x: round_to(3 * third(x), "float32"))).verdict.passed
    twice = data == "normal" and (real or (tier, seed, dtype) == ("smoke", 0, "float32"))
    assert len(device.ran) == 1 + twice


def test_two_runs_that_differ_are_seen(device):
    device.real, runs = True, itertools.count()
    judged = judge(Trial(op(), CASE, "tpu", lambda x: np.nextafter(kernel(x), np.float32(next(runs)))))
    assert judged.verdict.outcome == "NOT REPEATABLE"
    assert (judged.real, judged.backend, judged.bound) == (True, "tpu", 3.0)


def test_arguments_and_route_are_the_kernels_and_its_time_is_taken(device):
    routed = op(arguments=lambda case: {}, route=lambda case: {"way": "short"})
    judged = judge(Trial(routed, CASE, "gpu"))
    assert [(function, arguments) for function, _, arguments in device.ran] == [(kernel, {"way": "short"})]
    assert 0 < judged.seconds < 60
    assert judged.summary() == dict(
        op="third", case=CASE.id, backend="gpu", real=False, bound=3.0, outcome="AGREES", gate="G3",
        reason=judged.verdict.reason, passed=True, epsilon=judged.metrics.epsilon, eta_max=judged.metrics.eta_max,
        load=judged.load,
    )  # fmt: skip
    assert judged.eta_max == 0


def test_a_judgement_goes_to_another_process(device):
    """As those of `parity shrink` come from theirs; the op's magnitude is a closure."""
    judged = judge(Trial(op(), CASE, "tpu"))
    assert pickle.loads(pickle.dumps(judged)) == judged and judged.outputs


def test_the_worst_element_and_where_the_bad_ones_lie_are_told(device):
    golden = reference(op(), CASE).golden["out"]
    off = golden.copy()
    off[2, 1] *= 1 + 4 * U32  # beyond the bound of 3
    off[4, 6] *= 1 + 16 * U32
    off[5, 7] *= 1 + 2 * U32  # within it
    worst = judge(Trial(op(), CASE, "tpu", lambda x: round_to(off, "float32"))).worst
    assert (worst.index, worst.golden, worst.box, worst.beyond) == ((4, 6), golden[4, 6], ((2, 4), (1, 6)), 2)
    assert worst.got == np.float32(off[4, 6])
    assert worst.allowed == pytest.approx(3 * U32 * abs(golden[4, 6]))
    off[0, 3] = np.nan
    judged = judge(Trial(op(), CASE, "tpu", lambda x: round_to(off, "float32")))
    assert judged.verdict.outcome == "NON-FINITE" and judged.eta_max == np.inf
    assert (judged.worst.index, judged.worst.box, judged.worst.beyond) == ((0, 3), ((0, 4), (1, 6)), 3)
    assert judge(Trial(op(), CASE, "tpu", kernel)).worst.beyond == 0


def test_of_integer_data_only_the_elements_that_differ_are_bad(device):
    case, exact = CASE.with_data("integers"), op(lambda x, stages=None: 3 * third(x))
    golden = reference(exact, case).golden["out"]
    off = golden.copy()
    off[3, 5] += 1
    judged = judge(Trial(exact, case, "tpu", lambda x: off.astype(np.float32)))
    assert (judged.verdict.outcome, judged.bound) == ("LOGIC FAULT", 0)
    assert (judged.worst.index, judged.worst.box, judged.worst.beyond) == ((3, 5), ((3, 3), (5, 5)), 1)


def test_what_fails_on_integers_too_is_a_logic_fault(device):
    def same(x, stages=None):  # exact, of integers as well
        return x.astype(np.float64)

    logic = judge(Trial(op(same), CASE, "tpu", lambda x: -x))
    assert (logic.verdict.outcome, logic.twin.verdict.outcome) == ("LOGIC FAULT", "LOGIC FAULT")
    coarse = Trial(op(same), CASE, "tpu", lambda x: round_to(x, "bfloat16").astype(np.float32))
    precision = judge(coarse)
    assert (precision.verdict.outcome, precision.twin.verdict.outcome) == ("OUT OF BOUND", "EXACT")
    assert judge(coarse, twin=logic.twin).verdict.outcome == "LOGIC FAULT"


def test_an_unknown_twin_is_judged_and_a_known_one_kept(device):
    trial = Trial(op(lambda x, stages=None: 3 * third(x)), CASE, "gpu", lambda x: round_to(3 * third(x), "float32"))
    judged = judge(trial)
    twin = twin_of(trial, judged)
    assert twin is not None and twin.case.data == "integers"
    assert twin_of(trial, replace(judged, twin=judged)) is judged
    ended = judge(Trial(trial.op, CASE, "gpu", lambda x: 1 / 0))
    assert ended.ended and ended.seconds == 0.0
    assert twin_of(trial, ended) is None


def test_a_golden_that_is_not_exact_on_integers_has_no_twin(device):
    judged = judge(Trial(op(), CASE, "tpu", lambda x: kernel(x) * np.float32(2)))
    assert judged.twin is None and judged.verdict.outcome == "OUT OF BOUND"
    assert text.NO_TWIN in text.failure(judged, twin_of(Trial(op(), CASE, "tpu"), judged), "pytest")


@pytest.mark.parametrize("twin", [True, False])
def test_inexact_integer_data_are_judged_by_the_contract(device, twin):
    trial = Trial(op(twin=twin), CASE.with_data("integers"), "tpu")
    assert not trial.exact and judge(trial).verdict.outcome == "AGREES"
    wrong = judge(replace(trial, other=lambda x: kernel(x) * np.float32(2)))
    assert (wrong.verdict.gate, wrong.twin) == ("G3", None)


def test_an_op_that_declares_no_twin_is_not_run_on_integer_data(device):
    exact = op(lambda x, stages=lambda site, value: value: x.astype(np.float64), twin=False)
    judged = judge(Trial(exact, CASE, "tpu", lambda x: x * np.float32(2)))
    assert judged.verdict.outcome == "OUT OF BOUND" and judged.twin is None
    assert judge(replace(Trial(exact, CASE, "tpu", lambda x: x * np.float32(2)), op=replace(exact, twin=True))).twin


def test_a_case_whose_bound_lets_anything_pass_is_not_passed(device):
    vague = op(magnitude=lambda op, case, inputs: 1e9 * np.ones(SHAPE))
    assert judge(Trial(vague, CASE, "tpu")).verdict.outcome == "MISTRUSTED"
    wrong = judge(Trial(vague, CASE, "tpu", lambda x: kernel(x) + np.float32(1e9)))
    assert wrong.verdict.outcome == "OUT OF BOUND"  # said first: it is so whatever the case is worth


def test_what_has_another_shape_is_not_measured_and_what_has_another_dtype_is(device):
    shape = judge(Trial(op(), CASE, "tpu", lambda x: kernel(x)[1:]))
    assert (shape.verdict.outcome, shape.metrics, shape.worst, shape.outputs) == ("WRONG SHAPE", None, None, {})
    assert shape.eta_max == np.inf and not {"epsilon", "eta_max"} & set(shape.summary())
    dtype = judge(Trial(op(), CASE, "tpu", lambda x: third(x)))
    assert dtype.verdict.outcome == "WRONG DTYPE" and dtype.metrics.elements == 48 and dtype.worst.beyond == 0
    names = judge(Trial(op(), CASE, "tpu", lambda x: Pair(kernel(x), None)))
    assert (names.verdict.outcome, names.verdict.gate) == ("WRONG OUTPUTS", "G1")
    assert names.verdict.reason == "golden returns out, got a"
    assert (names.bound, names.outputs) == (0, {}) and 0 < names.seconds < 60


@pytest.mark.parametrize("dtype", [bool, np.int32, np.complex64])
def test_what_holds_no_floating_point_numbers_is_not_measured(dtype, device):
    judged = judge(Trial(op(), CASE, "tpu", lambda x: kernel(x).astype(dtype)))
    assert (judged.verdict.outcome, judged.metrics, judged.worst) == ("WRONG DTYPE", None, None)


def test_an_output_without_elements_has_no_worst_one(device):
    empty = op(inputs=lambda case: {"x": Array((0, 8), "float32")})
    judged = judge(Trial(empty, CASE, "tpu", lambda x: third(x)))
    assert (judged.verdict.outcome, judged.worst) == ("WRONG DTYPE", None)


@pytest.mark.parametrize(
    ("data", "factor", "outcome"),
    [
        ("normal", 1, "AGREES"),
        ("normal", 2, "LOGIC FAULT"),
        ("normal", np.nan, "NON-FINITE"),
        ("integers", 1, "EXACT"),
        ("integers", 2, "LOGIC FAULT"),
    ],
)
def test_an_output_of_no_axes_is_judged_as_any_other(device, data, factor, outcome):
    def most(x, stages=None):
        return np.array(np.abs(x.astype(np.float64)).max())

    loss = op(most, magnitude=lambda op, case, inputs: most(**inputs))
    judged = judge(Trial(loss, CASE.with_data(data), "tpu", lambda x: round_to(factor * most(x), "float32")))
    assert judged.verdict.outcome == outcome
    assert (judged.metrics.elements, judged.metrics.worst) == (1, ((),))
    assert (judged.worst.index, judged.worst.box, judged.worst.beyond) == ((), (), int(factor != 1))


def test_a_comparison_runs_both_backends_on_consecutive_seeds(device):
    compared = compare(op(), CASE.with_seed(5), 3)
    assert {backend: [j.case.seed for j in js] for backend, js in compared.judged.items()} == {
        "tpu": [5, 6, 7],
        "gpu": [5, 6, 7],
    }
    assert len(compared.everything) == 6 and len({x for _, x, _ in device.ran}) == 3
    assert compared.comparison.verdict.outcome == "TIE"
    errors = [j.metrics.epsilon for j in compared.judged["tpu"]]
    assert compared.epsilon("tpu") == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    device.ran.clear()
    again = compare(op(), CASE.with_seed(5), 3, recorded={"gpu": compared.judged["gpu"]})
    assert len(device.ran) == 3
    assert again.comparison == compared.comparison
    assert again.summary()["ratio"] == again.comparison.ratio == 1
    assert (again.summary()["outcome"], again.summary()["passed"]) == ("TIE", True)


def test_recorded_judgements_are_held_to_the_contract_of_what_recorded_them(device, monkeypatch):
    held = []
    monkeypatch.setattr(
        "parity.judging.judge.explained", lambda trial: held.append((trial.backend, trial.device)) or {}
    )
    here = compare(op(), CASE, 2).judged["gpu"]
    compare(op(), CASE, 2, recorded={"gpu": [replace(judged, device="NVIDIA H200") for judged in here]})
    assert held == [("gpu", "NVIDIA H200")] * 2


def test_a_kernel_that_fails_against_the_golden_is_not_compared(device):
    def fails(x):
        y = kernel(x)
        return y if x.tobytes() != bad else -y

    bad = reference(op(), CASE.with_seed(1)).inputs["x"].tobytes()
    device.kernels["on:gpu"] = fails
    compared = compare(op(), CASE, 3)
    assert compared.comparison.verdict.outcome == "OUT OF BOUND"
    assert compared.comparison.verdict.reason.startswith("gpu, seed 1: η = ")
    assert np.isnan(compared.comparison.ratio)
    device.kernels["on:gpu"] = lambda x: kernel(x)[1:]
    assert np.isnan(compare(op(), CASE, 1).epsilon("gpu"))


def test_a_gpu_that_is_off_its_contract_is_no_reference(device):
    """By its records, which have agreed: its results are not here."""
    sited = op(contract=lambda case, backend: Contract("ieee", "float32", sites={"out": "float32"}))
    coarse = lambda x: round_to(third(x), "tf32").astype(np.float32)  # noqa: E731
    for gpu, outcome in ((kernel, "TIE"), (coarse, "UNFIT")):
        agreed = Verdict("AGREES", "G0", "recorded")
        recorded = [replace(judge(Trial(sited, CASE.with_seed(n), "gpu", gpu)), verdict=agreed) for n in range(3)]
        compared = compare(sited, CASE, 3, {"gpu": [replace(judged, fits={}) for judged in recorded]}).comparison
        assert compared.verdict.outcome == outcome
    assert compared.verdict.gate == "G4"
    assert re.fullmatch(r"gpu, out: [0-9.e+]+ × its contract over 3 seeds", compared.verdict.reason)


def test_the_summary_of_a_comparison_is_of_the_worst_seed(device):
    bad = reference(op(), CASE.with_seed(1)).inputs["x"].tobytes()
    nearly = lambda x: round_to(third(x) * (1 + 2 * U32), "float32") if x.tobytes() == bad else kernel(x)  # noqa: E731
    device.kernels["on:tpu"] = nearly
    compared = compare(op(), CASE, 3)
    assert compared.summary()["case"] == CASE.with_seed(1).id
    assert compared.summary()["eta_max"] > 0


@pytest.mark.parametrize(
    ("a", "b", "declared", "decides"),
    [
        (("LOSS", 8.0), ("TAIL", 2.0), "", "TAIL"),  # the known failure does not hide another
        (("TAIL", 2.0), ("LOSS", 8.0), "", "TAIL"),
        (("LOSS", 8.0), ("TIE", 9.0), "", "EXPECTED LOSS"),
        (("LOSS", 8.0), ("TIE", 9.0), Pair._fields[0], "EXPECTED LOSS"),
        (("LOSS", 8.0), ("LOSS", 2.0), Pair._fields[0], "LOSS"),
        (("TIE", 0.5), ("WIN", 0.25), "", "UNEXPECTED PASS"),
        (("TAIL", 2.0), ("BIAS", 3.0), "", "BIAS"),
    ],
)
def test_of_several_outputs_the_one_that_fails_unexpectedly_decides(device, monkeypatch, a, b, declared, decides):
    device.kernels = dict.fromkeys(device.kernels, lambda x: Pair(kernel(x), -kernel(x)))
    made = itertools.cycle(Comparison(Verdict(outcome, "G5", ""), ratio) for outcome, ratio in (a, b))
    monkeypatch.setattr("parity.judging.judge.verdict.compare", lambda *measured, **options: next(made))
    sizes = dict(magnitude=lambda op, case, inputs: Pair(*[third(np.abs(inputs["x"]))] * 2))
    known = op(both, **sizes, expected=(Expected(lambda case: True, "LOSS", "is known", declared),))
    compared = compare(known, CASE, 1)
    assert compared.comparison.verdict.outcome == decides
    assert compared.epsilon("tpu") > 0


@pytest.mark.parametrize(
    ("outcome", "gate", "more", "seeds"), [("TIE", "G5", {}, 3), ("LOSS", "G5", {}, SEEDS), ("BIAS", "G7", {}, SEEDS),
                                           ("LOSS", "G5", {"seeds": 80}, 80), ("LOSS", "G5", {"recorded": True}, 3)]
)  # fmt: skip
def test_what_fails_on_few_seeds_is_asked_again(device, monkeypatch, outcome, gate, more, seeds):
    """Where both backends are at hand. A failure against the golden needs no more."""
    asked = []

    def made(tpu, gpu, **options):
        asked.append((len(tpu), len(gpu)))
        return Comparison(Verdict(outcome, gate, ""), 1.5)

    recorded = {"gpu": compare(op(), CASE, 3).judged["gpu"]} if "recorded" in more else None
    monkeypatch.setattr("parity.judging.judge.verdict.compare", made)
    compared = compare(op(), CASE, more.get("seeds", 3), recorded)
    assert asked[-1] == (seeds, seeds)
    assert len(asked) == 1 + (seeds == SEEDS or seeds == 80)
    assert [judged.case.seed for judged in compared.judged["tpu"]] == list(range(seeds))
    assert len(device.ran) < 3 * (seeds + 3)
    device.kernels["on:gpu"] = lambda x: -kernel(x)
    assert len(compare(op(), CASE, 3).everything) == 6


def test_a_comparison_names_its_output_where_there_are_others(device):
    alone = compare(op(), CASE, 1).comparison
    assert not alone.verdict.reason.startswith(alone.output)
    device.kernels = dict.fromkeys(device.kernels, lambda x: Pair(kernel(x), -kernel(x)))
    of_two = op(both, magnitude=lambda op, case, inputs: Pair(*[third(np.abs(inputs["x"]))] * 2))
    found = compare(of_two, CASE, 1).comparison
    assert found.verdict.reason.startswith(f"{found.output}: ")


@pytest.mark.parametrize(("low", "decides"), [(1.1, "EXPECTED LOSS"), (1.3, "LOSS")])
def test_a_loss_is_held_to_what_both_contracts_make_of_it(device, monkeypatch, low, decides):
    """The TPU's explains 1.2 times the error that the GPU's does, in every seed."""
    monkeypatch.setattr(
        "parity.judging.judge.explained",
        lambda trial: {"out": SimpleNamespace(variance=np.full(CASE.N, 1.44 if trial.backend == "tpu" else 1.0))},
    )
    lost = Comparison(Verdict("LOSS", "G5", ""), 1.5, low, 2.0)
    monkeypatch.setattr("parity.judging.judge.verdict.compare", lambda *measured, **options: lost)
    compared = compare(op(expected=(Expected(lambda case: True, "LOSS", "is known", explained=True),)), CASE, 3)
    assert compared.comparison.verdict.outcome == decides
    assert compared.comparison.explained == pytest.approx(1.2)


@pytest.mark.parametrize("silent", [("tpu", "gpu"), ("tpu",), ("gpu",)])
def test_no_loss_is_explained_by_a_contract_without_sites(device, monkeypatch, silent):
    of_one = {"out": SimpleNamespace(variance=np.ones(CASE.N))}
    monkeypatch.setattr("parity.judging.judge.explained", lambda trial: {} if trial.backend in silent else of_one)
    lost = Comparison(Verdict("LOSS", "G5", ""), 1.5, 1.1, 2.0)
    monkeypatch.setattr("parity.judging.judge.verdict.compare", lambda *measured, **options: lost)
    known = op(expected=(Expected(lambda case: True, "LOSS", "is known", explained=True),))
    with pytest.raises(DeclarationError, match="expected must not be explained where a contract names no sites"):
        compare(known, CASE, 1)


def test_the_magnitude_is_the_golden_of_the_absolute_values_of_what_is_named(device):
    pair = op(lambda x, y=None: x - (0 if y is None else y))
    x, y = -np.ones(2), np.array([2.0, -3.0])
    assert abs_of("x", "y")(pair, CASE, dict(x=x, y=y)).tolist() == [-1, -2]
    assert abs_of("x")(pair, CASE, dict(x=x, y=y)).tolist() == [-1, 4]
    assert abs_of("x", "y")(pair, CASE, dict(x=x, y=None)).tolist() == [1, 1]


def test_what_a_contract_explains_is_told_from_the_fewest_runs():
    """A golden each, of which the judge alone takes more, where a verdict needs them."""
    contract = Contract("ieee", "float32", sites={"out": "bfloat16"})
    allowed = explained(Trial(op(contract=lambda case, backend: contract), CASE, "gpu"))
    assert {name: len(of.runs) for name, of in allowed.items()} == {"out": RUNS[0]}
