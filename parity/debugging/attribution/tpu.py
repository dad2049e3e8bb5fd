"""Pallas programs in float64, all but some source lines: an evaluator of jaxprs on NumPy arrays.

A kernel is traced once; its jaxpr says of every operation from which source line it came. Every floating-point value is
carried in float64, whatever its declared dtype. An operation of an *active* line adds the error that it makes in its
own dtypes, matrix unit and all: with x̂ the operands rounded to their dtypes, x ↦ op(x) + [op_own(x̂) - op(x̂)]. With
every line active that is the kernel as it is interpreted, up to what XLA's CPU compiler fuses; with none it is exact.

Memory is that of the interpreter: blocks are views of arrays padded with NaN, scratch begins as NaN, an output that
aliases an input begins as a copy of it, copies are done when they are started, and grid steps run one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax._src import source_info_util
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.pallas import pallas_call
from jax.extend import core

from op_arguments import options, probe
from parity.backends.emulation import mxu
from parity.debugging.attribution.program import (
    LAUNCH,
    Active,
    Births,
    Executed,
    Line,
    Mark,
    Place,
    Run,
    is_cut,
    note_error,
)
from parity.debugging.attribution.tpu_primitives import (
    Values,
    bind,
    block_size,
    compiled_of,
    exact_of,
    in_float64,
    is_float,
    is_quantised,
    own_of,
    padded_to,
    referred,
    unset_memory,
    view_of,
    wide_of,
)
from parity.dtypes import Floats, round_to
from parity.interop import to_jax
from parity.op import Inputs, outputs

_mark_p = core.Primitive("parity_mark")
# With the effect of a debugging print: JAX drops an operation that has none and whose result nothing needs.
_EFFECTS = jax.make_jaxpr(lambda: jax.debug.print(""))().effects
_mark_p.def_effectful_abstract_eval(lambda where, value, *pieces, **params: (value, _EFFECTS))

_FRAMEWORK = str(Path(jax.__file__).parent)
_LAUNCHES = str(Path(pallas_call.__file__))
_NOT_THE_KERNELS = (_FRAMEWORK, __file__, options.__file__, probe.__file__)


def mark(site: str, value: Any, where: Any = None, **steps: Any) -> Any:
    """A kernel's probe: the value, marked as that of a site of the staged golden, where it is one.

    value: an array, or several that sum to it. steps: as of a `Mark`.
    """
    pieces = value if isinstance(value, tuple) else (value,)
    _mark_p.bind(True if where is None else where, *pieces, site=site, steps=tuple(steps.items()))
    return value


class PallasProgram:
    """A call of a JAX function, Pallas kernels and all, traced for evaluation."""

    def __init__(self, kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> None:
        """Of `kernel(**inputs, **arguments)`."""
        arrays = {name: to_jax(x) for name, x in inputs.items() if x is not None}

        def traced_kernel(given: Mapping[str, Any]) -> Any:
            return kernel(**given, **arguments)

        with _lines_of_rules(), probe.probing(mark):
            self._jaxpr, shapes = jax.make_jaxpr(traced_kernel, return_shape=True)(arrays)
        self._inputs = tree_util.tree_leaves(arrays)
        self._result = tree_util.tree_structure(shapes)
        self._sources = _Sources()

    def run(self, active: Active) -> Run:
        """The outputs in float64 where the lines that `active` admits err, and which lines those are."""
        evaluator = _Evaluator(active, self._sources)
        with jax.enable_x64(True), mxu.emulated(), np.errstate(all="ignore"):
            results = self._evaluated(evaluator)
        return Run(outputs(tree_util.tree_unflatten(self._result, results)), evaluator.erring, evaluator.marks)

    def births(self, births: Births, fill: float = np.nan) -> Run:
        """The outputs as the kernel computes them, what is born on the way noted. fill: what memory begins as."""
        watcher = _Watcher(births, fill, self._sources)
        with jax.enable_x64(True), mxu.emulated(), np.errstate(all="ignore"):
            results = self._evaluated(watcher)
        return Run(outputs(tree_util.tree_unflatten(self._result, results)), {}, watcher.marks)

    def slice(self, right: Set[int], of_finite: bool = True) -> Run:
        """The outputs in float64, and the lines that they and the marks come of."""
        slicer = _Slicer(right, of_finite, self._sources)
        with jax.enable_x64(True), np.errstate(all="ignore"):
            results = self._evaluated(slicer)
        named = outputs(tree_util.tree_unflatten(self._result, results))
        lines = outputs(tree_util.tree_unflatten(self._result, [*map(slicer.lines_of, results)]))
        return Run(named, {}, slicer.marks, lines, slicer.executed.when)

    def _evaluated(self, evaluator: _Evaluator) -> Values:
        consts = [*map(wide_of, self._jaxpr.consts)]
        return evaluator.evaluate(self._jaxpr.jaxpr, consts, map(wide_of, self._inputs))


@contextlib.contextmanager
def _lines_of_rules() -> Iterator[None]:
    """Let what a rule of differentiation traces be of its source lines: JAX says the line of the call it is for."""
    current = source_info_util.current

    def own() -> Any:
        info = current()
        traceback = xla_client.Traceback.get_traceback()
        for frame in traceback.frames if traceback else ():
            if frame.function_name in _REPLAYING and frame.file_name.startswith(_FRAMEWORK):
                break
            if not frame.file_name.startswith(_NOT_THE_KERNELS):
                return info.replace(traceback=traceback)
        return info

    source_info_util.current = own
    try:
        yield
    finally:
        source_info_util.current = current


_REPLAYING = {"eval_jaxpr", "backward_pass", "backward_pass3"}
"""JAX's functions that trace a jaxpr again, of which each operation knows where it came from."""


