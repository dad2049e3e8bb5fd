"""The mutation campaign: which faults it plants, whom it asks, and that it tells a net with a hole from one without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")

from mutation.__main__ import Result, equivalent, interval, report, results
from mutation.mutants import key, make, places, sample, statements
from mutation.net import Net, likeliest
from mutation.server import restore, wait, with_source
from mutation.tokens import occurrences
from tests.support.commands import environment, git

ROOT = Path(__file__).parents[2]

SOURCE = '''\
"""Of no use."""

LIMIT: "int | None" = 4
WIDE_TILES = {4: (16, 128)}


@dataclass(frozen=True)
class Box:
    def fill(self, size: int | None, *, out) -> int | str:
        if size < LIMIT and not out:
            out[0] = max(size - 1, 2)
            self.check(size)
        return out
'''


def mutants(source: str) -> list[str]:
    made = [make(place, source) for place in places("box.py", source)]
    return [f"{mutant.where}: {mutant.after}" for mutant, _ in filter(None, made)]


def test_every_fault_of_a_source():
    condition, store = "Box.fill: if {}:", "Box.fill: out[{}] = {}"
    assert sorted(mutants(SOURCE)) == sorted(
        [
            *(': LIMIT: "int | None" = 5', ': LIMIT: "int | None" = 3'),
            condition.format("size <= LIMIT and not out"),
            condition.format("size >= LIMIT and not out"),
            condition.format("not size < LIMIT and not out"),
            condition.format("size < LIMIT or not out"),
            condition.format("size < LIMIT and out"),
            *(store.format(at, "max(size - 1, 2)") for at in ("1", "- 1")),
            *(store.format(0, right) for right in ("max(size + 1, 2)", "min(size - 1, 2)")),
            *(store.format(0, f"max(size - {n}, 2)") for n in (0, 2)),
            *(store.format(0, f"max(size - 1, {n})") for n in (1, 3)),
            "Box.fill: pass",
            "Box.fill: pass",
        ]
    )


def test_a_fault_is_called_the_same_wherever_its_line_goes():
    moved = "\n\n" + SOURCE
    for place, same in zip(places("box.py", SOURCE), places("box.py", moved), strict=True):
        (mutant, _), (there, _) = make(place, SOURCE), make(same, moved)
        assert mutant.key == there.key and there.lines[0] == mutant.lines[0] + 2


def test_what_is_no_python_is_no_fault():
    made = [make(place, "f(lambda: x)\nfor x in y: continue\n") for place in places("a.py", "for x in y: continue\n")]
    assert None not in made[1:]


def test_a_sample_has_of_every_file_as_much_as_it_has_places():
    found = places("small.py", "x = 1\n" * 10) + places("large.py", "y = 2 + 3\n" * 10)
    chosen = sample(found, 20, seed=3)
    assert sorted(place.path for place in chosen) == ["large.py"] * 15 + ["small.py"] * 5
    assert len({(place.path, place.at) for place in chosen}) == 20
    assert chosen == sample(found, 20, seed=3) != sample(found, 20, seed=4)
    assert len(sample(found, 1000, seed=3)) == 40  # + and the three numbers: one fault of each place


def test_tests_of_the_line_come_first_and_kinds_alternate():
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "a[3]": 0.01, "b[1]": 3.0, "c": 0.5, "d": 0.1}
    net = Net(seconds, {"x.py": {5: ["a[1]", "a[2]", "b[1]", "a[3]"], 9: ["c", "a[1]"]}, "y.py": {5: ["d"]}})
    assert net.judges("x.py", 4, 6) == ["a[3]", "b[1]", "a[1]", "a[2]", "c"]
    assert net.judges("x.py", 9, 9) == ["c", "a[1]", "a[3]", "b[1]", "a[2]"]
    assert net.judges("z.py", 1, 9) == []


def test_unmeasured_tests_of_the_same_ops_come_first_by_turns():
    tpu, gpu, laws = "t/test_a_tpu.py::test_agrees", "t/test_a_gpu.py::test_agrees", "t/test_laws.py::test_law"
    there = [*(f"{tpu}[{op}-{n}]" for op in ("mul", "add") for n in "12"), f"{gpu}[add-1]", "t/test_one.py::test_one"]
    there += [f"{laws}[{backend}-{op}]" for backend in ("tpu", "gpu") for op in ("mul", "add")]
    there += ["t/test_a_compile_tpu.py::test_compiles[add]", "t/test_a_cpu.py::test_golden[add]"]

    def first(path: str, exact: list[str]) -> list[str]:
        return likeliest(there, path, exact, {"mul", "add"})

    ordered = first("tpu_kernels/a.py", [f"{tpu}[add-0]"])
    assert {ordered[0], ordered[3]} == {f"{tpu}[add-1]", f"{tpu}[add-2]"}
    assert ordered[1:3] == [f"{laws}[tpu-add]", "t/test_one.py::test_one"]
    assert ordered[5] == f"{laws}[tpu-mul]" and {ordered[4], ordered[6]} == {f"{tpu}[mul-1]", f"{tpu}[mul-2]"}
    assert ordered[-1] == "t/test_a_compile_tpu.py::test_compiles[add]" and not [t for t in ordered if "gpu" in t]
    golden = first("cpu_golden/a.py", [])
    assert golden[0] == "t/test_a_cpu.py::test_golden[add]" and sorted(golden) == sorted(there)


def test_the_interval_is_wilsons():
    assert interval(95, 100) == pytest.approx((0.88825, 0.97846), abs=1e-5)
    assert interval(10, 10) == pytest.approx((0.72246, 1.0), abs=1e-5)
    assert interval(0, 0) == (0.0, 1.0)


def test_a_fault_that_a_killed_campaign_left_is_taken_back(tmp_path):
    (tmp_path / "a").mkdir()
    module = tmp_path / "a" / "module.py"
    module.write_text("x = 1\n")
    planted = with_source(module, "x = 2\n")
    planted.__enter__()  # and no exit
    assert module.read_text() == "x = 2\n"
    restore(tmp_path)
    assert module.read_text() == "x = 1\n" and [path.name for path in module.parent.glob("*.*")] == ["module.py"]


def result(key: str, outcome: str) -> Result:
    return Result(key, "parity", "parity/op.py", 7, outcome, tests=3, run=2, by="test_a")


def test_an_equivalent_fault_is_not_counted_unless_it_is_caught(capsys):
    found = [result("a", "killed"), result("b", "timeout"), result("c", "survived"), result("d", "survived")]
    assert report(found, {"c": "the same", "a": "caught all the same"}) == 2 / 3
    out = capsys.readouterr().out
    assert "survived 2 of 3 tests: parity/op.py:7 d" in out and "parity/op.py:7 c" not in out


def test_every_equivalent_fault_is_one_of_the_code_as_it_is():
    code: dict[tuple[str, str], list[str]] = {}
    for package in {fault.partition("::")[0] for fault in equivalent()}:
        for path in (ROOT / package).rglob("*.py"):
            lines = (source := path.read_text()).splitlines()
            for where, first, last in statements(source):
                code.setdefault((package, where), []).append("\n".join(lines[first - 1 : last]))

    def is_there(fault: str) -> bool:
        package, _, rest = fault.partition("::")
        where, _, change = rest.partition(": ")
        before = change.partition("  →  ")[0]
        return any(any(occurrences(before, text)) for text in code.get((package, where), ()))

    assert all(equivalent().values())
    assert not [fault for fault in equivalent() if not is_there(fault)]


def test_an_equivalent_fault_keeps_its_name_in_other_layouts():
    ugly = SOURCE.replace("max(size - 1, 2)", "max(  # the least\n            size-1, 2,)").replace("Of", "Is of")
    for place, same in zip(places("cpu_golden/box.py", SOURCE), places("cpu_golden/_lib/a.py", ugly), strict=True):
        (mutant, _), (there, _) = make(place, SOURCE), make(same, ugly)
        assert mutant.key == there.key == key("cpu_golden", mutant.where, mutant.before, mutant.after)


PROJECT = {
    "parity/__init__.py": "",
    "parity/backends.py": "def prepare_environment():\n    pass\n",
    "parity/runners/plugin.py": "def pytest_addoption(parser):\n    parser.addoption('--parity-tier')\n",
    "cpu_golden/__init__.py": "",
    "cpu_golden/add.py": "def add(x, y):\n    return x + y\n\n\ndef least(x):\n    return x if x < 3 else 3\n",
    "tests/test_add.py": (
        "from cpu_golden.add import add, least\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
        "def test_least():\n    assert least(1) == 1 and least(5) == 3\n"
    ),
    "tests/test_more.py": (
        "from cpu_golden.add import least\n\n\ndef test_broken():\n    assert least(1) == 3\n\n\n"
        "def test_between():\n    assert least(2) == 2 and least(3.5) == 3\n"
    ),
}


@pytest.mark.full
def test_a_campaign_finds_the_hole_resumes_and_changes_nothing(tmp_path):
    project, work = tmp_path / "project", tmp_path / "work"
    for name, text in PROJECT.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    git(project, "init", "-q")
    command = [sys.executable, "-m", "mutation", "--work", str(work), "--groups", "cpu_golden"]
    command += ["--tests", "tests/test_add.py"]
    own = environment() | {"PYTHONPATH": str(ROOT)}

    def campaign(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], cwd=project, env=own, capture_output=True, text=True)

    sampled = campaign("--count", "2")
    assert len(results(work)) == 2, sampled.stdout + sampled.stderr
    done = campaign("--all")
    assert done.returncode == 1 and "cpu_golden/add.py" in done.stdout, done.stdout + done.stderr
    lines = [json.loads(line)["key"] for line in (work / "results.jsonl").read_text().splitlines()]
    assert len(set(lines)) == len(lines)
    outcomes = {each.key.partition(": ")[2]: (each.outcome, each.run, each.tests) for each in results(work)}
    assert outcomes["return x + y  →  return x - y"] == ("killed", 1, 2)
    survived = {key.partition("  →  ")[2] for key, each in outcomes.items() if each == ("survived", 2, 2)}
    assert survived == {f"return x if x {than} else 3" for than in ("<= 3", "< 4", "< 2")}
    others = campaign("--all", "--again", "--others", "9")
    assert "left out, for it fails without a fault: tests/test_more.py::test_broken" in others.stdout, others.stdout
    left = {each.key.partition("  →  ")[2]: (each.others_run, each.others) for each in results(work) if not each.caught}
    assert left == {"return x if x <= 3 else 3": (1, 1)}
    assert (project / "cpu_golden/add.py").read_text() == PROJECT["cpu_golden/add.py"]


@pytest.mark.parametrize(
    ("ends", "wall_s", "status"), [("os._exit(3)", 60, 3), ("time.sleep(99)", 1, -1), ("os.abort()", 60, -6)]
)
def test_a_run_that_waits_for_ever_is_no_crash(ends, wall_s, status):
    with subprocess.Popen([sys.executable, "-c", f"import os, time; {ends}"], start_new_session=True) as child:
        assert wait(child.pid, wall_s) == status
