"""The faults: cosmic-ray's operators, those of them that say something, and two of our own."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import parso.python.tree as syntax
from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

from mutation.tokens import difference

Node = Any
"""A node of parso's tree: what attributes it has depends on its type."""


class RemoveStatement(Operator):  # type: ignore[misc]
    """Leaves out a store (into an element, an attribute, a sum) or a call whose result is not used."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[Any, Any]]:
        """The statement, where it can go without a name missing."""
        if node.type == "simple_stmt" and (_is_store(node.children[0]) or _is_call(node.children[0])):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        """The statement replaced by `pass`."""
        prefix = node.children[0].get_first_leaf().prefix
        node.children[0] = syntax.Keyword("pass", node.start_pos, prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """For cosmic-ray's own documentation."""
        return ()


def _is_store(node: Node) -> bool:
    if node.type != "expr_stmt":
        return False
    augmented = node.children[1].type == "operator" and node.children[1].value != "="
    augmented |= node.children[1].type == "augassign"
    return augmented or node.children[0].type in ("atom_expr", "power")


def _is_call(node: Node) -> bool:
    return node.type in ("atom_expr", "power") and node.children[-1].get_first_leaf().value == "("


OTHERS = {
    "max": "min", "maximum": "minimum", "floor": "ceil", "any": "all", "zeros": "ones", "zeros_like": "ones_like",
    "argmax": "argmin", "floordiv": "cdiv", "exp": "exp2", "lhs": "rhs",
}  # fmt: skip


