"""`parity diff` says what moved and who moved it; `parity show` shows one record."""

import json
import math
from dataclasses import replace

import pytest

from parity.backends import EMULATED
from parity.ledger.diff import describe, diff, in_contracts, load, matches, regressed, show, to_json
from parity.ledger.schema import RecordError, ledger_path
from tests.support import records
from tests.support.commands import git
from tests.support.records import HASH, keep

PROVENANCE = replace(
    records.PROVENANCE, backend="tpu", flags={"XLA_FLAGS": "--old"},
    revisions={"inputs": 1, "magnitude": 1, "metrics": 1},
    versions={"python": "3.11.9", "jax": "0.10.2", "libtpu": "0.0.51"},
)  # fmt: skip
METRICS = replace(
    records.METRICS, elements=4096, scored=4096, epsilon=1e-7, floor=5e-8, eta_max=3.0, eta_q999=2.0, bias=-0.01,
    wrong_finiteness=0, histogram=(*[0] * 31, 7, 3, *[0] * 31), tiles=((0.5, 1.0), (0.0, 0.0)),
)  # fmt: skip
RECORD = replace(
    records.RECORD, case="double-M64_N64-f32-s0", seed=0, tiles=None, verdict="AGREES", outputs={"out": METRICS},
    contract_epsilon=1.1e-7, provenance=PROVENANCE,
)  # fmt: skip
BASE = [replace(RECORD, seed=seed) for seed in range(8)]
H100 = dict(device_kind="NVIDIA H100", real=True, backend="gpu")


def ledgers(given):
    found = {}
    for record in given:
        p = record.provenance
        found.setdefault((p.backend, p.device_kind, p.op), {})[record.key] = record
    return found


def changed(given=BASE, *, scale=1.0, where=None, metrics=None, **changes):
    """The same records with other provenance (`where`), ε times `scale`, other metrics, other fields."""
    return [
        replace(
            record,
            outputs={
                name: replace(m, epsilon=m.epsilon * scale, **metrics or {}) for name, m in record.outputs.items()
            },
            provenance=replace(record.provenance, **where or {}),
            **changes,
        )
        for record in given
    ]


def of_one_case(a, b):
    (of_op,) = diff(ledgers(a), ledgers(b))
    (case,) = of_op.cases
    return case


# --- what ---


@pytest.mark.parametrize(
    ("scale", "change"), [(1.4, "worse"), (0.7, "better"), (1.0, "unchanged"), (1.02, "unchanged"), (0.98, "unchanged")]
)
def test_a_change_counts_beyond_noise(scale, change):
    # z · 1.26 / √4096 / √8 = 2.8 %
    case = of_one_case(BASE, changed(scale=scale))
    assert (case.change, case.seeds, case.ratio.statistic) == (change, 8, "ε")
    assert case.ratio.ratio == pytest.approx(scale)
    assert math.log(case.ratio.high / case.ratio.low) == pytest.approx(2 * 4 * 1.26 / 64 / math.sqrt(8))
    assert case.cause == (
        "noise only" if change == "unchanged" else "unexplained (same kernel, versions, device and inputs)"
    )


def test_a_spread_between_seeds_widens_the_interval():
    noisy = [changed([r], scale=2.0 if r.seed % 2 else 0.6)[0] for r in BASE]
    assert of_one_case(BASE, noisy).change == "unchanged"
    assert of_one_case(BASE[:1], changed(BASE[:1], scale=1.07)).change == "unchanged"  # one seed: 8.2 %
    assert of_one_case(BASE, changed(scale=1.07)).change == "worse"


def test_a_narrow_output_is_compared_by_its_misround_rate():
    contract = "native/float32/bfloat16"
    at_floor = changed(contract=contract, metrics=dict(floor=1e-7, misrounded=0.01))
    worse = changed(at_floor, metrics=dict(misrounded=0.03))
    case = of_one_case(at_floor, worse)
    assert (case.change, case.ratio.statistic) == ("worse", "misround rate")
    assert case.ratio.ratio == pytest.approx(3, rel=0.02)
    bfloat16_sums = changed(worse, scale=4, contract="native/bfloat16/bfloat16")
    case = of_one_case(at_floor, bfloat16_sums)
    assert (case.change, case.ratio.statistic) == ("worse", "ε")


