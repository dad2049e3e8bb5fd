"""Drawing and rounding inputs, in processor time, beside the same in whole arrays and beside the generator alone.

    python -m benchmarks.drawing                    every distribution in three dtypes, ten million elements
    python -m benchmarks.drawing --only normal      some of them
    python -m benchmarks.drawing --json             for programs

The best of some runs, all in one process. What the generator takes for an element's words (four of 64 bits where data
are normal) is the floor. Whole arrays are normal data as one writes them, and rounding to odd and then to the dtype;
they have the same bits, or the exit code is 1.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.command import Figure, figure
from parity.dtypes import Floats, numpy_dtype, round_to
from parity.inputs import DISTRIBUTIONS, Bits
from parity.op import Array

SHAPE = (2500, 4000)
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
DATA = ("normal", "one_signed", "integers", "wide", "outliers", "correlated", "residuals", "cancellation")
REPEATS = 3
KEY = 28


@dataclass(frozen=True)
class Row:
    """One line of the table: nanoseconds of a processor an element."""

    data: str
    dtype: str
    ours: Figure = figure("ns", ".1f")
    words: Figure = figure("generator", ".1f")  # alone
    whole: Figure = figure("whole arrays", ".1f")
    faster: Figure = figure("times as fast", ".1f")  # as these
    result: str = ""


def measure(only: str = "", shape: tuple[int, int] = SHAPE, repeats: int = REPEATS) -> list[Row]:
    """The table: each distribution whose name contains `only`, in each dtype, of arrays of that shape."""
    return [_row(data, dtype, shape, repeats) for data in DATA if only in data for dtype in DTYPES]


def _row(data: str, dtype: str, shape: tuple[int, int], repeats: int) -> Row:
    spec, drawn = Array(shape, dtype, sum_over=1), 0

    def counted(count: int | tuple[int, ...]) -> np.ndarray:
        nonlocal drawn
        words: np.ndarray = generator(count)
        drawn += words.size
        return words

    def ours(bits: Bits) -> np.ndarray:
        return round_to(DISTRIBUTIONS[data](spec, bits, dtype), dtype)

    generator = np.random.Philox(key=KEY).random_raw
    values = ours(counted)
    drawing, words = (_nanoseconds(run, repeats) / values.size for run in (ours, lambda bits: bits(drawn)))
    if data != "normal":
        return Row(data, dtype, ours=drawing, words=words)
    same = in_whole(shape, dtype, np.random.Philox(key=KEY).random_raw).tobytes() == values.tobytes()
    whole = _nanoseconds(lambda bits: in_whole(shape, dtype, bits), repeats) / values.size
    result = "" if same else "other bits than whole arrays"
    return Row(data, dtype, ours=drawing, words=words, whole=whole, faster=whole / drawing, result=result)


def _nanoseconds(run: Callable[[Bits], Any], repeats: int) -> float:
    """Of a processor, the least that a run takes."""
    taken = []
    for _ in range(repeats):
        bits = np.random.Philox(key=KEY).random_raw
        began = time.process_time()
        run(bits)
        taken.append(time.process_time() - began)
    return min(taken) * 1e9


def in_whole(shape: tuple[int, int], dtype: str, bits: Bits) -> np.ndarray:
    """Normal data of that dtype, an array for each step: eight halves summed, rounded to odd, then to the dtype."""
    total = bits((*shape, 4)).view(np.uint32).sum(axis=-1, dtype=np.int64)
    values: Floats = (total - 8 * 2**31) / (np.sqrt(8 / 12) * 2.0**32)
    single = values.astype(np.float32)
    if dtype == "float32":
        return single
    inexact = single.astype(np.float64) != values
    away = inexact & (np.abs(single.astype(np.float64)) > np.abs(values))
    odd = np.where(inexact, (single.view(np.uint32) - away) | 1, single.view(np.uint32))
    return odd.astype(np.uint32).view(np.float32).astype(numpy_dtype(dtype))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 where whole arrays have other bits."""
    parser = argparse.ArgumentParser(prog="drawing", description="Drawing inputs, in processor time.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only data whose name contains TEXT")
    parser.add_argument("--json", action="store_true", help=command.ONE_LIST)
    given = parser.parse_args(arguments)
    table = measure(given.only)
    names = {"data": "data", "dtype": "dtype"}
    view = command.table("processor time an element", table, names, ("result",))
    command.show(given, [asdict(row) for row in table], view)
    return int(any(row.result for row in table))


if __name__ == "__main__":
    sys.exit(main())
