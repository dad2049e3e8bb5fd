"""How far a kernel of a whole layer may be from its golden: the layer in arithmetic that carries its error along.

A layer rounds what one matmul hands to the next, and in fp8 what it multiplies, so that its error is no multiple of
one sum's Σ|terms|: here every value comes with bounds on what a kernel's may differ from it, from the roundings of the
contract alone. Errors are added up in absolute value, with one exception: those of elements that were rounded each on
its own (`noise`) go into a sum of n by 8 times the root of the sum of their squares, if that is less, as 8·√n does for
the roundings of a sum (Higham & Mary 2019, SIAM J. Sci. Comput. 41:A2815, λ = 8).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cpu_golden._lib.scales import expand
from cpu_golden.permute import permute
from cpu_golden.quantize import fp8_quantize
from parity.dtypes import UNIT_ROUNDOFF, Floats, round_to
from parity.op import Case, Inputs

U = UNIT_ROUNDOFF["float32"]
LAMBDA = 8.0
SIGMOID = 8
"""Roundings of a sigmoid and of what it is multiplied with: an exponential within 2 ulp, and four operations."""
E4M3 = "float8_e4m3fn"
LARGEST = 448.0


class Uncertain(NamedTuple):
    """The golden's value, and what a kernel's may differ from it: `error` in any way, `noise` each on its own."""

    value: Floats
    error: Floats
    noise: Floats

    @property
    def total(self) -> Floats:
        return self.error + self.noise

    @property
    def size(self) -> Floats:
        """The largest magnitude that a kernel's value may have."""
        return np.abs(self.value) + self.total

    @property
    def T(self) -> Uncertain:
        return Uncertain(*(part.T for part in self))

    def __neg__(self) -> Uncertain:
        return self._replace(value=-self.value)

    def __getitem__(self, index: Any) -> Uncertain:
        return Uncertain(*(part[index] for part in self))

    def __mul__(self, other: Any) -> Uncertain:  # type: ignore[override]
        """The product of elements, rounded to float32."""
        a, b = np.abs(self.value), np.abs(other.value)
        error = a * other.error + b * self.error + self.total * other.total + U * self.size * other.size
        return Uncertain(self.value * other.value, error, a * other.noise + b * self.noise)

    def __add__(self, other: Any) -> Uncertain:  # type: ignore[override]
        """The sum of elements, rounded to float32."""
        error = self.error + other.error + U * (self.size + other.size)
        return Uncertain(self.value + other.value, error, self.noise + other.noise)

    def __matmul__(self, other: Uncertain) -> Uncertain:
        """The product of matrices, summed in float32 and no longer independent in its elements."""
        a, b = np.abs(self.value), np.abs(other.value)
        spread = LAMBDA * np.sqrt(self.noise**2 @ b**2 + a**2 @ other.noise**2)
        noise = np.minimum(spread, self.noise @ b + a @ other.noise)
        error = self.error @ b + a @ other.error + self.total @ other.total + noise
        error += U * chain(a.shape[1]) * (self.size @ other.size)
        return exactly(self.value @ other.value)._replace(error=error)

    def summed(self) -> Uncertain:
        """The sum of each row, [n, 1]."""
        ones = exactly(np.ones((self.value.shape[1], 1)))
        return self @ ones

    def stored(self, dtype: str) -> Uncertain:
        """Rounded to a dtype, each element on its own."""
        return self._replace(noise=self.noise + UNIT_ROUNDOFF[dtype] * self.size)

    def dependent(self) -> Uncertain:
        """With errors of which nothing is known."""
        return self._replace(error=self.total, noise=np.zeros_like(self.noise))

    def independent(self) -> Uncertain:
        """With errors that are independent between its rows, for sums over them."""
        return self._replace(error=np.zeros_like(self.error), noise=self.total)


def exactly(value: np.ndarray) -> Uncertain:
    """A value that every kernel has."""
    wide = value.astype(np.float64)
    return Uncertain(wide, np.zeros_like(wide), np.zeros_like(wide))


