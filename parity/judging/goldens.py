"""Goldens computed once and shared: a content-addressed cache in a folder, or at any URL that fsspec knows.

An entry's name is the SHA-256 of everything its arrays depend on: the bytes of the inputs, the case and its arguments,
the sources behind golden and magnitude. Its content is a SHA-256 of name and content, then a safetensors file; one that
does not match, half-written or spoilt, is removed and counts as missing. No code comes out of a cache, only arrays; but
whoever may write to it decides what is right.

Off unless asked for: what the matrix here compares takes milliseconds to compute, less than a look at a cache.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import tempfile
import time
import types
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from parity.dtypes import numpy_dtype
from parity.inputs import hashes
from parity.ledger.sources import fingerprint
from parity.op import Case, Inputs, Op

URL, LIMIT = "PARITY_GOLDEN_CACHE", "PARITY_GOLDEN_CACHE_GB"
"""Environment variables: where the cache is, for every process below this one, and its size in gigabytes."""
DEFAULT_GB = 20.0
PAYS = 0.1
"""Seconds of computing from which on an entry is written: below, reading one from another host takes as long."""
WAIT = 600.0
"""Seconds to wait for another process that computes the same; after that both do."""

Arrays = Mapping[str, np.ndarray]

_ENTRY, _PARTIAL = re.compile(r"[0-9a-f]{64}"), re.compile(r"\.partial-[0-9a-f]{32}")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # as file systems of fsspec call it
_DIGEST = hashlib.sha256().digest_size


def shared(op: Op, case: Case, inputs: Inputs, compute: Callable[[], Arrays]) -> Arrays:
    """What `compute` returns for a case with these inputs, from the cache that the environment names, if it does."""
    found = of_environment()
    name = key(op, case, inputs) if found else None
    return found.get(name, compute) if found and name else compute()


def of_environment() -> GoldenCache | None:
    """The cache that the environment names; None where it names none. Raises ValueError as `GoldenCache` does."""
    url = os.environ.get(URL)
    return _opened(url, float(os.environ.get(LIMIT, DEFAULT_GB))) if url else None


@lru_cache(maxsize=1)
def _opened(url: str, gigabytes: float) -> GoldenCache:
    return GoldenCache(url, int(gigabytes * 1e9))


def key(op: Op, case: Case, inputs: Inputs) -> str | None:
    """The name of the entry of a case with these inputs; None where not everything that it depends on can be named."""
    try:
        depends_on = {
            "op": op.name,
            "case": [case.dims, case.dtype, case.out, case.options, case.data],
            "arguments": dict(op.arguments(case)),
            "inputs": dict.fromkeys(inputs) | hashes(inputs),
            "golden": _identity(op.golden),
            "magnitude": None if op.bit_exact or op.magnitude is None else _identity(op.magnitude),
        }
        return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    except TypeError:
        return None


def _identity(function: Callable[..., Any]) -> Any:
    """What a function does, as plain data: its name, the code behind it, and what it closes over.

    Raises TypeError for what is no function, and for one without sources. What it closes over must be plain data too.
    """
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or (sources := _sources(function)) is None:
        raise TypeError(f"must be a function of a module with sources, got {function!r}")
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [
        sources,
        function.__qualname__,
        [_plain(value) for value in held],
    ]


def _plain(value: Any) -> Any:
    """What a function closes over, as plain data: of a dataclass, as `Stages` is, its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *(_plain(getattr(value, f.name)) for f in fields(value))]
    return _identity(value) if callable(value) else value


@cache
def _sources(function: types.FunctionType) -> dict[str, str] | None:
    try:
        return fingerprint(function)
    except (ModuleNotFoundError, ValueError):
        return None


