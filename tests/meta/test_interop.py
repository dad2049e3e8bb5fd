"""parity.interop: every bit pattern survives every crossing, and what cannot cross is refused."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity import interop
from parity.dtypes import numpy_dtype
from parity.interop import DTYPES, jax_to_torch, to_jax, to_numpy, to_torch, torch_to_jax

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

# What random bits miss: the first and last signalling NaN, quiet NaNs, ±inf, ±0, the ends of the subnormals.
FLOAT32_CORNERS = [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 1 << 31, 1, 0x7FFFFF]
FLOAT64_CORNERS = [
    *(0x7FF0000000000001, 0x7FF7FFFFFFFFFFFF, 0x7FF8000000000000, 2**64 - 1),
    *(0x7FF0000000000000, 0xFFF0000000000000, 0, 1 << 63, 1, 0x000FFFFFFFFFFFFF),
]
CORNERS = {
    "float64": FLOAT64_CORNERS,
    "float32": FLOAT32_CORNERS,
    "complex64": [(imaginary << 32) | real for real in FLOAT32_CORNERS for imaginary in FLOAT32_CORNERS],
    "int64": [0, 2**63 - 1, 2**63, 2**64 - 1],
    "int32": [0, 2**31 - 1, 2**31, 2**32 - 1],
    "uint64": [0, 2**63 - 1, 2**63, 2**64 - 1],
    "uint32": [0, 2**31 - 1, 2**31, 2**32 - 1],
}


def bit_patterns(name: str) -> np.ndarray[Any, Any]:
    """Every bit pattern of a dtype of 8 or 16 bits; of a wider one the corners and random ones. [rows, 16]."""
    dtype = numpy_dtype(name)
    word = np.dtype(f"uint{8 * dtype.itemsize}")
    if name == "bool":
        bits = np.arange(256, dtype=word) % 2
    elif dtype.itemsize <= 2:
        bits = np.arange(1 << 8 * dtype.itemsize, dtype=word)
    else:
        bits = np.random.default_rng(0).integers(0, np.iinfo(word).max, 4096, word, endpoint=True)
        bits[: len(CORNERS[name])] = CORNERS[name]
    return bits.view(dtype).reshape(-1, 16)


def as_torch(array: np.ndarray[Any, Any]) -> Any:
    """A contiguous torch tensor of the array's bytes, by a way that is not parity's."""
    words = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
    return words.clone().view(getattr(torch, array.dtype.name)).reshape(array.shape)


def assert_same(result: Any, expected: np.ndarray[Any, Any]) -> None:
    """`result`, of any framework, has the shape, dtype and bytes of `expected`."""
    assert tuple(result.shape) == expected.shape
    assert str(result.dtype).removeprefix("torch.") == expected.dtype.name
    if isinstance(result, torch.Tensor):
        result = result.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    assert np.asarray(result).tobytes() == expected.tobytes()


def x64_for(name: str) -> contextlib.AbstractContextManager[Any]:
    mode: contextlib.AbstractContextManager[Any] = jax.enable_x64(name in ("float64", "int64", "uint64"))
    return mode


def as_words(tensor: Any) -> Any:
    """The tensor's bits as integers, for what torch does not offer in float8."""
    return tensor.view(getattr(torch, f"int{8 * tensor.itemsize}"))