def test_nearly_perfect_rounding_is_not_worse_than_perfect():
    perfect = changed(metrics=dict(floor=1e-7))
    assert of_one_case(perfect, changed(perfect, scale=1.04)).change == "unchanged"
    assert of_one_case(perfect, changed(perfect, scale=1.06)).change == "worse"


def test_a_changed_verdict_outweighs_epsilon():
    fault = [changed([r], scale=0.5, verdict="LOGIC FAULT" if r.seed == 5 else "AGREES")[0] for r in BASE]
    case = of_one_case(BASE, fault)
    assert (case.change, case.verdicts) == ("worse", ("AGREES", "LOGIC FAULT"))
    assert of_one_case(fault, BASE).change == "better"
    crashed = changed(outputs_none := [replace(r, outputs={}) for r in BASE], verdict="WRONG SHAPE")
    assert of_one_case(BASE, crashed).change == "worse"
    assert of_one_case(BASE, crashed).ratio is None
    assert of_one_case(crashed, outputs_none).change == "better"


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_an_epsilon_that_is_no_number_is_worse(bad):
    assert of_one_case(BASE, changed(metrics=dict(floor=bad), scale=bad)).change == "worse"
    assert of_one_case(changed(scale=bad), BASE).change == "better"


@pytest.mark.parametrize(
    ("before", "after", "change", "words"),
    [
        (dict(eta_q999=2.0), dict(eta_q999=3.6), "worse", "tail 1.8×"),
        (dict(eta_q999=3.6), dict(eta_q999=2.0), "better", "tail 0.556×"),
        (dict(eta_q999=2.0), dict(eta_q999=2.9), "unchanged", ""),
        (dict(eta_q999=2.0), dict(eta_q999=3.2), "unchanged", ""),  # sampling makes as much of 1.5 times
        (dict(eta_q999=0.1), dict(eta_q999=0.9), "unchanged", ""),  # below one roundoff is no tail
        (dict(bias=-0.01), dict(bias=0.05), "worse", "bias 1.81 → 9.05"),
        (dict(bias=0.05), dict(bias=0.01), "better", "bias 9.05 → 1.81"),
        (dict(bias=-0.01), dict(bias=0.03), "unchanged", ""),
        (dict(bias=0.05), dict(bias=-0.055), "unchanged", ""),  # beyond 6, but not by more than sampling does
    ],
)
def test_a_tail_and_a_bias_count_beyond_the_verdicts_allowance(before, after, change, words):
    a, b = changed(metrics=before), changed(metrics=after, where=dict(kernel=HASH[::-1]))
    case = of_one_case(a, b)
    assert (case.change, case.beyond) == (change, (words,) if words else ())
    text = describe(diff(ledgers(a), ledgers(b)))
    assert (f"over 8 seeds   {words}   kernel" in text) == bool(words)
    assert json.loads(to_json(diff(ledgers(a), ledgers(b))))["ops"][0]["cases"][0]["beyond"] == list(case.beyond)


def test_a_better_epsilon_makes_up_for_no_tail():
    case = of_one_case(BASE, changed(scale=0.5, metrics=dict(eta_q999=4.0)))
    assert (case.change, case.beyond) == ("worse", ("tail 2×",))
    outputs = [replace(r, outputs={"dq": METRICS, "dk": replace(METRICS, bias=0.05)}) for r in BASE]
    start = [replace(r, outputs={"dq": METRICS, "dk": METRICS}) for r in BASE]
    case = of_one_case(start, outputs)
    assert (case.change, case.ratio.output, case.beyond) == ("worse", "dk", ("bias 1.81 → 9.05 of dk",))


