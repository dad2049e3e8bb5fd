"""Every project under examples/ gets the verdicts that its README shows, in a virtual environment of its own."""

import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.commands import environment

EXAMPLES = Path(__file__).parents[2] / "examples"


def verdicts(text):
    """Op, backend, cases and verdicts of every line of a summary, and the counts of pytest's last line."""
    lines = re.findall(r"^ *(\w+) +(tpu|gpu) emulated +(\d+) +\S+ +(?:–|\S+ \[.+\])  (.+)$", text, re.MULTILINE)
    return lines, re.findall(r"(?:\d+ failed, )?\d+ passed", text)[-1]


NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml"))


@pytest.mark.parametrize("example", [pytest.param(n, marks=[pytest.mark.full] * (n != "softmax")) for n in NAMES])
def test_example(example, tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    # Its own environment, with what is installed here in place of a download: kernel-parity is an installed package.
    folder = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    folder.joinpath("installed.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    own = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=EXAMPLES / example, env=own, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    shown = verdicts((EXAMPLES / example / "README.md").read_text())
    assert shown[0]
    assert verdicts(done.stdout) == shown, done.stdout + done.stderr


@pytest.mark.parametrize("example", NAMES)
def test_the_matrix_of_an_example_is_sound(example):
    """Those that are made of ours are changed with them."""
    load = "import sys, pathlib, parity.matrix; sys.path[:0] = ['.', '../..']; parity.matrix.load(pathlib.Path())"
    done = subprocess.run(
        [sys.executable, "-c", load], cwd=EXAMPLES / example, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
