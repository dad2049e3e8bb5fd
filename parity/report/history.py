"""How the ledger's ε moved over the committed revisions of a project."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parity import git
from parity.ledger.diff import FOLDER
from parity.ledger.read import FILE_LIMIT, parse
from parity.ledger.schema import RecordError
from parity.op import BACKENDS

REVISIONS = 20
"""The newest that are read."""


@dataclass(frozen=True)
class Series:
    """The ε of one case by revision, oldest first; None where a revision has no record of it.

    The case is that of its op and device whose η is nearest to its bound in the newest revision. Its ε is the root mean
    square over seeds and outputs.
    """

    op: str
    backend: str
    device_kind: str
    case: str
    epsilon: tuple[float | None, ...]


@dataclass(frozen=True)
class History:
    """The revisions that changed the ledger, oldest first, and a series for each op and device.

    note: why there is nothing, or what could not be read.
    """

    revisions: tuple[str, ...] = ()  # short hash, date and subject
    series: tuple[Series, ...] = ()
    note: str = ""


_Name = tuple[str, str, str]
"""Backend, folder of the device kind, op."""
_Cases = Mapping[str, tuple[float, float]]
"""Of each case with a measured output: its worst η over its bound, and its ε."""


def history(root: Path) -> History:
    """The history of the ledger of the project at `root`, as its git repository has it."""
    try:
        log = git.run(root, "log", f"-{REVISIONS}", "--format=%H%x09%h %cs %s", "--", FOLDER).decode(errors="replace")
        commits = [line.split("\t", 1) for line in reversed(log.splitlines())]
        blobs = {commit: _ledgers_of(root, commit) for commit, _ in commits}
        contents = {blob: git.content(root, blob) for found in blobs.values() for blob in found.values()}
    except (OSError, subprocess.SubprocessError):
        return History(note="No git repository here: nothing is known of earlier revisions.")
    if not commits:
        return History(note="No revision has a ledger yet.")
    cases: dict[git.Blob, _Cases] = {}
    unread = 0
    for blob, text in contents.items():
        try:
            cases[blob] = _cases(text)
        except RecordError:
            cases[blob] = {}
            unread += 1
    ledgers = [{name: cases[blob] for name, blob in blobs[commit].items()} for commit, _ in commits]
    series = (_series(name, [ledger.get(name, {}) for ledger in ledgers]) for name in sorted(ledgers[-1]))
    note = f"{unread} ledgers of earlier versions cannot be read by this one." if unread else ""
    return History(tuple(named for _, named in commits), tuple(filter(None, series)), note)


def _series(name: _Name, revisions: list[_Cases]) -> Series | None:
    newest = revisions[-1]
    if not newest:  # of an op that is compared bit for bit
        return None
    worst = max(newest, key=lambda case: newest[case])
    backend, device_kind, op = name
    epsilon = tuple(cases[worst][1] if worst in cases else None for cases in revisions)
    return Series(op, backend, device_kind, worst, epsilon)


def _ledgers_of(root: Path, commit: str) -> dict[_Name, git.Blob]:
    """The ledgers of a commit that lie where they belong; only those of a sane size count."""
    return {
        (path.parts[1], path.parts[2], path.stem): blob
        for path, blob in git.ledgers_in(root, commit, FOLDER).items()
        if len(path.parts) == 4 and path.parts[1] in BACKENDS and blob.size <= FILE_LIMIT
    }


def _cases(ledger: bytes) -> _Cases:
    records = parse(ledger, "ledger")
    loads: dict[str, float] = {}
    squares: dict[str, list[float]] = {}
    for record in records.values():
        for measured in record.outputs.values():
            if not math.isfinite(measured.epsilon):
                continue
            load = measured.eta_max / record.bound if record.bound else measured.eta_max
            loads[record.case] = max(load, loads.get(record.case, 0.0))
            squares.setdefault(record.case, []).append(measured.epsilon**2)
    return {case: (loads[case], float(np.sqrt(np.mean(squares[case])))) for case in loads}
