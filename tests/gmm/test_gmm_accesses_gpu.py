# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What the grouped matmuls of the GPU read, write and multiply, access by access: no result shows one too many."""

from dataclasses import dataclass
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton.runtime.interpreter import InterpreterBuilder

from cpu_golden import gmm as golden
from gpu_reference import gmm, grouped_gemm, quantized_gmm
from gpu_reference._lib import operands, visits
from op_arguments.gmm import GroupMetadata
from op_arguments.probe import probing
from parity.backends.emulation.tensor_core import TensorCoreBuilder, emulated
from parity.compilers.launches import intercepted
from parity.interop import to_numpy, to_torch
from tests.support.interpreter import interpreted

pytestmark = [pytest.mark.gpu, interpreted]

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
SIZES = np.array([9, 0, 3, 20, 0, 30, 5], np.int32)
OFFSET, GROUPS = 1, 5  # all but the first and the last
TILE = (16, 32, 16)
SHARD = slice(OFFSET, OFFSET + GROUPS)
UNCHECKED = {
    "negative": (np.array([-1, 9, -(2**31), 20, 3, 30, -7], np.int32), -3),
    "beyond": (np.array([2, 9, 0, 2**31 - 1, 3, 2**31 - 1, 5], np.int32), 2**31 - 1),
}
"""What a CUDA tensor may hold, since nobody checks it."""


@dataclass
class Accesses:
    """How often each element of a kernel's tensors was loaded and stored, and its dots."""

    loads: dict[str, np.ndarray]
    stores: dict[str, np.ndarray]
    dots: int


def addresses(tensor):
    """Of every element, in its shape."""
    offsets = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    return tensor.data_ptr() + offsets * tensor.element_size()


