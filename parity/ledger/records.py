"""The ledger: what was measured, on what, from what, in files that live in git.

`ROOT/<backend>/<device kind>/<op>.jsonl` holds one JSON object per line with sorted keys: first the provenances, by
id, then one record per (case, seed), in that order, each naming its provenance. Floats have 9 significant digits; the
three that JSON cannot spell are the strings "inf", "-inf" and "nan". The same records always give the same bytes.

While tests run, every process appends to a part of its own under `ROOT/.parts`; `merge` folds the parts into the
ledgers. A file is input like any other: `read` checks every field of every line and trusts none.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import reprlib
import subprocess
import types
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, get_args, get_origin, get_type_hints

from parity import inputs
from parity.backends import EMULATED
from parity.judging import magnitude, metrics
from parity.judging.metrics import HISTOGRAM, MAP, TOP, Metrics
from parity.ledger.sources import identity, identity_of, reached
from parity.op import Backend, Op

SCHEMA = 1

LINE_LIMIT = 2**20
FILE_LIMIT = 2**28
"""Bytes that a line and a file may have; what is larger is refused unread."""

_PARTS = ".parts"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
_DEVICE_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .+()-]{0,99}")
_REASON = 300  # characters of a message: it may quote a file
_NON_FINITE = ("inf", "-inf", "nan")

# What each backend's numbers depend on: distributions, and environment variables by the start of their names.
_VERSIONS = {"tpu": ("jax", "jaxlib", "libtpu"), "gpu": ("torch", "triton")}
_FLAGS = {
    "tpu": ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION"),
    "gpu": ("TRITON_", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
}


class RecordError(ValueError):
    """A file of records that cannot be trusted; names the file, the line and what is wrong with it."""


@dataclass(frozen=True)
class Provenance:
    """Where records come from. Raises ValueError for a name that no folder may have, or a device of the wrong kind."""

    schema: int
    op: str
    backend: Backend
    device_kind: str  # `EMULATED`, or what the framework calls the device
    real: bool  # whether an accelerator computed
    kernel: str  # sha256 of the kernel's code, see `sources`
    golden: str  # sha256 of the golden's code; its values are not hashed, BLAS changes their last bits
    revisions: Mapping[str, int]  # of inputs, magnitude and metrics
    versions: Mapping[str, str]  # of what is installed and this backend's numbers depend on, and of the driver
    flags: Mapping[str, str]  # environment variables that change results, where they are set
    commit: str | None
    dirty: bool | None
    utc: str  # when the recording began

    def __post_init__(self) -> None:
        ledger_path(Path(), self.backend, self.device_kind, self.op)
        if self.real == (self.device_kind == EMULATED):
            raise ValueError(f"real must be {not self.real} on device_kind {self.device_kind!r}, got {self.real}")
        _check_hashes({"kernel": self.kernel, "golden": self.golden})
        if datetime.strptime(self.utc, _TIME).strftime(_TIME) != self.utc:  # written in one way alone, so that it sorts
            raise ValueError(f"utc must be written as 2026-01-31T23:59:59Z, got {self.utc!r}")

    @cached_property
    def id(self) -> str:
        """What records call it by."""
        return hashlib.sha256(_canonical(self).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Record:
    """One case and seed on one backend: what was promised, what came out, how long it took."""

    case: str
    seed: int
    contract: str  # dot/accumulator/output: "native/float32/bfloat16"
    inputs: Mapping[str, str]  # sha256 by argument
    tiles: str | None  # None: the kernel's own choice
    verdict: str  # its outcome
    bound: float
    outputs: Mapping[str, Metrics]  # none where they could not be compared
    contract_epsilon: float | None  # ε of the contract emulated on the golden
    seconds: float
    provenance: Provenance

    def __post_init__(self) -> None:
        for name in ("case", "contract", "verdict"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        if not math.isfinite(self.seconds):
            raise ValueError(f"seconds must be finite, got {self.seconds}")
        _check_hashes(self.inputs)
        for name, m in self.outputs.items():
            if max(m.wrong_finiteness, m.differing) > m.elements or m.misrounded > 1:
                raise ValueError(f"outputs.{name} must count no more elements than its {m.elements}")
            if len(m.histogram) != (bins := len(HISTOGRAM) - 1):
                raise ValueError(f"outputs.{name}.histogram must have {bins} bins, got {len(m.histogram)}")
            if len(m.worst) > TOP or len(m.tiles) > MAP or any(len(row) > MAP for row in m.tiles):
                raise ValueError(f"outputs.{name} must have at most {TOP} worst elements and {MAP} x {MAP} tiles")
            if any(len(row) != len(m.tiles[0]) or not row or any(map(math.isnan, row)) for row in m.tiles):
                raise ValueError(f"outputs.{name}.tiles must be rows of equal length without NaN")

    @property
    def key(self) -> tuple[str, int]:
        """Its place in a ledger."""
        return self.case, self.seed


Ledger = dict[tuple[str, int], Record]
"""The records of one op on one device kind, by (case, seed)."""


def folder_name(device_kind: str) -> str:
    """The folder of a device kind: itself, with `_` for each space. Different kinds never share one.

    Raises ValueError unless it has 1 to 100 of A-Z a-z 0-9 . + ( ) - and space, starts with a letter or digit and has
    no two dots in a row: nothing else may enter a path.
    """
    if not _DEVICE_KIND.fullmatch(device_kind) or ".." in device_kind:
        raise ValueError(f"device_kind must be letters, digits, spaces and . + ( ) -, got {reprlib.repr(device_kind)}")
    return device_kind.replace(" ", "_")


def ledger_path(root: Path, backend: str, device_kind: str, op: str) -> Path:
    """The ledger of an op. Raises ValueError for names that no path may have, see `folder_name`."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be {' or '.join(get_args(Backend))}, got {reprlib.repr(backend)}")
    if not _OP.fullmatch(op) or ".." in op:
        raise ValueError(f"op must be letters, digits and _ . + -, got {reprlib.repr(op)}")
    return root / backend / folder_name(device_kind) / f"{op}.jsonl"


