"""Records written.

While tests run, every process appends to a part of its own under `ROOT/.parts`; `merge` folds the parts into the
ledgers.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from parity.ledger.read import FILE_LIMIT, REASON, content_of, decode_line, entries, home, inside, read_all, read_home
from parity.ledger.schema import TIME, Ledger, Provenance, Record, RecordError, canonical
from parity.op import BACKENDS

_PARTS = ".parts"
CLOCKS = timedelta(hours=1)
"""How far the clocks of two machines may be apart."""


class Recorder:
    """Appends records to a part of its own under `root`. What was written survives the process.

    One per process; close it before the merge that is to take its part. Also a context manager.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._part: BinaryIO | None = None
        self._known: set[str] = set()

    def write(self, record: Record) -> None:
        """Append one record, and its provenance before its first use; on disk when this returns.

        Raises ValueError for a record that `read` would refuse, OSError where the disk does.
        """
        provenance = record.provenance
        lines = [provenance_line(provenance)] if provenance.id not in self._known else []
        lines.append(record_line(record))
        for line in lines:
            decode_line(line.encode(), {provenance.id: provenance})
        part = self._part or self._open()
        try:
            part.write("".join(f"{line}\n" for line in lines).encode())
            part.flush()
            os.fsync(part.fileno())
        except OSError:
            self.close()  # whatever half a line this left, the next record goes elsewhere
            raise
        self._known.add(provenance.id)

    def _open(self) -> BinaryIO:
        # A merge takes away parts that nobody holds: none may run between creating this one and holding it.
        with _locked(self._root) as parts:
            self._part = (parts / f"{uuid.uuid4().hex}-{os.getpid()}.jsonl").open("xb")
            fcntl.flock(self._part, fcntl.LOCK_SH)
        return self._part

    def close(self) -> None:
        """Leave the part to the next `merge`."""
        part, self._part = self._part, None
        self._known.clear()
        if part is not None:
            part.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Follower:
    """Reads what recorders append to the parts under `root` while they do; every record once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[Path, tuple[int, dict[str, Provenance]]] = {}

    def new(self) -> list[Record]:
        """What was written whole since the last call. Raises RecordError for a line that is not a record."""
        found: list[Record] = []
        for path in sorted((self._root / _PARTS).glob("*.jsonl")):
            position, provenances = self._read.get(path, (0, {}))
            with path.open("rb") as part:
                part.seek(position)
                for line in part:
                    if not line.endswith(b"\n"):  # still being written, or its writer died
                        break
                    position += len(line)
                    try:
                        entry = decode_line(line, provenances)
                    except ValueError as error:
                        raise RecordError(f"{path}: {str(error)[:REASON]}") from None
                    if isinstance(entry, Provenance):
                        provenances[entry.id] = entry
                    else:
                        found.append(entry)
            self._read[path] = position, provenances
        return found


@dataclass(frozen=True)
class Merged:
    """What `merge` did."""

    written: int  # records that came into ledgers
    older: int  # records that did not: what the ledger has of their case and seed is newer
    lost_lines: tuple[str, ...]  # what is wrong with each line that could not be read
    in_use: int  # parts left alone because their writer still holds them


def merge(root: Path, others: Collection[Record] = ()) -> Merged:
    """Fold all parts that no writer holds, and `others`, into the ledgers; of each (case, seed) the newest stays.

    Newest is by the provenance's `utc`, within one part the last; a record from the future is older than any other, or
    a clock that was wrong once would keep its records for ever. Ledgers are replaced as a whole and parts removed after
    that, so a merge that dies anywhere is made good by the next; merges wait for each other.
    Raises RecordError, with nothing changed, for a ledger that cannot be read.
    """
    if not others and not (root / _PARTS).exists():
        return Merged(0, 0, (), 0)
    with _locked(root) as folder:
        parts = [inside(root, part) for part in sorted(folder.glob("*.jsonl")) if part.is_file()]
        free = [part for part in parts if not _in_use(part)]
        lost: list[str] = []
        records = list(others)
        for part in free:
            records += _latest(root, part, lost)
        found: dict[tuple[Path, tuple[str, int]], Record] = {}
        for record in records:
            place = home(root, record), record.key
            found[place] = _newer(record, found.get(place, record))
        paths = sorted({inside(root, path) for path, _ in found})
        ledgers = {path: read_home(root, path) if path.exists() else {} for path in paths}
        written = 0
        for (path, key), record in found.items():
            if _newer(record, ledgers[path].get(key, record)) is record:
                ledgers[path][key] = record
                written += 1
        for path, ledger in ledgers.items():
            _replace(path, ledger)
        for part in free:
            part.unlink()
        return Merged(written, len(found) - written, tuple(lost), len(parts) - len(free))


def left_in_parts(root: Path) -> tuple[list[Record], list[str]]:
    """The records of a folder of ledgers that no merge has folded in yet, as of a killed run, and what is wrong there.

    Nothing is changed, and no lock taken: the folder may be one that can only be read. Raises RecordError for a part
    that leads out of it.
    """
    lost: list[str] = []
    parts = sorted((root / _PARTS).glob("*.jsonl"))
    return [record for part in parts for record in _latest(root, inside(root, part), lost)], lost


def check(root: Path) -> None:
    """Raise what a merge at the end of a run would: OSError, RecordError. Without a ledger nothing is made."""
    for backend in BACKENDS:
        for folder in [root / backend, *(root / backend).glob("*")]:
            inside(root, folder)
        read_all(root, backend)
    with _locked(root):
        pass


def _latest(root: Path, part: Path, lost: list[str]) -> Collection[Record]:
    """Of each case and seed the last record in a part; what is wrong with a line goes to `lost`."""
    latest: dict[tuple[Path, tuple[str, int]], Record] = {}
    for _, entry in entries(content_of(part), str(part)):
        if isinstance(entry, RecordError):
            lost.append(str(entry))
        else:
            latest[home(root, entry), entry.key] = entry
    return latest.values()


@contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """The folder of parts, with no other process merging or opening a part. The lock dies with its holder."""
    parts = inside(root, root / _PARTS)
    parts.mkdir(parents=True, exist_ok=True)
    with inside(root, parts / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield parts


def _in_use(part: Path) -> bool:
    with part.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False  # for good: no writer opens a part twice


def _newer(one: Record, other: Record) -> Record:
    """Of two equally new records always the same one, so that the order of parts does not matter."""
    times = _time(one), _time(other)
    if times[0] == times[1]:
        return one if one == other else max(one, other, key=record_line)
    return one if times[0] > times[1] else other


def _time(record: Record) -> str:
    """When it was recorded, "" of one from the future (by more than clocks differ)."""
    latest = datetime.now(UTC) + CLOCKS
    return record.provenance.utc if record.provenance.utc <= latest.strftime(TIME) else ""


def _replace(path: Path, ledger: Ledger) -> None:
    provenances = {record.provenance.id: record.provenance for record in ledger.values()}
    lines = [provenance_line(provenances[key]) for key in sorted(provenances)]
    lines += [record_line(ledger[key]) for key in sorted(ledger)]
    content = "".join(f"{line}\n" for line in lines).encode()
    if len(content) > FILE_LIMIT:
        raise RecordError(f"{path}: must stay within {FILE_LIMIT} bytes, got {len(content)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a merge that died
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def provenance_line(provenance: Provenance) -> str:
    """The line of a ledger that defines a provenance."""
    return canonical({"id": provenance.id, "provenance": provenance})


def record_line(record: Record) -> str:
    """The line of a ledger that holds a record."""
    seconds = round(record.seconds, 3)
    return canonical({**vars(record), "seconds": seconds, "provenance": record.provenance.id})
