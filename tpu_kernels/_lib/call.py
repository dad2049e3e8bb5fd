"""`pl.pallas_call` with everything that a kernel sees under a name: its arrays travel as trees, blocks included."""

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.probe import active, probing
from tpu_kernels._lib.chip import default_vmem, vmem_capacity

P = ParamSpec("P")
R = TypeVar("R")

_interpreted: ContextVar[bool] = ContextVar("interpreted")


def is_interpreted() -> bool:
    """Whether the kernel that is traced here will be interpreted."""
    return _interpreted.get()


@dataclass(frozen=True)
class Block:
    """An array in HBM, and the block of it that a step of the grid has in VMEM.

    array: a `jax.ShapeDtypeStruct` for a result. shape: None for an axis of one that the kernel does not see.
    index(*steps, *scalars): which block, counted in blocks along each axis. space: where the array is as a whole, for
    one without blocks.
    """

    array: Any
    shape: tuple[int | None, ...] = ()
    index: Callable[..., Any] | None = None
    space: Any = None

    @property
    def spec(self) -> pl.BlockSpec:
        """As Pallas has it."""
        return pl.BlockSpec(memory_space=self.space) if self.index is None else pl.BlockSpec(self.shape, self.index)

    def transposed(self) -> "Block":
        """The same block of the array [..., B, A], transposed from [..., A, B]."""

        def swapped(axes: tuple[Any, ...]) -> tuple[Any, ...]:
            return *axes[:-2], axes[-1], axes[-2]

        index, array = self.index, self.array
        is_result = isinstance(array, jax.ShapeDtypeStruct)
        array = jax.ShapeDtypeStruct(swapped(array.shape), array.dtype) if is_result else array.swapaxes(-2, -1)
        return Block(array, swapped(self.shape), index and (lambda *steps: swapped(index(*steps))))


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[Any, ...] = (),
    parallel: int = 0,
    scalars: tuple[Any, ...] = (),
    operands: Any,
    out: Any,
    scratch: Any = None,
    cost: pl.CostEstimate,
    interpret: bool | pltpu.InterpretParams,
    vmem_limit: int | None = None,
    in_place: Mapping[str, str] | None = None,
    sized_by: str = "its arguments",
) -> Any:
    """The arrays `out` that `kernel(*scalars, operands, out, scratch)` fills.

    operands and out are `Block`s, scratch is memory, each alone or in a tree (a NamedTuple, a dictionary), where None
    stands for what a call does without: the kernel finds a reference, or None, in the same place. scalars are arrays
    in SMEM, in trees as well; index maps have them too. The first `parallel` axes of the grid may run in any order.
    vmem_limit: bytes that the kernel may have, None for what it has if it asks for none. in_place: an
    operand's name to that of the result that overwrites it; XLA copies the operand first if anyone else reads it.
    sized_by: the arguments of the caller's caller that blocks grow with.
    Raises ValueError where the blocks, twice buffered, and the scratch do not fit VMEM.
    """
    needed, there = vmem_bytes(operands, out, scratch), min(vmem_limit or default_vmem(), vmem_capacity())
    if needed > there:
        raise ValueError(
            f"{sized_by} must be smaller: {name} needs {needed} bytes of VMEM for its blocks, twice buffered, and its "
            f"scratch, and has {there}"
        )
    # Each tree in a list of one: Pallas would hand a kernel the members of a bare tuple or list one by one.
    specs, out_specs = ([jax.tree.map(lambda block: block.spec, tree)] for tree in (operands, out))
    arrays, shapes = ([jax.tree.map(lambda block: block.array, tree)] for tree in (operands, out))
    order: list[Literal["parallel", "arbitrary"]]
    order = ["parallel" if axis < parallel else "arbitrary" for axis in range(len(grid))]
    first = len(jax.tree.leaves(scalars))
    places = {first + sorted(operands).index(x): sorted(out).index(y) for x, y in (in_place or {}).items()}

    def traced(*references: Any) -> None:
        token = _interpreted.set(bool(interpret))
        try:
            kernel(*references)
        finally:
            _interpreted.reset(token)

    (results,) = pl.pallas_call(
        traced,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=specs,
            out_specs=out_specs,
            scratch_shapes=[scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=vmem_limit),
        cost_estimate=cost,
        input_output_aliases=places,
        interpret=interpret,
        name=name,
    )(*scalars, *arrays)
    return results


def vmem_bytes(operands: Any, out: Any, scratch: Any) -> int:
    """What blocks, twice buffered, and scratch take of VMEM; arguments as those of `call`."""
    blocks = [block for block in jax.tree.leaves((operands, out)) if block.index is not None]
    held = sum(2 * math.prod(filter(None, block.shape)) * block.array.dtype.itemsize for block in blocks)
    memory = [x for x in jax.tree.leaves(scratch) if x.memory_space == pltpu.VMEM]
    return held + sum(math.prod(x.shape) * x.dtype.itemsize for x in memory)


def jit(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`jax.jit` with the named arguments static, and the active probe: what is compiled for one is not another's."""

    def compiled(function: Callable[P, R]) -> Callable[P, R]:
        def traced(*args: Any, active_probe: Any, **kwargs: Any) -> Any:
            with probing(active_probe):
                return function(*args, **kwargs)

        traced.__name__ = function.__name__  # of the program that XLA compiles
        compiling = jax.jit(traced, static_argnames=("active_probe", *static))

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return compiling(*args, active_probe=active(), **kwargs)

        return called

    return compiled


def rarely(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when` of what few data make true: who reads the machine code is told by a scope of that name."""

    def called(body: Callable[[], None]) -> None:
        with jax.named_scope("rarely"):
            pl.when(condition)(body)

    return called


def bytes_of(*arrays: Any) -> int:
    """What arrays take in memory, given as such or as the arrays of `Block`s, in trees."""
    leaves = (leaf.array if isinstance(leaf, Block) else leaf for leaf in jax.tree.leaves(arrays))
    return sum(array.size * array.dtype.itemsize for array in leaves)