def here(op: Op, backend: Backend, device_kind: str, real: bool, utc: str | None = None) -> Provenance:
    """The provenance of what this process records of `op` from now on, without loading a framework.

    `utc` is when the recording began, where it began in another process: workers that share it share a provenance.
    Raises ModuleNotFoundError where the kernel's module is missing, AttributeError where the kernel is, ValueError as
    `Provenance`.
    """
    kernel: str = getattr(op, backend)
    commit, dirty = _git(reached(kernel)[0].module.path.parent)
    return Provenance(
        schema=SCHEMA,
        op=op.name,
        backend=backend,
        device_kind=device_kind,
        real=real,
        kernel=identity(kernel),
        golden=identity_of(inspect.unwrap(op.golden)),
        revisions={"inputs": inputs.REVISION, "magnitude": magnitude.REVISION, "metrics": metrics.REVISION},
        versions=installed(backend, real),
        flags={
            name: " ".join(value.split())
            for name, value in os.environ.items()
            # Folders for caches and dumps are where, not how.
            if name.startswith(_FLAGS[backend]) and not name.endswith(("_DIR", "_HOME"))
        },
        commit=commit,
        dirty=dirty,
        utc=utc or datetime.now(UTC).strftime(_TIME),
    )


def installed(backend: Backend, real: bool) -> dict[str, str]:
    """The versions of what a backend's numbers depend on, and of the driver of a `real` device."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "ml_dtypes", *_VERSIONS[backend]):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/sys/module/nvidia/version")
    if backend == "gpu" and real and driver.exists():
        found["driver"] = driver.read_text().strip()
    return found


def _git(folder: Path) -> tuple[str | None, bool | None]:
    """The commit checked out at `folder` and whether tracked files differ from it; None where git cannot say."""

    def ask(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return ask("rev-parse", "HEAD"), bool(ask("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


# --- writing ---


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
        lines = [_provenance_line(provenance)] if provenance.id not in self._known else []
        lines.append(_record_line(record))
        for line in lines:
            _decode_line(line.encode(), {provenance.id: provenance})
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
                        entry = _decode_line(line, provenances)
                    except ValueError as error:
                        raise RecordError(f"{path}: {str(error)[:_REASON]}") from None
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
    lost_lines: tuple[str, ...]  # what is wrong with each line that could not be read
    in_use: int  # parts left alone because their writer still holds them


def merge(root: Path, others: Collection[Record] = ()) -> Merged:
    """Fold all parts that no writer holds, and `others`, into the ledgers; of each (case, seed) the newest stays.

    Newest is by the provenance's `utc`, within one part the last. Ledgers are replaced as a whole and parts removed
    after that, so a merge that dies anywhere is made good by the next; merges wait for each other.
    Raises RecordError, with nothing changed, for a ledger that cannot be read.
    """
    if not others and not (root / _PARTS).exists():
        return Merged(0, (), 0)
    with _locked(root) as folder:
        parts = [_inside(root, part) for part in sorted(folder.glob("*.jsonl")) if part.is_file()]
        free = [part for part in parts if not _in_use(part)]
        lost: list[str] = []
        records = list(others)
        for part in free:
            latest: dict[tuple[Path, tuple[str, int]], Record] = {}
            for _, entry in _entries(part):
                if isinstance(entry, RecordError):
                    lost.append(str(entry))
                else:
                    latest[_home(root, entry), entry.key] = entry
            records += latest.values()
        found: dict[tuple[Path, tuple[str, int]], Record] = {}
        for record in records:
            place = _home(root, record), record.key
            found[place] = _newer(record, found.get(place, record))
        paths = sorted({_inside(root, path) for path, _ in found})
        ledgers = {path: _read_home(root, path) if path.exists() else {} for path in paths}
        written = 0
        for (path, key), record in found.items():
            if _newer(record, ledgers[path].get(key, record)) is record:
                ledgers[path][key] = record
                written += 1
        for path, ledger in ledgers.items():
            _replace(path, ledger)
        for part in free:
            part.unlink()
        return Merged(written, tuple(lost), len(parts) - len(free))


@contextmanager
def _locked(root: Path) -> Iterator[Path]:
    """The folder of parts, with no other process merging or opening a part. The lock dies with its holder."""
    parts = _inside(root, root / _PARTS)
    parts.mkdir(parents=True, exist_ok=True)
    with _inside(root, parts / "lock").open("ab") as lock:
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
    if one.provenance.utc == other.provenance.utc:
        return one if one == other else max(one, other, key=_record_line)
    return max(one, other, key=lambda record: record.provenance.utc)


def _replace(path: Path, ledger: Ledger) -> None:
    provenances = {record.provenance.id: record.provenance for record in ledger.values()}
    lines = [_provenance_line(provenances[key]) for key in sorted(provenances)]
    lines += [_record_line(ledger[key]) for key in sorted(ledger)]
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


def _provenance_line(provenance: Provenance) -> str:
    return _canonical({"id": provenance.id, "provenance": provenance})


def _record_line(record: Record) -> str:
    seconds = round(record.seconds, 3)
    return _canonical({**vars(record), "seconds": seconds, "provenance": record.provenance.id})


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        rounded = float(f"{value:.9g}")
        return rounded if math.isfinite(rounded) else str(rounded)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


# --- reading ---


def read(path: Path) -> Ledger:
    """The records of one file, every field checked.

    Raises RecordError for the first line that is not as this module writes it, and where there is no file or too large
    a one.
    """
    ledger: Ledger = {}
    for number, entry in _entries(path):
        if isinstance(entry, RecordError):
            raise entry
        if entry.key in ledger:
            raise RecordError(
                f"{path}:{number}: must be the only record of {reprlib.repr(entry.case)}, seed {entry.seed}"
            )
        ledger[entry.key] = entry
    return ledger


def read_all(root: Path, backend: Backend) -> dict[tuple[str, str], Ledger]:
    """All ledgers of a backend by (device kind, op).

    Raises RecordError as `read`, and for files that lie outside `root` or where their records do not belong.
    """
    ledgers: dict[tuple[str, str], Ledger] = {}
    for path in sorted((root / backend).glob("*/*.jsonl")):
        ledger = _read_home(root, path)
        if ledger:
            provenance = next(iter(ledger.values())).provenance
            ledgers[provenance.device_kind, provenance.op] = ledger
    return ledgers


def _read_home(root: Path, path: Path) -> Ledger:
    ledger = read(_inside(root, path))
    for record in ledger.values():
        if _home(root, record) != path:
            raise RecordError(f"{path}: must hold what belongs there, got a record of {_home(root, record)}")
    return ledger


def _home(root: Path, record: Record) -> Path:
    provenance = record.provenance
    return ledger_path(root, provenance.backend, provenance.device_kind, provenance.op)


def _inside(root: Path, path: Path) -> Path:
    """`path`, unless a symbolic link leads it out of `root`."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise RecordError(f"{path}: must lie in {root}, a symbolic link leads out of it")
    return path


