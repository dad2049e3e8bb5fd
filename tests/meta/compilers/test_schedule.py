"""The schedule ledger: what grows is told, what contradicts a declaration too, and lines come back whole."""

import json
from dataclasses import replace

import pytest

from parity.cli import main
from parity.cli.schedule import detail, hottest, table
from parity.compilers import programs
from parity.compilers.mosaic import Compiled
from parity.compilers.programs import Program
from parity.compilers.recorded import differences
from parity.compilers.schedule import LEDGER, Line, grown, regressions, surprises
from tests.support.commands import git

LINE = Line(
    chip="tpu7x",
    op="gmm",
    name="model-bf16",
    libtpu="0.0.51",
    work=8192,
    unit="row",
    cycles=1e6,
    floor_cycles=9e5,
    hbm_cycles=5e5,
    hbm_bytes=10**9,
    spills=100,
    code_bytes=200_000,
    bound="schedule",
    kernels=(
        {
            "name": "gmm", "steps": 32, "static_cycles": 1000.5, "step_bundles": 990, "periodic_bundles": 10.5,
            "mxu_cycles": 900.0, "hot_bundles": 600, "loop_bundles": 1200, "bundles": 1300, "spills": 100, "fills": 90,
            "spill_share": 0.1, "vmem_bytes": 2**20, "passes": {"bf16": 1.0}, "slots": {"MATMUL": 0.5, "XLU": 0.0},
            "unknown_loops": 0,
        },
    ),
)  # fmt: skip


def ledger(*lines):
    return {line.key: line for line in lines}


@pytest.mark.parametrize("figure", ["cycles", "hbm_bytes", "spills", "code_bytes"])
def test_growth_beyond_two_percent_is_told(figure):
    value = getattr(LINE, figure)
    assert grown(LINE, replace(LINE, **{figure: value * 1.02})) == []
    assert grown(LINE, replace(LINE, **{figure: value * 0.5})) == []
    (told,) = grown(LINE, replace(LINE, **{figure: value * 1.03}))
    assert told.startswith(figure)


def test_a_first_spill_is_told():
    assert grown(replace(LINE, spills=0), replace(LINE, spills=1)) == ["spills 0 → 1"]


def test_regressions():
    recorded = ledger(LINE)
    assert regressions(recorded, [LINE]) == []
    assert regressions(recorded, [replace(LINE, cycles=2e6)]) == ["gmm-model-bf16 on tpu7x: cycles 1e+06 → 2e+06"]
    assert regressions(recorded, [replace(LINE, chip="v6e")]) == ["gmm-model-bf16 on v6e: no record"]
    assert "recorded with libtpu 0.0.51" in regressions(recorded, [replace(LINE, libtpu="0.0.52")])[0]


def test_surprises_in_both_directions():
    program = Program("gmm", "fp8", "m:f", (), chips=("v6e",), refused={"v4": "Unsupported matmul RHS type"})
    refused = Compiled("refused", error="MosaicError: E2001: Unsupported matmul RHS type on target")

    def told(v6e, v4):
        return surprises([program], {("gmm-fp8", "v6e"): v6e, ("gmm-fp8", "v4"): v4})

    assert told(Compiled("compiled"), refused) == []
    assert told(refused, refused)[0].startswith("gmm-fp8 must compile for v6e: MosaicError: E2001")
    assert told(Compiled("compiled"), Compiled("compiled")) == [
        "gmm-fp8 is declared refused for v4 (Unsupported matmul RHS type), but compiles"
    ]
    other = told(Compiled("compiled"), Compiled("refused", error="ValueError: something else"))
    assert other == ["gmm-fp8 must be refused for v4 with 'Unsupported matmul RHS type', got something else"]


def test_lines_come_back_and_replace_each_other(tmp_path):
    other = replace(LINE, name="a")
    LEDGER.write(tmp_path, [LINE, other, replace(LINE, chip="v6e"), replace(LINE, op="tgmm")])
    LEDGER.write(tmp_path, [replace(LINE, cycles=5.0)])
    assert LEDGER.read(tmp_path) == ledger(
        other, replace(LINE, cycles=5.0), replace(LINE, chip="v6e"), replace(LINE, op="tgmm")
    )
    file = tmp_path / "records" / "schedule" / "tpu7x" / "gmm.jsonl"
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == ["a", "model-bf16"]


