"""The TPU that a kernel is traced for: its registers, its memory, and what its matrix unit multiplies.

`kind` is a JAX device kind (`"TPU7x"`). Where it is not given, the answers are about the abstract mesh in use (the
target of an ahead-of-time compilation), else about JAX's default backend.
"""

from typing import Any

import jax
import jax.numpy as jnp

from op_arguments.quantized_gmm import dot_dtype

LANES = 128
"""Of a vector register; it has 8 sublanes of 32 bits."""
REGISTER = 8 * LANES
"""Numbers of 32 bits in a vector register."""
MXU = 256
"""The width of the matrix unit on v6e and tpu7x; fewer rows cost no less than loading its weights."""
NEWEST = 7

_GENERATIONS = {
    "TPU v4": 4,
    "TPU v5 lite": 5,
    "TPU v5e": 5,
    "TPU v5": 5,
    "TPU v5p": 5,
    "TPU v6 lite": 6,
    "TPU v6e": 6,
    "TPU7x": 7,
}
# What libtpu 0.0.51 compiles a Pallas dot of; it refuses float16 everywhere, and on v4 all 8-bit types. Not all are
# native: v6e and earlier convert float8 to bfloat16, tpu7x converts int8.
_WIDE = ("float32", "bfloat16")
_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
_FIRST_GENERATION_WITH_NARROW = 5
_NATIVE = {"fp8": (7,), "int8": (5, 6)}  # the generations whose matrix unit multiplies it


def tpu_kind() -> str | None:
    """The device kind of the TPU in question, None where there is no TPU."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return target.device_kind if target.device_kind.startswith("TPU") else None
    return jax.devices()[0].device_kind if jax.default_backend() == "tpu" else None


def is_tpu(array: Any = None) -> bool:
    """Whether a TPU computes with `array`: where it is, or of a traced one (and None) whether there is a TPU.

    On a host with a TPU an array may be on the CPU, which runs what is computed with it.
    """
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return all(device.platform == "tpu" for device in array.devices())
    return tpu_kind() is not None


def tpu_generation(kind: str | None = None) -> int | None:
    """4 to 7, None where there is no TPU. Raises ValueError for a kind that is none of v4, v5e, v5p, v6e, tpu7x."""
    kind = kind or tpu_kind()
    if kind is None:
        return None
    if kind not in _GENERATIONS:
        raise ValueError(f"kind must be one of {', '.join(_GENERATIONS)}, got {kind!r}")
    return _GENERATIONS[kind]


def generation() -> int:
    """The generation that a kernel is traced for: where there is no TPU, and it is interpreted, the newest."""
    return tpu_generation() or NEWEST


def computes_bfloat16() -> bool:
    """Whether the vector unit computes with bfloat16, two elements of a 32-bit word at a time: from v6e on."""
    return generation() >= 6


def has_wide_mxu() -> bool:
    """Whether the matrix unit is `MXU` wide, and not 128: from v6e on."""
    return generation() >= 6


def sublanes(dtype: Any) -> int:
    """How many rows of `dtype` a vector register holds: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 32 // jnp.dtype(dtype).itemsize


def default_vmem() -> int:
    """The bytes of VMEM that a kernel has if it asks for none: 16 MiB, 32 MiB from v6e on."""
    return 2**24 if generation() < 6 else 2**25


def vmem_capacity() -> int:
    """The bytes of VMEM that a core has, at least: 16 MiB on v4, 64 MiB since (v5e and v6e have 128)."""
    return 2**24 if generation() < 5 else 2**26


def supports_matmul(dtype: Any, kind: str | None = None) -> bool:
    """Whether Mosaic compiles a dot of two operands of `dtype` for the TPU; False where there is none."""
    generation = tpu_generation(kind)
    if generation is None:
        return False
    narrow = _NARROW if generation >= _FIRST_GENERATION_WITH_NARROW else ()
    return jnp.dtype(dtype).name in (*_WIDE, *narrow)


def matmul_path(lhs: Any, rhs: Any, generation: int) -> tuple[str, str]:
    """What the matrix unit multiplies for operands of dtypes lhs and rhs of a quantised matmul, and why.

    The first is `"fp8"` or `"int8"` for the operands as they are, else the name of the dtype that both are widened to.
    Widening is exact. Sums of int8 products in bfloat16 are float32, exact up to 1024 products (127² · 1024 < 2²⁴),
    and int32 from there on. Raises TypeError for a pair of which neither or not the right one is quantised.
    """
    dot = dot_dtype(lhs, rhs)
    if dot == "float16":
        return "float32", "Mosaic has no float16, which float32 holds"
    if dot not in _NATIVE:
        return dot, f"an operand that is not quantised is multiplied as {dot}"
    if generation in _NATIVE[dot]:
        return dot, f"the matrix unit multiplies {dot}"
    return "bfloat16", f"the matrix unit does not multiply {dot}, which bfloat16 holds"


def select_input_dtype(lhs: Any, rhs: Any, kind: str | None = None) -> jnp.dtype[Any]:
    """The dtype to feed a dot of arrays (or dtypes) lhs and rhs: the narrowest supported one that holds both exactly.

    Their own where they agree and it is supported; else bfloat16, which holds every 8-bit type; else float32.
    Where there is no TPU (interpreted kernels), as on the newest.
    """
    kind = kind or tpu_kind() or "TPU7x"
    dtypes = {jnp.dtype(getattr(x, "dtype", x)) for x in (lhs, rhs)}
    if len(dtypes) == 1 and all(supports_matmul(dtype, kind) for dtype in dtypes):
        return dtypes.pop()
    in_bfloat16 = all(dtype.name in ("bfloat16", *_NARROW) for dtype in dtypes)
    return jnp.dtype(jnp.bfloat16 if in_bfloat16 else jnp.float32)
