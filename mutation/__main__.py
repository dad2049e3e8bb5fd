"""`python -m mutation`: plants faults, and exits 1 where the tests catch fewer than 95 % of those that matter."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mutation.mutants import Mutant, Place, key, make, places, sample
from mutation.net import SLACK, STARTING_S, UNMEASURED_S, Judges, Net, Others, Watcher
from mutation.server import (
    KILLED_BY_LIMIT,
    copy_project,
    load_frameworks,
    package_sources,
    pytest_in_fork,
    restore,
    with_source,
)

WANTED = 0.95
"""The share of the faults that matter which the tests must catch."""

GROUPS: Mapping[str, Sequence[str]] = {
    "cpu_golden": ["cpu_golden"],
    "tpu_kernels": ["tpu_kernels"],
    "gpu_reference": ["gpu_reference"],
    "op_arguments": ["op_arguments"],
    "parity": [
        *(f"parity/judging/{name}.py" for name in ("verdict", "metrics", "judge", "fit", "spread", "rounding")),
        *(f"parity/judging/{name}.py" for name in ("passes", "magnitude", "reference")),
        *("parity/inputs.py", "parity/op.py", "parity/trial.py"),
    ],
}
"""What is judged: the kernels, what checks their arguments, and how the verdict is come to."""

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
ASKED = ["tests/meta/test_signatures.py"]
"""Of `tests/meta` what judges kernels without running their lines. Most of it plants faults of its own, and would fail
because a line is not as it was."""
COLLECTING_S = 120.0
"""Processor seconds that loading the project and collecting the tests may take."""


@dataclass(frozen=True)
class Result:
    """What became of a fault. tests: how many may notice it; run: how many were asked; by: the one that failed.

    others, others_run: the same of the tests that were not measured.
    """

    key: str
    group: str
    path: str
    line: int
    outcome: str
    tests: int
    run: int
    by: str
    others: int = 0
    others_run: int = 0

    @property
    def caught(self) -> bool:
        """Whether a test failed, or did not end."""
        return self.outcome in ("killed", "timeout")


def equivalent() -> dict[str, str]:
    """The faults that change nothing which anyone can see, each with the reason, by their keys."""
    listed = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {key(m["package"], m["where"], m["before"], m["after"]): m["reason"] for m in listed}


def interval(caught: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, of which `caught` of `count` were seen; all of [0, 1] where none was."""
    if not count:
        return 0.0, 1.0
    z2 = 1.96**2
    middle = (caught + z2 / 2) / (count + z2)
    half = 1.96 * math.sqrt(caught * (count - caught) / count + z2 / 4) / (count + z2)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def measure(work: Path, given: argparse.Namespace, deadline: float) -> None:
    """Run the tests file by file, as they are, and write down what each runs."""
    tree, folder = work / "tree", work / "net"
    folder.mkdir(exist_ok=True)
    files = [path.relative_to(tree).as_posix() for glob in given.tests for path in sorted(tree.glob(glob))]
    for n, name in enumerate(files):
        target = folder / f"{name.replace('/', '.')}-{given.tier}.json"
        if target.exists():
            continue
        if time.monotonic() > deadline:
            raise TimeoutError
        began = time.monotonic()
        answer = work / "answer.json"
        tier = f"--parity-tier={given.tier}"
        status, _ = pytest_in_fork(tree, [name, tier], lambda: Watcher(tree), answer, work / "log", cpu_s=3000)
        if not answer.exists():
            raise RuntimeError(f"{name} could not be measured: see {work / 'log'}")
        answer.rename(target)
        print(f"tests {n + 1}/{len(files)}: {name}, status {status}, {time.monotonic() - began:.0f} s", flush=True)


def judge(work: Path, net: Net, group: str, mutant: Mutant, source: str, given: argparse.Namespace) -> Result:
    """Plant a fault and run the tests that may notice it, as many as the budgets of processor seconds allow.

    First those that were measured. Where they leave the fault, others of the same folders: what fails there without
    the fault as well says nothing of it.
    """
    judges = net.judges(mutant.path, *mutant.lines)
    chosen: list[str] = []
    spent = 0.0
    for test in judges:
        if chosen and spent + net.seconds[test] > given.budget:
            break
        chosen.append(test)
        spent += net.seconds[test]
    path, exact, done = work / "tree" / mutant.path, net.exact(mutant.path, *mutant.lines), {*chosen}
    status, said, others = 0, dict[str, Any](), dict[str, Any]()
    if chosen:
        with with_source(path, source):
            status, said = _ask(work, chosen, net)
    folders = sorted({str(Path(test.partition("::")[0]).parent) for test in exact or judges})
    folders = [folder for folder in folders if not folder.startswith("tests/meta")]
    there = [name for name in ASKED if (work / "tree" / name).exists()]
    while status in PASSED and folders and given.others:
        with with_source(path, source):
            plugin = partial(Others, mutant.path, exact, done, given.others)
            limit = given.others + UNMEASURED_S + COLLECTING_S
            status, others = _run(work, [*folders, *there, "-x", "--parity-tier=default"], plugin, limit)
        if (by := others.get("by")) and _ask(work, [by], net)[0] not in PASSED:
            print(f"left out, for it fails without a fault: {by}", flush=True)
            status, done = 0, {*done, by}
        else:
            break
    outcome = {KILLED_BY_LIMIT: "timeout"}.get(status, "survived" if status in PASSED else "killed")
    return Result(
        key=mutant.key, group=group, path=mutant.path, line=mutant.lines[0], outcome=outcome,
        tests=len(judges), run=said.get("run", 0), by=others.get("by") or said.get("by") or f"status {status}",
        others=others.get("there", 0), others_run=others.get("run", 0),
    )  # fmt: skip


