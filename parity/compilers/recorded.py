"""Ledgers of programs: one file per chip and op, one JSON line per program, sorted by name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from parity import git
from parity.ledger import diff
from parity.ledger.read import strict_json
from parity.words import shown

Key = tuple[str, str, str]
"""Chip, op and name."""


@dataclass(frozen=True)
class Entry:
    """What a line says of a program on a chip. kernels: the figures of each of its kernels."""

    chip: str
    op: str
    name: str
    kernels: tuple[Mapping[str, Any], ...]

    @property
    def key(self) -> Key:
        """What identifies it."""
        return self.chip, self.op, self.name

    def __str__(self) -> str:
        return f"{self.op}-{self.name} on {self.chip}"

    def changes(self, before: Self) -> Sequence[str]:
        """What differs from an earlier line of the same program and chip, a figure each."""
        raise NotImplementedError


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True)
class Recorded(Generic[E]):
    """A ledger, `records/<folder>/<chip>/<op>.jsonl`. title: what errors call it; entry: what its lines are."""

    folder: str
    title: str
    entry: type[E]
    schema: int

    @property
    def path(self) -> Path:
        """Its folder below the root of a project."""
        return Path(diff.FOLDER, self.folder)

    def read(self, root: Path) -> dict[Key, E]:
        """Its lines in the project at `root`. Raises ValueError for a line that this version does not know."""
        lines: dict[Key, E] = {}
        for path in sorted((root / self.path).glob("*/*.jsonl")):
            lines |= self.parse(path.read_text(), str(path))
        return lines

    def parse(self, text: str, where: str) -> dict[Key, E]:
        """The lines of one file; `where` is its name in errors."""
        lines = {}
        for number, content in enumerate(text.splitlines(), 1):
            try:
                found = strict_json(content.encode())
                if found["schema"] != self.schema:
                    raise ValueError(f"must have schema {self.schema}, got {found['schema']}")
                entry = self.entry(**found | {"kernels": tuple(found["kernels"])})
                if not content.isprintable() or not all(type(part) is str for part in entry.key):
                    raise ValueError("must be printable, its chip, op and name strings")
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(f"{where}:{number}: not a line of {self.title}: {shown(error)}") from None
            lines[entry.key] = entry
        return lines

    def write(self, root: Path, lines: Iterable[E]) -> None:
        """Put lines into the project at `root`, in place of those of the same program and chip."""
        new: dict[tuple[str, str], dict[str, E]] = {}
        for entry in lines:
            new.setdefault((entry.chip, entry.op), {})[entry.name] = entry
        for (chip, op), named in new.items():
            path = root / self.path / chip / f"{op}.jsonl"
            old = self.parse(path.read_text(), str(path)) if path.exists() else {}
            kept = {name: entry for (_, _, name), entry in old.items()} | named
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            part.write_text("".join(json.dumps(asdict(kept[name]), sort_keys=True) + "\n" for name in sorted(kept)))
            part.replace(path)

    def at_revision(self, root: Path, revision: str) -> dict[Key, E]:
        """Its lines in a git revision. Raises ValueError where there is no such revision."""
        try:
            blobs = git.ledgers_in(root, git.commit(root, revision), self.path.as_posix())
            texts = {f"{revision}:{path}": git.content(root, blob).decode() for path, blob in blobs.items()}
        except (OSError, ValueError, subprocess.SubprocessError):
            raise ValueError(f"--diff must name a git revision of {root}, got {revision!r}") from None
        return {key: entry for name, text in texts.items() for key, entry in self.parse(text, name).items()}


def differences(old: Mapping[Key, E], new: Mapping[Key, E]) -> list[str]:
    """What differs between two ledgers, one line of text for each program and chip."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new:
            found.append(f"{new[key]}: new" if key in new else f"{old[key]}: gone")
        elif changes := new[key].changes(old[key]):
            found.append(f"{new[key]}: {', '.join(changes)}")
    return found
