"""The arithmetic of NVIDIA's matrix units, put into Triton's interpreter.

By itself the interpreter multiplies bfloat16 as integers, truncates to bfloat16, ignores `input_precision`, and sums
in whatever order NumPy likes. Inside `emulated()` `tl.sum` adds in pairs, and a dot does what Triton compiles it to:

- Operands of 16 or 8 bits and TF32: products are exact, and each instruction adds the products of its own depth
  (DEPTHS) to the accumulator with one rounding. Fasi, Higham, Mikaitis & Pranesh 2021, "Numerical behavior of NVIDIA
  tensor cores" (PeerJ CS 7:e330): exact products, sums aligned and added without intermediate normalisation. The
  hardware aligns to a few extra bits and truncates; here the sum is exact to float64 and rounds to nearest even, which
  is the most accurate tensor core there could be, not a particular one. Depths are Hopper's; older chips cut them
  in parts. The narrower accumulator of Hopper's fp8 is not modelled.
- float32 "ieee": no tensor core, but one FMA per k, in order, continuing from the accumulator (the PTX is a chain of
  fma.rn.f32, with floating-point fusion on or off).
- float32 "tf32": the operands go to the instruction as they are, and it ignores their low 13 bits: truncation.
- "tf32x3", "bf16x3", "bf16x6": split operands, low-order products first, the accumulator added last (Triton's F32DotTC
  pass; Henry, Tang & Heinecke 2019, arXiv:1904.06376). TF32 splits round to nearest, ties away (cvt.rna).
- `tl.dot_scaled` of 8-bit floats: codes times scales are exact bfloat16, which Triton multiplies where the hardware has
  no scales of its own.
- int8 (exact in int32) and float64 are as the interpreter has them. Subnormals are kept: neither the FMA nor the tensor
  core flushes them as Triton compiles for them.

Not every Triton of 3.6 to 3.9 interprets `tl.dot_scaled`, and rounds `tl.fma` once: here they are the same in all.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from parity.backends.emulation import foreign

Array = np.ndarray[Any, np.dtype[Any]]
Operation = Callable[..., Array]

TF32_DEPTH = 8
DEPTHS = {8: 32, 16: 16}
"""Products that one instruction adds, by operand bits (Hopper: wgmma m64nNk32 and m64nNk16; TF32: m64nNk8)."""

_ALL_OF_TRITON = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

FLOAT8 = {
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e4b8": ml_dtypes.float8_e4m3fnuz,
    "fp8e5b16": ml_dtypes.float8_e5m2fnuz,
}


def interprets() -> bool:
    """Whether Triton interprets the kernels of this process: it reads TRITON_INTERPRET when it is imported."""
    return isinstance(tl.cdiv, InterpretedFunction)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Let kernels interpreted inside the context compute as a tensor core does; restored on exit, and may be nested.

    Only kernels that Triton interprets are affected (TRITON_INTERPRET=1), in every thread of the process: where it
    compiles them nothing is changed, for its compiler uses the same language.
    """
    if not interprets():
        yield
        return
    builder = interpreter.interpreter_builder
    before = builder.__class__, builder.options, interpreter._patch_lang
    # The interpreter makes Triton's language its own whenever a kernel calls a function, which takes half of its time:
    # here it does so once.
    patch_attribute = interpreter._patch_attr
    interpreter._patch_attr = _called_directly
    language = interpreter._patch_lang(_ALL_OF_TRITON)
    interpreter._patch_attr = patch_attribute
    # Triton 3.6 takes an array of one element for a number, which NumPy 2.4 forbids.
    language.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
    for owner, name, value in (*_made_once(), *_compared_once(), *_sums(), *foreign.patches()):
        language.set_attr(owner, name, value)
    names = foreign.Globals()

    def patch_lang(function: Callable[..., Any]) -> Any:
        names.adopt(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang
    builder.__class__ = TensorCoreBuilder
    builder.options = dataclasses.replace(
        builder.options,
        allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
        sanitize_overflow=False,  # as compiled without debug; the checks take a third of the interpreter's time
    )
    try:
        yield
    finally:
        builder.__class__, builder.options, interpreter._patch_lang = before
        names.restore()
        language.restore()


def _made_once() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The patches (owner, name, function) that make Triton's types of results once per name.

    Triton checks, wraps and spells the type of every result, which takes a fourth of its interpreter's time. Here the
    first of a name does so, and the others take over its attributes.
    """
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    get_dtype = interpreter._get_np_dtype
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self: Any, handle: TensorHandle, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle)

    def np_dtype(tt_dtype: Any) -> Any:
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = get_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    return [
        (tl.block_type, "__init__", block_type),
        (tl.tensor, "__init__", tensor),
        (interpreter, "_get_np_dtype", np_dtype),
    ]


_BUILTIN = tl.core.program_id.__code__
"""Of what `tl.core.builtin` makes of a function: asks whether there is a semantic, and calls it."""


def _called_directly(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Let a function of Triton's language have the interpreter's semantic, without two calls in between that copy what
    it is given."""
    function = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member
    semantic = TritonSemantic(builder)

    def call(*given: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*given, **options)

    scope.set_attr(owner, name, call)


def _compared_once() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The patches (owner, name, function) that compare the types of two operands once per pair of names.

    Triton casts and broadcasts the operands of every operation, which takes half of its interpreter's time. A number
    becomes a tensor once for each type that it meets.
    """
    unwrap = tl.core._unwrap_if_constexpr
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    cast = TritonSemantic.cast
    known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in _PLAIN else unwrap(value)

    def named_or_spelt(value: Any) -> Any:
        return value.type.name if type(value) is tl.tensor else (type(value), repr(value))

    def as_known(semantic: Any, value: Any, found: Any) -> Any:
        if type(found) is tl.tensor:
            return found
        return _broadcast_to(casted(semantic, value, found.scalar), found)

    def checked(semantic: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> Any:
        key = named_or_spelt(lhs), named_or_spelt(rhs), *options, *named.items()
        if key in known:
            x, y = known[key]
            return as_known(semantic, lhs, x), as_known(semantic, rhs, y)
        found = check(semantic, lhs, rhs, *options, **named)
        x, y = (of.type if type(x) is tl.tensor else of for x, of in zip((lhs, rhs), found, strict=True))
        known[key] = x, y
        return found

    def broadcasted(semantic: Any, lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name, "broadcast"
        types = known.get(key)
        if types:
            return _broadcast_to(lhs, types[0]), _broadcast_to(rhs, types[1])
        found = broadcast(semantic, lhs, rhs)
        known[key] = found[0].type, found[1].type
        return found

    def casted(semantic: Any, value: Any, dtype: Any, rounding: Any = None) -> Any:
        if rounding is None and value.type.scalar.name == dtype.scalar.name:
            return value
        return cast(semantic, value, dtype, rounding)

    return [
        (tl.core, "_unwrap_if_constexpr", unwrapped),
        (TritonSemantic, "binary_op_type_checking_impl", checked),
        (TritonSemantic, "broadcast_impl_value", broadcasted),
        (TritonSemantic, "cast", casted),
    ]


_PLAIN = frozenset({tl.tensor, tl.dtype, tl.block_type, int, float, bool, str, type(None)})
"""Types of values that hold no constexpr."""


def _broadcast_to(x: Any, type_: Any) -> Any:
    """A tensor repeated along axes, of that type; x where it has it."""
    if x.type.name == type_.name:
        return x
    # By the builder, whose operations `parity stages` records.
    return tl.tensor(interpreter.interpreter_builder.create_broadcast(x.handle, type_.shape), type_)


def _sums() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The patches (owner, name, function) with which tiles are summed.

    A sum goes in pairs. A running one goes step by step, of bfloat16 with each result rounded: the interpreter adds up
    its bit patterns.
    """

    def sum_(reduction: Any, x: Any) -> Any:
        bits = x.handle.data
        values = bits.view(ml_dtypes.bfloat16) if x.dtype == tl.bfloat16 else bits
        total = sum_in_pairs(values, reduction.axis, keep_dims=reduction.keep_dims)
        return reduction.to_tensor(total.view(bits.dtype), x.dtype)

    def running(original: Callable[..., Any], op: np.ufunc) -> Callable[..., Any]:
        def scanned(scan: Any, x: Any) -> Any:
            if x.handle.dtype.scalar != tl.bfloat16:
                return original(scan, x)
            values = np.moveaxis(_values(x.handle).astype(np.float64), scan.axis, 0).copy()
            for n in range(1, len(values)):
                values[n] = _float32_of(_round_to_bfloat16(op(values[n - 1], values[n])))
            return [scan.to_tensor(np.moveaxis(_round_to_bfloat16(values), 0, scan.axis), x.dtype)]

        return scanned

    return [
        (ReduceOps, "sum", sum_),
        (ScanOps, "cumsum", running(ScanOps.cumsum, np.add)),
        (ScanOps, "cumprod", running(ScanOps.cumprod, np.multiply)),
    ]


class TensorCoreBuilder(InterpreterBuilder):  # type: ignore[misc]
    """The interpreter's operations, those on bfloat16 and the dot replaced."""

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, max_num_imprecise_acc: int
    ) -> TensorHandle:
        """a [..., M, K] @ b [..., K, N] + d, of d's dtype."""
        bits = a.dtype.scalar.primitive_bitwidth
        if not a.dtype.scalar.is_floating() or bits == 64:
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        lhs, rhs = _values(a), _values(b)
        with np.errstate(all="ignore"):
            if bits < 32:
                data = fused_dot(lhs, rhs, d.data, DEPTHS[bits])
            else:
                data = FLOAT32_DOTS[input_precision.name](lhs, rhs, d.data)
        return TensorHandle(data, d.dtype.scalar)

    def create_dot_scaled(self, *operands: Any) -> TensorHandle:
        """a [..., M, K] @ b [..., K, N] + d, a and b times the scales of their blocks along K."""
        a, a_scale, _, b, b_scale, *_, d = operands
        if not {a.dtype.scalar.name, b.dtype.scalar.name} <= FLOAT8.keys():
            return super().create_dot_scaled(*operands)
        with np.errstate(all="ignore"):
            data = fused_dot(scaled(a, a_scale), scaled(b, b_scale, is_rhs=True), d.data, DEPTHS[16])
        return TensorHandle(data, d.dtype.scalar)

    def create_broadcast(self, arg: TensorHandle, shape: Any) -> TensorHandle:
        """A tensor repeated along axes, or a number."""
        data = np.empty([*shape], arg.data.dtype)  # np.broadcast_to takes five times as long
        data[...] = arg.data
        return TensorHandle(data, arg.dtype.scalar)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        """Any cast but those of 8-bit floats."""
        source, target = src.dtype.scalar, dst_type.scalar
        if source != tl.bfloat16 and target == tl.bfloat16:
            return TensorHandle(_round_to_bfloat16(src.data), tl.bfloat16)
        if source == tl.bfloat16 and target != tl.bfloat16:
            src = TensorHandle(_values(src), tl.float32)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        """Casts with a rounding mode, and those of 8-bit floats."""
        to_nearest = rounding_mode is None or rounding_mode.name == "RTNE"
        if dst_type.scalar == tl.bfloat16 and to_nearest:
            return TensorHandle(_round_to_bfloat16(_values(src)), tl.bfloat16)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def get_bf16(self, value: float) -> TensorHandle:
        """A scalar constant."""
        return self.cast_impl(self.get_fp32(value), tl.bfloat16)

    def unary_op(self, arg: TensorHandle, op: Operation) -> TensorHandle:
        """Elementwise op of one tensor."""
        return _on_bfloat16(op, arg) if arg.dtype.scalar == tl.bfloat16 else super().unary_op(arg, op)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Operation) -> TensorHandle:
        """Elementwise op or comparison of two tensors."""
        return _on_bfloat16(op, lhs, rhs) if lhs.dtype.scalar == tl.bfloat16 else super().binary_op(lhs, rhs, op)

    def ternary_op(self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Operation) -> TensorHandle:
        """Elementwise op of three tensors; a select (np.where) moves bits and is right as it is."""
        if other.dtype.scalar == tl.bfloat16 and op is not np.where:
            return _on_bfloat16(op, lhs, rhs, other)
        return super().ternary_op(lhs, rhs, other, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        """x * y + z, rounded once."""
        dtype = z.dtype.scalar
        if dtype == tl.bfloat16:
            return _on_bfloat16(lambda x, y, z: x * y + z, x, y, z)
        if dtype == tl.float32:
            return TensorHandle(fma(x.data, y.data, z.data), dtype)
        return super().create_fma(x, y, z)


def sum_in_pairs(x: Array, axis: int | None, *, keep_dims: bool) -> Array:
    """The sum of x over an axis whose length is a power of two, or over all, each addition rounded to x's dtype.

    Neighbours are added in pairs until one is left, as Triton compiles what one thread holds; its lanes and warps are a
    tree as well. NumPy adds row to row, which rounds more often.
    """
    axes = tuple(reversed(range(x.ndim))) if axis is None else (axis,)
    with np.errstate(all="ignore"):
        for along in axes:
            while x.shape[along] > 1:
                evens, odds = (x.take(range(first, x.shape[along], 2), along) for first in (0, 1))
                x = evens + odds
    return x if keep_dims else x.squeeze(axes)


def fused_dot(lhs: Array, rhs: Array, acc: Array, depth: int) -> Array:
    """acc + lhs @ rhs by instructions that each add `depth` exact products to the accumulator and round once."""
    lhs, rhs, acc = lhs.astype(np.float64), rhs.astype(np.float64), acc.copy()
    for k in range(0, lhs.shape[-1], depth):
        np.add(lhs[..., k : k + depth] @ rhs[..., k : k + depth, :], acc, out=acc, casting="same_kind")
    return acc


def fma_chain(lhs: Array, rhs: Array, acc: Array) -> Array:
    """acc + lhs @ rhs by one fused multiply-add per k, in order.

    A float64 sum rounded to float32 stands for the FMA: it differs where the first rounding makes a tie, 1 in 2^29.
    """
    columns = np.moveaxis(lhs, -1, 0).astype(np.float64, order="C")[..., None]
    rows = np.moveaxis(rhs, -2, 0).astype(np.float64, order="C")[..., None, :]
    acc = acc.copy()
    product = np.empty(acc.shape)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column, row, out=product)
        np.add(product, acc, out=acc, casting="same_kind")
    return acc


