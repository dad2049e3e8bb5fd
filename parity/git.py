"""What git has of a project: a commit, and the plain files that it holds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_@][A-Za-z0-9_./@{}~^+-]{0,199}")


class Blob(NamedTuple):
    """A file as git keeps it: its hash, and its size in bytes."""

    id: str
    size: int


def run(root: Path, *words: str, timeout: float = 60) -> bytes:
    """The output of a git command at `root`, which takes no lock of the repository.

    Raises OSError where there is no git, subprocess.SubprocessError where it fails or takes more than `timeout` s.
    """
    command = ["git", "--no-optional-locks", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=timeout).stdout


def commit(root: Path, revision: str) -> str:
    """The hash of the commit that a revision names. Raises ValueError where the repository at `root` has none."""
    try:
        if not _REVISION.fullmatch(revision):  # nor an option, nor a range
            raise ValueError("not written as a revision is")
        return run(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(f"must be a commit of the repository at {root}, got {revision!r}") from error


def ledgers_in(root: Path, commit: str, folder: str) -> dict[Path, Blob]:
    """The `*.jsonl` that a commit holds below a folder of `root`, by path. A link is none: it may lead anywhere.

    Raises as `run`.
    """
    found: dict[Path, Blob] = {}
    for entry in filter(None, run(root, "ls-tree", "-r", "-l", "-z", commit, "--", f"{folder}/").decode().split("\0")):
        description, name = entry.split("\t", 1)
        mode, _, blob, size = description.split()
        if mode.startswith("100") and name.endswith(".jsonl"):
            found[Path(name)] = Blob(blob, int(size))
    return found


def content(root: Path, blob: Blob) -> bytes:
    """What is in a file. Raises as `run`."""
    return run(root, "cat-file", "blob", blob.id)
