"""What a function's code is: the definitions of the project that it reaches by name, without comments and layout.

A definition is a statement of a module: a function, a class, a constant. It reaches the definitions that it names,
through imports and attributes of modules. Of each the syntax tree is hashed, in a form that is the same under every
Python from 3.11 to 3.13; comments, docstrings, layout and import statements have no part in it, and a name that is
imported stands for what it names. So a definition that moves to another file stays the same, and one that nothing
reaches counts for nothing. Where a module is handed around as a whole, or has no such name, all of it counts.

Nothing is imported to find this. Packages installed under their own name (NumPy) are not followed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

_BEGAN = time.time()
_INSTRUMENT = __name__.partition(".")[0]


def identity(target: str) -> str:
    """SHA-256 of the code behind `"module:function"`.

    Raises ModuleNotFoundError where the module is missing, AttributeError where the function is.
    """
    return _hash_of(reached(target))


def identity_of(function: FunctionType) -> str:
    """SHA-256 of the code behind a function that is there. Raises ModuleNotFoundError where its module has no file."""
    return _hash_of(_behind(function)[1])


def reached(target: str) -> list[Definition]:
    """The definitions behind `"module:function"`, its own among them. Raises as `identity`."""
    name, _, function = target.partition(":")
    project = _project(_package(name))
    project.existing(name)
    found = project.find([*name.split("."), function])
    if isinstance(found, str) or found[0].name is None:
        raise AttributeError(f"module {name!r} must define {function!r}")
    return project.reached(found[0].definitions)


def imported_by(module: str) -> set[str]:
    """The modules of the project behind a module: itself, what it imports, and what those import."""
    project = _project(_package(module))
    found: set[str] = set()
    wanted = [project.existing(module).name]
    while wanted:
        name = wanted.pop()
        source = None if name in found else project.module(name)
        if source is not None:
            found.add(name)
            for dotted in (*source.imports.values(), *source.stars):
                parts = dotted.split(".")
                wanted += [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return found


def fingerprint(function: FunctionType) -> dict[str, str]:
    """What decides how a function behaves: the identity of its code, and the versions that it builds on.

    Those are NumPy's, and of whatever is installed that the modules import in which the code is. What this instrument
    imports, the frameworks above all, is left out: hosts with either framework agree. Raises ModuleNotFoundError where
    the function's module is missing, ValueError for a file written after this process began: what was imported may be
    older.
    """
    begin, found = _behind(function)
    outside = {"numpy", "ml_dtypes"}
    for source in {definition.module for definition in found}:
        if source.path.stat().st_mtime > _BEGAN:
            raise ValueError(f"{source.path} was written after this process began")
        if _package(source.name) != _INSTRUMENT:
            outside |= {_package(dotted) for dotted in (*source.imports.values(), *source.stars)}
    versions = {name: version for name in outside - {_package(function.__module__)} if (version := version_of(name))}
    line = function.__code__.co_firstlineno - begin  # of two lambdas in one definition each has its own
    return versions | {"code": _hash_of(found), "line": str(line)}


def _behind(function: FunctionType) -> tuple[int, list[Definition]]:
    """The line on which the definition begins that a function is in, and all that it reaches."""
    project = _project(_package(function.__module__))
    module = project.existing(function.__module__)
    line = function.__code__.co_firstlineno
    around = [definition for definition in module.definitions if definition.first <= line <= definition.last]
    return around[0].first if around else 0, project.reached(around or module.definitions)


def texts(function: FunctionType) -> frozenset[str]:
    """The strings that the code behind a function has or puts together, as regular expressions.

    Raises as `identity_of`.
    """
    return frozenset(text for definition in _behind(function)[1] for text in definition.texts)


def labels(function: FunctionType) -> frozenset[str]:
    """The fields of classes and the keywords of calls in the code behind a function. Raises as `identity_of`."""
    return frozenset(label for definition in _behind(function)[1] for label in definition.labels)


def forget() -> None:
    """Read files anew from now on: each is read once."""
    _project.cache_clear()


def _hash_of(definitions: Iterable[Definition]) -> str:
    digests = sorted({definition.digest for definition in definitions})
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _package(module: str) -> str:
    return module.partition(".")[0]


@cache
def version_of(package: str) -> str | None:
    """The version under which a package of that name is installed; of the standard library ""."""
    if package in sys.stdlib_module_names:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- modules and what their names stand for ---


class Definition:
    """A statement of a module that is more than an import or a docstring, and the names that it binds."""

    def __init__(self, module: _Module, node: ast.stmt) -> None:
        self.module, self._node = module, node
        bound = _bound([node])
        self.names = [name for name, imported in bound.items() if imported is None]
        self.imports = {name: imported for name, imported in bound.items() if imported is not None}
        self.first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        self.last = node.end_lineno or node.lineno

    @cached_property
    def _read(self) -> tuple[str, list[_Place]]:
        reader = _Reader(self.module)
        reader.read(self._node, {})
        text = "\n".join([*reader.words, *(f"* {star}" for star in self.module.stars)])
        return hashlib.sha256(text.encode()).hexdigest(), reader.places

    @property
    def digest(self) -> str:
        """SHA-256 of its code."""
        return self._read[0]

    @cached_property
    def texts(self) -> set[str]:
        """The strings that it has or puts together, as regular expressions: what is filled in may be anything.

        `ANYTHING` is of all f-strings that have no text of their own.
        """
        nodes = list(ast.walk(self._node))
        whole = {_pattern(node) for node in nodes if isinstance(node, ast.JoinedStr)}
        parts = {_pattern(node) for node in nodes if isinstance(node, ast.Constant | ast.BinOp)}
        named = {pattern for pattern in whole | parts if pattern.replace(ANYTHING, "")}
        return named | {ANYTHING} if whole - named else named

    @cached_property
    def labels(self) -> set[str]:
        """The fields of its classes, and the keywords of its calls."""
        nodes = list(ast.walk(self._node))
        annotated = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
        keywords = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
        return keywords | {target.id for target in annotated if isinstance(target, ast.Name)}

    @property
    def places(self) -> list[_Place]:
        """What it names."""
        return self._read[1]


ANYTHING = ".*"
"""What is filled into a text, as a regular expression."""


def _pattern(node: ast.AST) -> str:
    """The strings that an expression may be, as a regular expression."""
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(map(_pattern, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _pattern(left) + _pattern(right)
    return ANYTHING


class _Module:
    """A file: its definitions, and by name what it imports."""

    def __init__(self, project: _Project, name: str, path: Path) -> None:
        self.project, self.name, self.path = project, name, path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_bytes())
        _make_absolute(tree, package)
        self.stars = [star for node in tree.body if (star := _star(node))]
        self.definitions = [Definition(self, node) for node in tree.body if not _is_silent(node)]
        self.imports = {name: imported for name, imported in _bound(tree.body).items() if imported is not None}
        for definition in self.definitions:  # imports in `try` and `if`
            self.imports |= definition.imports
        self.by_name: dict[str, list[Definition]] = {}
        for definition in self.definitions:
            for bound in definition.names:
                self.by_name.setdefault(bound, []).append(definition)
        # What binds no name changes what it mentions (it registers a class), or else may change anything here.
        self.effects: list[Definition] = []
        for definition in self.definitions:
            if not definition.names:
                own = {n.id for n in ast.walk(definition._node) if isinstance(n, ast.Name)} & self.by_name.keys()
                for mentioned in sorted(own):
                    self.by_name[mentioned].append(definition)
                self.effects += [] if own else [definition]


class _Place(NamedTuple):
    """A name in a module; None for the module as a whole."""

    module: _Module
    name: str | None

    @property
    def definitions(self) -> list[Definition]:
        return self.module.definitions if self.name is None else self.module.by_name[self.name]


class _Project:
    """The modules that are followed: of the package `own`, and of packages that are not installed."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._modules: dict[str, _Module | None] = {}

    def module(self, name: str) -> _Module | None:
        """The module of that name, where there is one to be followed."""
        if name not in self._modules:
            followed = _package(name) == self._own or version_of(_package(name)) is None
            path = _file(name) if followed else None
            self._modules[name] = _Module(self, name, path) if path else None
        return self._modules[name]

    def existing(self, name: str) -> _Module:
        """The module of that name. Raises ModuleNotFoundError."""
        if (found := self.module(name)) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found

    def find(self, parts: list[str], seen: tuple[str, ...] = ()) -> tuple[_Place, list[str]] | str:
        """What a dotted name stands for: a place of the project and the attributes of it, or else the name itself.

        seen: the imports that led here; two modules may have a name of each other.
        """
        module: _Module | None = None
        for n, part in enumerate(parts):
            dotted = ".".join(parts[: n + 1])
            if module is not None:
                if part in module.by_name:
                    return _Place(module, part), parts[n + 1 :]
                if (imported := module.imports.get(part, dotted)) not in (dotted, *seen):
                    return self.find([*imported.split("."), *parts[n + 1 :]], (*seen, imported))
            below = self.module(dotted)
            if below is None and module is not None:
                return _Place(module, None), parts[n:]
            module = below
        return ".".join(parts) if module is None else (_Place(module, None), [])

    def reached(self, begin: Iterable[Definition]) -> list[Definition]:
        """These definitions and all that they name, directly or not."""
        found: dict[Definition, None] = {}
        wanted = list(begin)
        while wanted:
            definition = wanted.pop()
            if definition in found:
                continue
            found[definition] = None
            module = definition.module
            wanted += module.effects
            for name in definition.names:
                wanted += module.by_name[name]
            for place in definition.places:
                wanted += place.definitions
            for star in module.stars:
                if (other := self.module(star)) is not None:
                    wanted += other.definitions
        return list(found)


