"""The TPU's matrix unit (MXU), emulated where Pallas kernels run interpreted on a CPU; sums by `vector_sums`.

What is left open of a TPU, the last bits of `exp` and `rsqrt`, is not XLA's for the host either (0.9 and 1.6 ulps):
they are the float64 results, rounded once. Contracts say which sites are theirs on a device.

XLA's CPU backend computes a float32 dot in float32 whatever its `precision`; the MXU multiplies bfloat16. Inside
`emulated()`, a `dot_general` is lowered for the CPU to what libtpu makes of it on the chip:

- A float32 operand is rounded to bfloat16, to nearest even, as it enters a pass. bfloat16 and float8 operands enter
  as they are and take one pass at every precision; float16 operands are widened to float32.
- With x = hi + rest and rest = mid + low, each of hi, mid and low 8 bits cut off by a mask (not rounded), the passes
  (lhs, rhs) are, in order: DEFAULT (x, x); HIGH (rest, hi), (hi, rest), (hi, hi); HIGHEST (low, hi), (hi, low),
  (rest, rest), (mid, hi), (hi, mid), (hi, hi). The split has no guard: an infinite operand gives NaN above DEFAULT.
- The array holds 128 rows of the contraction at a time, and makes all its passes over them before it takes the next.
  A pass leaves it as the exact sum of its exact products, rounded to float32, and is added to the accumulator in
  float32. The accumulator is rounded once more where the result is narrower.
- Integer dots, which the MXU computes exactly, and float64 and complex ones, which it does not have, are XLA's own.

Sources. Masks, pieces, depth, order of passes and additions: the LLO that libtpu 0.0.51 emits for a float32 Pallas dot
at HIGHEST on v5e and v5p. On v6e and tpu7x the depth is 256, computed as two sums of 128 that are added first. Mosaic
refuses HIGH; its passes are those of XLA's own dot on v5e, which runs each over the whole contraction. One bfloat16
pass by default: the documentation of `jax.lax.Precision`. Not published, and therefore assumed: how the array rounds a
float32 operand, and that it sums exactly (here: in float64, off by about 2⁻⁵³). Subnormal float32 values are flushed
to zero, as XLA's CPU runtime does with all of them; whether the array does so itself is not published either.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core.primitives import dot_general_p, exp_p, reduce_sum_p, rsqrt_p
from jax.interpreters import mlir

from parity.backends.emulation import pallas, vector_sums

DEPTH = 128
"""Rows of the array: how many products are summed before the sum is rounded to float32."""

_emulating = ContextVar("emulating the MXU", default=False)
_NARROW = {jnp.dtype(name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
_FLOATS = _NARROW | {jnp.dtype(name) for name in ("float32", "float16")}

Passes = Callable[[jax.Array, jax.Array], list[tuple[jax.Array, jax.Array]]]
"""From float32 operands to those of each pass, in the order in which the passes are added."""


@contextmanager
def emulated() -> Iterator[None]:
    """Dots lowered for the CPU inside use the MXU's arithmetic, and sums the vector unit's order of additions.

    Under `jit` or not, in `pallas_call(interpret=True)` and with `pltpu.InterpretParams`; in the current thread alone.
    What was compiled inside is never used outside, nor the reverse, and coming back finds both. The first use
    registers a lowering rule that hands every dot outside to JAX's own, and shortens Pallas's interpreter.
    """
    _register()
    token = _emulating.set(True)
    try:
        # JAX's caches do not know of the lowering rule, but XLA metadata are part of their keys.
        with set_xla_metadata(matrix_unit="mxu"):
            yield
    finally:
        _emulating.reset(token)


@cache
def _register() -> None:
    pallas.shorten()
    dot, sum_ = mlir._platform_specific_lowerings["cpu"][dot_general_p].rule, mlir._lowerings[reduce_sum_p].rule
    mlir.register_lowering(dot_general_p, partial(_lower, dot), platform="cpu")
    mlir.register_lowering(reduce_sum_p, partial(_lower_sum, sum_), platform="cpu")
    for function, of in {exp_p: jnp.exp, rsqrt_p: _rsqrt}.items():
        mlir.register_lowering(function, partial(_lower_function, mlir._lowerings[function].rule, of), platform="cpu")


def _lower_sum(original: Any, ctx: Any, x: Any, **params: Any) -> Any:
    """Lowering rule of `reduce_sum`: the vector unit's where emulation is on, else `original`."""
    if not _emulating.get():
        return original(ctx, x, **params)
    return vector_sums.lower(original, ctx, x, **params)


def _lower_function(original: Any, function: Callable[[jax.Array], jax.Array], ctx: Any, x: Any, **params: Any) -> Any:
    """Lowering rule of a function of each element: of float32 where emulation is on `function`, else `original`."""
    (of,) = ctx.avals_in
    if not _emulating.get() or of.dtype != jnp.float32:
        return original(ctx, x, **params)
    bare = ctx.replace(avals_in=[jax.core.ShapedArray(of.shape, of.dtype)])
    with jax.enable_x64(True):
        return mlir.lower_fun(lambda x: function(x.astype(jnp.float64)).astype(of.dtype), multiple_results=False)(
            bare, x
        )


