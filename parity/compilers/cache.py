"""Results of the compilers, kept between runs in the user's cache folder."""

import contextlib
import hashlib
import os
import pickle
import stat
import tempfile
from pathlib import Path
from typing import Any

LIMIT_BYTES = 256 * 2**20
"""What is kept of each compiler; beyond it goes what was not asked for longest."""


def folder() -> Path:
    """`$XDG_CACHE_HOME` (default ~/.cache) / kernel-parity; of who has no home a folder among the temporary ones."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernel-parity"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"kernel-parity-{os.getuid()}"


def digest(*parts: str | bytes) -> str:
    """The key of a result: a hash of all that it depends on."""
    whole = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.hexdigest()


def load(compiler: str, key: str) -> Any:
    """The result kept under a key; None without one, of a torn file, and of one that another user may have written.

    Entries are pickles, which run code: only a file that is this user's, in a folder that is, is read.
    """
    entry = folder() / compiler / key
    try:
        with entry.open("rb") as file:
            if not all(map(_is_ours, (os.fstat(file.fileno()), entry.parent.stat(), folder().stat()))):
                return None
            content = file.read()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # the folder may belong to another
        os.utime(entry)
    checksum, payload = content[:32], content[32:]
    return pickle.loads(payload) if hashlib.sha256(payload).digest() == checksum else None


def store(compiler: str, key: str, result: Any) -> None:
    """Keep a result. A crash leaves the old one or the new one; in a folder that cannot be written none is kept."""
    payload = pickle.dumps(result)
    target = folder() / compiler / key
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for kept in (folder(), target.parent):
            kept.chmod(0o700)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
            part.write(hashlib.sha256(payload).digest() + payload)
        Path(part.name).replace(target)
        _evict(target.parent)
    except OSError:
        return


def _is_ours(status: os.stat_result) -> bool:
    """Whether a file or a folder is this user's, and no other user may write to it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _evict(kept: Path) -> None:
    """Remove what was not asked for longest from a compiler's folder, until it is within LIMIT_BYTES."""
    entries = []
    for entry in kept.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process evicts too
            status = entry.stat()
            entries.append((status.st_mtime_ns, status.st_size, entry))
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= LIMIT_BYTES:
            return
        entry.unlink(missing_ok=True)
        total -= size