def _entries(path: Path) -> Iterator[tuple[int, Record | RecordError]]:
    """The records of a ledger or a part with their line numbers, and an error in place of each line that is bad."""
    provenances: dict[str, Provenance] = {}
    with _open(path) as file:
        for number, line in enumerate(_lines(file), 1):
            try:
                entry = _decode_line(line, provenances)
            except (ValueError, RecursionError) as error:
                reason = "is nested too deeply" if isinstance(error, RecursionError) else str(error)[:_REASON]
                yield number, RecordError(f"{path}:{number}: {reason}")
                continue
            if isinstance(entry, Provenance):
                provenances[entry.id] = entry
            else:
                yield number, entry


def _open(path: Path) -> BinaryIO:
    if not path.is_file():  # a pipe or a device would never end
        raise RecordError(f"{path}: must be a file")
    if path.stat().st_size > FILE_LIMIT:
        raise RecordError(f"{path}: must have at most {FILE_LIMIT} bytes, got {path.stat().st_size}")
    return path.open("rb")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines, each up to one byte beyond the limit."""
    while line := file.readline(LINE_LIMIT + 1):
        yield line
        while len(line) > LINE_LIMIT and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT + 1)


def _decode_line(line: bytes, provenances: Mapping[str, Provenance]) -> Provenance | Record:
    """What a line holds. Raises ValueError that says what is wrong with it, RecursionError."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"must have at most {LINE_LIMIT} bytes")
    try:
        text = line.decode()
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {reprlib.repr(value)}")
    if value.keys() == {"id", "provenance"}:
        data = value["provenance"]
        schema = data.get("schema") if isinstance(data, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, the one known here, got {reprlib.repr(schema)}")
        provenance: Provenance = _decode(Provenance, data, "provenance")
        if value["id"] != provenance.id:
            raise ValueError(f"id must be {provenance.id}, the provenance's own, got {reprlib.repr(value['id'])}")
        return provenance
    named = value.get("provenance")
    if not isinstance(named, str) or named not in provenances:
        raise ValueError(f"provenance must be the id of an earlier line, got {reprlib.repr(named)}")
    record: Record = _decode_fields(Record, value, "", provenance=provenances[named])
    return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("must not name a key twice in one object")
    return found


def _int(digits: str) -> int:
    if len(digits) > 19:
        raise ValueError(f"must have numbers of at most 19 digits, got {len(digits)}")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"must have numbers that float64 can hold, got {reprlib.repr(digits)}")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f'must spell non-finite numbers "inf", "-inf" or "nan", got a bare {name}')