def strided(array: np.ndarray[Any, Any], shape: list[int], strides: list[int], offset: int = 0) -> np.ndarray[Any, Any]:
    """The view of a 1-d array with the given strides in elements (NumPy's as_strided does not know float8)."""
    words = array.view(f"uint{8 * array.itemsize}")[offset:]
    steps = [stride * array.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(words, shape, steps, writeable=False).view(array.dtype)


class Layout(NamedTuple):
    """The same view of a [rows, 16] array, in NumPy and in torch."""

    numpy: Callable[[Any], Any]
    torch: Callable[[Any], Any]


LAYOUTS = {
    "contiguous": Layout(lambda a: a, lambda t: t),
    "offset": Layout(lambda a: a[1:], lambda t: t[1:]),
    "transposed": Layout(lambda a: a.T, lambda t: t.t()),
    "permuted": Layout(
        lambda a: a.reshape(-1, 4, 4).transpose(2, 0, 1), lambda t: t.reshape(-1, 4, 4).permute(2, 0, 1)
    ),
    "strided": Layout(lambda a: a[::2, 1::3], lambda t: t[::2, 1::3]),
    "expanded": Layout(
        lambda a: np.broadcast_to(a[:, None, :1], (len(a), 3, 5)), lambda t: t[:, None, :1].expand(-1, 3, 5)
    ),
    "overlapping": Layout(lambda a: strided(a[0], [13, 4], [1, 1]), lambda t: t[0].unfold(0, 4, 1)),
    "flipped": Layout(lambda a: a[::-1, ::-1], lambda t: as_words(t).flip(0, 1).view(t.dtype)),
    "0-d": Layout(lambda a: a[1, 3, ...], lambda t: t[1, 3]),
    "unit axes": Layout(lambda a: a[None, :1, None, ::4], lambda t: t[None, :1, None, ::4]),
    "empty": Layout(lambda a: a[:0, 0], lambda t: t[:0, 0]),
    "zero-size axis": Layout(lambda a: a.T[:, 2:2], lambda t: t.t()[:, 2:2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_survives_in_every_layout(name: str, layout: str) -> None:
    patterns, view = bit_patterns(name), LAYOUTS[layout]
    expected, tensor = view.numpy(patterns), view.torch(as_torch(patterns))
    with x64_for(name):
        array = torch_to_jax(tensor)
        assert isinstance(array, jax.Array)
        assert_same(array, expected)
        assert_same(to_jax(expected), expected)
    assert_same(jax_to_torch(array), expected)
    assert_same(to_torch(expected), expected)
    for source in (tensor, array, expected):
        assert isinstance(to_numpy(source), np.ndarray)
        assert_same(to_numpy(source), expected)


@pytest.mark.parametrize("name", DTYPES)
def test_a_column_major_jax_array_survives(name: str) -> None:
    patterns = bit_patterns(name)
    with x64_for(name):
        array = jax.dlpack.from_dlpack(as_torch(patterns).t())
    assert_same(jax_to_torch(array), patterns.T)
    assert_same(to_numpy(array), patterns.T)


@given(
    name=st.sampled_from(DTYPES),
    axes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4),
    offset=st.integers(0, 9),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_any_strides_survive(name: str, axes: list[tuple[int, int]], offset: int) -> None:
    words = bit_patterns(name).reshape(-1)[:128]
    shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
    expected = strided(words, shape, strides, offset)
    tensor = torch.as_strided(as_torch(words), shape, strides, offset)
    with x64_for(name):
        array = torch_to_jax(tensor)
        assert_same(array, expected)
        assert_same(to_jax(expected), expected)
    assert_same(jax_to_torch(array), expected)
    assert_same(to_torch(expected), expected)
    assert_same(to_numpy(tensor), expected)


@pytest.mark.parametrize("name", DTYPES)
def test_memory_is_shared(name: str) -> None:
    tensor = as_torch(bit_patterns(name))
    with x64_for(name):
        array = torch_to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert jax_to_torch(array).data_ptr() == tensor.data_ptr()
        own = jax.device_put(bit_patterns(name))
        assert jax_to_torch(own).data_ptr() == own.unsafe_buffer_pointer()
        assert to_numpy(own).ctypes.data == own.unsafe_buffer_pointer()
    assert to_numpy(tensor).ctypes.data == tensor.data_ptr()


def test_shared_memory_outlives_its_first_owner() -> None:
    expected = np.arange(1 << 16, dtype=np.float32)
    tensor = as_torch(expected)
    array = torch_to_jax({"x": tensor})["x"]
    pointer = tensor.data_ptr()
    del tensor
    gc.collect()
    noise = [torch.full((1 << 16,), 7.0) for _ in range(64)]
    assert pointer not in [other.data_ptr() for other in noise]
    assert_same(array, expected)

    tensor = jax_to_torch(array)
    values = to_numpy(array)
    del array
    gc.collect()
    noise += [torch.full((1 << 16,), 7.0) for _ in range(64)]
    assert pointer not in [other.data_ptr() for other in noise]
    assert_same(tensor, expected)
    assert_same(values, expected)


def test_a_jax_array_is_awaited() -> None:
    ones = jax.numpy.ones((700, 700), "float32")
    product = jax.jit(lambda x: jax.numpy.linalg.matrix_power(x / 700, 64))
    assert_same(jax_to_torch(product(ones)), np.asarray(product(ones)))


def test_a_donated_array_leaves_the_tensor_alone() -> None:
    tensor = torch.arange(16.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(torch_to_jax(tensor)).block_until_ready()
    assert_same(tensor, np.arange(16, dtype=np.float32))


def test_host_arrays_are_copied() -> None:
    source = torch.arange(1024.0).numpy()  # aligned as torch aligns, so that JAX could adopt the memory
    array, tensor = to_jax(source), to_torch(source)
    expected = source.copy()
    source[:] = -1
    assert_same(array, expected)
    assert_same(tensor, expected)
    tensor[:] = 5  # writable, and nobody else's
    assert source[0] == -1


def test_numpy_scalars_are_0d_arrays() -> None:
    expected = np.array(1.5, ml_dtypes.bfloat16)
    for result in (to_numpy(expected[()]), to_jax(expected[()]), to_torch(expected[()])):
        assert_same(result, expected)


def test_devices_can_be_chosen() -> None:
    (device,) = to_jax(np.zeros(2, np.float32), device=jax.devices()[-1]).devices()
    assert device == jax.devices()[-1]
    assert to_torch(np.zeros(2, np.float32), device=torch.device("meta")).is_meta


def test_gradients_are_dropped() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert_same(torch_to_jax(weight), expected)
    assert torch_to_jax(weight).unsafe_buffer_pointer() == weight.data_ptr()
    assert_same(torch_to_jax(weight * 1), expected)
    assert_same(to_numpy(weight), expected)
    assert weight.requires_grad


def test_lazy_conjugates_and_negatives_are_carried_out() -> None:
    patterns = bit_patterns("complex64")
    words = patterns.view(np.uint32).copy()
    words[:, 1::2] ^= np.uint32(1 << 31)
    conjugate = as_torch(patterns).conj()
    assert conjugate.is_conj()
    assert_same(torch_to_jax(conjugate), words.view(np.complex64))
    assert_same(to_numpy(conjugate), words.view(np.complex64))
    negative = conjugate.imag
    assert negative.is_neg()
    assert_same(torch_to_jax(negative), words.view(np.float32)[:, 1::2])
    assert_same(to_numpy(negative), words.view(np.float32)[:, 1::2])


# 64-bit types


@pytest.mark.parametrize("name", ["float64", "int64", "uint64"])
def test_64_bits_are_never_cut(name: str) -> None:
    expected = np.array([1, 2**40 + 1], name)
    narrow = name.replace("64", "32")
    leaf = "this leaf to float32 (.float())" if name == "float64" else "integers (torch_to_jax(…, narrow_ints=True))"
    wanted = (
        f"must be at most 32 bits wide while JAX's 64-bit types are off, got {name}: call this inside "
        f"`with jax.enable_x64(True):`, or narrow {leaf}"
    )
    assert not jax.config.jax_enable_x64
    for convert, where in (
        (lambda: torch_to_jax({"x": [as_torch(expected)]}), "tree['x'][0]"),
        (lambda: torch_to_jax(as_torch(expected.astype(narrow)), dtype=name), "tree"),
        (lambda: to_jax(expected), "array"),
    ):
        with pytest.raises(TypeError) as error:
            convert()
        assert str(error.value) == f"{where} {wanted}"
    with jax.enable_x64(True):
        array = torch_to_jax(as_torch(expected))
    # Reading needs no mode.
    assert_same(jax_to_torch(array), expected)
    assert_same(to_numpy(array), expected)
    assert not jax.config.jax_enable_x64


def batch_norm_state() -> dict[str, Any]:
    """A state_dict with counters, tied weights, views and fp8."""
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "norm.num_batches_tracked": torch.tensor(7),
        "norm.mask": torch.tensor([0, 2**32 - 1], dtype=torch.uint64),
        "norm.running_mean": weight[1:, ::2],
        "embedding": weight,
        "head": weight,
        "scale": torch.ones(5).to(torch.float8_e4m3fn),
        "seed": torch.tensor([3, 2**31], dtype=torch.uint32),
    }


def test_narrow_ints_narrows_counters_and_nothing_else() -> None:
    state = batch_norm_state()
    crossed = torch_to_jax(state, narrow_ints=True)
    for name, tensor in state.items():
        narrow = {"int64": np.int32, "uint64": np.uint32}.get(str(tensor.dtype).removeprefix("torch."))
        assert_same(crossed[name], to_numpy(tensor) if narrow is None else to_numpy(tensor).astype(narrow))
    assert crossed["embedding"].unsafe_buffer_pointer() == crossed["head"].unsafe_buffer_pointer()


@pytest.mark.parametrize(
    ("value", "dtype"), [(2**31, "int64"), (-(2**31) - 1, "int64"), (2**40, "int64"), (2**32, "uint64")]
)
def test_narrow_ints_refuses_what_does_not_fit(value: int, dtype: str) -> None:
    state = {"steps": torch.tensor([1, value], dtype=getattr(torch, dtype))}
    narrow = dtype.replace("64", "32")
    wanted = rf"^tree\['steps'\] must hold only what {narrow} can, got {value} of {dtype}$"
    with pytest.raises(ValueError, match=wanted):
        torch_to_jax(state, narrow_ints=True)
    with pytest.raises(ValueError, match=wanted):
        torch_to_jax(state, dtype=narrow)
    with jax.enable_x64(True):
        assert_same(torch_to_jax(state)["steps"], to_numpy(state["steps"]))


def test_narrow_ints_and_dtype_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"^narrow_ints must be left out where dtype is given, got dtype='float32'$"):
        torch_to_jax(torch.ones(2), dtype=torch.float32, narrow_ints=True)


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [
        (0.5, "int32", False), (-1.0, "uint8", False), (256.0, "uint8", False), (255.0, "uint8", True),
        (float("nan"), "int8", False), (2.0**31, "int32", False), (-(2.0**31), "int32", True), (2.0, "bool", False),
        (1 + 1j, "float32", False), (1 + 1j, "int32", False), (3 + 0j, "int32", True), (3 + 0j, "bfloat16", True),
    ],
)  # fmt: skip
def test_no_conversion_truncates(value: Any, dtype: str, held: bool) -> None:
    tensor = torch.tensor([1, value])
    for convert, source in ((torch_to_jax, tensor), (jax_to_torch, torch_to_jax(tensor))):
        if held:
            expected = np.array([1, value]).real.astype(numpy_dtype(dtype))
            assert_same(convert(source, dtype=dtype), expected)
        else:
            with pytest.raises(ValueError, match=rf"^tree must hold only what {dtype} can, got .* of "):
                convert(source, dtype=dtype)


def test_prng_key_data_cross_and_keys_say_so() -> None:
    key = jax.random.key(3)
    crossed = torch_to_jax(jax_to_torch(jax.random.key_data(key)))
    assert jax.random.uniform(jax.random.wrap_key_data(crossed)) == jax.random.uniform(key)


# dtype=


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16, jax.numpy.bfloat16],
    ids=["name", "scalar type", "numpy", "torch", "jax"],
)
def test_a_dtype_can_be_named_in_every_way(dtype: Any) -> None:
    source = np.linspace(-3, 3, 40).reshape(5, 8)
    expected = source.astype(ml_dtypes.bfloat16)
    assert_same(torch_to_jax(as_torch(source), dtype=dtype), expected)
    assert_same(torch_to_jax(as_torch(source).t(), dtype=dtype), expected.T)
    with jax.enable_x64(True):
        array = jax.numpy.asarray(source)
    assert_same(jax_to_torch(array, dtype=dtype), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in DTYPES if name not in ("float64", "int64", "uint64", "complex64")])
