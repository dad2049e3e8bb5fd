"""The same input bytes on every host and in every framework, without a framework.

Raw counter-based bits (Philox 4x64, Salmon et al. 2011, keyed by SHA-256 of op, case, argument and seed) are mapped
to values by integer arithmetic and single IEEE operations alone: no libm, whose last bits differ between hosts. One
key per argument, so a new argument moves no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from parity.blocks import ELEMENTS, in_blocks
from parity.declared import DeclarationError, check_spec, checked_unread
from parity.dtypes import UNIT_ROUNDOFF, Floats, numpy_dtype, round_to
from parity.op import Array, Case, Gates, Given, Groups, Inputs, Offsets, Op, Scales, Spec
from parity.words import one_of

REVISION = 1
"""Raised whenever a change here changes the bytes of an existing case."""

Bits = Callable[[int | tuple[int, ...]], np.ndarray]
"""Draws that many uint64 words, or an array of them of that shape; further calls go on in the stream."""

CANCELLATION = 2.0**-6
"""Relative difference of the two terms of a cancelling pair: far above any accumulator's roundoff, so that what is
left is a known value and not noise. Four roundoffs of the argument's dtype where that is more."""
INT8_UNIT = 16.0
"""What 1.0 of a distribution is in int8, whose range it would not fill otherwise; beyond ±127 it saturates."""
REACH = {"float8_e4m3fn": 6, "float8_e5m2": 6, "int8": 3}
"""Powers of two, up and down, of wide data in dtypes with less range than float32's."""
FP8_EXACT = 1.75
"""Integer data that an operation quantises itself are multiples of this: 448, the largest e4m3, is 2^8 of it, so
that scales are powers of two and every quotient is exact."""


def specs_of(op: Op, case: Case) -> Mapping[str, Spec]:
    """What the inputs of a case are drawn by, by argument name. Raises DeclarationError for what cannot be drawn."""
    specs = op.inputs(case)
    if not isinstance(specs, Mapping):
        raise DeclarationError(op, case, "inputs", f"must return a dict by name, got {type(specs).__name__}")
    for name, spec in specs.items():
        check_spec(op, case, name, spec)
        if isinstance(spec, Array) and case.data not in DISTRIBUTIONS:  # else the op may have data of its own
            raise DeclarationError(op, case, "data", one_of(DISTRIBUTIONS, case.data))
        for kind, patterns in ((Groups, GROUPS), (Scales, SCALES), (Offsets, OFFSETS), (Gates, GATES)):
            if isinstance(spec, kind) and isinstance(spec.pattern, str) and spec.pattern not in patterns:
                raise DeclarationError(op, case, f"inputs[{name!r}].pattern", one_of(patterns, spec.pattern))
    arrays = {name: spec.sum_over for name, spec in specs.items() if isinstance(spec, Array)}
    if case.data in ALONG_AN_AXIS and arrays and set(arrays.values()) == {None}:
        what = f"{case.data!r} must be along an axis: parity.Array(…, sum_over=…) of one of {', '.join(arrays)}"
        raise DeclarationError(op, case, "data", what)
    return specs


def draw(op: Op, case: Case) -> Inputs:
    """The input arrays of a case, by argument name. Raises DeclarationError for what the op cannot have drawn."""
    drawn: dict[str, np.ndarray | None] = {}
    specs = specs_of(op, case)
    for name, spec in specs.items():
        bits = stream(case, name)
        if isinstance(spec, Groups):
            drawn[name] = group_sizes(spec, bits)
        elif isinstance(spec, Array):
            values = DISTRIBUTIONS[case.data](spec, bits, case.out)
            if spec.dtype == "int8" and case.data != "integers":
                values = np.clip(values * INT8_UNIT, -127, 127)
            drawn[name] = round_to(values, spec.dtype)
        elif isinstance(spec, Scales):
            scales = SCALES["powers" if case.data == "integers" else spec.pattern](spec.shape, bits)
            drawn[name] = round_to(scales, spec.dtype)
        elif isinstance(spec, Offsets):
            sizes = OFFSETS[spec.pattern](spec.count, spec.rows, bits)
            drawn[name] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        elif isinstance(spec, Gates):
            drawn[name] = round_to(log_decays(spec, bits, exact=case.data == "integers"), spec.dtype)
        else:
            drawn[name] = spec.array if spec else None
    if case.data in ("poison", "nonfinite"):
        for name, unread in checked_unread(op, case, drawn).items():
            array = drawn[name]
            if array is None or isinstance(specs[name], Given):
                continue
            if array.dtype.kind != "i":  # integers have no such values
                where = unread if case.data == "poison" else ~unread & _one_in(4099, array.shape, stream(case, name))
                array[where] = np.resize(np.array([np.nan, np.inf, -np.inf]), int(where.sum()))
    return drawn


