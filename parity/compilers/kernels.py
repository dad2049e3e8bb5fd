"""What the Pallas kernels of a traced JAX function are: grids, blocks, dots and bytes, read from the jaxpr."""

import hashlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parity.compilers.chips import packed_rows

_OPERANDS = {4: "f32", 2: "bf16"}
_PASSES_OF_HIGHEST = 6
RARELY = "rarely"
"""The `jax.named_scope` of conditions that hold for few data."""
_SCALARS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")},
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "convert_element_type": lambda x: x,
}
"""What conditions on a grid step are made of, by the name of the primitive."""


@dataclass(frozen=True)
class Block:
    """How an operand is cut: its shape, a block's shape and bytes, and the grid axes that each index depends on."""

    array: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    axes: tuple[frozenset[int], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along each axis of the operand."""
        return tuple(-(-whole // block) for whole, block in zip(self.array, self.shape, strict=True))


@dataclass(frozen=True)
class Dot:
    """A `dot_general` [rows, depth] × [depth, columns]: how often a step runs it, and passes at its precision.

    operand: "f32", "bf16", "fp8" or "int8", of two types the wider. A float32 dot at HIGHEST is six bfloat16 products,
    any other a single one. place: "path:line" of the source, empty where JAX does not know it.
    """

    rows: int
    depth: int
    columns: int
    operand: str
    passes: int
    count: int
    place: str = ""


@dataclass(frozen=True)
class Branch:
    """A conditional part of a kernel. places: "path:line" of all that is in it; multiplies: whether dots are.

    share: of the steps, those that may run it as far as the grid alone says; none where the kernel traces it under the
    name `RARELY`. of: the same for all branches of the same steps where the data decide between them, "" where not.
    is_usual: whether what is rare runs where it does not. inner: those inside. operations: all that it traces.
    """

    places: frozenset[str]
    multiplies: bool
    share: float
    of: str = ""
    inner: tuple["Branch", ...] = ()
    is_usual: bool = False
    operations: int = 0


@dataclass(frozen=True)
class Kernel:
    """A `pallas_call`. grid: its axes, None for a length that is traced; operands: shapes of inputs and outputs.

    name: "" where it has none; estimated_bytes: as its `CostEstimate` has them, None without one; branches: in the
    order of the source, the outermost.
    """

    name: str
    grid: tuple[int | None, ...]
    operands: tuple[tuple[int, ...], ...]
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    dots: tuple[Dot, ...]
    estimated_bytes: int | None
    branches: tuple[Branch, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each grid axis. A traced axis has a step for each tile along it, as if all tiles were whole.

        Those tiles are of outputs, or of inputs where no output has any: an input may have smaller ones beside them, as
        a convolution reads the last rows of the tile before. An axis of single entries, such as the groups whose
        matrices a kernel picks, has no tiles.
        """

        def tiles(axis: int, blocks: Sequence[Block]) -> list[int]:
            sizes = (zip(block.counts, block.shape, block.axes, strict=True) for block in blocks)
            return [count for each in sizes for count, size, axes in each if axis in axes and size > 1]

        return tuple(
            max(tiles(axis, self.outputs) or tiles(axis, self.inputs), default=1) if length is None else length
            for axis, length in enumerate(self.grid)
        )

    @property
    def steps(self) -> int:
        """Steps of the grid."""
        return math.prod(self.lengths)

    @property
    def steps_per_block(self) -> float:
        """How many steps share a block of an output, at least 1; of several outputs the one whose blocks most share.

        (An output of which every step writes a block needs no condition.)
        """
        return max([1.0, *(self.steps / max(1, math.prod(block.counts)) for block in self.outputs)])

    @property
    def hbm_bytes(self) -> int:
        """Bytes read from and written to HBM: the kernel's `CostEstimate`, or else its blocks'.

        A block is fetched or written when its index changes: in each step of the innermost axis that it depends on.
        """
        if self.estimated_bytes is not None:
            return self.estimated_bytes
        total = 0
        for block in self.inputs + self.outputs:
            innermost = max([-1, *frozenset().union(*block.axes)])
            total += block.nbytes * math.prod(self.lengths[: innermost + 1])
        return total


def kernels(jaxpr: Any, *, places: bool = True) -> list[Kernel]:
    """The Pallas kernels in a closed jaxpr, in program order; places: with those in the source of what is in them.

    One whose results nothing takes is none of them: XLA drops it.
    """
    from jax.interpreters.partial_eval import dce_jaxpr

    live, _ = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    found = [_kernel(call) for call, _ in equations(live, "pallas_call", "mpmd_map")]
    return found if places else [without_places(kernel) for kernel in found]


def without_places(kernel: Kernel) -> Kernel:
    """The kernel wherever its source lies: dots without places, and no branches, which nothing else tells apart."""
    return replace(kernel, dots=tuple(replace(dot, place="") for dot in kernel.dots), branches=())


def equations(jaxpr: Any, *primitives: str, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The equations of these primitives, at any depth, and how often each runs (every branch, a `while` once)."""
    from jax.extend.core import jaxprs_in_params

    for equation in jaxpr.eqns:
        if equation.primitive.name in primitives:
            yield equation, times
            continue
        repeated = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, *primitives, times=repeated)


def _kernel(call: Any) -> Kernel:
    mapping, cost = call.params.get("grid_mapping"), call.params["cost_estimate"]
    # An `mpmd_map` is what `pl.kernel` becomes: it has no grid and no blocks, its loops and copies are its own.
    jaxprs = (call.params["jaxpr"],) if mapping else call.params["jaxprs"]
    grid = tuple(length if isinstance(length, int) else None for length in (mapping.grid if mapping else ()))
    blocks = tuple(_block(block, len(grid)) for block in (mapping.block_mappings if mapping else ()))
    dots = Counter(_dot(dot, times) for jaxpr in jaxprs for dot, times in equations(jaxpr, "dot_general"))
    kernel = Kernel(
        name=call.params["name"] or "",
        grid=grid,
        operands=tuple(variable.aval.shape for variable in [*call.invars, *call.outvars]),
        inputs=blocks[: mapping.num_inputs] if mapping else (),
        outputs=blocks[mapping.num_inputs :] if mapping else (),
        dots=tuple(dots.elements()),
        estimated_bytes=None if cost is None else cost.bytes_accessed,
    )
    return replace(kernel, branches=tuple(_branches(jaxprs[0], kernel.lengths))) if grid else kernel


def _branches(jaxpr: Any, lengths: tuple[int, ...]) -> list[Branch]:
    index = [axis.ravel() for axis in np.indices(lengths)]
    return list(_conditional(jaxpr, {}, np.ones(math.prod(lengths), bool), index))


class _AtMost(NamedTuple):
    """A condition that the data may make true in these steps, and in no others."""

    steps: npt.NDArray[np.bool_]


def _conditional(jaxpr: Any, known: dict[Any, Any], here: npt.NDArray[np.bool_], index: list[Any]) -> Iterator[Branch]:
    """The outermost branches in a jaxpr that the steps in `here` reach.

    index: the place of each step on each axis; known: each variable's value in each step.
    """
    from jax.extend.core import jaxprs_in_params

    usual = _usual(jaxpr)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        values = [atom.val if hasattr(atom, "val") else known.get(atom) for atom in equation.invars]
        if name == "program_id":
            known[equation.outvars[0]] = index[equation.params["axis"]]
        elif name == "cond":
            which, *operands = values
            is_rare = _is_rare(equation)
            for nth, branch in enumerate(equation.params["branches"]):
                inner = {v: x for v, x in zip(branch.jaxpr.invars, operands, strict=True) if x is not None}
                is_open = which is None or isinstance(which, _AtMost)
                steps = here & (which.steps if nth else True) if isinstance(which, _AtMost) else here
                steps = steps if is_open else here & (which == nth)
                inside = tuple(_conditional(branch.jaxpr, inner, steps, index))
                if branch.jaxpr.eqns:
                    places = list(_places(branch.jaxpr))
                    of = hashlib.sha256(steps.tobytes()).hexdigest()[:8] if is_open else ""
                    multiplies = any(True for _ in equations(branch.jaxpr, "dot_general"))
                    share = 0.0 if is_rare else float(steps.mean())
                    yield Branch(
                        frozenset(places) - {""}, multiplies, share, of, inside, equation in usual, len(places)
                    )
        elif name in _SCALARS and all(value is not None for value in values):
            known[equation.outvars[0]] = _of_steps(name, values)
        elif name == "and" and (bounds := [value for value in values if value is not None]):
            known[equation.outvars[0]] = _of_steps(name, [*bounds, _AtMost(np.ones_like(here))])
        else:
            for body in jaxprs_in_params(equation.params):
                yield from _conditional(body, {}, here, index)


def _is_rare(equation: Any) -> bool:
    return RARELY in str(equation.source_info.name_stack)


def _usual(jaxpr: Any) -> list[Any]:
    """The `cond`s in a jaxpr that run where a rare one does not, by conditions of which one is the other's opposite."""
    meanings: dict[Any, tuple[Any, bool]] = {}  # of a variable: it says that another holds, or that it does not
    conds = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in ("not", "convert_element_type", "cond") or hasattr(equation.invars[0], "val"):
            continue
        value, holds = meanings.get(equation.invars[0], (equation.invars[0], True))
        if name == "cond":
            conds.append((equation, value, holds))
        else:
            meanings[equation.outvars[0]] = value, holds != (name == "not")
    rare = {(value, holds) for equation, value, holds in conds if _is_rare(equation)}
    return [equation for equation, value, holds in conds if (value, not holds) in rare and not _is_rare(equation)]


def _places(jaxpr: Any) -> Iterator[str]:
    """Of all equations, at any depth."""
    from jax.extend.core import jaxprs_in_params

    for equation in jaxpr.eqns:
        yield _place(equation)
        for inner in jaxprs_in_params(equation.params):
            yield from _places(inner)


def _of_steps(name: str, values: list[Any]) -> Any:
    """The value in each step of a primitive of `_SCALARS`; None where it hangs on more than the grid."""
    if not any(isinstance(value, _AtMost) for value in values):
        return _SCALARS[name](*values)
    if name not in ("and", "convert_element_type"):
        return None
    return _AtMost(reduce(np.logical_and, [v.steps if isinstance(v, _AtMost) else v for v in values]))


def _block(mapping: Any, grid_axes: int) -> Block:
    array = mapping.array_aval
    shape = tuple(getattr(size, "block_size", 1) for size in mapping.block_shape)
    index_map = mapping.index_map_jaxpr.jaxpr
    axes: dict[Any, frozenset[int]] = {
        variable: frozenset([axis]) for axis, variable in enumerate(index_map.invars[:grid_axes])
    }

    def axes_of(atom: Any) -> frozenset[int]:
        return frozenset() if hasattr(atom, "val") else axes.get(atom, frozenset())  # a literal has a value

    for equation in index_map.eqns:
        of_any: frozenset[int] = frozenset().union(*map(axes_of, equation.invars))
        axes |= dict.fromkeys(equation.outvars, of_any)
    nbytes = math.prod(shape) * array.dtype.itemsize
    return Block(array.shape, shape, nbytes, tuple(map(axes_of, index_map.outvars)))


def _dot(equation: Any, times: int) -> Dot:
    lhs, rhs = (variable.aval for variable in equation.invars)
    (lhs_depth, rhs_depth), (lhs_batch, rhs_batch) = equation.params["dimension_numbers"]

    def size(shape: tuple[int, ...], axes: Any) -> int:
        return math.prod(shape[axis] for axis in axes)

    def rest(shape: tuple[int, ...], *used: Any) -> int:
        return math.prod(size for axis, size in enumerate(shape) if not any(axis in axes for axes in used))

    wider = max(lhs.dtype, rhs.dtype, key=lambda dtype: dtype.itemsize)
    operand = _OPERANDS.get(wider.itemsize, "int8" if wider.kind in "iu" else "fp8")
    highest = operand == "f32" and "HIGHEST" in str(equation.params["precision"])
    return Dot(
        rows=rest(lhs.shape, lhs_depth, lhs_batch),
        depth=size(lhs.shape, lhs_depth),
        columns=rest(rhs.shape, rhs_depth, rhs_batch),
        operand=operand,
        passes=_PASSES_OF_HIGHEST if highest else 1,
        count=times * size(lhs.shape, lhs_batch),
        place=_place(equation),
    )


def _place(equation: Any) -> str:
    """The innermost line outside JAX that an equation comes from, as the compiler's own locations have it."""
    import jax

    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not Path(frame.file_name).is_relative_to(Path(jax.__file__).parent):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


@dataclass(frozen=True)
class DotPasses:
    """The passes over the matrix unit that dots of one operand type take, times as much work as one pass each.

    place: the line of the source that they are on, empty for those of a whole kernel.
    promised: by their precision; emitted: in the machine code, as operands of which type ("" where the matrix unit has
    no part in it). Both are means over the dots, by their work. What is emitted may be less than promised: two passes
    over at most half of the unit's depth can share one.
    """

    operand: str
    dots: int
    promised: float
    emitted: float
    emitted_as: str
    place: str = ""


def dot_passes(
    dots: Iterable[Dot], emitted_rows: Mapping[str, float], width: int, place: str = ""
) -> tuple[DotPasses, ...]:
    """How many passes the machine code makes of each dot (of those at a place), for every operand type of the dots.

    emitted_rows: rows of left operands that a step sends through a width × width matrix unit, by operand type. A type
    that the unit does not have is converted to bfloat16 first, and counts among the bfloat16 dots.
    """
    by_type: dict[str, list[Dot]] = {}
    for dot in dots:
        emitted_as = next((operand for operand in (dot.operand, "bf16") if operand in emitted_rows), "")
        by_type.setdefault(emitted_as, []).append(dot)
    passes = []
    for emitted_as, same in by_type.items():
        packed = packed_rows(emitted_as or "f32")
        rows = [d.count * packed * -(-d.rows // packed) * -(-d.depth // width) * -(-d.columns // width) for d in same]
        passes.append(
            DotPasses(
                operand="+".join(sorted({dot.operand for dot in same})),
                dots=len(same),
                promised=sum(n * dot.passes for n, dot in zip(rows, same, strict=True)) / sum(rows),
                emitted=emitted_rows.get(emitted_as, 0.0) / sum(rows),
                emitted_as=emitted_as,
                place=place,
            )
        )
    return tuple(passes)
