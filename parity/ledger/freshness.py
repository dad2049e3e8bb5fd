"""Whether a record still speaks for the code and the machine at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parity.judging.metrics import Metrics
from parity.ledger.schema import SHA256, Provenance, Record, plain

SAME_FLOOR = 1e-3
"""How far, relatively, floors may be apart: another BLAS moves a golden's last bits, and seldom a random rounding."""


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
    floors: Mapping[str, float],
    measured: Mapping[str, Metrics] | None = None,
) -> Freshness:
    """Compare a record with what would be recorded now: `current`, and the case's input hashes, contract and tiles.

    INVALID, so not comparable at all: schema, inputs, a revision or the contract differ, or the golden or the units in
    which errors are counted: the floor of an output, which depends on these alone, is not what it was. VALID, whatever
    else differs: the figures `measured` now are the recorded ones, but for what the golden's last bits move, see
    `_agree`. STALE, so to be recorded again: code, tiles, or the environment (versions, driver, device, flags) differ.
    The environment counts only between two real devices or two emulations: where the record's device is missing, only
    its code can be checked. An emulation does not depend on the version of Python.
    """
    then = record.provenance
    if changed := _changes(_identity(then, record.inputs, record.contract), _identity(current, inputs, contract)):
        return Freshness("INVALID", changed)
    if changed := moved_floors(floors, record.outputs):
        return Freshness("INVALID", changed)
    if measured is not None and _agree(plain(measured), plain(record.outputs)):
        return Freshness("VALID")
    before, now = _sources(then, record.tiles), _sources(current, tiles)
    if then.real == current.real:
        before |= _environment(then)
        now |= _environment(current)
    changed = _changes(before, now)
    return Freshness("STALE", changed) if changed else Freshness("VALID")


def moved_floors(floors: Mapping[str, float], recorded: Mapping[str, Metrics]) -> str:
    """Which outputs have other floors than recorded, in words: their golden or units are others; "" where none has."""
    moved = {
        f"floor of {name}": (m.floor, floors[name])
        for name, m in recorded.items()
        if name in floors and not math.isclose(floors[name], m.floor, rel_tol=SAME_FLOOR)
    }
    return _changes(*({name: pair[n] for name, pair in moved.items()} for n in (0, 1)))


def _agree(one: Any, other: Any, name: str = "") -> bool:
    """Whether figures are the same: counts exactly, numbers to 1e-6, the bias, which may be about 0, also to 1e-8.

    Another BLAS sums the float64 golden in another order, whose last bits move a float32 result's figures by 2e-9.
    """
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
    if isinstance(value, float):
        return f"{value:.3g}"
    return value[:12] if isinstance(value, str) and SHA256.fullmatch(value) else str(value)