def _rsqrt(x: jax.Array) -> jax.Array:
    return 1 / jnp.sqrt(x)


def _lower(original: Any, ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    """Lowering rule of `dot_general`: the emulation where it is on and the dot is the MXU's, else `original`."""
    (out,) = ctx.avals_out
    on_mxu = _emulating.get() and out.dtype in _FLOATS
    passes = _passes({aval.dtype for aval in ctx.avals_in}, params["precision"]) if on_mxu else None
    if passes is None:
        return original(ctx, lhs, rhs, **params)
    dot = partial(_dot, passes=passes, dimension_numbers=params["dimension_numbers"], dtype=out.dtype)
    # Traced on bare shapes: where the operands lie on a mesh is no part of the arithmetic.
    bare = ctx.replace(avals_in=[jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in])
    # float64 needs the switch, which is thread-local and ends with the lowering of this one dot.
    with jax.enable_x64(True):
        return mlir.lower_fun(dot, multiple_results=False)(bare, lhs, rhs)


def _passes(dtypes: set[Any], precision: Any) -> Passes | None:
    """The passes that the MXU makes for operands of these dtypes, or None where it has none for them."""
    if not dtypes <= _FLOATS:
        return None
    if type(precision) is tuple:  # one per operand, and not a DotAlgorithm
        precision = max(precision, key=list(lax.Precision).index)
    passes = _PASSES.get(precision)
    return _bf16x1 if passes and dtypes <= _NARROW else passes


def _bf16x1(lhs: jax.Array, rhs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    return [(lhs, rhs)]


def _bf16x3(lhs: jax.Array, rhs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    (a, a_rest), (b, b_rest) = _split(lhs), _split(rhs)
    return [(a_rest, b), (a, b_rest), (a, b)]


def _bf16x6(lhs: jax.Array, rhs: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    (a, a_rest), (b, b_rest) = _split(lhs), _split(rhs)
    (a_mid, a_low), (b_mid, b_low) = _split(a_rest), _split(b_rest)
    return [(a_low, b), (a, b_low), (a_rest, b_rest), (a_mid, b), (a, b_mid), (a, b)]


_PASSES: dict[Any, Passes] = {
    None: _bf16x1,
    lax.Precision.DEFAULT: _bf16x1,
    lax.Precision.HIGH: _bf16x3,
    lax.Precision.HIGHEST: _bf16x6,
    lax.DotAlgorithmPreset.DEFAULT: _bf16x1,
    lax.DotAlgorithmPreset.BF16_BF16_F32: _bf16x1,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3: _bf16x3,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6: _bf16x6,
    lax.DotAlgorithmPreset.F32_F32_F32: _bf16x6,
}


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The leading 8 bits of float32 x, and the rest of it (exactly)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    leading = lax.bitcast_convert_type(bits, jnp.float32)
    return leading, x - leading


def _dot(lhs: jax.Array, rhs: jax.Array, *, passes: Passes, dimension_numbers: Any, dtype: Any) -> jax.Array:
    """`lax.dot_general` by the MXU's `passes`. Any shapes; the result has `dtype`."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    a, lhs_free = _canonical(lhs, lhs_batch, lhs_contract)
    b, rhs_free = _canonical(rhs, rhs_batch, rhs_contract)

    def add_filling(accumulator: jax.Array, filling: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        for operands in passes(*filling):
            x, y = (lax.reduce_precision(o, exponent_bits=8, mantissa_bits=7).astype(jnp.float64) for o in operands)
            exact = lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,))))
            accumulator += exact.astype(jnp.float32)
        return accumulator, None

    accumulator = jnp.zeros((a.shape[0], a.shape[1], b.shape[1]), jnp.float32)
    if a.shape[2] <= DEPTH:  # a loop of one step, and padding, take XLA a tenth longer to compile
        accumulator, _ = add_filling(accumulator, (a, b))
    else:
        accumulator, _ = lax.scan(add_filling, accumulator, (_fillings(a), _fillings(b)))
    batch = tuple(lhs.shape[axis] for axis in lhs_batch)
    return accumulator.reshape(batch + lhs_free + rhs_free).astype(dtype)


def _canonical(x: jax.Array, batch: tuple[int, ...], contract: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """x as float32 [batch, free, contraction], and the sizes of its free axes."""
    free = tuple(axis for axis in range(x.ndim) if axis not in {*batch, *contract})
    sizes = tuple(math.prod(x.shape[axis] for axis in axes) for axes in (batch, free, contract))
    rows = x.astype(jnp.float32).transpose(*batch, *free, *contract).reshape(sizes)
    return rows, tuple(x.shape[axis] for axis in free)


def _fillings(rows: jax.Array) -> jax.Array:
    """Rows [batch, free, contraction] as [fillings, batch, free, DEPTH], padded with zeros."""
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % DEPTH)))
    return rows.reshape(*rows.shape[:2], rows.shape[2] // DEPTH, DEPTH).transpose(2, 0, 1, 3)
