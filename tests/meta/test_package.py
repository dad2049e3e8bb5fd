"""The wheel, used by a project that is not this one."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"op_arguments", "cpu_golden", "tpu_kernels", "gpu_reference", "parity"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, unpacked where nothing else is."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = shutil.copytree(
        ROOT, folder / "sources", ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    )
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sources)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip(f"no index has the setuptools that build it: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.full  # it asks a package index for the setuptools that pyproject.toml names
def test_a_wheel_has_all_packages_with_their_types_and_no_tests(wheel):
    assert {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")} == PACKAGES
    assert all((wheel / package / "py.typed").exists() for package in PACKAGES)
    assert {path.name for path in (wheel / "parity/report").iterdir()} >= {"page.html", "page.css", "page.js"}


@pytest.mark.full
def test_a_project_elsewhere_judges_its_kernels_with_the_wheel(wheel, tmp_path):
    project = shutil.copytree(ROOT / "examples/softmax", tmp_path / "softmax")
    own = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": str(wheel),
    }
    for words in (["parity", "--version"], ["parity", "doctor"], ["pytest", "-q", "-p", "no:cacheprovider"]):
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=project, env=own, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    where = "import parity; print(parity.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", where], cwd=project, env=own, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(wheel))
