"""The programs that compilers are given: kernels at production shapes, declared beside a project's matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from parity import matrix
from parity.compilers.chips import CHIPS
from parity.compilers.mosaic import Abstract, Compilation


@dataclass(frozen=True)
class Program:
    """A function that the TPU compiler must take, at a production shape.

    function "module:function", arguments and keywords as a `Compilation` has them; name is unique among an op's
    programs. chips: those it must compile for; refused: those it cannot be compiled for, each with the compiler's own
    reason, or a part of it. work: how many units (rows, tokens, …) it works on.
    """

    op: str
    name: str
    function: str
    arguments: tuple[Abstract, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    chips: tuple[str, ...] = tuple(CHIPS)
    refused: Mapping[str, str] = field(default_factory=dict)
    work: int = 1
    unit: str = "row"

    @property
    def id(self) -> str:
        """Op and name."""
        return f"{self.op}-{self.name}"

    def on(self, chip: str) -> Compilation:
        """What the compiler is given for a chip."""
        return Compilation(self.function, chip, self.arguments, self.keywords)


def load(root: Path, *, planned: bool = False) -> tuple[Program, ...]:
    """`PROGRAMS` of the project at `root`.

    They stand in the module `programs`: inside the matrix if that is a package, else beside it.

    planned: and `PLANNED`, if it is there: programs that are traced and not compiled, which takes a tenth of a second.
    Raises ValueError where there is no such module, or a program is declared twice.
    """
    matrix.load(root)
    spec = import_module(matrix.module(root)).__spec__
    name = f"{spec.parent}.programs" if spec and spec.parent else "programs"
    try:
        module = import_module(name)
        programs: tuple[Program, ...] = tuple(module.PROGRAMS)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} must define PROGRAMS, a tuple of `Program`: {error}") from None
    programs += tuple(getattr(module, "PLANNED", ())) if planned else ()
    ids = [program.id for program in programs]
    for program in programs:
        if ids.count(program.id) > 1:
            raise ValueError(f"PROGRAMS must have unique names, got {program.id} twice")
        if both := set(program.chips) & set(program.refused):
            raise ValueError(f"{program.id} must compile for {', '.join(sorted(both))} or be refused, not both")
    return programs
