"""Work shared out over processes that may die: it costs what they were doing, and the rest goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any, Generic, TypeVar

from parity.backends import prepare_environment
from parity.runners.supervision import end_with_parent

POLL = 1.0
"""Seconds between two looks at whether a process lives: one that it has forked may keep its connection open."""

J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True)
class Death:
    """How a process ended that had no answer. status: as `subprocess` has it; None: it was killed, it took too long."""

    status: int | None


def each(
    work: Callable[[J], R], jobs: Sequence[J], count: int, seconds: float | None = None
) -> Iterator[tuple[int, R | Death]]:
    """Each job's number and what `work` returns of it, as they are done, by up to `count` processes at once.

    work: a function that pickle finds by name, or a `partial` of one. seconds: after which a job's process is killed.
    A process serves job after job; one that dies is replaced.
    """
    # Spawned, not forked: the frameworks' threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    waiting, idle, busy = deque(enumerate(jobs)), deque[_Lane[J, R]](), list[_Lane[J, R]]()
    try:
        while waiting or busy:
            while waiting and len(busy) < count:
                lane = idle.pop() if idle else _Lane(context, work)
                lane.begin(*waiting.popleft())
                busy.append(lane)
            wait([lane.connection for lane in busy], POLL)
            for lane in [*busy]:
                answer = lane.answer(seconds)
                if answer:
                    busy.remove(lane)
                    if not isinstance(answer[0], Death):
                        idle.append(lane)
                    yield lane.number, answer[0]
    finally:
        for lane in [*idle, *busy]:
            lane.end()


class _Lane(Generic[J, R]):
    """A process, and the number of the job that it is at."""

    number: int

    def __init__(self, context: SpawnContext, work: Callable[[J], R]) -> None:
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, work))
        self._process.start()
        other.close()
        self._began: float | None = None  # not before the process has

    def begin(self, number: int, job: J) -> None:
        self.number = number
        self._began = self._began and time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has died since: `answer` says so
            self.connection.send(job)

    def answer(self, seconds: float | None) -> tuple[R | Death] | None:
        """What came of the job, None while it is under way."""
        # Asked before the connection is looked at: what a process said before it died is there by then.
        lives = self._process.exitcode is None
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if self._began is not None:
                    return (message,)
                self._began = message
        except (EOFError, OSError):
            lives = False
        if lives and seconds and self._began and time.monotonic() - self._began > seconds:
            self.end()
            return (Death(None),)
        if lives:
            return None
        self._process.join(POLL)
        status = self._process.exitcode
        self.end()
        return (Death(status if status is not None else 1),)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which kills this process
    prepare_environment()
    connection.send(time.monotonic())
    with contextlib.suppress(EOFError):
        while True:
            connection.send(work(connection.recv()))
