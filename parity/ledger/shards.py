"""Which parts of a run a folder of ledgers holds, so that parts of different dealings are never joined as one whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from parity.ledger.read import content_of, strict_json
from parity.ledger.schema import RecordError

FILE = Path(".parts", "shards.json")


@dataclass(frozen=True)
class Shards:
    """Shards of one dealing. dealing: a hash of which test is in which; tests: how many, by shard; all: of them all."""

    dealing: str
    count: int
    all: int
    tests: dict[str, int]

    @property
    def missing(self) -> list[int]:
        """The shards that are not here."""
        return [n for n in range(1, self.count + 1) if str(n) not in self.tests]


def note(root: Path, shard: Shards) -> None:
    """Add a shard to what a folder of ledgers says it holds; another dealing's is forgotten. Raises OSError."""
    try:
        before = read(root)
    except RecordError:
        before = None
    if before is not None and before.dealing == shard.dealing:
        shard = Shards(shard.dealing, shard.count, shard.all, before.tests | shard.tests)
    path = root / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".new")
    part.write_text(json.dumps(asdict(shard)), encoding="utf-8")
    part.replace(path)


def read(root: Path) -> Shards | None:
    """What a folder says that it holds, None where it says nothing. Raises RecordError for what `note` never wrote."""
    path = root / FILE
    if not path.exists():
        return None
    try:
        found = Shards(**strict_json(content_of(path)))
        kinds = isinstance(found.dealing, str), isinstance(found.count, int), isinstance(found.all, int)
        if not all(kinds) or not all(type(n) is int for n in found.tests.values()):
            raise ValueError("of other types")
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise RecordError(f"{path}: must be as a run of a shard writes it; remove it") from None
    return found


def together(folders: Iterable[Path]) -> list[str]:
    """What is to be said of shards that are joined: which are missing, and how many tests do not add up.

    Raises RecordError where they are of different dealings: a test may then be in none of them.
    """
    whole: Shards | None = None
    for folder in folders:
        found = read(folder)
        if found is None:
            continue
        if whole and (whole.dealing, whole.count) != (found.dealing, found.count):
            raise RecordError(
                f"shards must be of one dealing, got {whole.dealing} and {found.dealing} (of {folder}): run them anew, "
                "on the same commit and with the same options"
            )
        whole = Shards(found.dealing, found.count, found.all, (whole.tests if whole else {}) | found.tests)
    if whole is None:
        return []
    if whole.missing:
        missing = ", ".join(f"{n}/{whole.count}" for n in whole.missing)
        return [f"of dealing {whole.dealing} these shards are missing: {missing}"]
    if sum(whole.tests.values()) != whole.all:
        return [f"the shards of dealing {whole.dealing} have {sum(whole.tests.values())} tests, of {whole.all}"]
    return []