def test_an_exact_output_that_no_longer_is():
    case = of_one_case(changed(scale=0.0), BASE)
    assert case.change == "worse"
    assert json.loads(to_json(diff(ledgers(changed(scale=0.0)), ledgers(BASE))))["regressed"]


def test_the_output_that_got_worse_most_decides():
    def outputs(dq, dk, dv):
        values = dict(dq=dq, dk=dk, dv=dv)
        return [replace(r, outputs={n: replace(METRICS, epsilon=v * 1e-7) for n, v in values.items()}) for r in BASE]

    assert of_one_case(outputs(1, 1, 1), outputs(1.2, 0.1, 1.5)).ratio.output == "dv"
    better = of_one_case(outputs(1, 1, 1), outputs(0.5, 1.01, 0.7))
    assert (better.change, better.ratio.output) == ("better", "dq")


def test_cases_and_seeds_that_only_one_has():
    other = changed(case="double-M8_N8-f32-s0")
    (of_op,) = diff(ledgers(BASE), ledgers(other))
    assert of_op.counts == {"only in A": 1, "only in B": 1}
    assert not regressed([of_op])
    assert of_one_case(BASE, changed(scale=2)[6:]).seeds == 2
    case = of_one_case(BASE[:4], BASE[4:])
    assert (case.change, case.cause) == ("not comparable", "no seed in common")


def test_ledgers_that_only_one_has():
    gpu = changed(where=dict(backend="gpu"))
    assert [(d.backend, d.counts) for d in diff(ledgers(BASE), ledgers(gpu))] == [
        ("gpu", {"only in B": 1}),
        ("tpu", {"only in A": 1}),
    ]


def test_changed_inputs_are_reported_but_not_compared():
    moved = [replace(r, inputs={"x": HASH[::-1]}) for r in changed(scale=3)]
    case = of_one_case(BASE, moved)
    assert (case.change, case.seeds, case.ratio, case.cause) == ("not comparable", 0, None, "generator")
    case = of_one_case(BASE, [*moved[:4], *changed(BASE[4:], seconds=0.5)])
    assert (case.change, case.seeds, case.moved) == ("unchanged", 4, ("generator",))
    assert of_one_case(BASE, changed(moved, verdict="OUT OF BOUND")).change == "worse"


# --- who ---


@pytest.mark.parametrize(
    ("where", "fields", "who"),
    [
        (dict(kernel=HASH[::-1]), {}, "kernel"),
        (dict(golden=HASH), {}, "golden"),
        (dict(revisions=PROVENANCE.revisions | {"inputs": 2}), {}, "generator"),
        (dict(versions=PROVENANCE.versions | {"jax": "0.11.2"}), {}, "framework jax 0.10.2 → 0.11.2"),
        (dict(versions=PROVENANCE.versions | {"libtpu": "0.0.52"}), {}, "compiler libtpu 0.0.51 → 0.0.52"),
        (dict(versions=PROVENANCE.versions | {"driver": "570.1"}), {}, "driver none → 570.1"),
        (dict(flags={}), {}, "flags XLA_FLAGS --old → none"),
        ({}, dict(contract="bf16x1/float32/float32"), "contract ieee/float32/float32 → bf16x1/float32/float32"),
        ({}, dict(tiles="64x64x64"), "tiles none → 64x64x64"),
    ],
)
def test_each_mover_is_named(where, fields, who):
    case = of_one_case(BASE, changed(scale=1.4, where=where, **fields))
    assert (case.change, case.moved, case.cause) == ("worse", (who,), who)


def test_an_upgraded_framework_in_a_copied_ledger_is_named(tmp_path):
    keep(tmp_path / "old", *BASE)
    old = load(str(tmp_path / "old"), tmp_path)
    (ledger,) = old.values()
    keep(tmp_path / "new", *changed(ledger.values(), where=dict(versions=PROVENANCE.versions | {"jax": "0.11.2"})))
    text = describe(diff(old, load(str(tmp_path / "new"), tmp_path)))
    assert text == "unchanged: 1 cases of 1 ledgers   who moved: framework jax 0.10.2 → 0.11.2"


