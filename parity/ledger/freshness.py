"""Whether a record still speaks for the code and the machine at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from parity.judging.metrics import Metrics
from parity.ledger.schema import SHA256, Provenance, Record, plain

SAME_UNIT = 1e-2
"""How far, relatively, floors may be apart. Another BLAS or exp moves a golden's last bits, which now and then turn a
random rounding. Four runs, of which a unit is drawn, tell it less exactly than this."""
SAME_FIGURE = 1e-6
"""How far, relatively, figures in one unit may be apart."""


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
    else differs: the figures `measured` now are the recorded ones, see `_confirmed`. STALE, so to be recorded again:
    code (of a golden where its floors do not say that it is the same), tiles, or the environment (versions, driver,
    device, flags) differ. The environment counts only between two real devices or two emulations: where the record's
    device is missing, only its code can be checked. An emulation does not depend on the version of Python.
    """
    then = record.provenance
    if changed := _changes(_identity(then, record.inputs, record.contract), _identity(current, inputs, contract)):
        return Freshness("INVALID", changed)
    if changed := moved_floors(floors, record.outputs):
        return Freshness("INVALID", changed)
    if measured is not None and _confirmed(measured, record.outputs):
        return Freshness("VALID")
    before, now = _sources(then, record.tiles), _sources(current, tiles)
    if _same_golden(floors, record.outputs):
        del before["golden"], now["golden"]
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
        if name in floors and not math.isclose(floors[name], m.floor, rel_tol=SAME_UNIT)
    }
    return _changes(*({name: pair[n] for name, pair in moved.items()} for n in (0, 1)))


def _same_golden(floors: Mapping[str, float], recorded: Mapping[str, Metrics]) -> bool:
    """Whether a golden returns what was recorded, whatever its code is.

    A floor is the rms of what rounding does to the golden's values: none moves alone. If it is 0 it says nothing.
    """
    return all(m.floor > 0 and _is_close(floors.get(name, 0.0), m.floor) for name, m in recorded.items())


def in_units_of(now: Metrics, then: Metrics) -> Metrics:
    """`then` with its ε in the unit of `now`: the floor is the same error in both."""
    return replace(then, epsilon=then.epsilon * (now.floor / then.floor)) if then.floor else then


def _confirmed(measured: Mapping[str, Metrics], recorded: Mapping[str, Metrics]) -> bool:
    """Whether every output's figures are the recorded ones, see `_same`."""
    return measured.keys() == recorded.keys() and all(_same(m, recorded[name]) for name, m in measured.items())


def _same(now: Metrics, then: Metrics) -> bool:
    """Whether an output's figures are the recorded ones.

    If the unit was drawn a little otherwise, figures without a unit decide: counts, and ε over the floor.
    """
    if _is_close(now.floor, then.floor):
        return _agree(plain(now), plain(then))
    epsilon = in_units_of(now, then).epsilon
    counts = [(m.elements, m.scored, m.wrong_finiteness, m.differing) for m in (now, then)]
    return (
        counts[0] == counts[1]
        and _is_close(now.misrounded, then.misrounded)
        and math.isclose(now.epsilon, epsilon, rel_tol=SAME_UNIT)
    )


def _agree(one: Any, other: Any, name: str = "") -> bool:
    """Whether figures are the same: counts exactly, numbers to `SAME_FIGURE`, the bias, which may be 0, also to 1e-8.

    Another BLAS sums the float64 golden in another order, whose last bits move a float32 result's figures by 2e-9.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_agree(one[key], other[key], key) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return _is_close(one, other) or (name == "bias" and math.isclose(one, other, abs_tol=1e-8))
    return bool(one == other)


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME_FIGURE)


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