class _Sources:
    """Where the equations of a program, which outlives this, are written."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Place | None, list[Line]]] = {}

    def of(self, eqn: Any) -> tuple[Place | None, list[Line]]:
        """The place of an equation, and the lines that led there, the innermost first."""
        if id(eqn) not in self._found:
            traceback = eqn.source_info.traceback
            frames = traceback.frames if traceback else ()
            within = itertools.takewhile(lambda f: "traced_kernel" not in f.function_name, frames)
            stack = [
                LAUNCH if f.file_name == _LAUNCHES else Line(f.file_name, f.line_num)
                for f in within
                if f.file_name == _LAUNCHES or not f.file_name.startswith(_NOT_THE_KERNELS)
            ]
            lines = [line for line in stack if line != LAUNCH]
            self._found[id(eqn)] = Place.of(stack if stack[:1] != [LAUNCH] else lines), lines
        return self._found[id(eqn)]


class _Evaluator:
    """One evaluation."""

    def __init__(self, active: Active, sources: _Sources) -> None:
        self.active = active
        self.erring: dict[Place, float] = {}
        self.marks: list[Mark] = []
        self._grid: tuple[int, ...] = ()
        self._at: tuple[int, ...] = ()
        # Of the call of a library function: its operations are the caller's, whoever had it traced first.
        self._caller: Place | None = None
        self._sources = sources
        # Of integers that are made of a float's bits, the number that it stands for.
        self._numbers: dict[int, tuple[weakref.ref[Any], Floats]] = {}

    def evaluate(self, jaxpr: Any, consts: Values, arguments: Iterator[Any]) -> Values:
        """The results of a jaxpr."""
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(var: Any) -> Any:
            aval: Any = var.aval
            return wide_of(np.asarray(var.val, aval.dtype)) if isinstance(var, core.Literal) else env[var]

        for eqn in jaxpr.eqns:
            operands = [*map(read, eqn.invars)]
            rule = _RULES.get(eqn.primitive.name)
            results = getattr(self, rule or "_operation")(eqn, operands)
            results = self.noted(eqn, operands, results)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def noted(self, eqn: Any, operands: Values, results: Values) -> Values:
        """The results of an equation, once they are known."""
        return results

    def _operation(self, eqn: Any, operands: Values) -> Values:
        floats = [is_float(var.aval) for var in (*eqn.invars, *eqn.outvars)]
        if not any(floats):
            return self._of_bits(operands, bind(eqn, operands, eqn.params))
        if not any(floats[: len(operands)]):  # an integer made a float
            own = [own_of(x, var.aval) for x, var in zip(operands, eqn.invars, strict=True)]
            return [*map(wide_of, bind(eqn, own, eqn.params))]
        if not any(floats[len(operands) :]):  # a comparison
            return bind(eqn, operands, in_float64(eqn))
        if is_quantised(eqn.outvars[0].aval):
            # What a number becomes in 8 bits is the operation's result, and no error of it.
            return [round_to(x, str(eqn.outvars[0].aval.dtype)).astype(np.float64) for x in exact_of(eqn, operands)]
        return self._erring(eqn, exact_of(eqn, operands), lambda: self._own_and_true(eqn, operands))

    def _own_and_true(self, eqn: Any, operands: Values) -> tuple[Values, Values]:
        own = [own_of(x, var.aval) for x, var in zip(operands, eqn.invars, strict=True)]
        return [*map(wide_of, bind(eqn, own, eqn.params))], exact_of(eqn, [*map(wide_of, own)])

    def _erring(self, eqn: Any, wide: Values, own_and_true: Callable[[], tuple[Values, Values]]) -> Values:
        """The results, and where the operation errs the difference of the two: rounded, and exact."""
        place = self._place(eqn)
        if eqn.primitive.name in _EXACT or place is None or not self.active(place):
            return wide
        rounded, exact = own_and_true()
        errors = [got - true for got, true in zip(rounded, exact, strict=True)]
        for error, true in zip(errors, exact, strict=True):
            note_error(self.erring, place, error, true)
        # Where an operation overflows, what it gives is all that is left.
        return [
            np.where(np.isfinite(error), true + error, got)
            for true, error, got in zip(wide, errors, rounded, strict=True)
        ]

    def bits(self, eqn: Any, operands: Values) -> Values:
        """The bits of a number; or the number of bits, which where they are cut or rounded is the whole one, and the
        cut its error."""
        (x,), (var,), (out,) = operands, eqn.invars, eqn.outvars
        results = [*map(wide_of, bind(eqn, [own_of(x, var.aval)], eqn.params))]
        if not is_float(out.aval):
            return self._noted_as(x, results) if is_float(var.aval) else results
        number = self._number(x)
        if number is None or number.shape != results[0].shape:
            return results
        true = wide_of(own_of(number, out.aval))
        return self._erring(eqn, [number], lambda: (results, [true])) if is_cut(true, results[0]) else results

    def _of_bits(self, operands: Values, results: Values) -> Values:
        """The results of integers, noted as of the one number whose bits are among them."""
        numbers = [*{id(n): n for n in map(self._number, operands) if n is not None}.values()]
        return self._noted_as(numbers[0], results) if len(numbers) == 1 else results

    def _noted_as(self, number: Floats, results: Values) -> Values:
        for x in results:
            if isinstance(x, np.ndarray) and x.shape == number.shape:
                gone = partial(lambda key, _: self._numbers.pop(key, None), id(x))
                self._numbers[id(x)] = weakref.ref(x, gone), number
        return results

    def _number(self, x: Any) -> Floats | None:
        known = self._numbers.get(id(x))
        return known[1] if known and known[0]() is x else None

    def _place(self, eqn: Any) -> Place | None:
        return self._caller or self._sources.of(eqn)[0]

    def call(self, eqn: Any, operands: Values) -> Values:
        """A function of its own: its jaxpr's results."""
        closed = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        jaxpr, consts = (closed.jaxpr, closed.consts) if hasattr(closed, "jaxpr") else (closed, [])
        caller = self._caller
        if _FRAMEWORK in jaxpr.debug_info.func_src_info:
            self._caller = self._place(eqn)
        results = self.evaluate(jaxpr, [*map(wide_of, consts)], iter(operands))
        self._caller = caller
        return results

    def cond(self, eqn: Any, operands: Values) -> Values:
        """`lax.cond` and `lax.switch`."""
        index, *operands = operands
        branches = eqn.params["branches"]
        branch = branches[min(max(int(index), 0), len(branches) - 1)]
        return self.evaluate(branch.jaxpr, [*map(wide_of, branch.consts)], iter(operands))

    def while_loop(self, eqn: Any, operands: Values) -> Values:
        """`lax.while_loop`."""
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_test, of_body, carry = operands[:n], operands[n : n + m], operands[n + m :]
        while self.test(self.evaluate(test.jaxpr, [*map(wide_of, test.consts)], iter([*of_test, *carry]))[0]):
            carry = self.evaluate(body.jaxpr, [*map(wide_of, body.consts)], iter([*of_body, *carry]))
        return carry

    def test(self, condition: Any) -> bool:
        """Whether a condition holds."""
        return bool(condition)

    def scan(self, eqn: Any, operands: Values) -> Values:
        """`lax.scan`, and a `lax.fori_loop` of a known length."""
        body, (n, m) = eqn.params["jaxpr"], _consts_and_carry(eqn.params)
        consts, carry, xs = operands[:n], operands[n : n + m], operands[n + m :]
        steps = range(eqn.params["length"])
        ys: list[Values] = []
        for step in reversed(steps) if eqn.params["reverse"] else steps:
            arguments = [*consts, *carry, *(x[step] for x in xs)]
            results = self.evaluate(body.jaxpr, [*map(wide_of, body.consts)], iter(arguments))
            carry = results[:m]
            ys.append(results[m:])
        ordered = ys[::-1] if eqn.params["reverse"] else ys
        return [*carry, *(np.stack(y) for y in zip(*ordered, strict=True))]

    def pallas_call(self, eqn: Any, operands: Values) -> Values:
        """A kernel, one grid step after the other."""
        mapping, jaxpr = eqn.params["grid_mapping"], eqn.params["jaxpr"]
        dynamic, rest = operands[: mapping.num_dynamic_grid_bounds], operands[mapping.num_dynamic_grid_bounds :]
        bounds = iter(dynamic)
        grid = tuple(size if isinstance(size, int) else int(next(bounds)) for size in mapping.grid)
        scalars, inputs = rest[: mapping.num_index_operands], rest[mapping.num_index_operands :]
        aliased = {out: rest[given] for given, out in eqn.params["input_output_aliases"]}
        results = [aliased.get(n, self.unset(var.aval)) for n, var in enumerate(eqn.outvars)]
        blocks = mapping.block_mappings
        arrays = [self.padded(x, block) for x, block in zip([*inputs, *results], blocks, strict=True)]
        scratch = [self.unset(aval) for aval in mapping.scratch_avals]
        outer = self._grid, self._at
        self._grid = grid
        for at in product(*map(range, grid)):
            self._at = at
            views = [self._block(x, block, at, scalars) for x, block in zip(arrays, blocks, strict=True)]
            self.evaluate(jaxpr, [], iter([*scalars, *views, *scratch]))
        self._grid, self._at = outer
        outs = arrays[len(inputs) :]
        return [x[tuple(map(slice, result.shape))] for x, result in zip(outs, results, strict=True)]

    def padded(self, x: Any, block: Any) -> Any:
        """x in whole blocks."""
        return padded_to(x, block)

    def unset(self, aval: Any) -> Any:
        """Memory that nothing has been stored to."""
        return unset_memory(aval)

    def index(self, block: Any, at: tuple[int, ...], scalars: Values) -> Values:
        """Which block of an array a grid step has."""
        place = block.index_map_jaxpr
        return self.evaluate(place.jaxpr, place.consts, iter([*map(np.int32, at), *scalars]))

    def _block(self, x: Any, block: Any, at: tuple[int, ...], scalars: Values) -> Any:
        index = self.index(block, at, scalars)
        where: list[Any] = []
        for n, size in zip(map(int, index), map(block_size, block.block_shape), strict=True):
            where.append(n if size is None else slice(n * size, n * size + size))
        return self.chosen(x[(*where, ...)], index)

    def chosen(self, view: Any, index: Values) -> Any:
        """The view of an array that is a grid step's block."""
        return view

    def program_id(self, eqn: Any, operands: Values) -> Values:
        """`pl.program_id`."""
        return [np.int32(self._at[eqn.params["axis"]])]

    def num_programs(self, eqn: Any, operands: Values) -> Values:
        """`pl.num_programs`."""
        return [np.int32(self._grid[eqn.params["axis"]])]

    def get(self, eqn: Any, operands: Values) -> Values:
        """A load from a reference."""
        ref, *index = operands
        return [view_of(ref, tree_util.tree_unflatten(eqn.params["tree"], index)).copy()]

    def swap(self, eqn: Any, operands: Values) -> Values:
        """A store to a reference, of what has been rounded where it was made; the result is what was there."""
        ref, value, *index = operands
        view = view_of(ref, tree_util.tree_unflatten(eqn.params["tree"], index))
        before = view.copy()
        view[...] = value
        return [before]

    def run_scoped(self, eqn: Any, operands: Values) -> Values:
        """A kernel's function with memory of its own."""
        jaxpr = eqn.params["jaxpr"]
        return self.evaluate(jaxpr, operands, iter([self.unset(var.aval) for var in jaxpr.invars]))

    def dma_start(self, eqn: Any, operands: Values) -> Values:
        """A copy between memories, done at once."""
        source, target, *_ = tree_util.tree_unflatten(eqn.params["tree"], operands)
        referred(target)[...] = referred(source)
        return []

    def mark(self, eqn: Any, operands: Values) -> Values:
        """`mark`."""
        where, *pieces = operands
        marked = np.where(where, np.sum(pieces, axis=0), np.nan)
        self.marks.append(Mark(eqn.params["site"], marked, eqn.params["steps"], self._place(eqn)))
        return pieces[:1]

    def nothing(self, eqn: Any, operands: Values) -> Values:
        """What has no result and no effect here."""
        return []

    def first(self, eqn: Any, operands: Values) -> Values:
        """What says something of its operand, and is that."""
        return operands[:1]

    def bitcast(self, eqn: Any, operands: Values) -> Values:
        """`pltpu.bitcast`, which only a compiled program has."""
        own = [own_of(x, var.aval) for x, var in zip(operands, eqn.invars, strict=True)]
        return [wide_of(compiled_of(eqn.primitive, tuple(eqn.params.items()))(*own))]

    def roll(self, eqn: Any, operands: Values) -> Values:
        """`pltpu.roll`."""
        if eqn.params["stride"] is not None:
            raise NotImplementedError("lines cannot follow pltpu.roll with a stride")
        return [np.roll(operands[0], int(operands[1]), eqn.params["axis"])]


