"""A command in a child of its own, so that one that a kernel ends, `os._exit(0)` or a signal, is not taken for done.

The process that was started waits and passes signals on; its child does the work, and says at its end with which
status. One that ends without having said so has died of something, whatever its status is. A child never outlives its
parent (Linux: PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals by which a user ends a command: a child gets those to its parent as well."""
FRAMEWORKS = ("jax", "torch", "triton")
"""What has threads or devices that no fork survives: with one of them loaded, the child is this command anew."""
_INHERITED = "PARITY_SUPERVISED"
"""Environment variable of such a child: the descriptor that it reports to, and the note it was given."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class End:
    """How a child ended. status: as `subprocess` has it, negative a signal; said: what it said it would be, or None."""

    status: int
    said: int | None

    @property
    def code(self) -> int:
        """The exit code of the command: never 0 where the child did not say so."""
        if self.said is None:
            return self.status if self.status > 0 else 1
        return self.said or (self.status if self.status >= 0 else 1)


@dataclass(frozen=True)
class Child:
    """In the child: the note that the parent has for it. finish: say with which status this process is about to end."""

    note: str
    report: int

    def finish(self, status: int) -> None:
        """Say that the work is done."""
        os.write(self.report, f"{status}\n".encode())


def can_split() -> bool:
    """Whether this process can be split: not while it is debugged or traced, nor where signals cannot be waited for."""
    watched = sys.gettrace() is not None or sys.getprofile() is not None or "pydevd" in sys.modules
    main = threading.current_thread() is threading.main_thread()
    return hasattr(signal, "sigtimedwait") and main and not watched


def inherited() -> Child | None:
    """What the child is that this process was started as, None where it was not."""
    descriptor, colon, note = os.environ.pop(_INHERITED, "").partition(":")
    if not colon:
        return None
    os.set_inheritable(int(descriptor), False)
    _begin_child(signal.pthread_sigmask(signal.SIG_BLOCK, ()) - PASSED_ON - {signal.SIGCHLD})
    return Child(note, int(descriptor))


def split(note: str = "") -> Child | End:
    """Go on in a child of this process, which is told `note`; in the parent, how that ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    awaited = PASSED_ON | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    if any(name in sys.modules for name in FRAMEWORKS):
        environment = {**os.environ, _INHERITED: f"{writing}:{note}"}
        command = [sys.executable, *sys.orig_argv[1:]]
        pid = subprocess.Popen(command, env=environment, pass_fds=[writing]).pid
    elif not (pid := os.fork()):
        os.close(reading)
        _begin_child(mask)
        return Child(note, writing)
    os.close(writing)
    try:
        status = _wait(pid, awaited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.set_blocking(reading, False)  # what the child has left running may still hold the other end
    try:
        said = os.read(reading, 64).decode().split()
    except BlockingIOError:
        said = []
    os.close(reading)
    return End(status, int(said[-1]) if said else None)


def end_with_parent() -> None:
    """Let this process be killed when the one that started it ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


def _begin_child(mask: set[Any]) -> None:
    end_with_parent()
    for number in PASSED_ON - {signal.SIGINT}:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _interrupt(number: int, frame: Any) -> None:
    """As Ctrl-C, so that what is begun is put away; once, since the second one would end that."""
    signal.signal(number, signal.SIG_IGN)
    if not callable(signal.getsignal(signal.SIGINT)):  # of a job in the background
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _wait(pid: int, awaited: set[signal.Signals]) -> int:
    """The child's exit status. Signals to this process alone, not those of the terminal, go to it as well."""
    while True:
        found = signal.sigtimedwait(awaited, 1.0)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        # Stopped (Ctrl-Z) for longer than that second, CPython returns a siginfo that it has not filled.
        if found and found.si_signo in PASSED_ON and found.si_code <= 0:
            os.kill(pid, found.si_signo)
