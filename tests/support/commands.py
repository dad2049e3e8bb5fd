"""Commands that tests run in a folder: pytest, `parity` and git, as their users do."""

import os
import subprocess
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """The environment without what it tells the pytest that runs this test: its options, and which worker it is."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def run_module(module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `python -m module arguments` prints in a folder, and its exit status."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder."""
    # Without hypothesis, which nobody's project uses here: a third of the time that a run takes to start.
    return run_module("pytest", folder, "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments)


def git(folder: Path, *words: str) -> str:
    """What git prints in a folder, as somebody without settings of their own."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