def test_conversion_is_numpys(name: str) -> None:
    source = np.array([0.0, -0.0, 1.0])
    if "int" not in name and name != "bool":
        source = np.array([-0.0, 1 / 3, 20.5, -2.5, 448.0, 500.0, 1e5, 1e39, 1e-9, np.inf, -np.inf, np.nan])
    expected = source.astype(numpy_dtype(name))
    assert_same(torch_to_jax(as_torch(source), dtype=name), expected)
    with jax.enable_x64(True):
        array = jax.numpy.asarray(source)
    assert_same(jax_to_torch(array, dtype=name), expected)


def test_the_dtype_a_leaf_has_costs_nothing() -> None:
    tensor = torch.arange(64.0)
    assert torch_to_jax(tensor, dtype="float32").unsafe_buffer_pointer() == tensor.data_ptr()
    array = jax.numpy.arange(64.0)
    assert jax_to_torch(array, dtype=torch.float32).data_ptr() == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["uint4", float, torch.complex128, "bf16"])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"^dtype must be float64, float32, .*, bool or complex64, got \w+$"):
        torch_to_jax(torch.zeros(2), dtype=dtype)
    with pytest.raises(TypeError, match=r"^dtype must be float64, float32, .*, bool or complex64, got \w+$"):
        jax_to_torch(jax.numpy.zeros(2), dtype=dtype)