def _decode(hint: Any, value: Any, name: str) -> Any:
    """`value` from JSON as the annotated type `hint`. Raises ValueError with the `name` of what does not fit.

    Numbers are counts, sizes and errors: none is negative but a bias.
    """
    kind, arguments = _parts_of(hint)
    if is_dataclass(hint):
        return _decode_fields(hint, value, f"{name}.")
    if kind is types.UnionType:  # X | None
        return None if value is None else _decode(arguments[0], value, name)
    if kind is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if kind is Mapping and isinstance(value, dict):
        return {_decode(str, k, f"a key of {name}"): _decode(arguments[1], v, f"{name}.{k}") for k, v in value.items()}
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str) and value.isprintable():
        return value
    if kind is int and type(value) is int and value >= 0:
        return value
    if kind is float and (type(value) in (int, float) or (isinstance(value, str) and value in _NON_FINITE)):
        number = float(value)
        if not number < 0 or name.endswith(".bias"):
            return number
    raise ValueError(f"{name} must be {_MUST_BE[kind]}, got {reprlib.repr(value)}")


_MUST_BE: Mapping[Any, str] = {
    tuple: "a list",
    Mapping: "an object",
    bool: "true or false",
    str: "a printable string",
    int: "a whole number of 0 or more",
    float: 'a number of 0 or more, "inf" or "nan"',
}