def fma(x: Array, y: Array, z: Array) -> Array:
    """x * y + z of float32 arrays, rounded once (Boldo & Melquiond 2008, doi:10.1109/TC.2007.70819)."""
    with np.errstate(all="ignore"):
        product, addend = x.astype(np.float64) * y, z.astype(np.float64)
        total = product + addend
        part = total - product
        lost = (product - (total - part)) + (addend - part)  # Knuth's TwoSum
        return _round_to_odd(total, lost).astype(np.float32)


def scaled(operand: TensorHandle, scale: TensorHandle | None, *, is_rhs: bool = False) -> Array:
    """8-bit floats times the E8M0 scales of their blocks along k, which are [..., rows or columns, blocks]."""
    values = _values(operand)
    if scale is None:
        return values
    scales = scale.data.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    scales = np.repeat(scales, values.shape[-2 if is_rhs else -1] // scales.shape[-1], axis=-1)
    return values * (np.swapaxes(scales, -1, -2) if is_rhs else scales)


def truncate_to_tf32(x: Array) -> Array:
    """float32 without its low 13 bits: what a TF32 instruction reads."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def round_to_tf32(x: Array) -> Array:
    """float32 rounded to TF32, ties away from zero (cvt.rna.tf32.f32)."""
    nearest = truncate_to_tf32((x.view(np.uint32) + np.uint32(0x1000)).view(np.float32))
    return np.where(np.isfinite(x), nearest, x)


def round_to_bf16(x: Array) -> Array:
    """float32 rounded to bfloat16, ties to even."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


Pass = tuple[int, int]
CORRECTIONS_3: tuple[Pass, ...] = ((1, 0), (0, 1))
CORRECTIONS_6: tuple[Pass, ...] = ((1, 1), (2, 0), (0, 2), *CORRECTIONS_3)


def split_dot(
    lhs: Array, rhs: Array, acc: Array, depth: int, roundings: tuple[Operation, ...], corrections: tuple[Pass, ...]
) -> Array:
    """acc + lhs @ rhs in several narrow passes: `corrections` (part of lhs, part of rhs), then the leading parts.

    Part i is what `roundings[i]` makes of what the parts before it left over. An infinite operand makes its
    corrections NaN (inf - inf), which are dropped.
    """
    lhs_parts, rhs_parts = _split(lhs, roundings), _split(rhs, roundings)
    total = np.zeros_like(acc)
    for i, j in corrections:
        total = fused_dot(lhs_parts[i], rhs_parts[j], total, depth)
    total = np.where(np.isnan(total), np.float32(0), total)
    return fused_dot(lhs_parts[0], rhs_parts[0], total, depth) + acc


FLOAT32_DOTS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "IEEE": fma_chain,
    "TF32": lambda a, b, acc: fused_dot(truncate_to_tf32(a), truncate_to_tf32(b), acc, TF32_DEPTH),
    "TF32x3": lambda a, b, acc: split_dot(a, b, acc, TF32_DEPTH, (round_to_tf32, truncate_to_tf32), CORRECTIONS_3),
    "BF16x3": lambda a, b, acc: split_dot(a, b, acc, DEPTHS[16], (round_to_bf16,) * 2, CORRECTIONS_3),
    "BF16x6": lambda a, b, acc: split_dot(a, b, acc, DEPTHS[16], (round_to_bf16,) * 3, CORRECTIONS_6),
}
"""By the name of Triton's InputPrecision."""


