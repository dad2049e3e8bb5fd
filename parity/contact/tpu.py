"""A TPU's functions as Mosaic compiles them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from parity.backends import runner

LANES, ROWS = 128, 2048

FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": jnp.log,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "minimum": lambda x: jnp.minimum(x, 1.0),
    "kept": lambda x: x * 1.0,
    "": lambda x: x,
}


def _unary(x: jax.Array, *, function: str, dtype: str = "float32", interpret: bool) -> jax.Array:
    n = x.size
    rows = -(-n // (ROWS * LANES)) * ROWS
    whole = jnp.pad(x, (0, rows * LANES - n), constant_values=1.0).reshape(rows, LANES)

    def kernel(x: Any, out: Any) -> None:
        out[...] = FUNCTIONS[function](x[...]).astype(out.dtype)

    block = pl.BlockSpec((ROWS, LANES), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(whole.shape, dtype)
    grid = (rows // ROWS,)
    call: Any = pl.pallas_call(
        kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=shape, interpret=interpret
    )
    found: jax.Array = jax.jit(call)(whole).reshape(-1)[:n]
    return found


def _dot(a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32)
    call: Any = pl.pallas_call(kernel, out_shape=shape, interpret=interpret)
    found: jax.Array = jax.jit(call)(a, b)
    return found


class Tpu:
    """`probes.Device` of the TPU, or of Pallas' interpreter."""

    def _run(self, call: Any, inputs: dict[str, np.ndarray], **arguments: Any) -> np.ndarray:
        here = runner("tpu")
        return np.asarray(here.run(partial(call, interpret=not here.real), inputs, arguments))

    def unary(self, x: np.ndarray, *, function: str) -> np.ndarray:
        """See `probes.Device`."""
        return self._run(_unary, {"x": x}, function=function)

    def convert(self, x: np.ndarray, *, dtype: str) -> np.ndarray:
        """See `probes.Device`."""
        return self._run(_unary, {"x": x}, function="", dtype=dtype)

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """See `probes.Device`."""
        lanes = np.zeros((b.shape[0], LANES), b.dtype)
        lanes[:, : b.shape[1]] = b
        return self._run(_dot, {"a": a, "b": lanes})[:, : b.shape[1]]


def device() -> Tpu:
    """The functions of the TPU of this process."""
    return Tpu()


def kind() -> str:
    """As in `parity.contact.assumptions`."""
    return "tpu"