@cache
def _project(own: str) -> _Project:
    return _Project(own)


def _file(name: str) -> Path | None:
    package, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # of `__main__`
        return None
    if spec is None:
        return None
    if not below:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = [folder.joinpath(*below) for folder in folders]
    found = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
    return next(filter(Path.is_file, found), None)


# --- reading a definition ---

Scope = Mapping[str, str | None]
"""The names that functions bind around a place: to what is imported, or (None) to values."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LAYOUT = ("ctx", "type_comment", "kind")


class _Reader:
    """Writes a syntax tree as words, and collects the places of the project that it names.

    `ast.dump` is not the same under all versions of Python: fields come, and empty ones go.
    """

    def __init__(self, module: _Module) -> None:
        self._module = module
        self.words: list[str] = []
        self.places: list[_Place] = []

    def read(self, value: Any, scope: Scope) -> None:
        """Write a node, a list of them or a constant."""
        if isinstance(value, list):
            self.words.append("[")
            for item in value:
                if not isinstance(item, ast.stmt) or not (_is_silent(item) or isinstance(item, ast.Pass)):
                    self.read(item, scope)
            self.words.append("]")
        elif isinstance(value, (ast.Name, ast.Attribute)):
            self._read_name(value, scope)
        elif isinstance(value, ast.AST):
            self._read_node(value, scope)
        else:
            self.words.append(ascii(value))

    def _read_node(self, node: ast.AST, scope: Scope) -> None:
        inner = scope
        if isinstance(node, _FUNCTIONS):
            inner = {**scope, **_parameters(node.args)}
            body = node.body if isinstance(node.body, list) else [node.body]
            inner.update(_bound(body))
        elif isinstance(node, _COMPREHENSIONS):
            self.read(node.generators[0].iter, scope)
            inner = {**scope, **_bound([generator.target for generator in node.generators])}
        elif isinstance(node, ast.JoinedStr):
            node = ast.JoinedStr(_merged(node.values))
        self.words.append(type(node).__name__)
        self.words.append("(")
        for name, value in ast.iter_fields(node):
            if name not in _LAYOUT and value is not None and value != []:
                self.words.append(name)
                outside = isinstance(node, _FUNCTIONS) and name != "body"
                self.read(value, scope if outside else inner)
        self.words.append(")")

    def _read_name(self, node: ast.Name | ast.Attribute, scope: Scope) -> None:
        attributes: list[str] = []
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            attributes.insert(0, base.attr)
            base = base.value
        if not isinstance(base, ast.Name):
            self.words += [".", *attributes]
            self.read(base, scope)
            return
        name, module = base.id, self._module
        imported = scope[name] if name in scope else module.imports.get(name)
        if name not in scope and name in module.by_name:
            self.places.append(_Place(module, name))
        if imported is not None:
            found = module.project.find([*imported.split("."), *attributes])
            if isinstance(found, str):
                name, attributes = found, []
            else:
                self.places.append(found[0])
                name, attributes = found[0].name or "", found[1]
        self.words.append(".".join([name, *attributes]))


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, its text in as few pieces as can be: versions of Python cut it differently."""
    found: list[ast.expr] = []
    for is_text, parts in groupby(values, lambda value: isinstance(value, ast.Constant)):
        if not is_text:
            found += parts
        elif text := "".join(str(part.value) for part in parts if isinstance(part, ast.Constant)):
            found.append(ast.Constant(text))
    return found


