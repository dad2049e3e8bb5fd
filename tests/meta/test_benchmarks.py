"""The benchmarks' commands: each can be asked for help, and their tables have what their rows say."""

import importlib
import pkgutil
from dataclasses import dataclass

import pytest

import benchmarks
from benchmarks import command
from benchmarks.command import Figure, figure

OTHERS = {"command", "delta_rule_schemes", "fp8_precision"}
"""What the others share, and two that have no options."""
COMMANDS = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in OTHERS]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_tells_its_options(name, capsys):
    if name.startswith("gpu_"):
        pytest.importorskip("triton")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert ended.value.code == 0
    assert name in capsys.readouterr().out


@dataclass(frozen=True)
class Row(command.Row):
    """A row with two figures."""

    kernel: str
    cycles: Figure = figure("cycles", ".1f")
    floor: Figure = figure("MXU floor", ".0%")


def test_a_table_has_names_figures_and_what_is_said_of_them():
    rows = [Row("v6e", "gmm", cycles=2.25, target="≤ 2", result="missed"), Row("v6e", "tgmm", error="refused")]
    table = command.table("cycles", rows, {"chip": "chip", "of": "kernel"})
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns == {
        "chip": ["v6e", "v6e"], "of": ["gmm", "tgmm"], "cycles": ["2.2", "–"], "MXU floor": ["–", "–"],
        "target": ["≤ 2", ""], "result": ["missed", "refused"],
    }  # fmt: skip


def test_footprints_are_shares_of_the_unfused_routes():
    from benchmarks.gla_static import footprints

    rows = {(row.chunk, row.route): row for row in footprints()}
    for (chunk, route), row in rows.items():
        assert row.training == max(row.forward, row.backward) > row.kept > 0
        assert row.of_unfused == row.training / rows[chunk, "unfused"].training
        assert bool(row.result) == (route == "fused")
