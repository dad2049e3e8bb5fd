"""Ledgers read: a file is input like any other. Every field of every line is checked, and none trusted."""

from __future__ import annotations

import io
import json
import math
import os
import reprlib
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from parity.ledger.schema import SCHEMA, Ledger, Provenance, Record, RecordError, ledger_path
from parity.op import Backend

LINE_LIMIT = 2**20
"""Bytes that a line may have."""
FILE_LIMIT = 2**28
"""Bytes that a file may have; a larger one is refused unread."""

REASON = 300  # characters of a message: it may quote a file

_NON_FINITE = ("inf", "-inf", "nan")


def read(path: Path) -> Ledger:
    """The records of one file, every field checked. Raises RecordError as `parse` and `content_of`."""
    return parse(content_of(path), str(path))


def parse(content: bytes, name: str) -> Ledger:
    """The records in the content of a ledger that errors call `name`.

    Raises RecordError for the first line that is not as `parity.ledger.write` writes it.
    """
    ledger: Ledger = {}
    for number, entry in entries(content, name):
        if isinstance(entry, RecordError):
            raise entry
        if entry.key in ledger:
            raise RecordError(
                f"{name}:{number}: must be the only record of {reprlib.repr(entry.case)}, seed {entry.seed}"
            )
        ledger[entry.key] = entry
    return ledger


def read_all(root: Path, backend: Backend, op: str = "*") -> dict[tuple[str, str], Ledger]:
    """All ledgers of a backend by (device kind, op), or those of one op.

    Raises RecordError as `read`, and for files that lie outside `root` or where their records do not belong.
    """
    ledgers: dict[tuple[str, str], Ledger] = {}
    for path in sorted((root / backend).glob(f"*/{op}.jsonl")):
        ledger = read_home(root, path)
        if ledger:
            provenance = next(iter(ledger.values())).provenance
            ledgers[provenance.device_kind, provenance.op] = ledger
    return ledgers


def read_home(root: Path, path: Path) -> Ledger:
    """A ledger under `root`. Raises RecordError as `read`, and for records that do not belong there."""
    ledger = read(inside(root, path))
    for record in ledger.values():
        if home(root, record) != path:
            raise RecordError(f"{path}: must hold what belongs there, got a record of {home(root, record)}")
    return ledger


def home(root: Path, record: Record) -> Path:
    """The ledger that a record belongs to."""
    provenance = record.provenance
    return ledger_path(root, provenance.backend, provenance.device_kind, provenance.op)


def inside(root: Path, path: Path) -> Path:
    """`path`, unless a symbolic link leads it out of `root`."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise RecordError(f"{path}: must lie in {root}, a symbolic link leads out of it")
    return path


def entries(content: bytes, name: str) -> Iterator[tuple[int, Record | RecordError]]:
    """The records of a ledger or a part with their line numbers, and an error in place of each line that is bad."""
    provenances: dict[str, Provenance] = {}
    for number, line in enumerate(io.BytesIO(content), 1):
        try:
            entry = decode_line(line, provenances)
        except (ValueError, RecursionError) as error:
            reason = "is nested too deeply" if isinstance(error, RecursionError) else str(error)[:REASON]
            yield number, RecordError(f"{name}:{number}: {reason}")
            continue
        if isinstance(entry, Provenance):
            provenances[entry.id] = entry
        else:
            yield number, entry


def content_of(path: Path) -> bytes:
    """The bytes of a file. Raises RecordError where there is none, or too large a one."""
    if not path.is_file():  # a pipe or a device would never end
        raise RecordError(f"{path}: must be a file")
    check_size(str(path), path.stat().st_size)
    return path.read_bytes()


def check_size(name: str, size: int) -> None:
    """Raises RecordError for a file that is larger than a ledger may be."""
    if size > FILE_LIMIT:
        raise RecordError(f"{name}: must have at most {FILE_LIMIT} bytes, got {size}")


def decode_line(line: bytes, provenances: Mapping[str, Provenance]) -> Provenance | Record:
    """What a line holds. Raises ValueError that says what is wrong with it, RecursionError."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"must have at most {LINE_LIMIT} bytes")
    try:
        value = strict_json(line)
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


def strict_json(content: bytes) -> Any:
    """The value of JSON in UTF-8 that names no key twice, and no number that int64 or float64 cannot hold.

    Raises ValueError, of which JSONDecodeError is one, and RecursionError.
    """
    return json.loads(
        content.decode(), object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("must not name a key twice in one object")
    return found


def _int(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**63:
        raise ValueError(f"must have whole numbers that int64 can hold, got {reprlib.repr(digits)}")
    return value


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
    if kind is int and type(value) is int and value >= 0:  # most of all
        return value
    if kind is float and (type(value) in (int, float) or (isinstance(value, str) and value in _NON_FINITE)):
        number = float(value)
        if not number < 0 or name.endswith(".bias"):
            return number
    if kind is str and isinstance(value, str) and value.isprintable():
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if kind is Mapping and isinstance(value, dict):
        return {_decode(str, k, f"a key of {name}"): _decode(arguments[1], v, f"{name}.{k}") for k, v in value.items()}
    if kind is types.UnionType:  # X | None
        return None if value is None else _decode(arguments[0], value, name)
    if is_dataclass(hint):
        return _decode_fields(hint, value, f"{name}.")
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