@pytest.mark.parametrize("line", ["{", "[]", '{"schema": 1}', '{"schema": 99}', "3"])
def test_a_torn_or_unknown_line_is_an_error(tmp_path, line):
    LEDGER.write(tmp_path, [LINE])
    with (tmp_path / "records" / "schedule" / "tpu7x" / "gmm.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"gmm\.jsonl:2: not a line of the schedule ledger"):
        LEDGER.read(tmp_path)


def test_moved():
    faster, gone = replace(LINE, cycles=9e5), replace(LINE, op="tgmm")
    assert differences(ledger(LINE), ledger(LINE)) == []
    assert differences(ledger(LINE, gone), ledger(faster)) == [
        "gmm-model-bf16 on tpu7x: cycles 1e+06 → 900000 (-10.0%)",
        "tgmm-model-bf16 on tpu7x: gone",
    ]


def test_the_command_shows_the_ledger_and_what_moved(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("parity.cli.schedule.load", lambda root: ())

    LEDGER.write(tmp_path, [LINE, replace(LINE, op="tgmm")])
    for words in (["init"], ["add", "."], ["commit", "-m", "ledger"]):
        git(tmp_path, *words)
    LEDGER.write(tmp_path, [replace(LINE, spills=0), replace(LINE, op="tgmm", spills=0)])

    def output(*arguments):
        assert main(["--root", str(tmp_path), "schedule", *arguments]) == 0
        return capsys.readouterr().out

    table = output()
    assert "122.1 / row" in table and "90%" in table and "50%" in table and "schedule" in table
    assert json.loads(output("--json"))[0]["cycles"] == 1e6
    moved = "gmm-model-bf16 on tpu7x: spills 100 → 0 (-100.0%)\n"
    assert output("--diff", "HEAD") == f"{moved}t{moved}"
    assert output("gmm-model-bf16", "--diff", "HEAD") == output("-k", "not tgmm", "--diff", "HEAD") == moved
    assert output("--chip", "v6e", "--diff", "HEAD") == "nothing moved\n"
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path), "schedule", "--diff", "--upload-pack=x"])
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path), "schedule", "--chip", "v6e"])


def test_the_hottest_lines_are_shown_with_their_text_and_passes(tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text("import this\nacc += jnp.dot(x, y)\n")
    lines = [
        {"place": "", "bundles": 600.0, "instructions": 3.0},
        {"place": f"{kernel}:2", "bundles": 250.125, "instructions": 9.0},
    ]
    passes = [{"place": f"{kernel}:2", "operand": "f32", "emitted": 6.0}]
    (figures,) = LINE.kernels
    shown = hottest({**figures, "lines": lines, "line_passes": passes}).splitlines()
    assert shown[1:] == [f"      250.1  25%  {kernel}:2 [f32 ×6]  acc += jnp.dot(x, y)"]


def test_the_detail_of_a_kernel_is_all_that_is_known_of_it():
    waits = {"hbm_bytes": 10**9, "fetch_starvation": 0.25, "write_starvation": 0.125}
    shown = detail({**LINE.kernels[0], **waits})
    for part in (
        "1000.5 cycles a step, 32 steps",
        "990 a step + 10.5 every few steps, hot region 600, loop 1200, program 1300; MXU floor 900",
        "spills 100, fills 90, 10.0% of the store slots; VMEM 1.0 MiB; passes: bf16 ×1",
        "HBM 953.7 MiB; the compiler expects 25.0% of its bundles to wait for fetches, 12.5% for writes",
        "slots: MATMUL 50%",
    ):
        assert part in shown
    assert "XLU" not in shown and "counted once" not in shown


def test_what_the_compiler_refuses_is_in_the_table():
    program = Program("gmm", "fp8", "module:function", (), chips=("tpu7x",), refused={"v4": "Unsupported matmul"})
    shown = table([LINE], [(program, "v4")])
    assert shown.row_count == 2
    assert [list(column.cells)[-1] for column in shown.columns][2:4] == ["v4", "–"]
    assert list(shown.columns[-1].cells)[-1] == "refused: Unsupported matmul"


def test_programs_are_declared_once(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.parity]\nmatrix = "some_matrix"\n')
    package = tmp_path / "some_matrix"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(programs.matrix, "load", lambda root: ())
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"some_matrix\.programs must define PROGRAMS"):
        programs.load(tmp_path)


def test_programs_stand_in_a_matrix_package_or_beside_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(programs.matrix, "load", lambda root: ())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(programs.matrix, "module", lambda root: "alone_matrix")
    (tmp_path / "alone_matrix.py").touch()
    (tmp_path / "programs.py").write_text("PROGRAMS = ()\n")
    assert programs.load(tmp_path) == ()
    monkeypatch.setattr(programs.matrix, "module", lambda root: "inner.matrix")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "matrix.py").touch()
    with pytest.raises(ValueError, match=r"^inner\.programs must define PROGRAMS"):
        programs.load(tmp_path)


def test_the_projects_programs_are_sound(pytestconfig):
    assert {program.op for program in programs.load(pytestconfig.rootpath)} >= {"gmm", "tgmm"}