def _split(x: Array, roundings: tuple[Operation, ...]) -> list[Array]:
    parts = []
    for rounding in roundings:
        parts.append(rounding(x))
        x = x - parts[-1]
    return parts


def _values(handle: TensorHandle) -> Array:
    """The numbers in a handle, which keeps bfloat16 and 8-bit floats as bit patterns."""
    dtype = handle.dtype.scalar
    if dtype == tl.bfloat16:
        return _float32_of(handle.data)
    if dtype.name in FLOAT8:
        return handle.data.view(FLOAT8[dtype.name]).astype(np.float32)
    data: Array = handle.data
    return data


def _float32_of(bits: Array) -> Array:
    """The numbers that are bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _round_to_bfloat16(x: Array) -> Array:
    """The bit patterns of x rounded to bfloat16 once, ties to even."""
    if x.dtype != np.float32:
        exact = x.astype(np.float64)
        x = exact.astype(np.float32)
        x = _round_to_odd(x, exact - x)
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def _round_to_odd(x: Array, lost: Array) -> Array:
    """x + lost, which was rounded to x, rounded to odd: towards zero, last bit set where inexact.

    A second rounding, to a narrower dtype, then sees no false tie.
    """
    is_inexact = np.abs(lost) > 0
    is_beyond = is_inexact & (np.signbit(lost) != np.signbit(x))
    return ((x.view(f"u{x.itemsize}") - is_beyond) | is_inexact).view(x.dtype)


def _on_bfloat16(op: Operation, *handles: TensorHandle) -> TensorHandle:
    with np.errstate(all="ignore"):
        result = op(*(_values(handle).astype(np.float64) for handle in handles))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(_round_to_bfloat16(result), tl.bfloat16)