class SwapName(Operator):  # type: ignore[misc]
    """Calls the function's counterpart instead: the smallest for the largest, `lhs` for `rhs`."""

    def __init__(self) -> None:
        self._others = OTHERS | {other: name for name, other in OTHERS.items()}

    def mutation_positions(self, node: Node) -> Iterator[tuple[Any, Any]]:
        """A use of the name: neither a definition, nor a keyword, nor an import."""
        if node.type == "name" and node.value in self._others and not node.is_definition(include_setitem=True):
            following = node.get_next_leaf()
            keyword = node.parent.type == "argument" and following is not None and following.value == "="
            if not keyword and node.search_ancestor("import_from", "import_name", "param") is None:
                yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        """The counterpart."""
        node.value = self._others[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """For cosmic-ray's own documentation."""
        return ()


BINARY = (
    ("Add", "Sub"), ("Sub", "Add"), ("Mul", "FloorDiv"), ("FloorDiv", "Mul"), ("Div", "Mul"), ("Mod", "FloorDiv"),
    ("Pow", "Mul"), ("LShift", "RShift"), ("RShift", "LShift"), ("BitOr", "BitAnd"), ("BitAnd", "BitOr"),
    ("BitXor", "BitOr"),
)  # fmt: skip
COMPARISON = (
    ("Eq", "NotEq"), ("NotEq", "Eq"), ("Lt", "LtE"), ("LtE", "Lt"), ("Gt", "GtE"), ("GtE", "Gt"), ("Lt", "GtE"),
    ("LtE", "Gt"), ("Gt", "LtE"), ("GtE", "Lt"), ("Is", "IsNot"), ("IsNot", "Is"),
)  # fmt: skip
UNARY = ("Delete_USub", "Delete_Invert", "Delete_Not")
CHOSEN = (
    *(f"ReplaceBinaryOperator_{old}_{new}" for old, new in BINARY),
    *(f"ReplaceComparisonOperator_{old}_{new}" for old, new in COMPARISON),
    *(f"ReplaceUnaryOperator_{name}" for name in UNARY),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    "ZeroIterationForLoop",
)
"""Of cosmic-ray's operators those that leave a program which could have been written: a sum turned into a shift, or a
comparison of numbers into `is`, dies of its types and would only flatter the count."""


def operators() -> Mapping[str, Any]:
    """Every operator by its name."""
    theirs = OperatorProvider()
    return {name: theirs[name]() for name in CHOSEN} | {"RemoveStatement": RemoveStatement(), "SwapName": SwapName()}


@dataclass(frozen=True)
class Mutant:
    """One fault: the `occurrence`-th place of `operator` in the file `path`.

    lines: the first and the last line of the statement it is in (of a block: its head), from 1. where: the function or
    class around it, "" for the module. before, after: of the statement, on one line, what is near the fault, as it is
    and as the fault has it.
    """

    path: str
    operator: str
    occurrence: int
    lines: tuple[int, int]
    where: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """What it is called, whatever its file in the package, its line and layout: stays as long as its statement."""
        return key(self.path.split("/")[0], self.where, self.before, self.after)


def key(package: str, where: str, before: str, after: str) -> str:
    """What a fault is called: by its package, the function it is in, and the code around it without it and with it."""
    return f"{package}::{where}: {'  →  '.join(difference(before, after))}"


class Statement(NamedTuple):
    """A statement, or the head of a block: the function or class it is in, its first and its last line."""

    where: str
    first: int
    last: int


def statements(source: str) -> list[Statement]:
    """Every statement of a file, blocks before what is in them."""
    found: list[Statement] = []

    def add(node: ast.AST, names: tuple[str, ...]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = (*names, node.name)
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            found.append(Statement(".".join(names), node.lineno, last))
        if not isinstance(node, ast.expr):
            for child in ast.iter_child_nodes(node):
                add(child, names)

    add(ast.parse(source), ())
    return found


@dataclass(frozen=True)
class Place:
    """What an operator may change: a Mutant before it is made, its column `at` included."""

    path: str
    operator: str
    occurrence: int
    at: tuple[int, int]
    lines: tuple[int, int]
    where: str


def places(path: str, source: str) -> list[Place]:
    """Every place in a file's source that an operator may change."""
    found: list[Place] = []
    tree = get_ast(source)
    around = {line: (s.first, s.last) for s in statements(source) for line in range(s.first, s.last + 1)}
    for name, operator in operators().items():
        _Finder(path, name, operator, around, found).walk(tree)
    return found


class _Finder(Visitor):  # type: ignore[misc]
    """Walks as cosmic-ray's own visitor does, so that occurrences are counted alike."""

    def __init__(
        self, path: str, name: str, operator: Any, around: Mapping[int, tuple[int, int]], found: list[Place]
    ) -> None:
        self._path, self._name, self._operator, self._around, self._found = path, name, operator, around, found
        self._occurrence = 0

    def visit(self, node: Node) -> Node:
        for start, _ in self._operator.mutation_positions(node):
            if not _is_spelling(node) and not _is_speed(node):
                lines = self._around.get(start[0], (start[0], start[0]))
                self._found.append(Place(self._path, self._name, self._occurrence, start, lines, _where(node)))
            self._occurrence += 1
        return node


def _is_spelling(node: Node) -> bool:
    """Whether a node computes nothing: an annotation, a decorator, or the stars of a signature or of a display."""
    if node.parent is not None and node.parent.type in ("parameters", "dictorsetmaker", "lambdef"):
        return node.type == "operator"
    while node.parent is not None:
        parent = node.parent
        inside = parent.children.index(node)
        annotates = parent.type in ("annassign", "tfpdef") and parent.children[inside - 1] == ":"
        returns = parent.type == "funcdef" and parent.children[inside - 1] == "->"
        if annotates or returns or parent.type == "decorator":
            return True
        node = parent
    return False


def _is_speed(node: Node) -> bool:
    """Whether a node is in a table of tiles: whichever it holds, the results are the same."""
    statement = node if node.type == "expr_stmt" else node.search_ancestor("expr_stmt")
    return statement is not None and any(name.value.endswith("_TILES") for name in statement.get_defined_names())


def _where(node: Node) -> str:
    names = []
    while node is not None:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
        node = node.parent
    return ".".join(reversed(names))


def make(place: Place, source: str) -> tuple[Mutant, str] | None:
    """The mutant of a place and the whole source with its fault; None where that is no Python, or the same."""
    mutated = mutate_code(source, operators()[place.operator], place.occurrence)
    if mutated is None:
        raise ValueError(f"place must be one of the source, got {place.operator} {place.occurrence} of {place.path}")
    try:
        compile(mutated, place.path, "exec")
    except SyntaxError:
        return None
    old, new = source.splitlines(), mutated.splitlines()
    first, last = place.lines
    if old == new:
        return None
    statement, changed = ("\n".join(lines[first - 1 : last + len(lines) - len(old)]) for lines in (old, new))
    before, after = difference(statement, changed)
    fields = {name: getattr(place, name) for name in ("path", "operator", "occurrence", "lines", "where")}
    return Mutant(**fields, before=before, after=after), mutated


def sample(found: list[Place], count: int, seed: int) -> list[Place]:
    """`count` places, or all, each at another position of the source: as many of every file as it has positions.

    The same for the same files and seed. Where several operators may change a position, one of them is drawn.
    """
    draw = random.Random(seed)
    positions: dict[tuple[str, tuple[int, int]], list[Place]] = {}
    for place in found:
        positions.setdefault((place.path, place.at), []).append(place)
    by_file: dict[str, list[list[Place]]] = {}
    for (path, _), same in sorted(positions.items()):
        by_file.setdefault(path, []).append(same)
    chosen: list[Place] = []
    for done, places_of in enumerate(by_file.values()):
        before = sum(len(each) for each in list(by_file.values())[:done])
        share = _share(before + len(places_of), len(positions), count) - _share(before, len(positions), count)
        chosen += [draw.choice(same) for same in draw.sample(places_of, share)]
    draw.shuffle(chosen)  # the first of them are a sample as well
    return chosen


def _share(part: int, whole: int, count: int) -> int:
    return min(count, whole) * part // whole
