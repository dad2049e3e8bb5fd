"""The HTML report: what it has in it, how large it gets, and that nothing in it is more than text."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import html5lib
import pytest

from parity import cli
from parity.cli import options
from parity.debugging.contrasts import Contrast
from parity.judging.verdict import PASSING
from parity.report import drawing, entries
from parity.report.entries import COMPARED, Entry, Measured, attribute
from parity.report.history import history
from parity.report.page import LIMIT, Run, write
from tests.support import projects
from tests.support.commands import git

HOSTILE = '<script>document.title="run"</script>&"\'<img src=x onerror=alert(1)>'
FIGURES = dict(epsilon=2.5e-9, floor=1e-9, misrounded=0.5, bias=-0.01, eta_max=0.9, eta_q999=0.3)
FIGURES |= dict(elements=32768, differing=906)
FIT = dict(load=0.26, fit="out: 2.3 σ (bound 8.86), 0.98 × its contract", worst="out[1, 2]: golden 0.5, got 0.5")
HISTOGRAM = tuple(range(40)) + (0,) * 24
TILES = tuple(tuple(float(8 * r + c) for c in range(8)) for r in range(8))


def measured(backend="tpu", outcome="AGREES", **given):
    given = dict(bound=429.0, figures=FIGURES, histogram=HISTOGRAM, tiles=TILES) | FIT | given
    provenance = dict(
        op="matmul", backend=backend, device_kind="emulated", kernel="a" * 64, golden="b" * 64, commit=None, dirty=None,
        versions={"numpy": "2.4.6"}, flags={},
    )  # fmt: skip
    return Measured(
        backend=backend, real=False, outcome=outcome, reason=f"G3: {FIT['fit']}", seed=0, output="out",
        contract="native/float32/bfloat16", seconds=0.7, provenance=provenance, **given,
    )  # fmt: skip


def entry(n=0, side="tpu", outcome="AGREES", op="matmul", **given):
    epsilon = {b: 2.5e-9 * (n % 9 + 1) / (2 if b == "tpu" else 1) for b in ("tpu", "gpu") if b in side}
    case = given.pop("case", f"{op}-M{n}_K2880_N128_G8-bf16_f32-shard32x128-zipf-s0")
    whole = dict(
        model="", measured=tuple(measured(b) for b in epsilon), epsilon=epsilon, reason=f"G3: {FIT['fit']}",
        ratio=(0.5, 0.4, 0.6) if side == COMPARED else None, passed=outcome in PASSING,
        rerun=f'pytest -n0 "tests/test_matmul_tpu.py::test_agrees_with_golden[{case}]"',
    )  # fmt: skip
    return Entry(op=op, case=case, side=side, outcome=outcome, **whole | given)


RUN = Run("pytest -n2", ("tpu emulated", "gpu emulated"), "2026-11-21T00:00:00Z")


@pytest.fixture
def page(tmp_path):
    def render(*judged, run=RUN, root=tmp_path):
        written = write(tmp_path / "report.html", judged, run, {".": root})
        text = written.path.read_text(encoding="utf-8")
        assert written.size == len(text.encode())
        return text

    return render


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_a_page_of_every_kind_of_entry_is_well_formed(page):
    text = page(
        entry(), entry(side="gpu"), entry(2, COMPARED, "WIN"), entry(3, COMPARED, "LOSS"),
        entry(4, COMPARED, "EXPECTED LOSS"),
        entry(5, outcome="LOGIC FAULT", attribution=("tpu: a logic fault in axis 0 5-7", "axis 0 5-7: all of it")),
        entry(6, measured=(measured(figures={}, histogram=(), tiles=()),), outcome="WRONG SHAPE", epsilon={}),
        replace(entry(7), measured=(measured(tiles=((float("inf"), 1.0), (0.0, 2.0))),)),
        replace(entry(8), measured=(), outcome="CRASH", passed=False),
        replace(entry(9), measured=(), outcome="SKIPPED", passed=None),
    )  # fmt: skip
    html5lib.HTMLParser(strict=True).parse(text)
    ids = [attributes["id"] for _, attributes in Elements(text).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {attributes["href"] for tag, attributes in Elements(text).found if tag == "a"}
    assert links and links <= {f"#{name}" for name in ids}
    for shown in (
        "4 of 10 judgements failed, 1 not made", "4 AGREES", "1 LOGIC FAULT", "1 EXPECTED LOSS, 1 LOSS, 1 WIN",
        "1 SKIPPED",
        "a logic fault in axis 0 5-7", "error 0.26 of its bound", FIT["fit"], "native/float32/bfloat16",
        "out[1, 2]: golden 0.5", "906 of 32,768",
        "tests/test_matmul_tpu.py::test_agrees_with_golden[matmul-M5_K2880", "aaaaaaaaaaaa", "No git repository here",
    ):  # fmt: skip
        assert shown in text.replace("&#34;", '"'), shown


def test_a_page_of_nothing_is_well_formed(page):
    text = page()
    html5lib.HTMLParser(strict=True).parse(text)
    assert "nothing was judged" in text


def test_what_is_hostile_is_shown_and_is_nothing_but_text(page):
    m = replace(measured(), reason=HOSTILE, contract=HOSTILE, worst=HOSTILE, output=HOSTILE)
    m = replace(m, provenance={**m.provenance, "device_kind": HOSTILE, "flags": {HOSTILE: HOSTILE}})
    hostile = Entry(
        op=HOSTILE, case=HOSTILE + "-s0", model=HOSTILE, side=COMPARED, outcome=HOSTILE, reason=HOSTILE, passed=False,
        rerun=HOSTILE, epsilon={"tpu": 1e-9, "gpu": 1e-8}, measured=(m,), record=HOSTILE, attribution=(HOSTILE,) * 2,
    )  # fmt: skip
    text = page(hostile, run=Run(HOSTILE, (HOSTILE,), HOSTILE, (HOSTILE,)))
    html5lib.HTMLParser(strict=True).parse(text)
    found = Elements(text).found
    assert [tag for tag, _ in found].count("script") == 1
    assert "img" not in {tag for tag, _ in found}
    assert not [a for _, attributes in found for a in attributes if a.startswith("on")]
    assert "&lt;script&gt;document.title=&#34;run&#34;&lt;/script&gt;" in text


def test_nothing_comes_from_the_network(page):
    text = page(entry(), entry(side="gpu"))
    assert not re.search(r"(https?:)?//\w|url\(|@import", text)
    assert not [a for _, attributes in Elements(text).found for a in attributes if a in ("src", "srcset", "data")]
    assert "default-src 'none'" in text


def many(count):
    sides = ("tpu", "gpu", COMPARED)
    passed = [entry(n // 3, sides[n % 3], ("AGREES", "AGREES", "TIE")[n % 3]) for n in range(count - 1)]
    return [*passed, entry(count, outcome="OUT OF BOUND")]


@pytest.mark.parametrize("count", [pytest.param(count, marks=pytest.mark.full) for count in (5000, 20000)])
def test_the_page_stays_under_its_limit_and_says_what_it_lacks(tmp_path, count):
    written = write(tmp_path / "report.html", many(count), RUN, {".": tmp_path})
    assert written.size == (tmp_path / "report.html").stat().st_size < LIMIT
    assert written.size > 0.99 * LIMIT  # what fits is there
    text = written.path.read_text()
    assert f"1 of {count} judgements failed" in text
    shown = Elements(text).found
    listed = sum(tag == "details" and attributes.get("id", "").startswith("c") for tag, attributes in shown)
    assert listed == written.listed
    assert (listed == count) == (count == 5000)
    assert (f"{listed} of {count} judgements are listed: the file stays under 5 MB" in text) == (listed < count)
    for one, what in (("<dl>", "listed with their figures"), ('class="histogram"', "drawn")):
        (number,) = re.findall(rf"(\d+) of {count} judgements are {what}", text)
        assert 200 <= int(number) <= text.count(one)
    first = text.index("✗ OUT OF BOUND", text.index('id="list"'))
    assert 'class="map"' in text[first : text.index("</details>", first)]  # what failed is drawn


def test_a_case_judged_twice_counts_once_as_the_worse(page):
    failed = entry(1, outcome="OUT OF BOUND", measured=(measured(outcome="OUT OF BOUND"),))
    compared = entry(1, COMPARED, "TIE")
    text = page(entry(0), entry(0), failed, compared)
    assert "1 AGREES, 1 OUT OF BOUND" in text


def test_the_scatter_is_logarithmic_and_has_its_diagonal():
    points = [drawing.Point(1e-8, 1e-8, "TIE", "same"), drawing.Point(1e-4, 1e-6, "WIN", "<better>")]
    text = drawing.scatter(points)
    shown = re.findall(r'translate\(([^)]*)\)"><title>([^<]*)</title>', text)
    places = {title: tuple(map(float, place.split())) for place, title in shown}
    (x0, y0), (x1, y1) = places["same"], places["&lt;better&gt;"]
    start, end = re.search(r'class="diagonal" d="M(\S+ \S+)L(\S+ \S+)"', text).groups()
    (dx0, dy0), (dx1, dy1) = (map(float, p.split()) for p in (start, end))
    assert y0 == pytest.approx(dy0 + (x0 - dx0) * (dy1 - dy0) / (dx1 - dx0), abs=0.2)  # on the diagonal
    assert y1 > dy0 + (x1 - dx0) * (dy1 - dy0) / (dx1 - dx0)  # below it: the TPU errs less
    assert (x1 - x0) / (y0 - y1) == pytest.approx(4 / 2 * (dx1 - dx0) / (dy0 - dy1), rel=0.01)  # decades


def test_a_larger_error_is_a_larger_square_the_worst_framed():
    text = drawing.heat_map(((0.0, 1.0), (2.0, math.inf), (7.0, 0.0)))
    style = (Path(drawing.__file__).parent / "page.css").read_text()
    sides = dict(re.findall(r"\.h(\d) \{.* stroke-width: (\d+);", style))
    assert list(map(int, sides.values())) == sorted({int(side) for side in sides.values()})
    squares = re.findall(r'class="h(\d)" d="(\S+ \S+)h0"', text)
    assert squares == [("1", "M24 8"), ("2", "M8 24"), ("7", "M8 40"), ("8", "M24 24")]
    assert 'class="frame" x="16" y="16"' in text
    assert "worst inf in row 1, column 1" in text
    for n in range(1, 200):  # whatever the division rounds to, what is finite is no more than the largest square
        assert 'class="h7"' in drawing.heat_map(((n / 97, 0.0),))


def test_bars_beyond_the_bound_are_told_apart():
    assert 'class="bar beyond"' not in drawing.histogram(HISTOGRAM, bound=2.0**20)
    assert 'class="bar beyond"' in drawing.histogram(HISTOGRAM, bound=2.0**-8)
    assert "bound</text>" not in drawing.histogram(HISTOGRAM, bound=0.0)


def test_entries_survive_the_trip_between_processes():
    import execnet.gateway_base as execnet

    whole = entry(2, COMPARED, "WIN", attribution=("a", "b"))
    again = Entry.from_plain(execnet.loads(execnet.dumps(whole.plain())))
    assert again == whole


def test_the_history_is_of_the_case_nearest_to_its_bound(project, tmp_path):
    run = project()
    git(tmp_path, "init", "-q")
    for subject, factor in (("exact", "0"), ("worse", "2**-23")):
        run.write("kernels.py", f"def good(x):\n    return x + x * (1 + {factor})\n")
        run("-q", "--parity-record", "-k", "test_agrees and f32")
        git(tmp_path, "add", "records")
        git(tmp_path, "commit", "-q", "-m", f"<b>{subject}")
    found = history(tmp_path)
    assert [name.split(" ", 2)[2] for name in found.revisions] == ["<b>exact", "<b>worse"]
    (series,) = found.series
    assert (series.op, series.backend, series.device_kind) == ("double", "tpu", "emulated")
    assert series.case.endswith("-f32-s0")
    before, after = series.epsilon
    assert before == 0 < after < 2**-22
    run.write(run.ledger, "{}\n")
    git(tmp_path, "commit", "-q", "-a", "-m", "no ledger")
    assert "1 ledgers of earlier versions cannot be read" in history(tmp_path).note


DYING = """
def dying(x):
    import os
    if x.shape[0] == 3:
        os._exit(3)
    if "bfloat16" in str(x.dtype):
        raise MemoryError("so <i>much</i>")
    raise RuntimeError("no <i>such</i> instruction")