@pytest.mark.parametrize("measure", ["metrics", "magnitude"])
def test_another_measure_is_not_compared(measure):
    case = of_one_case(BASE, changed(scale=1.4, where=dict(revisions=PROVENANCE.revisions | {measure: 2})))
    assert (case.change, case.cause) == ("not comparable", "metrics")


def test_the_only_accelerators_of_each_side_are_compared():
    a = changed(where=H100)
    b = changed(a, scale=1.4, where=dict(device_kind="NVIDIA H200"))
    (of_op,) = diff(ledgers([*a, *BASE]), ledgers(b))[:1]
    assert of_op.device_kind == "NVIDIA H100 → NVIDIA H200"
    assert of_op.cases[0].cause == "device NVIDIA H100 → NVIDIA H200"
    emulated = changed(a, where=dict(device_kind=EMULATED, real=False))
    assert {d.device_kind for d in diff(ledgers(a), ledgers(emulated))} == {"NVIDIA H100", EMULATED}
    two = [*b, *changed(b, where=dict(device_kind="NVIDIA B200"))]
    assert all("→" not in d.device_kind for d in diff(ledgers(a), ledgers(two)))


def test_several_movers_are_named_the_likeliest_first():
    where = dict(kernel=HASH[::-1], golden=HASH, versions={"jax": "0.11.2", "libtpu": "0.0.52", "python": "3.11.2"})
    first = of_one_case(BASE, changed(scale=1.4, where=where))
    assert first.cause == "kernel, compiler libtpu 0.0.51 → 0.0.52, framework jax 0.10.2 → 0.11.2, golden"


def test_a_contract_that_is_none_is_refused():
    with pytest.raises(RecordError, match="contract must be dot/accumulator/output, got 'ieee'"):
        of_one_case(BASE, changed(contract="ieee"))


# --- where from ---


def test_load_reads_files_and_folders(tmp_path):
    gpu = changed(where=H100)
    keep(tmp_path, *BASE, *gpu)
    both = ledgers([*BASE, *gpu])
    assert load(str(tmp_path), tmp_path) == both
    assert load(str(tmp_path / "tpu"), tmp_path) == ledgers(BASE)
    assert load(str(ledger_path(tmp_path, "gpu", "NVIDIA H100", "double")), tmp_path) == ledgers(gpu)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(ledger_path(tmp_path, "tpu", EMULATED, "double").read_bytes())
    assert load(str(copy), tmp_path) == ledgers(BASE)
    with pytest.raises(RecordError, match="another ledger has it"):
        load(str(tmp_path), tmp_path)
    copy.write_text("{}\n")
    with pytest.raises(RecordError, match=r"copy.jsonl:1: provenance must be"):
        load(str(copy), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must be a ledger or hold some"):
        load(str(tmp_path / "empty"), tmp_path)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "nothing")
    keep(tmp_path / "records", *BASE)
    git(tmp_path, "add", "-f", "records/tpu")
    git(tmp_path, "commit", "-q", "-m", "records")
    return tmp_path


def test_load_reads_revisions(repository):
    root = repository
    keep(root / "records", *changed(scale=1.4, where=dict(kernel=HASH[::-1], utc="2026-02-01T00:00:00Z")))
    git(root, "commit", "-q", "-a", "-m", "worse")
    git(root, "tag", "v1.0", "HEAD~1")
    for revision in ("v1.0", "HEAD^", "HEAD~1", "@~1"):
        assert load(revision, root) == ledgers(BASE)
    (of_op,) = diff(load("HEAD~1", root), load("HEAD", root))
    assert (of_op.counts, of_op.cause) == ({"worse": 1}, "kernel")
    with pytest.raises(ValueError, match="HEAD~2:records must be a ledger or hold some"):
        load("HEAD~2", root)


