"""The tutorial of docs/own-kernels.md: its files are written, its commands run, and they print what the page shows."""

import re
import shlex
from pathlib import Path

import pytest

from parity.inputs import DISTRIBUTIONS
from tests.support.commands import run_module, run_pytest

PAGE = (Path(__file__).parents[2] / "docs" / "own-kernels.md").read_text()
START = PAGE.index("## A flash attention")
TUTORIAL = PAGE[START : PAGE.index("\n## ", START + 1)]
PARTS = TUTORIAL.split("```")  # text and blocks in turn
FILES = {
    re.findall(r"^`(\w+\.(?:py|toml))` ", before, re.MULTILINE)[-1]: block.partition("\n")[2]
    for before, block in zip(PARTS[::2], PARTS[1::2], strict=False)
    if not block.startswith("diff")
}
((OLD, NEW),) = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", TUTORIAL)
SHOWN = dict(re.findall(r"^    \$ (.+)\n((?:    .+\n)*)", TUTORIAL, re.MULTILINE))
SUITE, PLANTED, EXPLAIN, STAGES = SHOWN
NUMBER = r"[\d.]+%?"


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def plant(project):
    text = (project / "tpu.py").read_text()
    assert text.count(f"{OLD}\n") == 1
    (project / "tpu.py").write_text(text.replace(f"{OLD}\n", f"{NEW}\n"))


def ran(command, project):
    """What a command of the page prints."""
    program, *arguments = shlex.split(command)
    run = run_pytest if program == "pytest" else lambda folder, *given: run_module("parity", folder, *given)
    return run(project, *arguments).stdout


def assert_shown(command, printed):
    """Every line that the page shows is printed: words and places as they are, figures to a tenth."""
    for line in SHOWN[command].splitlines():
        parts = re.split(rf"(?<![\w:.])({NUMBER})(?![\w])", line.strip())
        pattern = "".join(f"({NUMBER})" if n % 2 else re.escape(part) for n, part in enumerate(parts))
        found = re.search(re.sub(r"(\\ )+", r"\\s+", pattern), printed)
        assert found, (line, printed)
        for then, now in zip(parts[1::2], found.groups(), strict=True):
            a, b = (float(x.strip("%")) for x in (then, now))
            assert abs(a - b) <= 0.1 * max(a, b), (line, found[0])


def test_the_page_shows_every_file_and_command():
    assert [*FILES] == ["pyproject.toml", "golden.py", "matrix.py", "tpu.py", "gpu.py", "test_attention.py"]
    assert len(PARTS) == 2 * (len(FILES) + 1) + 1 and len(SHOWN) == TUTORIAL.count("    $ ")


def test_the_page_names_every_kind_of_data():
    table = PAGE.partition("| data | |\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(DISTRIBUTIONS)


def test_stages_find_the_planted_bug(project):
    plant(project)
    assert_shown(STAGES, ran(STAGES, project))


@pytest.mark.full
def test_the_tutorial_prints_what_it_shows(project):
    assert_shown(SUITE, ran(SUITE, project))
    plant(project)
    assert_shown(PLANTED, ran(PLANTED, project))
    assert_shown(EXPLAIN, ran(EXPLAIN, project))
