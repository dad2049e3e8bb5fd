"""Arrays between torch, JAX and NumPy, bit for bit.

`torch_to_jax` and `jax_to_torch` take whole pytrees and share memory through DLPack where they can; `to_numpy` brings
one array to the host, `to_jax` and `to_torch` copy one from it. Every bit pattern of every dtype in `DTYPES` survives:
the sign of zero, subnormals, infinities, the payload of every NaN (signalling ones too). What cannot be held exactly
is refused, never truncated.
"""

import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from op_arguments import check_output_dtype, dtype_name

if TYPE_CHECKING:
    import jax
    import torch

HostArray = np.ndarray[Any, np.dtype[Any]]

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64"),
)
"""What crosses. NumPy (with ml_dtypes), JAX and torch all use these names."""


def torch_to_jax(tree: Any, *, dtype: Any = None, narrow_ints: bool = False) -> Any:
    """The pytree `tree` (dict, list, tuple, NamedTuple, None, …) with each torch tensor turned into a JAX array.

    A contiguous tensor is not copied: the array shares its memory and keeps it alive. JAX arrays are immutable, so do
    not write into the tensor afterwards. (On the CPU, JAX itself copies memory that is not 64-byte aligned.) Other
    strides, and lazy conjugates or negatives, are copied once into row-major order. The result is detached: JAX knows
    nothing of a tensor's requires_grad. A CUDA tensor becomes an array on the same device; a tensor on a device that
    JAX does not have goes through the host to JAX's default device.

    `dtype` (a name, or a NumPy, JAX or torch dtype) converts every leaf, as `numpy.ndarray.astype` does with ml_dtypes:
    torch's own casts changed between releases (float8_e4m3fn saturates since 2.12). Wider types reach bfloat16 and
    float8 through float32. `narrow_ints` gives int64 and uint64 leaves 32 bits and leaves all others as they are: what
    a state_dict with counters needs while JAX's 64-bit types are off.

    Raises TypeError for a leaf that is not a dense torch tensor of one of `DTYPES` (sparse, meta, quantised, nested and
    fake tensors are refused), and for a result of 64 bits while JAX's 64-bit types are off; ValueError for a value that
    an integer or boolean dtype that is asked for does not hold, and for dtype and narrow_ints together.
    """
    if dtype is not None and narrow_ints:
        raise ValueError(f"narrow_ints must be left out where dtype is given, got dtype={dtype_name(dtype)!r}")
    import jax

    def convert(path: Any, tensor: Any) -> Any:
        name = "tree" + jax.tree_util.keystr(path)
        source = _check_torch(name, tensor)
        target = check_output_dtype("dtype", dtype, source, DTYPES)
        if narrow_ints and target in ("int64", "uint64"):
            target = target.replace("64", "32")
        _check_x64(name, target)
        device = jax_device(tensor)
        if device is None or target != source:
            return to_jax(_converted(name, to_numpy(tensor), target), device=device)
        return jax.dlpack.from_dlpack(_materialised(tensor).contiguous())

    return jax.tree_util.tree_map_with_path(convert, tree)


def jax_to_torch(tree: Any, *, dtype: Any = None) -> Any:
    """The pytree `tree` (dict, list, tuple, NamedTuple, None, …) with each JAX array turned into a torch tensor.

    An array on the CPU, or on a CUDA device that torch has, is not copied: the tensor shares its memory and keeps it
    alive. JAX arrays are immutable, so clone such a tensor before writing into it. An array on another device (TPU) or
    over several devices is gathered on the host and becomes a CPU tensor. 64-bit arrays need no x64 mode here.
    `dtype` as in `torch_to_jax`.

    Raises TypeError for a leaf that is not a concrete JAX array of one of `DTYPES` (tracers are refused, and PRNG keys,
    whose `jax.random.key_data` crosses), ValueError for an array that is sharded over processes, and for a value that
    an integer or boolean `dtype` does not hold.
    """
    import jax
    import torch

    def convert(path: Any, array: Any) -> Any:
        name = "tree" + jax.tree_util.keystr(path)
        source = _check_jax(name, array)
        target = check_output_dtype("dtype", dtype, source, DTYPES)
        device = torch_device(array)
        if device is None or target != source:
            return to_torch(_converted(name, to_numpy(array), target), device=device)
        return torch.utils.dlpack.from_dlpack(array)

    return jax.tree_util.tree_map_with_path(convert, tree)


def to_numpy(array: Any) -> HostArray:
    """The NumPy (ml_dtypes) array of a NumPy, JAX or torch one: same shape, dtype and bits.

    Shares memory with an array that is on the host already: read it, do not write into it. From a device, or several,
    it is a copy. Raises TypeError and ValueError as `torch_to_jax` and `jax_to_torch` do.
    """
    # A framework's array can only come from a host where the framework is loaded.
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch and isinstance(array, torch.Tensor):
        _check_torch("array", array)
        return _torch_to_numpy(array)
    if jax and isinstance(array, jax.Array):
        _check_jax("array", array)
    elif isinstance(array, np.ndarray | np.generic):
        _check_dtype("array", array)
    else:
        raise TypeError(f"array must be a NumPy, JAX or torch array, got {type(array).__name__}")
    return np.asarray(array)


def to_jax(array: Any, *, device: Any = None) -> "jax.Array":
    """A copy of a NumPy (ml_dtypes) array as a JAX array on `device` (default: JAX's default device).

    Raises TypeError for a dtype outside `DTYPES`, and for one of 64 bits while JAX's 64-bit types are off.
    """
    import jax

    host = np.array(to_numpy(array), order="C")  # a copy, since on the CPU JAX may adopt the memory it is given
    _check_x64("array", dtype_name(host.dtype))
    placed: jax.Array = jax.device_put(host, device)
    return placed


