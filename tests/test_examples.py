"""Every project under examples/ passes its own tests, in a virtual environment of its own."""

import os
import site
import subprocess
import venv
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("example", sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")))
def test_example(example, tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    # Its own environment, with what is installed here in place of a download: kernel-parity is an installed package.
    folder = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    folder.joinpath("installed.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=EXAMPLES / example, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
