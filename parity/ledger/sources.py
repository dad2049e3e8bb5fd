"""The files behind a module: its own, and those of what it imports. Nothing is imported to find them."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

_BEGAN = time.time()
_INSTRUMENT = __name__.partition(".")[0]


def sources_of(module: str) -> list[Path]:
    """The file of a module, then those of its own package that it imports, directly or not, by name.

    Raises ModuleNotFoundError where the module is missing.
    """
    package = _package(module)
    found = {name: source.path for name, source in _behind(module, lambda other: other == package).items()}
    return [found.pop(module), *(found[name] for name in sorted(found))]


def hash_of(files: Sequence[Path]) -> str:
    """SHA-256 of the files' bytes, one behind the other."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def fingerprint(module: str) -> dict[str, str]:
    """What decides how a module behaves: SHA-256 of each source file behind it, and the versions that it builds on.

    Followed are all imports but those of the standard library, and of packages that are installed under their own name
    (NumPy), of which the version is there instead; the module's own package is followed in any case. What else this
    instrument imports, the frameworks above all, is no part of it: hosts with either framework agree. Raises
    ModuleNotFoundError where the module is missing, ValueError for a file written after this process began: what was
    imported may be older.
    """
    own = _package(module)
    behind = _behind(module, lambda other: other == own or _installed(other) is None)
    outside = {"numpy", "ml_dtypes"}
    for name, source in behind.items():
        if source.path.stat().st_mtime > _BEGAN:
            raise ValueError(f"{source.path} was written after this process began")
        if _package(name) != _INSTRUMENT:
            outside |= {_package(other) for other in source.imports}
    found = {name: hash_of([source.path]) for name, source in behind.items()}
    return found | {other: version for other in outside - {own} if (version := _installed(other))}


def _package(module: str) -> str:
    return module.partition(".")[0]


@cache
def _installed(package: str) -> str | None:
    """The version under which a package of that name is installed; of the standard library ""."""
    if package in sys.stdlib_module_names:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class _Source(NamedTuple):
    path: Path
    imports: tuple[str, ...]  # modules, and names in them that may be modules


def _behind(module: str, follows: Callable[[str], bool]) -> dict[str, _Source]:
    """By module name, through the packages that `follows` admits."""
    found: dict[str, _Source] = {}
    wanted = [module]
    while wanted:
        name = wanted.pop()
        if name in found or (path := _file(name)) is None:
            continue
        found[name] = _Source(path, _imports(name, path))
        wanted += [other for other in found[name].imports if follows(_package(other))]
    if module not in found:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    return found


def _imports(name: str, path: Path) -> tuple[str, ...]:
    """What the module of that name and file imports, anywhere in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                source = importlib.util.resolve_name("." * node.level + source, package)
            names += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return tuple(names)


def _file(name: str) -> Path | None:
    package, *below = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if not below:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = [folder.joinpath(*below) for folder in folders]
    found = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
    return next(filter(Path.is_file, found), None)