def chain(n: int) -> float:
    """Roundings of a sum of n terms, as `parity.op.Contract.bound` counts them."""
    return float(min(n + 2, LAMBDA * np.sqrt(max(n, 1))))


def sigmoid(x: Uncertain) -> tuple[Uncertain, Uncertain]:
    """The sigmoid and the silu; the second derivatives of both are within ±½."""
    value = _logistic(x.value)
    slope, silu_slope = value * (1 - value), np.abs(value * (1 + x.value * (1 - value)))
    curved = x.total**2 / 4
    s = Uncertain(value, slope * x.error + curved + SIGMOID * U * value, slope * x.noise)
    silu = x.value * value
    return s, Uncertain(silu, silu_slope * x.error + curved + SIGMOID * U * np.abs(silu), silu_slope * x.noise)


def quantized(x: Uncertain, axis: int, block: int, power_of_two: bool) -> Uncertain:
    """x in e4m3 with a scale per `block` elements along an axis.

    A kernel's element and scale are in intervals around the golden's; so is its code, the same or, where a boundary
    between two codes is near, a neighbour.
    """
    v, total = (np.moveaxis(part, axis, -1) for part in (x.value, x.total))
    length = v.shape[-1]
    padding = [(0, 0)] * (v.ndim - 1) + [(0, -length % block)]
    v, total = (np.pad(part, padding).reshape(*v.shape[:-1], -1, block) for part in (v, total))
    # What is quantised is a float32.
    scale, low, high = (
        scale_of(np.where(np.isfinite(size), size, 0).max(axis=-1, keepdims=True), power_of_two)
        for size in (np.abs(v.astype(np.float32)), np.maximum(np.abs(v) - total, 0), np.abs(v) + total)
    )
    value = code(v.astype(np.float32) / scale) * scale
    shared = np.abs(value) * np.maximum(high / scale - 1, 1 - low / scale)
    up, down = (code(np.where(end > 0, end / low, end / high)) for end in (v + total, total - v))
    flipped = np.maximum(up * np.where(up > 0, high, low) - value, down * np.where(down > 0, high, low) + value)
    noise = np.maximum(flipped - shared, 0)

    def back(part: Floats) -> Floats:
        return np.moveaxis(part.reshape(*part.shape[:-2], -1)[..., :length], -1, axis)

    # Where errors have a sign in common flips have it as well: on average they then shift by no more than these.
    return Uncertain(back(value), back(shared + total), back(noise))


def scale_of(absmax: Floats, power_of_two: bool) -> Floats:
    """The scale of blocks of these largest magnitudes."""
    if not power_of_two:
        return np.where(absmax > 0, (absmax / LARGEST).astype(np.float32).astype(np.float64), 1.0)
    mantissa, exponent = np.frexp(absmax / LARGEST)
    return np.ldexp(1.0, np.where(absmax > 0, np.maximum(exponent - (mantissa == 0.5), -127), -127))


def code(quotient: Floats) -> Floats:
    """The nearest e4m3."""
    return round_to(np.clip(quotient, -LARGEST, LARGEST).astype(np.float64), E4M3).astype(np.float64)


