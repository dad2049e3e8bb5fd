"""What the benchmarks' commands share: compiling with a bar, times on a GPU, targets and tables."""

import argparse
import inspect
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, fields
from itertools import groupby
from pathlib import Path
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
Figure = float | None
Measure = Callable[[Sequence[str], str, int | None, Done], T]
"""measure(chips, only, jobs, done): what has a name with `only` in it, compiled for these chips, `jobs` at a time."""


def figure(heading: str, form: str) -> Any:
    """A field of a row that is a column of its table, in this format."""
    return field(default=None, metadata={"heading": heading, "form": form}, kw_only=True)


@dataclass(frozen=True)
class Row:
    """One line of a table. Where the compiler refused the program, error says why and its figures are None."""

    chip: str
    _: KW_ONLY
    target: str = ""
    result: str = ""  # "met", or what is missed by how much
    error: str = ""


@dataclass(frozen=True)
class Timed:
    """One line of a table of times. Ratios are speeds: this one's over the other's. error: why it was not timed."""

    kernel: str
    whose: str
    _: KW_ONLY
    microseconds: Figure = figure("µs", ".1f")
    eager: Figure = figure("eager µs", ".0f")
    relative_error: Figure = figure("relative error", ".1e")
    error: str = ""


ONE_LIST = "one JSON list, a row each, instead of the table"


def gpu_parser(measure: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser of a benchmark that runs on a GPU; its name and description are those of the module of `measure`."""
    parser = _parser(inspect.getmodule(measure))
    parser.add_argument("--json", action="store_true", help=ONE_LIST)
    return parser


def _parser(module: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=Path(module.__file__).stem, description=module.__doc__.splitlines()[0])


def check_device(parser: argparse.ArgumentParser) -> None:
    """Exit where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and PyTorch finds none")


def measured(
    arguments: Sequence[str] | None, measure: Measure[T], what: str, as_json: str = ONE_LIST
) -> tuple[argparse.Namespace, T]:
    """The options of a benchmark that compiles, and what it measured, with a bar meanwhile; what: has names.

    What it is called and does is read from the module of `measure`.
    """
    parser = _parser(inspect.getmodule(measure))
    parser.add_argument("--chip", choices=BENCHMARKED_CHIPS, action="append", help="only this chip (may be repeated)")
    parser.add_argument("--only", default="", metavar="TEXT", help=f"only {what} whose name contains TEXT")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one per core)")
    parser.add_argument("--json", action="store_true", help=as_json)
    given = parser.parse_args(arguments)
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        return given, measure(
            given.chip or BENCHMARKED_CHIPS,
            given.only,
            given.jobs,
            lambda count, total: progress.update(task, completed=count, total=total),
        )


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


def judged(limits: Iterable[tuple[str, float | None, float]]) -> tuple[str, str]:
    """The targets in words, and what is missed by how much, of (unit, figure, the most that it may be)."""
    limits = list(limits)
    results = [f"{unit.strip()} unknown" for unit, got, _ in limits if got is None]
    results += [f"{unit.strip()} missed by {got / most - 1:.0%}" for unit, got, most in limits if got and got > most]
    return ", ".join(f"≤ {most:.3g}{unit}" for unit, _, most in limits), "; ".join(results) or ("met" if limits else "")


def wrong(error: float) -> str:
    """What is wrong with a result of that relative error, nothing if it is rounding alone."""
    return "" if error <= MOST_ERROR else f"wrong: relative error {error:.2g}, at most {MOST_ERROR:.2g} is rounding"


def device() -> str:
    """The GPU that times are of, and PyTorch's version."""
    import torch

    return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"


def times(run: Callable[[], Any], *, warm_up: int, repeats: int) -> dict[str, float]:
    """The two times of `Timed` by its fields' names, in µs by CUDA events.

    microseconds: the median of a captured graph with a cold L2 cache. eager: of calls one after the other, in which the
    host may take longer than the GPU.
    """
    import torch

    from parity.contact.gpu import captured

    graph, _ = captured(run)
    cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    found = []
    for _ in range(warm_up + repeats):
        cache.zero_()
        found.append(_microseconds(graph.replay))
    return {"microseconds": statistics.median(found[warm_up:]), "eager": _microseconds(run, repeats)}


def _microseconds(run: Callable[[], Any], repeats: int = 1) -> float:
    """The time of a run, of so many one after the other, by CUDA events."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1e3 / repeats)


def brief(row: Timed) -> str:
    """A row's time in a line of progress."""
    return f"{row.whose} {row.error or f'{row.microseconds:.0f} µs'}"


def table(
    title: str,
    rows: Sequence[Any],
    names: Mapping[str, str],
    words: Sequence[str] = ("target", "result"),
    apart: Sequence[str] = (),
) -> Table:
    """A table for people: by their headings the fields that name a row, its figures, and what is said of them.

    A row's result is its error where it has one. Rows that differ in a field of `apart` are set apart.
    """
    view = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in names:
        view.add_column(heading, no_wrap=True)
    figures = [x for x in fields(rows[0]) if x.metadata] if rows else []
    for each in figures:
        view.add_column(each.metadata["heading"], justify="right", no_wrap=True)
    for heading in words:
        view.add_column(heading)
    for _, together in groupby(rows, key=lambda row: [getattr(row, name) for name in apart]):
        for row in together:
            numbers = (_cell(getattr(row, x.name), x.metadata["form"]) for x in figures)
            said = (getattr(row, "error", "") * (name == "result") or getattr(row, name) for name in words)
            view.add_row(*(str(getattr(row, name)) for name in names.values()), *numbers, *said)
        view.add_section()
    return view


def _cell(figure: Figure, form: str) -> str:
    return "–" if figure is None else format(figure, form)


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
