"""What each operation accepts, refuses and returns, in one wording for all three implementations.

Standard library only: arrays are looked at through `.shape` and `.dtype`, which NumPy, JAX (traced or
not) and torch share. Nothing here computes a result, so the implementations stay independent.
"""

from collections.abc import Callable
from typing import Any, Protocol

Tiling = tuple[int, int, int] | Callable[[int, int, int], tuple[int, int, int] | None]


class Array(Protocol):
    """What NumPy, JAX and torch arrays have in common."""

    @property
    def shape(self) -> Any:
        """Sizes of the axes."""

    @property
    def dtype(self) -> Any:
        """The framework's own dtype."""


def dtype_name(dtype: Any) -> str:
    """The plain name (`"bfloat16"`) of a NumPy, ml_dtypes, JAX or torch dtype, scalar type or name."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, type):
        return dtype.__name__
    return str(dtype).rpartition(".")[2]


def check_array(name: str, value: Any, axes: str, dtypes: tuple[str, ...], *, exact: bool = False) -> None:
    """Refuse `value` unless it is an array with the named axes (`"M, K"`) and one of `dtypes`.

    `exact` lets float64 through as well, which only the goldens take and no kernel is promised to.
    """
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} must be an array [{axes}], got {type(value).__name__}")
    rank = axes.count(",") + 1
    if len(value.shape) != rank:
        raise ValueError(f"{name} must have rank {rank} [{axes}], got shape {list(value.shape)}")
    _check_dtype(name, dtype_name(value.dtype), dtypes, exact)


def check_shape(name: str, value: Array, axes: str, expected: tuple[int, ...]) -> None:
    """Refuse `value` unless its shape is `expected`, whose axes are called `axes`."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} must have shape [{axes}] = {list(expected)}, got {list(value.shape)}")


def check_output_dtype(name: str, dtype: Any, default: Any, dtypes: tuple[str, ...], *, exact: bool = False) -> str:
    """The name of the output dtype asked for (`default`'s where `dtype` is None); `exact` as in `check_array`."""
    chosen = dtype_name(default if dtype is None else dtype)
    _check_dtype(name, chosen, dtypes, exact)
    return chosen


def resolve_tiling(
    tiling: Tiling | None, table: Callable[[int, int, int], tuple[int, int, int]], m: int, k: int, n: int
) -> tuple[int, int, int]:
    """(tm, tk, tn) for a problem of m, k, n: the caller's tuple or look-up, else the kernel's `table`.

    Raises ValueError where a look-up returns None or a tile is not positive, TypeError where it is not three ints.
    """
    tile = table(m, k, n) if tiling is None else tiling(m, k, n) if callable(tiling) else tiling
    if tile is None:
        raise ValueError(f"tiling must give (tm, tk, tn) for every shape, got None for (m, k, n) = ({m}, {k}, {n})")
    return check_tiles(tile)


def check_tiles(tile: Any) -> tuple[int, int, int]:
    """The tile (tm, tk, tn), refused unless it is three positive ints; as `resolve_tiling`."""
    if not isinstance(tile, (tuple, list)) or len(tile) != 3 or not all(type(t) is int for t in tile):
        raise TypeError(f"tiling must be three ints (tm, tk, tn), got {tile!r}")
    if min(tile) < 1:
        raise ValueError(f"tiling must be three positive ints (tm, tk, tn), got {tile!r}")
    tm, tk, tn = tile
    return tm, tk, tn


def _check_dtype(name: str, dtype: str, dtypes: tuple[str, ...], exact: bool) -> None:
    if dtype not in dtypes and not (exact and dtype == "float64"):
        raise TypeError(f"{name} must be {_either(dtypes)}, got {dtype}")


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