"""


@pytest.mark.full
def test_pytest_reports_what_passed_failed_died_and_was_skipped(project, tmp_path):
    run = project(kernel="bad")
    run.replace("matrix.py", 'gpu="kernels:bad"', 'gpu="kernels:dying"')
    run.write("kernels.py", projects.KERNELS + DYING)
    skipping = projects.COMPARED.replace(
        "    run.", "    if run.case.M == 3: pytest.skip('no <such> device')\n    run."
    )
    run.write("test_double.py", projects.BOTH + skipping)
    chosen = "f32 or (test_gpu and M8)"
    done = run("-q", "-n", "1", "--parity-report", "out/report.html", "-k", chosen)
    assert re.search(r"report: out/report.html: 7 judgements, 0\.\d MB", done.stdout), done.stdout
    text = (tmp_path / "out" / "report.html").read_text()
    html5lib.HTMLParser(strict=True).parse(text)
    assert "5 of 7 judgements failed, 1 not made" in text
    rows = {
        (case, side): (outcome, reason)
        for outcome, case, side, reason in re.findall(
            r'<details id="c\d+"><summary><span class="\w+">. ([^<]*)</span><span><b>double</b>-(\w+-\w+)-s0</span>'
            r"<span>([^<]*)</span>.*?<p>([^<]*)",
            text,
        )
    }
    assert {place: outcome for place, (outcome, _) in rows.items()} == {
        ("M8_N40-f32", "tpu"): "LOGIC FAULT",
        ("M3_N5-f32", "tpu"): "AGREES",
        ("M8_N40-f32", "gpu"): "CRASH",
        ("M8_N40-bf16", "gpu"): "OOM",
        ("M3_N5-f32", "gpu"): "CRASH",
        ("M8_N40-f32", COMPARED): "CRASH",
        ("M3_N5-f32", COMPARED): "SKIPPED",
    }
    assert rows["M8_N40-f32", "gpu"][1] == "G1: RuntimeError: no &lt;i&gt;such&lt;/i&gt; instruction"
    assert rows["M8_N40-bf16", "gpu"][1] == "G1: MemoryError: so &lt;i&gt;much&lt;/i&gt;"
    assert rows["M3_N5-f32", "gpu"][1] == "ended with status 3"
    assert "no &lt;such&gt; device" in rows["M3_N5-f32", COMPARED][1]
    assert 'class="why">tpu: not explained by rounding: a logic fault' in text
    assert "pytest -n0 &#39;test_double.py::test_tpu[double-M8_N40-f32-s0]&#39;" in text


def test_a_report_that_cannot_be_written_costs_no_result_and_is_not_green(project, tmp_path):
    (tmp_path / "taken").mkdir()
    done = project()("-q", "--parity-report", "taken", "-k", "test_agrees and M3")
    assert done.returncode == 1, done.stdout
    assert "2 passed" in done.stdout
    assert "report: not written: " in done.stdout


def test_an_interrupted_run_says_so(project, tmp_path):
    run = project()
    (tmp_path / "test_stop.py").write_text("def test_stop():\n    raise KeyboardInterrupt\n")
    run("-q", "--parity-report", "report.html", "test_stop.py")
    text = (tmp_path / "report.html").read_text()
    assert "The run was interrupted" in text
    assert "nothing was judged" in text


@pytest.mark.full
def test_parity_run_writes_a_report_of_what_its_table_has(project, tmp_path):
    run = project()
    tiny = "DOUBLE = _DOUBLE.with_cases(_DOUBLE.grid([dict(M=8, N=4)], dtype=['float32'], model='Tiny'))\nOPS ="
    run.replace("matrix.py", "OPS =", tiny)
    done = run.parity("run", "--seeds", "2", "-j", "1", "--report", "report.html")
    assert done.returncode == 0, done.stderr
    assert "report: report.html: 1 judgements, 0.0 MB" in done.stdout
    text = (tmp_path / "report.html").read_text()
    rerun = "parity run -k double-M8_N4-f32-s0 --seeds 2"
    for shown in ("Tiny", "1 TIE", "2 seeds", "parity run --seeds 2", rerun):
        assert shown in text, shown


@pytest.mark.parametrize("path", [".", "nowhere/report.html"])
def test_parity_run_refuses_a_report_that_it_could_not_write(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        cli.main(["run", "--report", path])
    assert refused.value.code == 2
    assert f"--report: must be a file in a folder that is there, got {path}" in capsys.readouterr().err


def test_a_report_that_may_not_be_written_is_refused_before_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["run", "--report", str(tmp_path / "report.html")])
    assert "--report: must be a file that may be written, got " in capsys.readouterr().err


def test_what_failed_and_the_nearest_to_bounds_are_explained(monkeypatch):
    op = SimpleNamespace(name="matmul", bit_exact=False)
    bits = SimpleNamespace(name="bits", bit_exact=True)
    asked = []

    def explain(trial):
        asked.append((trial.case.id, trial.backend))
        if len(asked) == 4:
            raise RuntimeError("no such instruction")
        return SimpleNamespace(conclusion="error = tf32 at lhs", contrasts=(Contrast("axis 0", "5-7", 1.0, math.inf),))

    drawn = SimpleNamespace(with_seed=lambda seed: SimpleNamespace(id=name))
    monkeypatch.setattr(entries, "explain", explain)
    monkeypatch.setattr(entries.matrix, "find", lambda ops, case: (op, drawn))
    monkeypatch.setattr(entries, "WORST", 2)
    loads = [3.0, 9.0, 9.0, 5.0, 1.0]
    names = ["a", "b", "b", "c", "d"]
    given = [
        entry(case=name, measured=(measured(**FIT | {"load": load}),)) for name, load in zip(names, loads, strict=True)
    ]
    given += [entry(side="gpu", case="e", outcome="OUT OF BOUND"), entry(case="f", op="bits", outcome="OTHER BITS")]
    given += [entry(side=COMPARED, case="g", outcome="UNFIT"), entry(side=COMPARED, case="h", outcome="LOSS")]
    begun = []
    name = "of the seed that failed"
    found = attribute((op, bits), given, begun.append)
    assert begun == ["e", "g", "h", "b", "c"]
    assert asked == [(name, backend) for backend in ("gpu", "gpu", "tpu", "tpu", "tpu")]
    assert found[5].attribution == ("gpu: error = tf32 at lhs", "axis 0 5-7: all of the error")
    assert found[1].attribution == ("tpu: not explained: RuntimeError: no such instruction",)
    assert [bool(e.attribution) for e in found] == [False, True, False, True, False, True, False, True, True]
