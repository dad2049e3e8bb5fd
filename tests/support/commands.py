"""Commands that tests run in a folder: pytest, `parity` and git, as their users do."""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

FORKS = Path(__file__).with_name("forks.py")
SECONDS = 300  # that a command may take


def environment() -> dict[str, str]:
    """The environment without what it tells the pytest that runs this test: its options, and which worker it is.

    GPUs are hidden: what a command prints is that of a host without one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PARITY_"))}
    # Of a module that a test edits within a second, the bytecode would be stale.
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}


class Forks:
    """The process that forks for commands: see `tests.support.forks`. seconds: of a processor, that these took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._process = subprocess.Popen(
            [sys.executable, FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        atexit.register(self.end)

    def status(self, **asked: Any) -> int:
        """The exit status of the command that `tests.support.forks.become` becomes."""
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            self.end()
            the_forks.cache_clear()
            raise TimeoutError(f"{asked['module']} {asked['arguments']} took more than {SECONDS} s")
        status, seconds = self._process.stdout.readline().split()
        self.seconds += float(seconds)
        return int(status)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


the_forks = cache(Forks)
"""The one of this process."""


def run_module(module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `python -m module arguments` prints in a folder, and its exit status."""
    with tempfile.TemporaryDirectory() as written:
        out, err = Path(written, "out"), Path(written, "err")
        asked = dict(module=module, folder=str(folder), arguments=arguments, environment=environment())
        status = the_forks().status(**asked, out=str(out), err=str(err))
        return subprocess.CompletedProcess([module, *arguments], status, out.read_text(), err.read_text())


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder."""
    # Without hypothesis, which nobody's project uses here: a third of the time that a run takes to start.
    return run_module("pytest", folder, "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments)


def git(folder: Path, *words: str) -> str:
    """What git prints in a folder, as somebody without settings of their own."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