# Trees


class Pair(NamedTuple):
    q: Any
    scale: Any


def test_trees_keep_their_structure() -> None:
    one, two = np.arange(3, dtype=np.int32), np.ones((2, 2), ml_dtypes.bfloat16)
    tree: dict[str, Any] = {
        "b": [one, (two, None)],
        "a": Pair(two, None),
        "empty": {},
        "nothing": None,
        "list": [],
        "tuple": (),
    }
    leaves = jax.tree.map(lambda leaf: leaf.tobytes(), tree)
    tensors = jax.tree.map(as_torch, tree)
    arrays = torch_to_jax(tensors)
    assert isinstance(arrays["a"], Pair)
    assert jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), arrays) == leaves
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays))
    back = jax_to_torch(arrays)
    assert all(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(back))
    assert jax.tree.map(lambda leaf: to_numpy(leaf).tobytes(), back) == leaves
    assert torch_to_jax(None) is None
    assert jax_to_torch(None) is None


def test_dtype_converts_every_leaf() -> None:
    arrays = torch_to_jax([torch.zeros(2), (torch.zeros(3, dtype=torch.float64),)], dtype="bfloat16")
    assert [leaf.dtype.name for leaf in jax.tree.leaves(arrays)] == ["bfloat16", "bfloat16"]


