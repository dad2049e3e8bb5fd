"""What every kernel does with the arguments of a call: values that are known, an offset, operands without float16."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from op_arguments import gmm
from op_arguments.gmm import Groups, Problem
from tpu_kernels._lib.chip import is_tpu

Interpreted = bool | pltpu.InterpretParams
Interpret = Interpreted | None


@dataclass(frozen=True, kw_only=True)
class GmmOptions(gmm.GmmOptions):
    """With interpret, as `tpu_kernels.gmm.gmm`."""

    interpret: Interpret = None


@dataclass(frozen=True, kw_only=True)
class TgmmOptions(gmm.TgmmOptions):
    """With interpret, as `tpu_kernels.gmm.gmm`."""

    interpret: Interpret = None


class Shard(NamedTuple):
    """The groups that a device has: group_sizes [E] int32 of all of them, group_offset [1] int32, the first here."""

    group_sizes: jax.Array
    group_offset: jax.Array


def concrete_values(group_sizes: Any) -> list[int] | None:
    """The values of group_sizes, or None where it is traced (or not the vector it should be: the check says so)."""
    if isinstance(group_sizes, jax.core.Tracer) or len(getattr(group_sizes, "shape", ())) != 1:
        return None
    return [int(size) for size in np.asarray(group_sizes)]


def held(array: Any) -> Any:
    """An integer array as a backward pass may keep it: of NumPy's a copy, since on the CPU JAX shares their memory."""
    return jnp.array(array) if isinstance(array, np.ndarray) else array


def static_scalar(value: Any) -> Any:
    """The int in a concrete integer scalar ([] or [1]); anything else as it is, for the check to judge."""
    concrete = isinstance(value, jax.Array | np.ndarray | np.integer) and not isinstance(value, jax.core.Tracer)
    return int(value.reshape(())) if concrete and value.size == 1 and value.dtype.kind == "i" else value


def groups_of(group_sizes: Any, group_offset: Any) -> Groups:
    """The groups as checks take them, with what is known of them outside tracing."""
    return Groups(group_sizes, static_scalar(group_offset), concrete_values(group_sizes))


def shard_of(groups: Groups, p: Problem) -> Shard:
    """The groups of a checked problem as the kernels read them."""
    return Shard(groups.sizes, as_vector(groups.offset, p.experts - p.groups))


def as_vector(group_offset: int | jax.Array, most: int) -> jax.Array:
    """group_offset as the kernels read it: int32 [1], clipped where a traced one could not be checked."""
    if not isinstance(group_offset, int):
        group_offset = jnp.clip(group_offset, 0, most)
    return jnp.asarray(group_offset, jnp.int32).reshape(1)


def resolve_interpret(interpret: Interpret, array: Any) -> bool | pltpu.InterpretParams:
    """interpret, or where it is None whether no TPU computes with `array`."""
    return not is_tpu(array) if interpret is None else interpret


def kernel_operand(x: jax.Array) -> jax.Array:
    """x as Mosaic can load it: it has no float16."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def kernel_dtype(name: str) -> Any:
    """The dtype in which the kernel stores an output that XLA hands over as dtype `name`."""
    return jnp.dtype("float32" if name == "float16" else name)
