"""The steps of a first contact, each in a process of its own, against the clock; what came of them, in one file.

The file is lines of JSON: the device and the code first, then a row for each step as it ends. A session that finds the
file of its own device and code goes on where it ended; a step that was under way when all was killed is tried again.
Any other file that is in its place is kept under another name.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from parity.compilers.processes import shortened
from parity.contact.steps import NOT_HERE, Found, Step, perform
from parity.op import Backend

CRASHED, HUNG, RAISED = "CRASHED", "HUNG", "RAISED"
FAILED = (CRASHED, HUNG, RAISED)
DEVICE = Step("device", "", 120)
MODULES = {"gpu": ["torch", "triton"], "tpu": ["jax", "jax.experimental.pallas.tpu"]}
"""What a process starts with: loaded once, before any device is touched."""
_STACK = re.compile(r'^Current thread .*\n +File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""Where the innermost call of the thread was that a signal came to, as faulthandler writes it."""


@dataclass(frozen=True)
class Row:
    """A step and what came of it; outcome as of `Found`, or CRASHED, HUNG, RAISED."""

    kind: str
    name: str
    outcome: str
    by: float
    detail: str
    seconds: float
    more: Any = None
    log: str = ""

    @property
    def id(self) -> str:
        """The step's."""
        return f"{self.kind} {self.name}"


@dataclass(eq=False)
class Session:
    """Where a contact is made, and what it writes. aside: where the file went that was there and is not its own."""

    root: Path
    backend: Backend
    file: Path
    aside: Path | None = None

    @cached_property
    def context(self) -> Any:
        """Of its processes. This one leaves the device alone, which may be one process's at a time."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES[self.backend])
        return context

    @cached_property
    def about(self) -> dict[str, Any]:
        """The device, the code and the versions. Raises ValueError where there is no answer."""
        row = self._tried(DEVICE, DEVICE.seconds)
        if row is None or row.more is None:
            raise ValueError(f"the device must answer, got {row and f'{row.outcome}: {row.detail}'}")
        about: dict[str, Any] = row.more
        return about

    def resume(self) -> list[Row]:
        """The rows of a session of the same device and code, whose file is kept; else none, and a new file.

        A line that a session was killed in while it wrote it is cut off. What else is in the file's place is set aside.
        """
        if self.file.exists():
            whole = self.file.read_bytes()
            first, *others = whole.split(b"\n")[:-1] or [b""]
            with suppress(ValueError, TypeError):
                if json.loads(first or "null") == self.about:
                    rows = [Row(**json.loads(line)) for line in others]
                    os.truncate(self.file, whole.rfind(b"\n") + 1)
                    return rows
            names = (self.file.with_stem(f"{self.file.stem}-{n}") for n in itertools.count(1))
            self.aside = self.file.rename(next(name for name in names if not name.exists()))
        self._write("w", self.about)
        return []

    def run(self, steps: Sequence[Step], seconds: float, tell: Callable[[Row], None]) -> list[Row]:
        """Every step that has no row yet, until `seconds` are over; all rows. tell: of each row when it is written."""
        ends = time.monotonic() + seconds
        rows = self.resume()
        done = {row.id for row in rows}
        for step in steps:
            left = ends - time.monotonic()
            if left <= 0:
                break
            if step.id in done:
                continue
            row = self._tried(step, left)
            if row is None:  # the time was over: it is tried again
                break
            rows.append(row)
            self._write("a", asdict(row))
            tell(row)
        return rows

    def _tried(self, step: Step, left: float) -> Row | None:
        """A step's row, None where the session's time ended it and not its own."""
        began = time.monotonic()
        receiving, sending = self.context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile() as log:
            process = self.context.Process(target=_child, args=(self.root, self.backend, step, sending, log.name))
            process.start()
            sending.close()
            try:
                answer = _answer(receiving, process, min(step.seconds, left))
                if answer == HUNG:
                    _abort(process)
            finally:
                _end(process)
            text = log.read().decode(errors="replace")
        took = time.monotonic() - began
        if isinstance(answer, Found):
            return Row(step.kind, step.name, answer.outcome, answer.by, answer.detail, took, answer.more)
        if answer == HUNG and left < step.seconds:
            return None
        outcome, detail = answer if isinstance(answer, tuple) else (HUNG, f"ended after {step.seconds:g} s")
        if place := _STACK.search(text):
            detail += f", in {Path(place[1]).name}:{place[2]} {place[3]}"
        return Row(step.kind, step.name, outcome, float("inf"), detail, took, None, shortened(text))

    def _write(self, mode: str, line: dict[str, Any]) -> None:
        with self.file.open(mode, encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def _answer(receiving: Connection, process: Any, seconds: float) -> Found | tuple[str, str] | str:
    """What the process found, how it failed, or HUNG."""
    if not receiving.poll(seconds):
        return HUNG
    try:
        answer: Found | tuple[str, str] = receiving.recv()
        return answer
    except EOFError:
        process.join(10)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
        return CRASHED, f"the process ended with {how}"


def _abort(process: Any) -> None:
    """Let a process that hangs write where it is into its log, and end."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGABRT)
    process.join(2)


def _end(process: Any) -> None:
    """The end of a process and of what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        process.kill()
    process.join(10)


def _end_with_session() -> None:
    """Wait for the session's end, which a kill may be, and end with it, and with what was started here."""
    if session := multiprocessing.parent_process():
        session.join()
        os.killpg(0, signal.SIGKILL)


def _child(root: Path, backend: Backend, step: Step, sending: Connection, log: str) -> None:
    """The process of a step."""
    os.setpgrp()
    threading.Thread(target=_end_with_session, daemon=True).start()
    stream: TextIO = Path(log).open("w", encoding="utf-8")  # noqa: SIM115 (as long as the process lives)
    for descriptor in (1, 2):
        os.dup2(stream.fileno(), descriptor)
    faulthandler.enable()  # of a signal that ends this process the log has the stack
    sys.path.insert(0, str(root))
    answer: Found | tuple[str, str]
    try:
        answer = perform(root, backend, step)
    except NotImplementedError as error:
        answer = Found(NOT_HERE, 0.0, str(error))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        answer = (RAISED, f"{type(error).__name__}: {error}".splitlines()[0][:300])
    sending.send(answer)
    sending.close()
    stream.flush()
    os._exit(0)  # an accelerator whose context is lost may not let it end otherwise