@dataclass
class GoldenCache:
    """Arrays by key, in a folder or at an fsspec URL, of at most `limit` bytes in all.

    A folder loses what was read or written longest ago, other stores, which note no reading, what was written longest
    ago; while several processes write it may be larger by a hundredth and an entry for each. Processes of one host, or
    of several that share the folder, that want the same entry compute it once. A store that fails is warned of once: a
    cache is never why a run fails. Raises ValueError for a URL whose file system is not installed, and for a limit of
    nothing.
    """

    url: str
    limit: int
    pays: float = PAYS
    _unchecked: float = field(default=float("inf"), init=False)  # bytes written since the size was looked at
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        if self.limit <= 0:
            raise ValueError(f"the golden cache's limit must be more than 0 bytes, got {self.limit}")
        try:
            self._store, root = url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ValueError(f"the golden cache must be a folder or an fsspec URL, got {self.url}: {error}") from None
        self._root = str(root).rstrip("/")
        self._is_local = isinstance(self._store, LocalFileSystem)
        place = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._locks = Path(self._root) if self._is_local else _cache_home() / "locks" / place

    def get(self, key: str, compute: Callable[[], Arrays]) -> Arrays:
        """The arrays of that key: read, or else computed, and written where that took long enough."""
        with ExitStack() as held:
            self._lock(held, key[:2], WAIT)
            found = self._read(key)
            if found is not None:
                return found
            began = time.perf_counter()
            computed = compute()
            if time.perf_counter() - began >= self.pays:
                self._write(key, computed)
            return computed

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key}"

    def _lock(self, held: ExitStack, name: str, seconds: float) -> bool:
        """Whether the lock could be had, until `held` ends: one of 256, so that they do not pile up. Where there can
        be none there is nothing to write either."""
        from filelock import FileLock

        with suppress(OSError, NotImplementedError):  # a filelock.Timeout is an OSError
            folder = self._locks / name
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(folder / ".lock", timeout=seconds))
            return True
        return False

    def _read(self, key: str) -> Arrays | None:
        path = self._path(key)
        try:
            content: bytes = self._store.cat_file(path)
            arrays = unpack(key, content)
            if arrays is None:
                self._remove(path)
            elif self._is_local:
                with suppress(OSError):  # of a folder that is only to be read
                    os.utime(path)
            return arrays
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a remote store raises
            self._warn(error)
            return None

    def _write(self, key: str, arrays: Arrays) -> None:
        content = pack(key, arrays)
        if len(content) > self.limit:
            return
        path = self._path(key)
        # Object stores show an object when it is whole; in a folder a rename makes it so.
        first = f"{path.rpartition('/')[0]}/.partial-{uuid.uuid4().hex}" if self._is_local else path
        try:
            self._store.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._store.pipe_file(first, content)
            if self._is_local:
                Path(first).replace(path)
            self._unchecked += len(content)
            if self._unchecked > self.limit / 100:
                self._evict()
                self._unchecked = 0
        except Exception as error:  # whatever a remote store raises
            self._warn(error)

    def _evict(self) -> None:
        """Remove the oldest entries until a tenth of the limit is free; one process at a time."""
        with ExitStack() as held:
            if not self._lock(held, "evict", 0):
                return
            entries: list[tuple[Any, int, str]] = []
            for path, info in self._store.find(self._root, detail=True).items():
                if _ENTRY.fullmatch(Path(path).name):
                    entries.append((_time(info), info["size"], path))
                elif _PARTIAL.fullmatch(Path(path).name) and _time(info) < time.time() - WAIT:
                    self._remove(path)  # its writer died
            size = sum(bytes for _, bytes, _ in entries)
            if size <= self.limit:
                return
            for _, bytes, path in sorted(entries):
                if size <= 0.9 * self.limit:
                    return
                self._remove(path)
                size -= bytes

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):  # another process was faster
            self._store.rm_file(path)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(f"golden cache {self.url}: {reason}; goldens are computed", RuntimeWarning, stacklevel=2)


def _time(info: Mapping[str, Any]) -> Any:
    """When an entry was last written (or of a folder: read), in the store's own words; they compare."""
    return next((info[name] for name in _TIMES if name in info), 0)


def _cache_home() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "kernel-parity" if home else Path(tempfile.gettempdir()) / f"kernel-parity-{os.getuid()}"


def pack(key: str, arrays: Arrays) -> bytes:
    """Arrays of any dtype as the content of an entry; their places and dtypes are part of their names."""
    from safetensors.numpy import save

    payload = save({f"{n}:{x.dtype}:{name}": _as_bits(x) for n, (name, x) in enumerate(arrays.items())})
    return hashlib.sha256(key.encode() + payload).digest() + payload


def unpack(key: str, content: bytes) -> Arrays | None:
    """The arrays of an entry; None where it is not whole, or not that key's."""
    from safetensors.numpy import load

    digest, payload = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(key.encode() + payload).digest() != digest:
        return None
    stored = load(payload)
    arrays: dict[str, np.ndarray] = {}
    for label in sorted(stored, key=lambda label: int(label.partition(":")[0])):
        _, dtype, name = label.split(":", 2)
        arrays[name] = stored[label].reshape(-1).view(numpy_dtype(dtype)).reshape(stored[label].shape)
    return arrays


def _as_bits(x: np.ndarray) -> np.ndarray:
    """ml_dtypes' as unsigned integers of their width, NumPy's as they are."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return (flat if x.dtype.isbuiltin == 1 else flat.view(f"u{x.dtype.itemsize}")).reshape(x.shape)