def hashes(inputs: Inputs) -> dict[str, str]:
    """SHA-256 of each input's shape, dtype and bytes."""
    return {
        name: hashlib.sha256(f"{array.shape}{array.dtype}".encode() + array.tobytes()).hexdigest()
        for name, array in inputs.items()
        if array is not None
    }


def stream(case: Case, argument: str) -> Bits:
    """The raw bits of one argument of a case (or of whatever else is to be random about it)."""
    name = case.with_data("normal" if case.data == "poison" else case.data).with_seed(0).id
    key = hashlib.sha256(f"{name}|{argument}|{case.seed}".encode()).digest()
    return np.random.Philox(key=int.from_bytes(key[:16], "little")).random_raw


# --- distributions: float64 (or smaller) values, which `draw` rounds to the argument's dtype ---


def _normal(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Mean 0, variance 1: eight uniform 32-bit integers summed (Irwin-Hall), which reaches ±4.9."""
    sigma = np.sqrt(8 / 12) * 2.0**32

    def value(words: np.ndarray) -> np.ndarray:
        halves = words >> np.uint64(32)
        halves += words & np.uint64(2**32 - 1)
        total = halves[:, 0] + halves[:, 1] + (halves[:, 2] + halves[:, 3])
        return (total.view(np.int64) - 8 * 2**31) / sigma

    return _from_words(value, spec.shape, bits, count=4)


def _from_words(
    value: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], bits: Bits, count: int = 1
) -> Floats:
    """value(words [n, count]) of each element, of words that are drawn for a block of elements at a time."""
    values = np.empty(shape)
    flat = values.reshape(-1)
    step = ELEMENTS // count
    for first in range(0, flat.size, step):
        part = flat[first : first + step]
        part[...] = value(bits(part.size * count).reshape(-1, count))
    return values


def _one_signed(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Uniform in (0, 1): nothing cancels, errors of one sign add up."""
    return _uniform(spec.shape, bits)


def _uniform(shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    return _from_words(lambda words: ((words[:, 0] >> np.uint64(11)) + 0.5) * 2.0**-53, shape, bits)


def _integers(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """±1 and ±2, sparse enough along the summed axis that every partial sum is exact in the output dtype.

    Quantised data are ±1 and their scales 1 and 2. Data that swing are far from sparse: the first half of the sum
    climbs, the second half comes back.
    """
    if spec.swings and spec.sum_over is not None:
        return _swinging(spec, spec.sum_over, bits)
    digits = 1 - round(np.log2(float(ml_dtypes.finfo(numpy_dtype(out)).eps)))
    words = bits(spec.shape)
    narrow = spec.dtype == "int8" or spec.dtype.startswith("float8")
    sizes = np.array([-1.0, -1.0, 1.0, 1.0] if narrow else [-2.0, -1.0, 1.0, 2.0])
    sizes *= FP8_EXACT if spec.quantised_inside else 1.0

    def value(words: np.ndarray) -> np.ndarray:
        of_words = sizes.take((words & np.uint64(3)).view(np.int64))
        return of_words if spec.one_in == 1 else of_words * ((words >> np.uint64(32)) % np.uint64(spec.one_in) == 0)

    values = in_blocks(value, words, dtype=np.float64)
    if spec.sum_over is None:
        return values
    # 2·2 per term, and a quarter of the range left for what is added at the end.
    terms = 2 ** min(24, digits) // 8
    if spec.quantised_inside:
        terms = max(terms // 49, 1)  # (4 · 1.75)² per product; a single one is exact in any case
    length = spec.shape[spec.sum_over]
    stride = np.uint64(max(-(-length // terms), 1))
    others = tuple(a for a in range(len(spec.shape)) if a != spec.sum_over % len(spec.shape))
    position = np.expand_dims(np.arange(length, dtype=np.uint64), others)
    # One phase per line along the summed axis: over all lines every position is used.
    phase = np.take(words, [0], axis=spec.sum_over) >> np.uint64(2) if length else words
    values[position % stride != (stride - phase % stride) % stride] = 0
    return values


def _wide(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Log-uniform magnitudes over 24 (float16: 8) powers of two, either sign."""
    reach = 4 if "float16" in (spec.dtype, out) else REACH.get(spec.dtype, 12)
    sizes = np.ldexp(1.0, np.arange(-reach, reach + 1))

    def value(words: np.ndarray, signs: np.ndarray) -> np.ndarray:
        mantissa = 1 + (words >> np.uint64(12)) * 2.0**-52
        size = sizes.take((words % np.uint64(sizes.size)).view(np.int64))
        return mantissa * size * (1.0 - 2.0 * (signs & np.uint64(1)))

    return in_blocks(value, bits(spec.shape), bits(spec.shape), dtype=np.float64)


def _outliers(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Normal, with one channel in 32 along the summed axis of the first factor 64 times larger.

    Activations of large language models have such channels (Dettmers et al. 2022, arXiv:2208.07339).
    """
    values = _normal(spec, bits, out)
    if spec.sum_over is None or spec.pair_sign < 0:
        return values
    channels = [1] * values.ndim
    channels[spec.sum_over] = -1
    loud = _one_in(32, (spec.shape[spec.sum_over],), bits)
    return values * np.where(loud, 64.0, 1.0).reshape(channels)


def _correlated(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Normal, nine tenths of the variance common to all lines along the summed axis (the last one, where none is).

    Rows of a trained model's activations point much the same way (Ethayarajh 2019, arXiv:1909.00512).
    """
    values = _normal(spec, bits, out)
    if not spec.shape:
        return values
    axis = (-1 if spec.sum_over is None else spec.sum_over) % values.ndim
    common = values[tuple(slice(None) if n == axis else slice(1) for n in range(values.ndim))]
    return np.sqrt(0.9) * common + np.sqrt(0.1) * values


def _residuals(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Normal in rows of sizes down to 2^-12, or as far down as fp8 reaches: what is left of most has converged."""
    exponents = bits(spec.shape[:-1]) % np.uint64(2 * REACH.get(spec.dtype, 6) + 1)
    return _normal(spec, bits, out) * np.ldexp(1.0, -exponents.astype(np.int64))[..., None]


def _cancellation(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Neighbours along the summed axis whose products cancel up to `CANCELLATION`."""
    values = _normal(spec, bits, out)
    if spec.sum_over is None:
        return values
    # Rounded first: the pair must stay a pair in the argument's dtype.
    lines = np.moveaxis(round_to(values, spec.dtype).astype(np.float64), spec.sum_over, -1)
    even = lines[..., 0 : lines.shape[-1] // 2 * 2 : 2]
    left = max(CANCELLATION, 4 * UNIT_ROUNDOFF[spec.dtype])
    lines[..., 1::2] = even if spec.pair_sign > 0 else -even * (1 + left)
    return np.moveaxis(lines, -1, spec.sum_over)


def _swinging(spec: Array, axis: int, bits: Bits) -> np.ndarray:
    """121 to 127 in one factor; in the other with a minus in the second half of the summed axis."""
    values = 121.0 + bits(spec.shape) % np.uint64(7)
    if spec.pair_sign < 0:
        return values
    lines = np.moveaxis(values, axis, -1)
    lines[..., lines.shape[-1] // 2 :] *= -1
    return values


def _bits(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Every bit pattern of the dtype alike: NaN, ±inf, ±0 and subnormals among them."""
    dtype = numpy_dtype(spec.dtype)
    patterns = bits(spec.shape).astype(f"uint{8 * dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return patterns.astype(np.float64)


def _ranges(spec: Array, bits: Bits, out: str) -> np.ndarray:
    """Normal in tiles of 128 x 128 (small arrays: 32 x 32), each of another magnitude.

    In turn: zero, about the largest value, subnormal, about the smallest normal one, in between.
    """
    info = ml_dtypes.finfo(numpy_dtype(spec.dtype))
    smallest, largest = int(info.minexp), int(info.maxexp)
    sizes = np.ldexp(1.0, np.array([0, largest, smallest - 6, smallest + 6, smallest, smallest // 2, 0]))
    sizes[0] = 0.0
    rows, columns = (1, 1, *spec.shape)[-2:]
    edge = 128 if min(rows, columns) >= 128 else 32
    tiles = -(-rows // edge), -(-columns // edge)
    chosen = np.resize(sizes, tiles)
    of_elements = np.kron(chosen, np.ones((edge, edge)))[:rows, :columns]
    return _normal(spec, bits, out) / 8 * of_elements.reshape(spec.shape[-2:])


DISTRIBUTIONS: Mapping[str, Callable[[Array, Bits, str], np.ndarray]] = {
    "normal": _normal,
    "one_signed": _one_signed,
    "integers": _integers,
    "wide": _wide,
    "outliers": _outliers,
    "correlated": _correlated,
    "residuals": _residuals,
    "cancellation": _cancellation,
    "poison": _normal,  # normal, with NaN and ±inf wherever the operation must not read
    "nonfinite": _normal,  # normal, with a few NaN and ±inf where it must
    "bits": _bits,
    "ranges": _ranges,
}
ALONG_AN_AXIS = ("outliers", "cancellation")
"""Data that are normal in an array without `sum_over`."""


def _one_in(n: int, shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    return bits(shape) % np.uint64(n) == 0


# --- scales ---


def _varied(shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    """Log-uniform over four powers of two around 1, all digits of float32 used."""
    words = bits(shape)
    exponent = (words & np.uint64(3)).astype(np.int32) - 2
    return np.ldexp(_significand(words), exponent).astype(np.float32)


def _steps(shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    """Each about eight times or an eighth of its neighbours along every axis."""
    words = bits(shape)
    odd = np.indices(shape).sum(axis=0) % 2
    return (_significand(words) * np.where(odd, 2.0, 0.25)).astype(np.float32)


def _extremes(shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    """About the smallest normal and the largest float32, and in between."""
    words = bits(shape)
    exponent = np.array([-126, -120, 0, 120, 127])[(words % np.uint64(5)).astype(int)]
    return np.ldexp(_significand(words), exponent).astype(np.float32)


def _powers(shape: tuple[int, ...], bits: Bits) -> np.ndarray:
    """1 or 2, for integer data."""
    return np.where(bits(shape) & np.uint64(1), 2.0, 1.0).astype(np.float32)


def _significand(words: np.ndarray) -> np.ndarray:
    return 1 + (words >> np.uint64(41)) * 2.0**-23


SCALES: Mapping[str, Callable[[tuple[int, ...], Bits], np.ndarray]] = {
    "varied": _varied,
    "steps": _steps,
    "extremes": _extremes,
    "powers": _powers,
}


# --- log decays ---


def log_decays(spec: Gates, bits: Bits, *, exact: bool) -> Floats:
    """The log decays of `spec`, in float64; `exact`: in their place 0 and `RESET`, whose decays are exactly 1 and 0."""
    if exact:
        heads = np.arange(spec.shape[0]) % 2 == 1  # of a vector of heads every other one
        return np.where(heads if len(spec.shape) == 1 else _one_in(41, spec.shape, bits), RESET, 0.0)
    if isinstance(spec.pattern, tuple):
        return np.broadcast_to(np.array(spec.pattern), spec.shape)
    return GATES[spec.pattern](spec.shape, bits)


RESET = -(2.0**14)
"""A log decay of which float32 and float64 alike make a decay of exactly 0, exact in every dtype, and in sums."""


def _sigmoid(shape: tuple[int, ...], bits: Bits) -> Floats:
    """logsigmoid(x) / 16 for x of the logistic distribution, as a trained gate is (Yang et al. 2024, arXiv:2312.06635):
    sigmoid(x) is then uniform in (0, 1)."""
    return _log_uniform(shape, bits) / 16


def _steep(shape: tuple[int, ...], bits: Bits) -> Floats:
    """About -500 over 64 steps."""
    return _log_uniform(shape, bits) * (500 / 64)


def _slow(shape: tuple[int, ...], bits: Bits) -> Floats:
    """About -1 over 256 steps."""
    return _log_uniform(shape, bits) / 256


def _bound(shape: tuple[int, ...], bits: Bits) -> Floats:
    """-5, the lower bound of a bounded gate, at half of all, and anything above it at the others."""
    return np.where(_one_in(2, shape, bits), -5.0, -5.0 * _uniform(shape, bits))


def _resets(shape: tuple[int, ...], bits: Bits) -> Floats:
    """Next to no decay, and -80 at about one step in 29."""
    return _log_uniform(shape, bits) / 1024 - np.where(_one_in(29, shape, bits), 80.0, 0.0)


def _zero(shape: tuple[int, ...], bits: Bits) -> Floats:
    return np.zeros(shape)


def _positive(shape: tuple[int, ...], bits: Bits) -> Floats:
    """Growth: about e in 256 steps."""
    return -_log_uniform(shape, bits) / 256


def _mixed(shape: tuple[int, ...], bits: Bits) -> Floats:
    """Growth and decay in turn, as `_sigmoid` in size."""
    return _log_uniform(shape, bits) / 16 * (1.0 - 2.0 * _one_in(2, shape, bits))


def _log_uniform(shape: tuple[int, ...], bits: Bits) -> Floats:
    """Natural logarithms of numbers uniform in (0, 1): exponentially distributed, mean -1."""
    mantissa, exponent = np.frexp(_uniform(shape, bits))
    # log m = 2 artanh((m - 1) / (m + 1)), |·| <= 1/3: the series to x^33 is right to float64's roundoff.
    x = (mantissa - 1) / (mantissa + 1)
    series = np.zeros(shape)
    for power in range(33, 0, -2):
        series = series * x * x + 1 / power
    return 2 * x * series + exponent * LN2


LN2 = 0.6931471805599453

GATES: Mapping[str, Callable[[tuple[int, ...], Bits], Floats]] = {
    "sigmoid": _sigmoid,
    "steep": _steep,
    "resets": _resets,
    "zero": _zero,
    "positive": _positive,
    "mixed": _mixed,
    "slow": _slow,
    "bound": _bound,
}


# --- group sizes ---


def group_sizes(spec: Groups, bits: Bits) -> np.ndarray:
    """`spec.count` group sizes of int32 that sum to at most `spec.rows`, by `spec.pattern`."""
    return GROUPS[spec.pattern](spec.count, spec.rows, bits).astype(np.int32)


def _balanced(count: int, rows: int, bits: Bits) -> np.ndarray:
    return np.full(count, rows // max(count, 1)) + (np.arange(count) < rows % max(count, 1))


def _zipf(count: int, rows: int, bits: Bits) -> np.ndarray:
    """Each row picks the expert of rank r with probability ~ 1/r; ranks are shuffled over the experts."""
    if not count:
        return np.zeros(0, np.int64)
    edges = np.cumsum([2**40 // rank for rank in range(1, count + 1)])
    ranks = np.searchsorted(edges, (bits(rows) >> np.uint64(1)).astype(np.int64) % edges[-1], side="right")
    return np.bincount(ranks, minlength=count)[np.argsort(bits(count), kind="stable")]


def _with_empty(empty: Callable[[int], list[int]]) -> Callable[[int, int, Bits], np.ndarray]:
    def sizes(count: int, rows: int, bits: Bits) -> np.ndarray:
        full = np.setdiff1d(np.arange(count), empty(count))
        out = np.zeros(count, np.int64)
        out[full] = _straddle(len(full), rows, bits)
        return out

    return sizes


def _one_hot(count: int, rows: int, bits: Bits) -> np.ndarray:
    return np.where(np.arange(count) == count // 2, rows, 0)


def _ones(count: int, rows: int, bits: Bits) -> np.ndarray:
    return (np.arange(count) < rows).astype(np.int64)


def _straddle(count: int, rows: int, bits: Bits) -> np.ndarray:
    """Sizes in proportion 3 : 5 : 7 : 3 : …, nudged to be odd, so that boundaries fall inside tiles."""
    if not count:
        return np.zeros(0, np.int64)
    weights = np.resize([3, 5, 7], count)
    edges = np.cumsum(weights) * rows // weights.sum()
    edges[:-1] -= (edges[:-1] % 2 == 0) & (edges[:-1] > 0)
    return np.diff(edges, prepend=0)


def _short(count: int, rows: int, bits: Bits) -> np.ndarray:
    """Only about three fifths of the rows belong to a group: a padded buffer."""
    return _zipf(count, rows * 3 // 5, bits)


def _none(count: int, rows: int, bits: Bits) -> np.ndarray:
    return np.zeros(count, np.int64)


GROUPS: Mapping[str, Callable[[int, int, Bits], np.ndarray]] = {
    "balanced": _balanced,
    "zipf": _zipf,
    "empty_first": _with_empty(lambda count: [0]),
    "empty_middle": _with_empty(lambda count: [count // 2]),
    "empty_last": _with_empty(lambda count: [count - 1]),
    "empty_runs": _with_empty(lambda count: [g for g in range(count) if g % 4 != 3]),
    "one_hot": _one_hot,
    "ones": _ones,
    "straddle": _straddle,
    "short": _short,
    "none": _none,
}


def _zeros_and_ones(count: int, rows: int, bits: Bits) -> np.ndarray:
    """0, 1, 1, 0, … in turn, and what is left in the middle."""
    sizes = np.resize([0, 1, 1], count)
    sizes[count // 2] += rows - sizes.sum()
    return sizes


OFFSETS: Mapping[str, Callable[[int, int, Bits], np.ndarray]] = {
    "even": _balanced,
    "ragged": _straddle,
    "zeros_and_ones": _zeros_and_ones,
    "one": _one_hot,
}
"""Lengths of sequences that are packed one behind the other, by pattern; they sum to all rows."""