def tensors_of(arguments, within=""):
    """(name, tensor) of a kernel's arguments, in structs too: their fields after a dot, but for `.data` and `task.`."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield f"{within}{name}".removesuffix(".data").removeprefix("task."), value
        elif hasattr(value, "_asdict"):
            yield from tensors_of(value._asdict(), f"{within}{name}.")


@pytest.fixture
def traced(monkeypatch):
    """The accesses of each kernel that is launched, by its name. One of no element of an argument is an error."""
    kernels, now = {}, SimpleNamespace(known=None, loads=None, stores=None, dots=0, inside=False)

    def counted(launch, run):
        tensors = {name: addresses(x) for name, x in tensors_of(launch.arguments)}
        now.known, now.dots = np.unique(np.concatenate([x.ravel() for x in tensors.values()])), 0
        now.loads, now.stores = np.zeros((2, len(now.known) + 1), int)
        run()
        at = {name: np.searchsorted(now.known, x) for name, x in tensors.items()}
        loads, stores = ({name: counts[x] for name, x in at.items()} for counts in (now.loads, now.stores))
        kernels[launch.name] = Accesses(loads, stores, now.dots)

    def checked(way, pointers, mask):
        at = pointers.data[mask.data].astype(np.int64).ravel()
        place = np.searchsorted(now.known, at)
        assert (now.known[np.minimum(place, len(now.known) - 1)] == at).all(), "no element of an argument"
        np.add.at(getattr(now, way), place, 1)

    def tracing(builder, name, note):
        original = getattr(builder, name)

        def method(self, *arguments):
            note(*arguments)
            outermost, now.inside = not now.inside, True
            try:
                return original(self, *arguments)
            finally:
                now.inside = not outermost

        monkeypatch.setattr(builder, name, method)

    def dot(*_):
        now.dots += not now.inside

    tracing(InterpreterBuilder, "create_masked_load", lambda at, mask, *_: checked("loads", at, mask))
    tracing(InterpreterBuilder, "create_masked_store", lambda at, value, mask, *_: checked("stores", at, mask))
    for builder in (InterpreterBuilder, TensorCoreBuilder):
        for name in ("create_dot", "create_dot_scaled"):
            if name in vars(builder):
                tracing(builder, name, dot)
    with intercepted(counted):
        yield kernels


def window(x):
    """A tensor of x inside a larger one of NaN."""
    bits = np.asarray(x).view(f"u{x.dtype.itemsize}")
    larger = np.full([size + 3 for size in x.shape], -1, f"i{x.dtype.itemsize}").view(bits.dtype)
    larger[tuple(slice(1, 1 + size) for size in x.shape)] = bits
    return to_torch(larger.view(x.dtype))[tuple(slice(1, 1 + size) for size in x.shape)]


def is_active(sizes, first, m):
    """Of each row, whether it belongs to a group of the shard."""
    ends = np.cumsum([0, *sizes])
    return (np.arange(m) >= ends[first]) & (np.arange(m) < ends[first + GROUPS])


@dataclass(frozen=True)
class Form:
    """A matmul: gmm or tgmm of float32 operands, of fp8 with scales of `block` or the whole axis, or of MXFP8."""

    name: str
    operands: str
    length: int  # of the axis that is summed over
    block: int = 0
    transposed: bool = False
    existing: bool = False

    @property
    def dims(self):
        return (75, self.length, 17) if self.name == "gmm" else (self.length, 33, 17)

    @property
    def kernel(self):
        return {
            "float32": f"_{self.name}_kernel",
            "fp8": f"_{self.name}_quantized_kernel",
            "mxfp8": "_grouped_gemm_kernel" if self.name == "gmm" else "_grouped_wgrad_kernel",
        }[self.operands]

    @property
    def tile(self):
        """Steps of two blocks of MXFP8; of other blocks one at most, and 32 rows at least."""
        tm, tk, tn = TILE
        if self.operands == "mxfp8":
            return (tm, 64, tn) if self.name == "gmm" else (64, tk, tn)
        return (32 if (self.name, self.operands) == ("tgmm", "fp8") else tm), tk, tn

    @property
    def scale_block(self):
        """Elements along the sum that share a scale."""
        return {"float32": 1, "fp8": self.block or self.length, "mxfp8": 32}[self.operands]

    def multiply(self, sizes=SIZES, offset=OFFSET):
        """The result, and the golden's of sizes and an offset that are clamped. What must not be read is NaN."""
        (m, k, n), rng, is_gmm = self.dims, np.random.default_rng(0), self.name == "gmm"
        clamped = np.diff(np.minimum(np.cumsum([0, *np.maximum(sizes, 0)]), m)).astype(np.int32)
        first = min(max(offset, 0), len(sizes) - GROUPS)
        shapes = ((m, k), (GROUPS, k, n)) if is_gmm else ((m, k), (m, n))
        axes = (1, 1) if is_gmm else (0, 0)
        operands = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
        old = rng.integers(-9, 10, (m, n) if is_gmm else (GROUPS, k, n)).astype(np.float32)
        given = dict(existing_out=old if self.existing else None)
        given |= {} if is_gmm else dict(num_actual_groups=GROUPS)
        block = self.scale_block
        scales = [
            np.exp2(rng.integers(-1, 2, [-(-size // block) if a == axis else size for a, size in enumerate(shape)]))
            for shape, axis in zip(shapes, axes, strict=True)
        ]
        scaled = operands
        if self.operands != "float32":
            scaled = [
                x * np.repeat(scale, block, axis).take(range(self.length), axis).astype(np.float32)
                for x, scale, axis in zip(operands, scales, axes, strict=True)
            ]
        expected = getattr(golden, self.name)(*scaled, clamped, group_offset=first, **given)
        lhs, rhs = operands
        unread = ~is_active(clamped, first, m)
        lhs[unread] = np.nan
        rhs[clamped[first : first + GROUPS] == 0 if is_gmm else unread] = np.nan
        if self.transposed:
            rhs, scales[1], given["transpose_rhs"] = rhs.swapaxes(1, 2), scales[1].swapaxes(1, 2), True
        given |= dict(
            group_offset=torch.tensor([offset], dtype=torch.int32), preferred_element_type="float32", tiling=self.tile
        )
        given["existing_out"] = window(old) if self.existing else None
        if self.operands == "float32":
            return to_numpy(getattr(gmm, self.name)(window(lhs), window(rhs), window(sizes), **given)), expected
        lhs, rhs = (window(x.astype(E4M3)) for x in (lhs, rhs))
        lhs_scale, rhs_scale = (window(x.astype(np.float32 if self.operands == "fp8" else E8M0)) for x in scales)
        if self.operands == "fp8":
            multiply = getattr(quantized_gmm, f"{self.name}_quantized")
            return to_numpy(multiply(lhs, lhs_scale, rhs, rhs_scale, window(sizes), **given)), expected
        given |= dict(lhs_scale=lhs_scale, rhs_scale=rhs_scale, ragged="lhs" if is_gmm else "contracting")
        return to_numpy(grouped_gemm.grouped_gemm(lhs, rhs, window(sizes), **given)), expected


FORMS = [
    Form("gmm", "float32", 33),
    Form("gmm", "float32", 64, transposed=True, existing=True),
    Form("gmm", "fp8", 1),
    Form("gmm", "fp8", 33, existing=True),
    Form("gmm", "fp8", 96, block=32, transposed=True),
    Form("gmm", "mxfp8", 96, existing=True),
    Form("gmm", "mxfp8", 33, transposed=True),
    Form("tgmm", "float32", 75),
    Form("tgmm", "float32", 75, existing=True),
    Form("tgmm", "fp8", 75),
    Form("tgmm", "fp8", 96, block=32, existing=True),
    Form("tgmm", "mxfp8", 75),
    Form("tgmm", "mxfp8", 75, existing=True),
]


def steps_of(form):
    """Each group's steps of the sum over its rows: of tgmm from its first row, of scaled operands from row 0."""
    ends = np.cumsum(SIZES)
    starts, tm = ends - SIZES, form.tile[0]
    first = starts if (form.name, form.operands) == ("tgmm", "float32") else starts // tm * tm
    return np.where(SIZES > 0, -(-(ends - first) // tm), 0)[SHARD]


def groups_of_block(block, m):
    """How many groups of the shard have rows in each block of rows, [blocks, 1]."""
    ends = np.cumsum(SIZES)
    first = np.arange(0, m, block)[:, None]
    has_rows = np.maximum(first, ends - SIZES) < np.minimum(first + block, ends)
    return has_rows[:, SHARD].sum(1, keepdims=True)


def ids(form):
    return f"{form.name}-{form.operands}-{form.length}" + "-transposed" * form.transposed + "-existing" * form.existing


@pytest.mark.parametrize("form", FORMS, ids=ids)
def test_every_element_is_read_and_written_as_often_as_it_must_and_no_other(traced, form):
    with emulated():
        got, expected = form.multiply()
    np.testing.assert_array_equal(got, expected)
    seen, (m, k, n), (_, tk, tn) = traced[form.kernel], form.dims, form.tile
    tiles_k, tiles_n, steps = -(-k // tk), -(-n // tn), steps_of(form)
    assert (seen.stores["out"] == 1).all()
    assert not any(stores.any() for name, stores in seen.stores.items() if name != "out")
    active = is_active(SIZES, OFFSET, m)[:, None].astype(int)
    assert (seen.loads["lhs"] == active * tiles_n).all()
    assert seen.dots == steps.sum() * tiles_k * tiles_n
    assert (seen.loads["rhs"] == (steps[:, None, None] if form.name == "gmm" else active * tiles_k)).all()
    if form.operands != "float32":
        of_lhs, of_rhs = active * tiles_n, steps[:, None, None]
        if form.name == "tgmm":
            groups = groups_of_block(form.scale_block, m)
            of_lhs, of_rhs = groups * tiles_n, groups * tiles_k
        assert (seen.loads["lhs.scale"] == of_lhs).all()
        if form.name == "tgmm" or form.scale_block < k:  # else they are read, once, for no rows too
            assert (seen.loads["rhs.scale"] == of_rhs).all()
    if form.existing:
        assert (seen.loads["existing_out"] == (1 - active if form.name == "gmm" else 1)).all()
    if form.name == "gmm":
        metadata = traced["_metadata_kernel"].stores
        assert all((metadata[f"metadata.{name}"] == 1).all() for name in GroupMetadata._fields)


@pytest.mark.parametrize("unchecked", UNCHECKED)
@pytest.mark.parametrize("form", {form.kernel: form for form in FORMS}.values(), ids=ids)
def test_sizes_and_offsets_that_nobody_checked_are_clamped(traced, form, unchecked, monkeypatch):
    """No row is of a negative size or beyond M, and the shard is of the groups that there are."""
    for module in (operands, visits):
        monkeypatch.setattr(module, "values", lambda sizes: None)
        monkeypatch.setattr(module, "scalar", lambda offset: offset)
    with emulated():
        got, expected = form.multiply(*UNCHECKED[unchecked])
    np.testing.assert_array_equal(got, expected)
    assert traced


@pytest.mark.parametrize("form", {form.kernel: form for form in FORMS}.values(), ids=ids)
def test_sums_are_shown_where_they_are_of_a_group_and_after_every_step_where_a_step_is_rounded(form):
    """Those that are scaled are shown once, when they are finished."""
    shown = []

    def show(site, value, where=None, **steps):
        assert site == "acc"
        shown.append((np.broadcast_to(where.handle.data, value.shape).sum(), steps))
        return value

    with emulated(), probing(show):
        got, expected = form.multiply()
    np.testing.assert_array_equal(got, expected)
    (m, k, n), (tm, tk, _), in_steps = form.dims, form.tile, form.operands == "float32"
    if form.name == "gmm":
        elements = is_active(SIZES, OFFSET, m).sum() * n * (-(-k // tk) if in_steps else 1)
        steps = {"depth": tk}
    else:
        elements = (steps_of(form).sum() if in_steps else np.count_nonzero(steps_of(form))) * k * n
        steps = {"depth": tm}
    assert sum(count for count, _ in shown) == elements
    assert all(given == (steps if in_steps else {}) for _, given in shown)
