"""The first page: every link, command and quoted output on it."""

import re
import shlex
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest

from parity import cli, matrix
from parity.cli.run import Job, cells, judge_line
from parity.judging.judge import judge
from parity.report import text
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import plant, tpu
from tests.support.commands import run_module, run_pytest
from tests.support.interpreter import interpreted

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
BLOCKS = [re.sub("^    ", "", block, flags=re.MULTILINE) for block in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)]
COMMANDS = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()
            if re.match(r"(make|parity|pytest|pip|cd) ", line)]  # fmt: skip
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
BOUNDARY = tpu("gmm", "return OwnRows(jnp.maximum(start, 0),", "return OwnRows(jnp.maximum(start - 1, 0),")


def block(first):
    """The block that begins with a word."""
    (found,) = (block for block in BLOCKS if block.startswith(first))
    return found.rstrip("\n").splitlines()


def rows():
    """The quoted lines of the table, as cells, each with its op and case."""
    _, *quoted = [re.split(r"  +", line.strip()) for line in block("op ")]
    of_models = {
        (c.op, c.model, " ".join(f"{n}{s}" for n, s in c.dims)): (op, c) for op in OPS for c in op.cases if c.model
    }
    return [(row, *of_models[row[0], row[2], row[3]]) for row in quoted]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))],
                         ids=lambda page: page.name)  # fmt: skip
def test_links_lead_to_files(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_has_two_commands_five_uses_and_ten_lines_of_the_table():
    assert [command for command in COMMANDS if command.startswith("make")] == ["make parity", "make test"]
    assert len(rows()) == 10 and len(PAGE.splitlines()) <= 130
    uses = PAGE[PAGE.index("## Five uses") : PAGE.index("## One failure")]
    assert len(re.findall(r"^    (?:parity|pytest|cd) ", uses, re.MULTILINE)) == 5


@pytest.mark.parametrize(
    ("target", "recipe"), [("parity", "parity run --seeds 2 --report parity-report.html"), ("test", "pytest")]
)
def test_make_knows_what_it_is_told(target, recipe):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ".ci/install" in done.stdout or (ROOT / ".venv").exists()
    assert f".venv/bin/{recipe}" in done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match(r"parity (plans|schedule|list|show|doctor)", c)])
def test_a_command_that_reads_ledgers_prints(command, capsys):
    assert cli.main(["--root", str(ROOT), *shlex.split(command)[1:]]) == 0
    assert capsys.readouterr().out


def test_one_failure_prints_what_the_page_quotes(tmp_path):
    quoted = block("LOGIC FAULT")
    op, case = matrix.find(OPS, re.search(r"\S+-straddle-s0", quoted[0])[0])
    kernel = plant(BOUNDARY, tmp_path).gmm
    judged = judge(Trial(op, case, "tpu", kernel))
    rerun = quoted[-1].removeprefix("rerun: ")
    assert case.id in rerun
    printed = [line.strip() for line in text.failure(judged, judged.twin, rerun).splitlines()]
    assert [line for line in quoted if line.strip() != "…" and line.strip() not in printed] == [], "\n".join(printed)


# The cheapest of them in every run, all in the full tier.
LINES = [pytest.param(*row, id=row[2].id, marks=[] if row[0][0] == "tgmm" else pytest.mark.full) for row in rows()]


COUNTED = 5  # cells of a line that no arithmetic makes


def measured(row):
    """The words of the other cells, and their numbers."""
    shown = "  ".join(row[COUNTED:])
    return NUMBER.split(shown), list(map(Decimal, NUMBER.findall(shown)))


def unit(number):
    """One in the last of a number's three digits: another processor's BLAS sums in another order."""
    return Decimal(10) ** (number.adjusted() - 2)


@interpreted
@pytest.mark.parametrize(("row", "op", "case"), LINES)
def test_a_line_of_the_table_is_what_the_command_prints(row, op, case):
    line = judge_line(ROOT, int(row[4]), ROOT / "records", Job(op.name, case, {}))
    printed = list(cells(line))
    assert printed[:COUNTED] == row[:COUNTED]
    (words, sizes), (quoted_words, quoted_sizes) = map(measured, (printed, row))
    assert words == quoted_words
    assert [pair for pair in zip(sizes, quoted_sizes, strict=True) if abs(pair[0] - pair[1]) > unit(max(pair))] == []


@pytest.mark.full
@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match(r"(pytest|parity (explain|run|stages)) ", c)])
def test_a_command_that_runs_kernels_ends_well(command):
    program, *words = shlex.split(command)
    done = run_pytest(ROOT, "-q", *words) if program == "pytest" else run_module("parity", ROOT, *words)
    assert done.returncode == 0, done.stdout + done.stderr