def test_a_path_comes_before_a_revision(repository, monkeypatch):
    root = repository
    git(root, "tag", "old")
    keep(root / "old", *changed(scale=2))
    monkeypatch.chdir(root)
    assert load("old", root) == ledgers(changed(scale=2))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-h",
        "--output=x",
        "HEAD..HEAD",
        "HEAD:records",
        "no such",
        "nosuch",
        "$(id)",
        "a\0b",
        "a\nb",
        "../HEAD",
        "x" * 999,
    ],
)
def test_what_is_no_source_is_refused(repository, name):
    root = repository
    with pytest.raises(ValueError, match="must be a ledger, a folder of ledgers or a revision of the repository"):
        load(name, root)


def test_links_and_bad_lines_in_a_revision(repository):
    root = repository
    (root / "secret").write_text("secret\n")
    (root / "records" / "link.jsonl").symlink_to(root / "secret")
    git(root, "add", "-f", "records/link.jsonl")
    git(root, "commit", "-q", "-m", "link")
    assert load("HEAD", root) == ledgers(BASE)
    (root / "records" / "bad.jsonl").write_text("[]\n")
    git(root, "add", "-f", "records/bad.jsonl")
    git(root, "commit", "-q", "-m", "bad")
    with pytest.raises(RecordError, match=r"^HEAD:records/bad.jsonl:1: must be an object"):
        load("HEAD", root)


# --- told ---


def test_describe_names_the_worst_cases_first():
    sizes = {"double-M1-f32-s0": 1.1, "double-M2-f32-s0": 1.42, "double-M3-f32-s0": 0.5, "double-M4-f32-s0": 1.0}
    a = [r for name in sizes for r in changed(case=name)]
    b = [r for name, x in sizes.items() for r in changed(case=name, scale=x, where=dict(kernel=HASH[::-1]))]
    found = diff(ledgers(a), ledgers(b))
    assert describe(found, worst=2).splitlines() == [
        "double  tpu emulated: 2 worse, 1 better, 1 unchanged   who moved: kernel",
        "  worse  double-M2-f32-s0   ε 1.42× [1.38, 1.46] over 8 seeds   kernel",
        "  worse  double-M1-f32-s0   ε 1.10× [1.07, 1.13] over 8 seeds   kernel",
        "  … and 1 more",
    ]
    assert regressed(found)
    same = diff(ledgers(a), ledgers(a))
    assert describe(same) == "unchanged: 4 cases of 1 ledgers"
    assert not regressed(same)
    assert describe([]) == ""


def test_describe_shows_a_changed_verdict():
    text = describe(diff(ledgers(BASE), ledgers(changed(verdict="OUT OF BOUND"))))
    assert "ε 1.0000× [0.9725, 1.0282] over 8 seeds   AGREES → OUT OF BOUND   unexplained" in text


def of_a_contract_of(epsilon):
    return lambda record: {name: m.epsilon / epsilon for name, m in record.outputs.items()}


def test_what_moved_is_told_in_terms_of_the_contract():
    a, b = ledgers(BASE), ledgers(changed(scale=3.0))
    (of_op,) = found = in_contracts(diff(a, b), a, b, of_a_contract_of(1e-7))
    assert of_op.cases[0].contract == pytest.approx((1.0, 3.0))
    assert "over 8 seeds   1 → 3 × its contract   unexplained" in describe(found)
    assert json.loads(to_json(found))["ops"][0]["cases"][0]["contract"] == pytest.approx([1.0, 3.0])


def test_nothing_is_told_of_a_contract_that_is_not_known_for_a_seed():
    a, b = ledgers(BASE), ledgers(changed(scale=3.0))
    found = in_contracts(diff(a, b), a, b, lambda record: {"out": 1.0} if record.seed else {})
    assert "contract" not in describe(found)


def test_both_kinds_of_device_are_held_to_the_contract():
    a = ledgers(changed(where=H100))
    b = ledgers(changed(scale=3.0, where={**H100, "device_kind": "NVIDIA H200"}))
    (of_op,) = in_contracts(diff(a, b), a, b, of_a_contract_of(1e-7))
    assert of_op.device_kinds == ("NVIDIA H100", "NVIDIA H200")
    assert of_op.cases[0].contract == pytest.approx((1.0, 3.0))


