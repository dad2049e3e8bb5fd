"""What the benchmarks' commands share: compiling with a bar, times on a GPU, targets and tables."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity.compilers.mosaic import Compilation, Compiled, compile_for_tpu

BENCHMARKED_CHIPS = ("tpu7x", "v6e")
FLUSH_BYTES = 256 * 2**20  # more than any L2 cache
MOST_ERROR = 2**-8  # relative, Frobenius: twice what rounding every element to bfloat16 costs at most
Done = Callable[[int, int], None]
"""Called as something ends, with how many have and how many there are."""
Key = TypeVar("Key")
T = TypeVar("T")


ONE_LIST = "one JSON list, a row each, instead of the table"


def unseen(count: int, total: int) -> None:
    """A `Done` that shows nothing."""


def gpu_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of a benchmark that runs on a GPU."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--json", action="store_true", help=ONE_LIST)
    return parser


def check_device(parser: argparse.ArgumentParser) -> None:
    """Exit where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and PyTorch finds none")


def static_parser(name: str, description: str, what: str, as_json: str = ONE_LIST) -> argparse.ArgumentParser:
    """The parser of a benchmark that compiles; what: has names."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--chip", choices=BENCHMARKED_CHIPS, action="append", help="only this chip (may be repeated)")
    parser.add_argument("--only", default="", metavar="TEXT", help=f"only {what} whose name contains TEXT")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one per core)")
    parser.add_argument("--json", action="store_true", help=as_json)
    return parser


def compile_each(
    keys: Sequence[Key], compilation: Callable[[Key], Compilation], jobs: int | None, done: Done
) -> dict[Key, Compiled]:
    """What the compiler makes of each key's compilation, `jobs` at a time; done(count, total) is called as they end."""
    answers: dict[Key, Compiled] = {}
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        compiled = pool.map(lambda key: compile_for_tpu([compilation(key)], schedule=True)[0], keys)
        for key, answer in zip(keys, compiled, strict=True):
            answers[key] = answer
            done(len(answers), len(keys))
    return answers


def with_bar(given: argparse.Namespace, measure: Callable[[Sequence[str], str, int | None, Done], T]) -> T:
    """What `measure` returns for the chips, text and jobs of a command line, with a bar while it compiles."""
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        return measure(
            given.chip or BENCHMARKED_CHIPS,
            given.only,
            given.jobs,
            lambda count, total: progress.update(task, completed=count, total=total),
        )


def judged(limits: Iterable[tuple[str, float | None, float]]) -> tuple[str, str]:
    """The targets in words, and what is missed by how much, of (unit, figure, the most that it may be)."""
    limits = list(limits)
    results = [f"{unit.strip()} unknown" for unit, got, _ in limits if got is None]
    results += [f"{unit.strip()} missed by {got / most - 1:.0%}" for unit, got, most in limits if got and got > most]
    return ", ".join(f"≤ {most:.3g}{unit}" for unit, _, most in limits), "; ".join(results) or ("met" if limits else "")


def wrong(error: float) -> str:
    """What is wrong with a result of that relative error, nothing if it is rounding alone."""
    return "" if error <= MOST_ERROR else f"wrong: relative error {error:.2g}, at most {MOST_ERROR:.2g} is rounding"


def median_microseconds(run: Callable[[], Any], *, warm_up: int, repeats: int) -> float:
    """The median time of a run by CUDA events, with a cold L2 cache."""
    import torch

    cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(warm_up + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        cache.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times[warm_up:]))


def table(title: str, names: Sequence[str], figures: Sequence[str], words: Sequence[str]) -> Table:
    """An empty table: columns that name a row, its figures, and what is said of it."""
    view = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in names:
        view.add_column(name, no_wrap=True)
    for name in figures:
        view.add_column(name, justify="right", no_wrap=True)
    for name in words:
        view.add_column(name)
    return view


def cells(*figures: tuple[float | None, str]) -> list[str]:
    """Figures in their formats, a dash for one that is not there."""
    return ["–" if figure is None else format(figure, form) for figure, form in figures]


def say_without_tokamax() -> None:
    """Print that tokamax's rows are left out."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(f"tokamax cannot be imported (Python {version}; it needs 3.12): its rows are left out")


def show(given: argparse.Namespace, data: Any, *tables: Table) -> None:
    """Print the tables, or with --json the data."""
    if given.json:
        print(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        # Wide enough for every column where there is no terminal to ask.
        console = Console(width=None if sys.stdout.isatty() else 200)
        for view in tables:
            console.print(view)