def to_torch(array: Any, *, device: Any = None) -> "torch.Tensor":
    """A copy of a NumPy (ml_dtypes) array as a torch tensor on `device` (default: the CPU).

    Raises TypeError for a dtype outside `DTYPES`.
    """
    import torch

    host = np.array(to_numpy(array), order="C")
    bits = torch.from_numpy(host.view(_bits_name(host.itemsize)))
    return bits.view(getattr(torch, dtype_name(host.dtype))).to(device or "cpu")


def _torch_to_numpy(tensor: "torch.Tensor") -> HostArray:
    """`tensor`'s values on the host, through integers of the same width: torch gives NumPy no bfloat16 or float8."""
    import torch

    bits = _materialised(tensor).cpu().view(getattr(torch, _bits_name(tensor.itemsize)))
    return bits.numpy().view(_numpy_dtype(dtype_name(tensor.dtype)))


def _bits_name(itemsize: int) -> str:
    return f"int{8 * itemsize}"


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _converted(name: str, array: HostArray, dtype: str) -> HostArray:
    """`array` in the dtype of that name, floats rounded to it. Raises ValueError where an integer, a boolean or a real
    dtype does not hold a value."""
    target = _numpy_dtype(dtype)
    values = array
    if array.dtype.kind == "c" and target.kind != "c":
        values = np.where(array.imag == 0, array.real, np.nan)
        held = ~np.isnan(values) | np.isnan(array.real)
    else:
        held = np.ones(array.shape, bool)
    if target.kind in "iub" and array.dtype != target:
        values = values if values.dtype.kind in "iub" else values.astype(np.float64)
        least, beyond = (0, 2) if target.kind == "b" else (np.iinfo(target).min, int(np.iinfo(target).max) + 1)
        held &= (values >= least) & (values < beyond)
        if values.dtype.kind == "f":
            held &= values == np.trunc(values)
    if not held.all():
        wrong = array[tuple(np.argwhere(~held)[0])]
        raise ValueError(f"{name} must hold only what {dtype} can, got {wrong} of {array.dtype}")
    return values.astype(target, copy=False)


def _materialised(tensor: "torch.Tensor") -> "torch.Tensor":
    """`tensor` without what exists only in torch: its graph, and conjugations and negations not yet carried out."""
    return tensor.detach().resolve_conj().resolve_neg()


def _check_dtype(name: str, array: Any) -> str:
    return check_output_dtype(name, array.dtype, None, DTYPES)


def _check_torch(name: str, tensor: Any) -> str:
    """The name of `tensor`'s dtype, after checking that it is one, and plain memory."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    for refused, kind in (
        (tensor.is_nested, "a nested"),
        (tensor.layout is not torch.strided, f"a {dtype_name(tensor.layout)}"),
        (tensor.is_quantized, f"a quantized {dtype_name(tensor.dtype)}"),
        (tensor.is_meta, "a meta"),
        # Subclasses that take over dispatch (FakeTensor, DTensor) need not hold their values where data_ptr points.
        (type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__, f"a {type(tensor).__name__}"),
    ):
        if refused:
            raise TypeError(f"{name} must be a dense torch tensor that holds its values, got {kind} tensor")
    return _check_dtype(name, tensor)


def _check_jax(name: str, array: Any) -> str:
    """The name of `array`'s dtype, after checking that it is one, and that its values can be read here and now."""
    import jax

    if not isinstance(array, jax.Array):
        raise TypeError(f"{name} must be a JAX array, got {type(array).__name__}")
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a concrete JAX array, got a tracer of {array.aval}: convert outside jit, grad and vmap, "
            "or inside jax.pure_callback"
        )
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(
            f"{name} must be held by this process, got an array sharded over processes: gather it first "
            "(jax.experimental.multihost_utils.process_allgather)"
        )
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        kind = f"PRNG keys ({array.dtype})"
        raise TypeError(f"{name} must be of a dtype of numbers, got {kind}: jax.random.key_data of it")
    return _check_dtype(name, array)


def _check_x64(name: str, dtype: str) -> None:
    import jax

    if dtype in ("float64", "int64", "uint64") and not jax.enable_x64.value:
        is_float = dtype == "float64"
        narrow = "this leaf to float32 (.float())" if is_float else "integers (torch_to_jax(…, narrow_ints=True))"
        raise TypeError(
            f"{name} must be at most 32 bits wide while JAX's 64-bit types are off, got {dtype}: call this inside "
            f"`with jax.enable_x64(True):`, or narrow {narrow}"
        )


def jax_device(tensor: "torch.Tensor") -> "jax.Device | None":
    """The JAX device on which `tensor` lies, None where JAX has no such device."""
    import jax

    platform = {"cpu": "cpu", "cuda": "gpu"}.get(tensor.device.type)
    try:
        devices = jax.local_devices(backend=platform) if platform else []
    except RuntimeError:  # JAX runs without that platform
        return None
    return next((device for device in devices if device.local_hardware_id == (tensor.device.index or 0)), None)


def torch_device(array: "jax.Array") -> "torch.device | None":
    """The torch device on which `array` lies, None where torch has no such device or it lies on several."""
    import torch

    device, *others = array.devices()
    if not others and device.platform == "cpu":
        return torch.device("cpu")
    if not others and device.platform == "gpu" and device.local_hardware_id < torch.cuda.device_count():
        return torch.device("cuda", device.local_hardware_id)
    return None