def test_json_keeps_everything():
    found = diff(ledgers(BASE), ledgers(changed(scale=1.4, where=dict(kernel=HASH[::-1]))))
    document = json.loads(to_json(found))
    assert (document["schema"], document["regressed"]) == (1, True)
    (of_op,) = document["ops"]
    assert {k: of_op[k] for k in ("backend", "device_kind", "op", "counts", "cause")} == {
        "backend": "tpu", "device_kind": EMULATED, "op": "double", "counts": {"worse": 1}, "cause": "kernel",
    }  # fmt: skip
    (case,) = of_op["cases"]
    assert case["moved"] == ["kernel"]
    assert case["ratio"]["ratio"] == found[0].cases[0].ratio.ratio
    assert to_json(found) == to_json(
        diff(ledgers(BASE[::-1]), ledgers(changed(scale=1.4, where=dict(kernel=HASH[::-1]))))
    )


def test_show_prints_what_was_recorded():
    worst = changed(BASE[3:4], metrics=dict(eta_max=60.0))
    given = [*BASE[:3], *worst, *BASE[4:], *changed(where=H100, verdict="OUT OF BOUND")]
    text = show(given, lambda record: {"out": 0.984} if record.seed == 3 else {})
    gpu, tpu = text.split("\n\n")
    assert gpu.splitlines()[:2] == [
        "double-M64_N64-f32-s0   8 OUT OF BOUND",
        "gpu NVIDIA H100   contract ieee/float32/float32   tiles chosen by the kernel",
    ]
    for expected in (
        "double-M64_N64-f32-s0   8 AGREES",
        "recorded 2026-01-31T23:59:59Z at commit d21663a with local changes   "
        "kernel 0123456789ab   golden fedcba987654",
        "versions jax 0.10.2, libtpu 0.0.51, python 3.11.9",
        "flags XLA_FLAGS='--old'",
        "out: ε = 1e-07 over 8 seeds",
        "      2     1e-07     5e-08     25.00%               –  AGREES",
        "      3     1e-07     5e-08     25.00%            0.98  AGREES",
        "  worst η 60 at [1, 2], seed 3",
        "  η  2^-1 █▄ 2^1",
        "    |▒▒██|",
    ):
        assert expected in tpu.splitlines(), expected


def test_show_takes_records_with_nothing_measured():
    text = show(
        [replace(RECORD, outputs={}, verdict="WRONG SHAPE", provenance=replace(PROVENANCE, commit=None, flags={}))]
    )
    assert "1 WRONG SHAPE" in text
    assert "at commit unknown" in text
    empty = replace(METRICS, worst=(), histogram=(0,) * 64, tiles=(), epsilon=1e300)
    assert "ε = 1e+300" in show([replace(RECORD, outputs={"out": empty})] * 2)
    assert show([]) == ""


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("gmm", True), ("GMM and zipf", True), ("gmm and not zipf", False), ("(f32 or bf16) and M512", True),
        ("tgmm", False), ("", True), ("  ", True), ("gmm-M512_K256-bf16-zipf-s3", True),
    ],
)  # fmt: skip
def test_matches_as_pytest_does(expression, found):
    assert matches(expression, "gmm-M512_K256-bf16-zipf-s3") is found


@pytest.mark.parametrize("expression", ["gmm and", "(gmm", "gmm)", "not", "a = b", "gmm!", "f(x=1)", "(" * 9999])
def test_malformed_expressions_are_refused(expression):
    with pytest.raises(ValueError, match="-k "):
        matches(expression, "gmm")


def test_seeds_not_recorded_again_do_not_hide_the_one_that_was():
    again = changed(BASE[:1], scale=8.0, where=dict(kernel="f" * 64))
    case = of_one_case(BASE, [*again, *BASE[1:]])
    assert (case.change, case.seeds) == ("worse", 1)
    assert "kernel" in case.cause
