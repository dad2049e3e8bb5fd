"""The ledger: what was measured, on what, from what, in files that live in git.

`ROOT/<backend>/<device kind>/<op>.jsonl` holds one JSON object per line with sorted keys: first the provenances, by
id, then one record per (case, seed), in that order, each naming its provenance. Floats have 9 significant digits; the
three that JSON cannot spell are the strings "inf", "-inf" and "nan". The same records always give the same bytes.

While tests run, every process appends to a part of its own under `ROOT/.parts`; `merge` folds the parts into the
ledgers. A file is input like any other: `read` checks every field of every line and trusts none.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from parity.backends import EMULATED
from parity.judging.metrics import HISTOGRAM, MAP, TOP, Metrics
from parity.op import Backend

SCHEMA = 1

TIME = "%Y-%m-%dT%H:%M:%SZ"

SHA256 = re.compile(r"[0-9a-f]{64}")

_OP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")

_DEVICE_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .+()-]{0,99}")


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
        if datetime.strptime(self.utc, TIME).strftime(TIME) != self.utc:  # written in one way alone, so that it sorts
            raise ValueError(f"utc must be written as 2026-01-31T23:59:59Z, got {self.utc!r}")

    @cached_property
    def id(self) -> str:
        """What records call it by."""
        return hashlib.sha256(canonical(self).encode()).hexdigest()[:12]


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


def canonical(value: Any) -> str:
    """JSON with sorted keys and 9 significant digits: the same value always gives the same text."""
    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """Dataclasses, mappings and numbers as JSON has them."""
    if isinstance(value, float):
        rounded = float(f"{value:.9g}")
        return rounded if math.isfinite(rounded) else str(rounded)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return value


def _check_hashes(hashes: Mapping[str, str]) -> None:
    for name, value in hashes.items():
        if not SHA256.fullmatch(value):
            raise ValueError(f"the hash of {name} must be 64 hexadecimal digits, got {reprlib.repr(value)}")