# What cannot cross


def fake_tensor() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces the end of quantised and nested tensors
@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse_coo tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "a sparse_csr tensor"),
        (lambda: torch.zeros(3, device="meta"), "a meta tensor"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8), "a quantized quint8 tensor"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested tensor"),
        pytest.param(fake_tensor, "a FakeTensor tensor", marks=pytest.mark.full),
    ],
)
def test_tensors_without_plain_memory_are_refused(make: Callable[[], Any], got: str) -> None:
    tensor = make()
    wanted = f"must be a dense torch tensor that holds its values, got {got}"
    with pytest.raises(TypeError) as error:
        torch_to_jax({"x": tensor})
    assert str(error.value) == f"tree['x'] {wanted}"
    with pytest.raises(TypeError) as error:
        to_numpy(tensor)
    assert str(error.value) == f"array {wanted}"


@pytest.mark.parametrize(
    ("leaf", "got"), [(1.5, "float"), ("x", "str"), (np.zeros(2), "ndarray"), (jax.numpy.zeros(2), "ArrayImpl")]
)
def test_leaves_that_are_no_tensors_are_refused(leaf: Any, got: str) -> None:
    with pytest.raises(TypeError) as error:
        torch_to_jax({"w": (None, leaf)})
    assert str(error.value) == f"tree['w'][1] must be a torch tensor, got {got}"


@pytest.mark.parametrize(
    ("leaf", "got"), [(1.5, "float"), ("x", "str"), (np.zeros(2), "ndarray"), (torch.zeros(2), "Tensor")]
)
def test_leaves_that_are_no_jax_arrays_are_refused(leaf: Any, got: str) -> None:
    with pytest.raises(TypeError) as error:
        jax_to_torch(Pair(leaf, None))
    assert str(error.value) == f"tree.q must be a JAX array, got {got}"


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("convert", [jax_to_torch, to_numpy])
def test_tracers_are_refused(convert: Callable[[Any], Any], transform: Callable[[Any], Any]) -> None:
    with pytest.raises(
        TypeError, match=r"must be a concrete JAX array, got a tracer of float32\[.*\]: convert outside"
    ):
        transform(convert)(jax.numpy.zeros((2, 3)))


def test_dtypes_outside_the_table_are_refused() -> None:
    wanted = "must be float64, float32, .* or complex64, got "
    with pytest.raises(TypeError, match=rf"^tree {wanted}complex128$"):
        torch_to_jax(torch.zeros(2, dtype=torch.complex128))
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz"):
        with pytest.raises(TypeError, match=rf"^tree {wanted}{name}$"):
            torch_to_jax(torch.zeros(2).to(getattr(torch, name)))
    for convert in (jax_to_torch, to_numpy):
        with pytest.raises(TypeError, match=r"got PRNG keys \(key<fry>\): jax.random.key_data of it$"):
            convert(jax.random.key(0))
    with pytest.raises(TypeError, match=rf"^tree\[0\] {wanted}int4$"):
        jax_to_torch([jax.numpy.zeros(2, "int4")])
    # A swapped byte order would be misread, objects and records have no bits to keep.
    for dtype in (">f4", "O", "f4,i4", "S3"):
        for convert in (to_numpy, to_jax, to_torch):
            with pytest.raises(TypeError, match=rf"^array {wanted}"):
                convert(np.zeros(2, dtype))
    for value in (None, 1.5, [1.0], "x"):
        for convert in (to_numpy, to_jax, to_torch):
            with pytest.raises(TypeError, match=r"^array must be a NumPy, JAX or torch array, got \w+$"):
                convert(value)