def _consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.11.2
    return len(consts), len(carry)


class _Watcher(_Evaluator):
    """One evaluation as the kernel computes it, in which what is born is noted."""

    def __init__(self, births: Births, fill: float, sources: _Sources) -> None:
        super().__init__(lambda place: True, sources)
        self._births, self._fill = births, fill

    def _operation(self, eqn: Any, operands: Values) -> Values:
        results = super()._operation(eqn, operands)
        floats = [np.asarray(x) for x, var in zip(operands, eqn.invars, strict=True) if is_float(var.aval)]
        return [
            self._births.seen(self._place(eqn), floats, x) if is_float(var.aval) else x
            for x, var in zip(results, eqn.outvars, strict=True)
        ]

    def unset(self, aval: Any) -> Any:
        """Memory that nothing has been stored to."""
        x = super().unset(aval)
        return np.full(x.shape, self._fill) if is_float(aval) else x


class _Slicer(_Evaluator):
    """One evaluation in which nothing rounds, that follows which source lines each array comes of.

    An array has the lines of what it was computed of; memory those of everything stored to it, until all of it is
    stored to at once; what is done on a condition has the condition's. A mark that is right begins anew.
    """

    def __init__(self, right: Set[int], of_finite: bool, sources: _Sources) -> None:
        super().__init__(lambda place: False, sources)
        self._right, self._of_finite = right, of_finite
        self._lines: dict[int, tuple[weakref.ref[Any], frozenset[Line]]] = {}
        self._condition: frozenset[Line] = frozenset()
        self.executed = Executed()

    def lines_of(self, *arrays: Any) -> frozenset[Line]:
        """The lines that arrays come of; a view has those of what it is a view of, too."""
        found: frozenset[Line] = frozenset()
        for x in arrays:
            while x is not None and self._counts(x):
                known = self._lines.get(id(x))
                if known and known[0]() is x:
                    found |= known[1]
                x = getattr(x, "base", None)
        return found

    def _counts(self, x: Any) -> bool:
        return self._of_finite or getattr(x, "dtype", None) != np.float64 or not np.isfinite(x).all()

    def _note(self, x: Any, lines: frozenset[Line]) -> Any:
        self._lines[id(x)] = weakref.ref(x), lines
        return x

    def _here(self, eqn: Any) -> frozenset[Line]:
        around = () if self._caller else self._sources.of(eqn)[1]
        return self.executed.at(self._place(eqn), around) | self._condition

    def noted(self, eqn: Any, operands: Values, results: Values) -> Values:
        """The results, with the operands' lines and that of the equation."""
        name = eqn.primitive.name
        if name == "parity_mark":
            return results
        lines = self.lines_of(*operands) | self._here(eqn)
        if name in ("swap", "dma_start"):
            self._stored(name, eqn, operands, lines)
        noted = []
        for x in map(np.asarray, results):
            own = self.lines_of(x) if name in _CALLS else frozenset()
            noted.append(x if own else self._note(x if x.base is None else x.copy(), lines))
        return noted

    def _stored(self, name: str, eqn: Any, operands: Values, lines: frozenset[Line]) -> None:
        if name == "swap":
            ref, _, *index = operands
            target = view_of(ref, tree_util.tree_unflatten(eqn.params["tree"], index))
            known = None if self._of_finite else self._lines.get(id(ref))  # of which block of an array this is
            block = known[1] if known and known[0]() is ref else frozenset()
            lines = self.lines_of(*operands[1:]) | self._here(eqn) | block
        else:
            source, to, *_ = tree_util.tree_unflatten(eqn.params["tree"], operands)
            target = referred(to)
            indices = [x for x in operands if not np.ndim(x)]
            lines = self.lines_of(referred(source), *indices) | self._here(eqn)
        memory = target
        while memory.base is not None:
            memory = memory.base
        self._note(memory, lines if target.size == memory.size else lines | self.lines_of(memory))

    def mark(self, eqn: Any, operands: Values) -> Values:
        """`mark`: of one that is right nothing is followed further back."""
        where, *pieces = operands
        number = len(self.marks)
        results = super().mark(eqn, operands)
        self.marks[-1] = replace(self.marks[-1], lines=self.lines_of(where, *pieces) | self._here(eqn))
        for x in pieces if number in self._right else ():
            self._note(x, frozenset())
        return results

    def cond(self, eqn: Any, operands: Values) -> Values:
        """`lax.cond`, whose branch is taken on a condition."""
        before, self._condition = self._condition, self._here(eqn) | self.lines_of(operands[0])
        results = super().cond(eqn, operands)
        self._condition = before
        return results

    def while_loop(self, eqn: Any, operands: Values) -> Values:
        """`lax.while_loop`, which goes on on a condition."""
        before = self._condition
        results = super().while_loop(eqn, operands)
        self._condition = before
        return results

    def test(self, condition: Any) -> bool:
        """Whether a loop goes on, and from then on that it did."""
        self._condition |= self.lines_of(condition)
        return super().test(condition)

    def pallas_call(self, eqn: Any, operands: Values) -> Values:
        """A kernel, which does what it does as often as its grid has steps."""
        bounds = operands[: eqn.params["grid_mapping"].num_dynamic_grid_bounds]
        before, self._condition = self._condition, self._condition | self.lines_of(*bounds)
        results = super().pallas_call(eqn, operands)
        self._condition = before
        return results

    def padded(self, x: Any, block: Any) -> Any:
        """x in whole blocks, of x's lines. What fills them up is finite where only what is not counts."""
        whole = super().padded(x, block)
        if not self._of_finite:
            whole = np.nan_to_num(whole, nan=0.0, posinf=np.inf, neginf=-np.inf)
            whole[tuple(map(slice, x.shape))] = x
        return self._note(whole, self.lines_of(x))

    def chosen(self, view: Any, index: Values) -> Any:
        """A grid step's block, which is of the lines that say which it is as well."""
        return self._note(view, self.lines_of(*index))


_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call"),
    *("cond", "while", "scan", "pallas_call", "run_scoped"),
}
"""What has a program of its own: its results have the lines that they were given there."""


_RULES: Mapping[str, str] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint"), "call"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call"),
    "cond": "cond",
    "while": "while_loop",
    "scan": "scan",
    "pallas_call": "pallas_call",
    "program_id": "program_id",
    "num_programs": "num_programs",
    "get": "get",
    "swap": "swap",
    "run_scoped": "run_scoped",
    "dma_start": "dma_start",
    "dma_wait": "nothing",
    "multiple_of": "first",
    "bitcast": "bitcast",
    "bitcast_convert_type": "bits",
    "roll": "roll",
    "parity_mark": "mark",
}
"""By primitive, the method that evaluates it; of all others `_operation` does."""
_EXACT = {
    "select_n",
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "slice",
    "transpose",
    "pad",
    "concatenate",
    "max",
    "min",
}


def make_program(kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> PallasProgram:
    """See `parity.debugging.attribution.program`."""
    return PallasProgram(kernel, inputs, arguments)