PASSED = (0, 5)
"""The exit statuses of pytest where no test failed, or there was none."""


def _ask(work: Path, tests: Sequence[str], net: Net) -> tuple[int, dict[str, Any]]:
    """Run these tests, in this order, until one fails."""
    seconds = {test: net.seconds.get(test, UNMEASURED_S / SLACK) for test in tests}
    limit = sum(SLACK * each + STARTING_S for each in seconds.values()) + COLLECTING_S
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    return _run(work, [*files, "-x", "--parity-tier=full"], lambda: Judges(tests, seconds), limit)


def _run(work: Path, arguments: Sequence[str], plugin: Callable[[], Any], limit: float) -> tuple[int, dict[str, Any]]:
    return pytest_in_fork(work / "tree", arguments, plugin, work / "answer.json", work / "log", limit)


def campaign(work: Path, given: argparse.Namespace, deadline: float) -> None:
    """Judge every fault of the sample that is not yet judged as thoroughly as asked."""
    net = Net.read(work / "net")
    known = {result.key: result for result in results(work)}
    faults = list(drawn(work / "tree", given))
    with (work / "results.jsonl").open("a") as out:
        for n, (group, place, source) in enumerate(faults):
            made = make(place, source)
            if made is None:
                continue
            mutant, mutated = made
            before = known.get(mutant.key)
            if before and (before.caught or not given.again):
                continue
            if time.monotonic() > deadline:
                raise TimeoutError
            began = time.monotonic()
            result = judge(work, net, group, mutant, mutated, given)
            out.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
            out.flush()
            seconds = time.monotonic() - began
            print(f"{n + 1}/{len(faults)} {result.outcome} {seconds:.0f} s: {mutant.key} [{result.by}]", flush=True)


def drawn(tree: Path, given: argparse.Namespace) -> Iterator[tuple[str, Place, str]]:
    """The faults of each group in turn, each with the source of its file: a sample, or all."""
    for group, files in package_sources(tree, GROUPS).items():
        if group in given.groups:
            found = [place for path, source in files.items() for place in places(path, source)]
            for place in found if given.all else sample(found, given.count, given.seed):
                yield group, place, files[place.path]


def results(work: Path) -> list[Result]:
    """What is known of every fault that was judged: the last word on each."""
    path = work / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    last = {found["key"]: Result(**found) for found in map(json.loads, lines)}
    return list(last.values())


def report(found: Sequence[Result], listed: Mapping[str, str]) -> float:
    """Print the table and the survivors; returns the share of the faults that matter which were caught."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("file", "faults", "killed", "timeout", "survived", "equivalent", "caught", "95 % interval"):
        table.add_column(name, justify="left" if name == "file" else "right", no_wrap=True)
    for group in GROUPS:
        of_group = [result for result in found if result.group == group]
        for path in sorted({result.path for result in of_group}):
            table.add_row(*_row(path, [result for result in of_group if result.path == path], listed))
        if of_group:
            table.add_row(*_row(f"{group}, all", of_group, listed), end_section=True, style="bold")
    table.add_row(*_row("all", found, listed), style="bold")
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    for result in found:
        if not result.caught and result.key not in listed:
            others = f" and {result.others_run} of {result.others} others" * bool(result.others)
            print(f"survived {result.run} of {result.tests} tests{others}: {result.path}:{result.line} {result.key}")
    caught, count = _counts(found, listed)
    return caught / count if count else 0.0


def _counts(found: Sequence[Result], listed: Mapping[str, str]) -> tuple[int, int]:
    matter = [result for result in found if result.caught or result.key not in listed]
    return sum(result.caught for result in matter), len(matter)


def _row(name: str, found: Sequence[Result], listed: Mapping[str, str]) -> list[str]:
    caught, count = _counts(found, listed)
    low, high = interval(caught, count)
    timeouts = sum(result.outcome == "timeout" for result in found)
    figures = [len(found), caught - timeouts, timeouts, count - caught, len(found) - count]
    share = f"{caught / count:.1%}" if count else "–"
    return [name, *map(str, figures), share, f"{low:.1%} … {high:.1%}"]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where a campaign is kept: go on there")
    parser.add_argument(
        "--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="what to judge (default: all)"
    )
    parser.add_argument("--count", type=int, default=100, metavar="N", help="faults of each group (default: 100)")
    parser.add_argument("--all", action="store_true", help="every fault, and not a sample")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the sample (default: 0)")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="S", help="seconds of tests per fault (default: all tests)"
    )
    parser.add_argument(
        "--others", type=float, default=0, metavar="S",
        help="then seconds of tests of the same folders that were not measured (default: 0, none)",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="judge those again that have survived")
    parser.add_argument(
        "--tests", nargs="+", default=["tests/**/test_*.py"], metavar="GLOB", help="files of the net (default: all)"
    )
    parser.add_argument("--tier", default="default", help="tier of their cases (default: default)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="stop after N minutes")
    parser.add_argument("--measure", action="store_true", help="only measure the tests")
    parser.add_argument("--report", action="store_true", help="only print what is known")
    given = parser.parse_args()
    work: Path = given.work.resolve()
    deadline = time.monotonic() + 60 * given.minutes
    if not given.report:
        if not (work / "tree").exists():
            copy_project(Path.cwd(), work / "tree")
        restore(work / "tree")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
        load_frameworks(work / "tree")
        try:
            measure(work, given, deadline)
            if not given.measure:
                campaign(work, given, deadline)
        except TimeoutError:
            print("the time is over: the same command goes on")
            return 2
    return 0 if report(results(work), equivalent()) >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