# Devices


@pytest.mark.parametrize("name", DTYPES)
def test_the_way_through_the_host_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for device_of in ("jax_device", "torch_device"):
        monkeypatch.setattr(interop, device_of, lambda tensor: None)
    patterns = bit_patterns(name)
    tensor = as_torch(patterns)
    with x64_for(name):
        array = torch_to_jax(tensor.t())
        assert_same(array, patterns.T)
    assert_same(jax_to_torch(array), patterns.T)
    assert jax_to_torch(array).data_ptr() != array.unsafe_buffer_pointer()


def test_cuda_devices_are_matched_by_their_hardware_id(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(platform="gpu", local_hardware_id=index) for index in (3, 1)]

    def local_devices(backend: str) -> list[Any]:
        assert backend == "gpu"
        return gpus

    def no_backend(backend: str) -> list[Any]:
        raise RuntimeError(f"Unknown backend: '{backend}'")

    tensor: Any = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert interop.jax_device(tensor) is gpus[1]
    tensor.device = torch.device("cuda", 2)
    assert interop.jax_device(tensor) is None
    tensor.device = torch.device("xpu", 1)
    assert interop.jax_device(tensor) is None
    tensor.device = torch.device("cuda", 1)
    monkeypatch.setattr(jax, "local_devices", no_backend)
    assert interop.jax_device(tensor) is None

    array: Any = SimpleNamespace(devices=lambda: [gpus[1]])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert interop.torch_device(array) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert interop.torch_device(array) is None
    array.devices = lambda: [SimpleNamespace(platform="tpu", local_hardware_id=0)]
    assert interop.torch_device(array) is None


def test_an_array_sharded_over_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jax.numpy.zeros(2)
    for where in ("is_fully_addressable", "is_fully_replicated"):
        monkeypatch.setattr(type(array), where, False)
    with pytest.raises(ValueError, match=r"^tree must be held by this process, got an array sharded over processes"):
        jax_to_torch(array)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", DTYPES)
def test_cuda_tensors_cross(name: str) -> None:
    patterns = bit_patterns(name)
    tensor = as_torch(patterns).cuda()
    with x64_for(name):
        array = torch_to_jax(tensor)
        assert_same(array, patterns)
        assert_same(torch_to_jax(tensor.t()), patterns.T)
    assert_same(jax_to_torch(array).cpu(), patterns)
    assert_same(to_numpy(tensor), patterns)
    if any(device.platform == "gpu" for device in jax.devices()):
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert jax_to_torch(array).data_ptr() == tensor.data_ptr()


def run_python(code: str, **environment: str) -> None:
    """Run `code` in a fresh interpreter; what it raises fails the test."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={**os.environ, **environment})


def test_arrays_on_several_devices_are_gathered() -> None:
    run_python(
        """
        import jax, numpy as np, torch
        from jax.sharding import NamedSharding, PartitionSpec
        from parity.interop import jax_to_torch, to_numpy
        assert len(jax.devices()) == 4
        expected = np.arange(32, dtype=np.float32).reshape(8, 4)
        mesh = jax.make_mesh((2, 2), ("x", "y"))
        for spec in (PartitionSpec("x", "y"), PartitionSpec(None, "x"), PartitionSpec()):
            array = jax.device_put(expected, NamedSharding(mesh, spec))
            assert len(array.devices()) == 4
            assert torch.equal(jax_to_torch(array), torch.from_numpy(expected))
            assert np.array_equal(to_numpy(array), expected)
        last = jax.device_put(expected, jax.devices()[3])
        assert jax_to_torch(last).data_ptr() == last.unsafe_buffer_pointer()
        """,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )


def test_neither_framework_is_needed_for_numpy() -> None:
    run_python(
        """
        import sys
        sys.modules["jax"] = sys.modules["torch"] = None  # importing either raises ImportError
        import importlib, numpy as np
        interop = importlib.import_module("parity.interop")
        assert interop.to_numpy(np.zeros(2)).shape == (2,)
        """
    )