def _decode_fields(cls: Any, value: Any, prefix: str, **known: Any) -> Any:
    hints = _hints(cls)
    if not isinstance(value, dict):
        raise ValueError(f"{prefix[:-1]} must be an object, got {reprlib.repr(value)}")
    for name in sorted(value.keys() ^ hints.keys()):
        raise ValueError(f"{prefix}{reprlib.repr(name)} must be {'there' if name in hints else 'left out'}")
    return cls(**{n: known[n] if n in known else _decode(hints[n], value[n], prefix + n) for n in hints})


_hints = cache(get_type_hints)


@cache
def _parts_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """`tuple[int, ...]` as tuple and (int, ...), `int` as int and ()."""
    kind = get_origin(hint) or hint
    return str if kind is Literal else kind, get_args(hint)  # which words are allowed, the dataclass checks


def _check_hashes(hashes: Mapping[str, str]) -> None:
    for name, value in hashes.items():
        if not _SHA256.fullmatch(value):
            raise ValueError(f"the hash of {name} must be 64 hexadecimal digits, got {reprlib.repr(value)}")


# --- trusting ---


@dataclass(frozen=True)
class Freshness:
    """Whether a record still speaks for the code and the machine at hand, and if not, what changed."""

    status: Literal["VALID", "STALE", "INVALID"]
    reason: str = ""


def freshness(
    record: Record,
    current: Provenance,
    inputs: Mapping[str, str],
    contract: str,
    tiles: str | None,
    measured: Mapping[str, Metrics] | None = None,
) -> Freshness:
    """Compare a record with what would be recorded now: `current`, and the case's input hashes, contract and tiles.

    INVALID, so not comparable at all: schema, inputs, a revision or the contract differ. VALID, whatever else differs:
    the figures `measured` now are the recorded ones, but for what the golden's last bits move, see `_agree`. STALE, so
    to be recorded again: code, tiles, or the environment (versions, driver, device, flags) differ. The environment
    counts only between two real devices or two emulations: where the record's device is missing, only its code can be
    checked. An emulation does not depend on the version of Python.
    """
    then = record.provenance
    if changed := _changes(_identity(then, record.inputs, record.contract), _identity(current, inputs, contract)):
        return Freshness("INVALID", changed)
    if measured is not None and _agree(_plain(measured), _plain(record.outputs)):
        return Freshness("VALID")
    before, now = _sources(then, record.tiles), _sources(current, tiles)
    if then.real == current.real:
        before |= _environment(then)
        now |= _environment(current)
    changed = _changes(before, now)
    return Freshness("STALE", changed) if changed else Freshness("VALID")


def _agree(one: Any, other: Any, name: str = "") -> bool:
    """Whether figures are the same, counts exactly and numbers to 1e-6: of a float32 result they move by some 2e-9 with
    the last bits of its float64 golden, which another BLAS sums in another order. The bias may be next to nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_agree(one[key], other[key], key) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-8 if name == "bias" else 0.0)
    return bool(one == other)


def _identity(provenance: Provenance, inputs: Mapping[str, str], contract: str) -> dict[str, Any]:
    return {
        "schema": provenance.schema,
        "contract": contract,
        **{f"input {name}": value for name, value in inputs.items()},
        **{f"revision of {name}": value for name, value in provenance.revisions.items()},
    }


def _sources(provenance: Provenance, tiles: str | None) -> dict[str, Any]:
    return {"kernel": provenance.kernel, "golden": provenance.golden, "tiles": tiles}


def _environment(provenance: Provenance) -> dict[str, Any]:
    versions = {name: v for name, v in provenance.versions.items() if provenance.real or name != "python"}
    return {"device": provenance.device_kind, **versions, **provenance.flags}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [*before, *(name for name in now if name not in before)]
    pairs = [(name, before.get(name), now.get(name)) for name in names]
    return ", ".join(f"{name} {_shown(old)} → {_shown(new)}" for name, old, new in pairs if old != new)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return value[:12] if isinstance(value, str) and _SHA256.fullmatch(value) else str(value)