def _is_silent(node: ast.AST) -> bool:
    """Whether a statement is an import or a docstring."""
    value = node.value if isinstance(node, ast.Expr) else None
    documents = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return documents or isinstance(node, (ast.Import, ast.ImportFrom))


def _star(node: ast.AST) -> str | None:
    """The module of which a statement imports all names."""
    return node.module if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" else None


def _make_absolute(tree: ast.Module, package: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            node.level = 0


def _parameters(given: ast.arguments) -> dict[str, str | None]:
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return {parameter.arg: None for parameter in named}


def _bound(body: Iterable[ast.AST]) -> dict[str, str | None]:
    """The names that code binds in its own scope: to the dotted name of what it imports, or (None) to a value."""
    found: dict[str, str | None] = {}
    elsewhere: set[str] = set()
    for node in _in_scope(body):
        if isinstance(node, ast.Import):
            found |= {a.asname or _package(a.name): a.name if a.asname else _package(a.name) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names if a.name != "*"}
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere |= {*node.names}
        elif isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                found[node.id] = None
        elif isinstance(node, _NAMED) and node.name:
            found[node.name] = None
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found[node.rest] = None
    return {name: imported for name, imported in found.items() if name not in elsewhere}


def _in_scope(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of code but for what is inside functions, classes and comprehensions."""
    wanted = list(body)
    while wanted:
        node = wanted.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, *_COMPREHENSIONS)):
            wanted += ast.iter_child_nodes(node)
