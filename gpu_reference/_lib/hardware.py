"""What the device at hand can do, asked before a kernel is launched.

An *architecture* is the name of a compiler target: `"sm_90"`, `"gfx942"`; None where kernels are interpreted.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib.metadata import version
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

_WIDE = (torch.float32, torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _bfloat16_probe_kernel(lhs, rhs, out):
    i = tl.arange(0, 16)
    tile = i[:, None] * 16 + i[None, :]
    product = tl.dot(tl.load(lhs + tile), tl.load(rhs + tile), input_precision="ieee")
    tl.store(out + tile, product.to(tl.bfloat16))


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter.

    Triton reads TRITON_INTERPRET once for its own functions and once for each kernel, so both are asked.
    """
    return isinstance(_bfloat16_probe_kernel, InterpretedFunction) and isinstance(tl.cdiv, InterpretedFunction)


def check_devices(tensors: Mapping[str, Tensor | int | None]) -> torch.device:
    """The device that all `tensors` are on (None and an int are on none).

    Raises ValueError where they are on several, RuntimeError where it is the CPU and kernels are not interpreted, or
    cannot be.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if not isinstance(tensor, int | None)}
    if len(set(devices.values())) != 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device, got {where}")
    device = next(iter(devices.values()))
    if device.type == "cpu" and not is_interpreted():
        raise RuntimeError(
            "Triton kernels run on CPU tensors only if TRITON_INTERPRET=1 was set before triton was imported"
        )
    if device.type == "cpu" and not _interprets_loops(device):
        raise RuntimeError(
            f"the interpreter of Triton {triton.__version__} cannot loop with NumPy {version('numpy')}: "
            "on CPU tensors kernels need triton>=3.7 or numpy<2.4"
        )
    return device


def _interprets_loops(device: torch.device) -> bool:
    """Whether a loop may end where a tensor says. Triton 3.6's interpreter, unless it is mended, takes an array of one
    element for a number, which NumPy 2.4 refuses."""
    return not is_older(triton.__version__, 3, 7) or is_older(version("numpy"), 2, 4) or computes_bfloat16(device)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether kernels on `device` multiply bfloat16 operands and round to bfloat16 as the format says.

    Every GPU does. Triton's interpreter (3.6 to 3.9) multiplies the bit patterns and truncates, unless it is
    mended: so it is tried out, and on every call, because a mended one may be swapped in at any time.
    """
    if device.type != "cpu":
        return True
    lhs = torch.zeros(16, 16, dtype=torch.bfloat16)
    lhs[:, :2] = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8]]).repeat(8, 1)  # sums are ties; even: below, above
    out = torch.empty_like(lhs)
    _bfloat16_probe_kernel[(1,)](lhs, torch.ones_like(lhs), out)
    return bool((out.view(8, 2, 16) == torch.tensor([[1.0], [1 + 2 * 2.0**-7]])).all())


def bfloat16_as_float32_where_interpreted(
    results: Callable[..., Any] = lambda *arguments: arguments[-1],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function to be called with float32 for bfloat16 where kernels cannot compute bfloat16.

    That is every bfloat16 tensor and dtype among its arguments, in their tuples and dicts too. What it returns is cast
    to the dtypes that `results(*args, **kwargs)` returns in the same structure (default: its last argument, a dtype);
    None leaves a result as it is. Arguments are to be checked before: in float32, two unlike dtypes may be one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            device = next(leaf.device for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if device.type != "cpu" or not _has_bfloat16((args, kwargs)) or computes_bfloat16(device):
                return function(*args, **kwargs)
            wide_args, wide_kwargs = _each(_in_float32, (args, kwargs))
            return _each(_cast, function(*wide_args, **wide_kwargs), results(*args, **kwargs))

        return call

    return decorate


def architecture(device: torch.device | None = None) -> str | None:
    """The architecture of `device` (default: the current CUDA device), None where there is none."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName.partition(":")[0])
    return f"sm_{properties.major}{properties.minor}"


def supports_matmul(dtype: torch.dtype, target: str | None = None) -> bool:
    """Whether the matrix unit of `target` (default: of the device at hand) multiplies two operands of `dtype` as they
    are, with sums in float32 or int32; False where there is none.

    The OCP fp8 types came with sm_89 and gfx950 (gfx942 has others, with other exponents), int8 with sm_75.
    float32 is multiplied by FMAs, in full precision.
    """
    target = target or architecture()
    if target is None:
        return False
    if dtype in _FP8:
        return target == "gfx950" or _compute_capability(target) >= 89
    if dtype == torch.int8:
        return target.startswith("gfx9") or _compute_capability(target) >= 75
    return dtype in _WIDE


def block_scaled_tile(target: str) -> tuple[int, int] | None:
    """The least (rows, depth) of a tile that the matrix unit of `target` multiplies with MXFP8's scales, None where it
    takes none.

    They came with sm_100 (tcgen05: 128 rows), sm_120 and gfx950 (v_mfma_scale_f32_16x16x128). Of a smaller tile Triton
    makes a dot of bfloat16.
    """
    if target == "gfx950":
        return 16, 128
    return {10: (128, 32), 12: (16, 32)}.get(_compute_capability(target) // 10)


def sums_fp8_in_float32(target: str) -> bool:
    """Whether the matrix unit of `target` keeps a sum of fp8 products to float32's precision.

    The tensor cores of sm_89 and sm_90 keep 13 bits of its fraction, with float32 accumulators all the same: found
    by DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437, section 3.3.2), and bit by bit by Khattak &
    Mikaitis 2025, "Accurate Models of NVIDIA Tensor Cores" (arXiv:2512.07004).
    """
    return _compute_capability(target) not in (89, 90)


def converts_fp8(dtype: torch.dtype, target: str | None) -> bool:
    """Whether fp8 of `dtype` becomes float16 by an instruction on `target`, NaN and all: NVIDIA's do from sm_89 on."""
    return dtype in _FP8 and target is not None and _compute_capability(target) >= 89


def _leaves(tree: Any) -> Iterator[Any]:
    """What stands in nested tuples and dicts."""
    if isinstance(tree, dict | tuple):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(branch)
    else:
        yield tree


def _has_bfloat16(tree: Any) -> bool:
    """Whether a tensor or a dtype in it is bfloat16."""
    return any(torch.bfloat16 is (leaf.dtype if isinstance(leaf, Tensor) else leaf) for leaf in _leaves(tree))


def _each(change: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`change` of each leaf of nested tuples and dicts, in their structure; others: a leaf beside each, or None."""
    if isinstance(tree, dict):
        return {key: _each(change, branch, *(o and o[key] for o in others)) for key, branch in tree.items()}
    if isinstance(tree, tuple):
        branches = [_each(change, branch, *(o and o[i] for o in others)) for i, branch in enumerate(tree)]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    return change(tree, *others)


def _in_float32(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dtype == torch.bfloat16:
        return leaf.float()
    return torch.float32 if leaf is torch.bfloat16 else leaf


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf if leaf is None or dtype is None else leaf.to(dtype)


def is_older(version: str, major: int, minor: int) -> bool:
    """Whether a version comes before major.minor."""
    return tuple(map(int, version.split(".")[:2])) < (major, minor)


def _compute_capability(target: str) -> int:
    """90 for `"sm_90"`, 0 for what is not NVIDIA's."""
    return int(target[3:].rstrip("abcdef")) if target.startswith("sm_") else 0
