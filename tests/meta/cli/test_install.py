"""What `make parity` and runners install with, on pretended installers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m venv") shift 2; echo "venv $*" >>calls; for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python";;
  "-m pip") shift 2; echo "pip $*" >>calls; echo "WARNING: noise"; echo "Collecting jax"; {pip};;
esac
"""
UV = '#!/bin/sh\necho "uv $*" >>calls; echo "Resolved 40 packages" >&2; {uv}\n'


@pytest.fixture
def install(tmp_path):
    """Runs the installer; what it called, what it printed and its exit code. uv, pip: what these end with."""

    def run(extras, *, pip="exit 0", uv=None):
        (tmp_path / ".ci").mkdir()
        shutil.copy(ROOT / ".ci/install", tmp_path / ".ci/install")
        for name, text in {"python": PYTHON.format(pip=pip), **({"uv": UV.format(uv=uv)} if uv else {})}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        own = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(tmp_path / "python")}
        done = subprocess.run(
            ["bash", ".ci/install", extras], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=60
        )
        called = [call.split() for call in (tmp_path / "calls").read_text().splitlines()]
        return [(words[0], "+cpu" in " ".join(words)) for words in called[1:]], called[0], done

    return run


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="with an NVIDIA device torch's plain build is wanted")  # noqa: PTH110
@pytest.mark.parametrize(
    ("ends", "called"),
    [
        (dict(uv="exit 0"), [("uv", True)]),
        (dict(), [("pip", True)]),
        (dict(uv="exit 1"), [("uv", True), ("pip", True)]),
        (dict(uv="exit 1", pip='case "$*" in *+cpu*) exit 1;; esac'),
         [("uv", True), ("pip", True), ("uv", False), ("pip", False)]),
    ],
)  # fmt: skip
def test_uv_comes_before_pip_and_the_cpu_build_before_any(install, ends, called):
    calls, _, done = install("jax,triton", **ends)
    assert calls == called and done.returncode == 0
    assert "WARNING" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("installed kernel-parity[jax,triton] into .venv in ")


def test_a_runner_without_torch_asks_for_none_and_one_without_frameworks_has_those_of_its_image(install, tmp_path):
    calls, venv, _ = install("jax,libtpu,tests")
    assert calls == [("pip", False)] and venv == ["venv", ".venv"]
    shutil.rmtree(tmp_path / ".ci")
    shutil.rmtree(tmp_path / ".venv")
    (tmp_path / "calls").unlink()
    assert install("tests")[1] == ["venv", "--system-site-packages", ".venv"]


def test_what_cannot_be_installed_is_shown_and_fails(install):
    _, _, done = install("jax", pip="echo 'ERROR: No matching distribution'; exit 1")
    assert done.returncode == 1
    assert "ERROR: No matching distribution" in done.stderr and "not installed: .venv/install.log" in done.stderr
