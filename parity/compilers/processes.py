"""Compilers in processes of their own: one that crashes or hangs costs the case at hand, not the others."""

import contextlib
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

START_SECONDS = 300.0
"""For a process to import its framework: minutes on a machine that is busy and has cold disks."""
LOG_CHARACTERS = 8000


@dataclass(frozen=True)
class Death:
    """How a process ended before it had an answer, and what it wrote."""

    outcome: Literal["crashed", "timed out"]
    error: str
    log: str


def compile_each(
    compile: Callable[[Any, Path], Any],
    cases: Sequence[Any],
    timeout: float,
    *,
    framework: str,
    environment: Mapping[str, str],
) -> list[Any]:
    """`compile(case, log)` of each case, in order, in as few processes as possible; a `Death` where one died of it.

    compile: a function that pickle finds by name, or a `partial` of one; log: the file that has what was written since
    the case began. timeout: seconds for each case. framework: the module to be imported before the first one begins.
    Raises RuntimeError where a process does not start.
    """
    results: list[Any] = []
    while len(results) < len(cases):
        job = compile, cases[len(results) :], timeout, framework
        answers, death = _in_process(job, timeout, environment)
        results += answers
        if len(results) < len(cases):
            results.append(death)
    return results


def _in_process(job: tuple[Any, ...], timeout: float, environment: Mapping[str, str]) -> tuple[list[Any], Death]:
    """What one process answers, and how it died if that is not an answer for every case."""
    with tempfile.TemporaryDirectory() as folder:
        paths = request, answers, log = [Path(folder, name) for name in ("request", "answers", "log")]
        request.write_bytes(pickle.dumps(job))
        answers.touch()
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import _serve; import sys; _serve(*sys.argv[1:])", *paths],
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,  # open as long as this process lives: the other one ends with it
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        with process:
            try:
                status = process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started too, as ptxas
        started, *done = _read(answers) or [False]
        text = shortened(log.read_text(errors="replace"))
    if status == -signal.SIGALRM:
        death = Death("timed out", f"the compiler took more than {timeout if started else START_SECONDS:g} s", text)
    else:
        end = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        reason = first_error(text) or text.strip().rpartition("\n")[2]
        death = Death("crashed", f"the compiler ended with {end}: {reason}", text)
    if not started:
        raise RuntimeError(f"the compiler did not start: {death.error}\n{text}")
    return done, death


def _read(answers: Path) -> list[Any]:
    """The complete answers in a file whose last one may be torn."""
    results: list[Any] = []
    with answers.open("rb") as stream:
        while True:
            try:
                results.append(pickle.load(stream))
            except (EOFError, pickle.UnpicklingError):
                return results


def _serve(request: str, answers: str, log: str) -> None:
    """The process: answer case by case, True first, as long as the parent lives."""
    threading.Thread(target=lambda: os._exit(bool(sys.stdin.read())), daemon=True).start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, wherever in the compiler it is
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
    compile, cases, timeout, framework = pickle.loads(Path(request).read_bytes())
    importlib.import_module(framework)
    with Path(answers).open("ab") as stream:

        def answer(result: Any) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(pickle.dumps(result))
            stream.flush()

        answer(True)
        for case in cases:
            signal.setitimer(signal.ITIMER_REAL, timeout)
            os.ftruncate(sys.stderr.fileno(), 0)  # what is in it when the process dies is about this case
            answer(compile(case, Path(log)))
    os._exit(0)  # to take a framework apart takes as long as to load it


def shortened(text: str) -> str:
    """A log without its middle, where it is long."""
    half = LOG_CHARACTERS // 2
    return text if len(text) <= LOG_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"


def first_error(log: str) -> str | None:
    """The first line that calls itself an error, or a failed assertion."""
    lines = (line.strip() for line in log.splitlines())
    return next((line for line in lines if re.search(r"\b(error|ERROR)\s*:|Assertion .* failed", line)), None)
