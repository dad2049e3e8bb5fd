"""The matrix of a project: the ops named by `[tool.parity] matrix` in its pyproject.toml."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from parity.op import Case, Op


def load(root: Path) -> tuple[Op, ...]:
    """The ops of the project at `root`: the `OPS` of the module that its pyproject.toml names.

    Raises ValueError where the setting, the module's `OPS`, or the uniqueness of their names is missing, and for an
    expected failure that no case has.
    """
    pyproject = root / "pyproject.toml"
    tools = tomllib.loads(pyproject.read_text()).get("tool", {}) if pyproject.exists() else {}
    settings = tools.get("parity", {})
    if "matrix" not in settings:
        raise ValueError(f'{pyproject} must name a module of ops: [tool.parity] matrix = "tests.matrix"')
    # The project's modules are found where its tests find them.
    for folder in [".", *tools.get("pytest", {}).get("ini_options", {}).get("pythonpath", [])]:
        path = str((root / folder).resolve())
        if path not in sys.path:
            sys.path.insert(0, path)
    ops: tuple[Op, ...] = getattr(importlib.import_module(settings["matrix"]), "OPS", ())
    if not ops:
        raise ValueError(f"{settings['matrix']} must define OPS, a tuple of parity.Op, got none")
    names = [op.name for op in ops]
    if len(set(names)) < len(names):
        raise ValueError(f"{settings['matrix']}.OPS must have unique names, got {', '.join(names)}")
    for op in ops:
        declared = {op.expectation(case) for case in op.cases}
        for n, expected in enumerate(op.expected):
            if expected not in declared:
                raise ValueError(f"{op.name}.expected[{n}] must match a case, matches none: {expected.reason}")
    return ops


def find(ops: Iterable[Op], case_id: str) -> tuple[Op, Case]:
    """The op and the case of that id; it may have another seed than the matrix gives it, or be its integer twin.

    Raises ValueError where no case has it.
    """
    seed = re.search(r"-s(\d+)$", case_id)
    for op in ops:
        if case_id.startswith(f"{op.name}-"):
            for case in op.cases:
                drawn = case.with_seed(int(seed[1])) if seed else case
                for same in (drawn, drawn.with_data("integers")):
                    if case_id in (same.id, re.sub(r"-s\d+$", "", same.id)):
                        return op, same
    raise ValueError(f"case must be the id of a case of the matrix (parity list -k WORDS prints them), got {case_id}")