def _logistic(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


# --- the layer ---


class Routing(NamedTuple):
    """Where tokens go. margin [T]: how far the chosen logits of each token are from the others, beyond the errors of
    both: a kernel in float32 chooses as the golden does where that is positive, and cannot be judged elsewhere."""

    logits: Uncertain
    indices: np.ndarray
    source: np.ndarray
    slots: np.ndarray
    group_sizes: np.ndarray
    margin: Floats


def routing(c: Case, inputs: Inputs, capacity: int | None) -> Routing:
    x, w_router = inputs["x"], inputs["w_router"]
    logits = exactly(x) @ exactly(w_router)
    ranked = np.argsort(-logits.value, axis=1, kind="stable").astype(np.int32)
    indices = np.ascontiguousarray(ranked[:, : c.k])
    chosen, left = (np.take_along_axis(logits.value, part, axis=1) for part in (indices, ranked[:, c.k :]))
    errors = 2 * logits.error.max(axis=1, initial=0)
    margin = chosen[:, -1] - left.max(axis=1, initial=-np.inf) - errors
    _, slots, group_sizes = permute(x, indices, num_experts=w_router.shape[1], capacity=capacity)
    rows = c.T * c.k if capacity is None else min(c.T * c.k, w_router.shape[1] * capacity)
    source = np.full(rows, -1)
    source[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
    return Routing(logits, indices, source, slots, group_sizes, margin)


class Layer:
    """Both passes of `moe_layer` on the inputs of a case, in arithmetic that carries its error along."""

    def __init__(self, c: Case, inputs: Inputs, options: dict[str, Any]) -> None:
        self.c, self.inputs, self.quantize, self.block = c, inputs, options["quantize"], options["block_size"]
        self.between = c.dtype if self.quantize is None else "float32"
        self.routed = routing(c, inputs, options["capacity"])
        ends = np.cumsum(self.routed.group_sizes)
        held = range(options["group_offset"], options["group_offset"] + inputs["w_gate"].shape[0])
        self.groups = [slice(ends[e] - self.routed.group_sizes[e], ends[e]) for e in held]
        self.renormalize = options["renormalize"]
        self.weights = self._softmax()
        self.taken = self._of_rows(exactly(inputs["x"]), c.k)
        self.row_weights = self._of_rows(Uncertain(*(part.reshape(-1, 1) for part in self.weights)), 1)
        self.gate, self.up = (self._product(self.taken, name, self.between) for name in ("w_gate", "w_up"))
        self.sigmoid, self.silu = sigmoid(self.gate)
        self.hidden = (self.row_weights * self.silu * self.up).stored(self.between)
        self.rows = self._product(self.hidden, "w_down", c.out)

    def out(self) -> Uncertain:
        return self._summed(self.rows)

    def grads(self) -> dict[str, Uncertain]:
        c, inputs = self.c, self.inputs
        dout = self._of_rows(exactly(inputs["dout"]), c.k)
        dhidden = self._product(dout, "w_down", self.between, transposed=True)
        dweights = (dhidden * self.silu * self.up).summed()
        weighted = dhidden * self.row_weights
        one = exactly(np.ones((1, 1)))
        slope = self.sigmoid * (one + self.gate * (one + -self.sigmoid))
        dgate = (weighted * self.up * slope).stored(self.between)
        dup = (weighted * self.silu).stored(self.between)
        parts = [self._product(d, w, None, transposed=True) for d, w in ((dgate, "w_gate"), (dup, "w_up"))]
        dexperts = self._summed((parts[0] + parts[1]).stored(c.out)).stored(c.out)
        dlogits = self._softmax_bwd(dweights)
        drouter = (dlogits.dependent() @ exactly(inputs["w_router"].T)).stored(c.out)
        return {
            "x": dexperts + drouter,
            "w_router": exactly(inputs["x"].T) @ dlogits.independent(),
            "w_gate": self._weight_gradient(self.taken, dgate),
            "w_up": self._weight_gradient(self.taken, dup),
            "w_down": self._weight_gradient(self.hidden, dout),
        }

    def _softmax(self) -> Uncertain:
        """An error of the logits within ±ε changes their exponentials by up to exp(ε), and so their sum."""
        logits, indices = self.routed.logits, self.routed.indices
        chosen, errors = (np.take_along_axis(part, indices, axis=1) for part in (logits.value, logits.error))
        among = chosen if self.renormalize else logits.value
        grown = np.exp(among - among.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
        value = np.exp(chosen - among.max(axis=1, keepdims=True)) / grown
        relative = np.expm1(errors + (errors if self.renormalize else logits.error).max(axis=1, keepdims=True))
        return exactly(value)._replace(error=value * (relative + U * (SIGMOID + among.shape[1])))

    def _softmax_bwd(self, dweights: Uncertain) -> Uncertain:
        c, slots = self.c, self.routed.slots
        padded = Uncertain(*(np.append(part, 0.0)[slots] for part in dweights)).dependent()
        product = self.weights * padded
        ones = exactly(np.ones((c.k, 1)))
        mean = product @ ones
        centred = product + self.weights * -mean if self.renormalize else product
        experts = self.inputs["w_router"].shape[1]
        full = Uncertain(*(np.zeros((c.T, experts)) for _ in range(3)))
        for into, part in zip(full, centred, strict=True):
            np.put_along_axis(into, self.routed.indices, part, axis=1)
        if self.renormalize:
            return full
        logits = self.routed.logits
        everyone = np.exp(logits.value - logits.value.max(axis=1, keepdims=True))
        everyone /= everyone.sum(axis=1, keepdims=True)
        relative = np.expm1(logits.error + logits.error.max(axis=1, keepdims=True)) + U * (SIGMOID + experts)
        likelihoods = exactly(everyone)._replace(error=everyone * relative)
        return full + likelihoods * -mean

    def _of_rows(self, x: Uncertain, top_k: int) -> Uncertain:
        source = self.routed.source
        return Uncertain(*(np.where(source[:, None] >= 0, part[source // top_k], 0.0) for part in x))

    def _summed(self, rows: Uncertain) -> Uncertain:
        slots = self.routed.slots
        parts = [np.vstack([part, np.zeros((1, part.shape[1]))])[slots] for part in (rows.value, rows.total)]
        value, error = (part.sum(axis=1) for part in parts)
        return exactly(value)._replace(error=error + U * self.c.k * (np.abs(parts[0]) + parts[1]).sum(axis=1))

    def _product(self, lhs: Uncertain, name: str, dtype: str | None, transposed: bool = False) -> Uncertain:
        weights = self.inputs[name]
        lhs = self._operand(lhs, 1)
        out = Uncertain(*(np.zeros((lhs.value.shape[0], weights.shape[1 if transposed else 2])) for _ in range(3)))
        for group, rows in self._active():
            product = lhs[rows] @ self._weights(weights[group : group + 1], transposed)
            for into, part in zip(out, product, strict=True):
                into[rows] = part
        return out if dtype is None else out.stored(dtype)

    def _weight_gradient(self, lhs: Uncertain, rhs: Uncertain) -> Uncertain:
        lhs, rhs = self._operand(lhs, 0), self._operand(rhs, 0)
        shape = (len(self.groups), lhs.value.shape[1], rhs.value.shape[1])
        out = Uncertain(*(np.zeros(shape) for _ in range(3)))
        for group, rows in self._active():
            for into, part in zip(out, lhs[rows].T @ rhs[rows], strict=True):
                into[group] = part
        return out

    def _active(self) -> Iterator[tuple[int, slice]]:
        return ((group, rows) for group, rows in enumerate(self.groups) if rows.start < rows.stop)

    def _operand(self, x: Uncertain, axis: int) -> Uncertain:
        """x as the matmuls multiply it, with scales along an axis."""
        if self.quantize is None:
            return x
        block = 32 if self.quantize == "mxfp8" else self.block or max(x.value.shape[axis], 1)
        return quantized(x, axis, block, self.quantize == "mxfp8")

    def _weights(self, w: np.ndarray, transposed: bool) -> Uncertain:
        exact = exactly(w[0].T if transposed else w[0])
        if self.quantize is None:
            return exact
        if self.quantize == "mxfp8":
            return quantized(exact, 0, 32, True)
        q, scale = fp8_quantize(w, (1, 2), self.block, check_finite=False)
        blocks = tuple(a // b for a, b in zip(q.shape, scale.shape, strict=True))
        wide = (q.astype(np.float64) * expand(scale, blocks))[0]
        return exactly(wide.T if transposed else wide)
