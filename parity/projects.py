"""Projects: which one a file belongs to, and whose modules imports find. Several may be in one run of pytest."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.words import said, shown

SETTINGS = "pyproject.toml"
_entered: dict[Path, dict[str, ModuleType]] = {}
"""The projects that imports have been for, each with its modules while another project has their names."""
_here: list[Path] = []
"""The project and the folder that imports are for."""


def of(path: Path) -> Path | None:
    """The project of a file or folder: the nearest folder at or above it whose pyproject.toml has [tool.parity]."""
    path = path.resolve()
    return next((folder for folder in (path, *path.parents) if _is_project(folder)), None)


def near(paths: Iterable[Path]) -> set[Path]:
    """The projects of these paths; of a folder in none, those up to two levels below it."""
    found: set[Path] = set()
    for path in paths:
        project = of(path)
        below = chain(path.glob(f"*/{SETTINGS}"), path.glob(f"*/*/{SETTINGS}"))
        found |= {project} if project else {each.parent.resolve() for each in below if _is_project(each.parent)}
    return found


def tools(root: Path) -> dict[str, Any]:
    """`[tool]` of a project's pyproject.toml, empty where there is none. Raises ValueError where it is no TOML."""
    pyproject = root / SETTINGS
    try:
        found: Any = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {}) if pyproject.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{pyproject} must be TOML: {said(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{pyproject}: tool must be a table, got {shown(repr(found))}")
    return found


def enter(root: Path, *folders: Path) -> None:
    """Let imports find the modules of the project at `root`, and of further folders of it, before all others.

    Modules of another project that have the same names wait until that is entered again: each has its own `matrix`.
    Raises ValueError as `tools`, and for an import path that is no list of folders.
    """
    root = root.resolve()
    if [root, *folders] == _here:
        return
    found = [*_import_path(root), *(folder.resolve() for folder in folders)]
    sys.path[:] = [*map(str, reversed(found)), *(path for path in sys.path if path not in set(map(str, found)))]
    waiting = _entered.pop(root, {})
    names = {name.partition(".")[0] for name in waiting} | set(chain.from_iterable(map(_defined, found)))
    for name, module in list(sys.modules.items()) if _entered.keys() - {root} else ():
        if name.partition(".")[0] in names and (owner := _owner(module)) not in (None, root) and owner in _entered:
            _entered[owner][name] = sys.modules.pop(name)
    sys.modules.update(waiting)
    _entered[root] = {}
    _here[:] = [root, *folders]
    importlib.invalidate_caches()


def _import_path(root: Path) -> list[Path]:
    """Where the tests of a project find its modules: its folder, and pytest's pythonpath."""
    try:
        folders = tools(root).get("pytest", {}).get("ini_options", {}).get("pythonpath", [])
        folders = folders.split() if isinstance(folders, str) else folders
        return [(root / folder).resolve() for folder in (".", *folders)]
    except (AttributeError, TypeError):
        raise ValueError(f"{root / SETTINGS}: [tool.pytest.ini_options] pythonpath must be folders") from None


def _defined(folder: Path) -> set[str]:
    """The names of modules that a folder has; a conftest is pytest's affair."""
    modules = {path.stem for path in folder.glob("*.py")}
    return (modules | {path.parent.name for path in folder.glob("*/__init__.py")}) - {"conftest"}


def _owner(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None or "site-packages" in Path(file).parts else of(Path(file))


@cache
def _is_project(folder: Path) -> bool:
    try:
        return "parity" in tools(folder)
    except ValueError:  # said where the settings are asked for
        return True
