"""What `gmm`, `tgmm` and `make_group_metadata` accept (the operations are defined in `cpu_golden/gmm.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from op_arguments import Array, Tiling, check_array, check_output_dtype, check_shape, dtype_name

FLOATS = ("float32", "bfloat16", "float16")
COVERS = ("tiles", "groups")


class Groups(NamedTuple):
    """The groups of a grouped matmul as they are given: group_sizes [E], and group_offset, where the shard's G begin.

    values: those of group_sizes, or None where reading them is impossible (traced) or would stall a device.
    """

    sizes: Any
    offset: Any
    values: Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class ProductOptions:
    """The options of every grouped matmul; `cpu_golden.gmm` says what they are."""

    group_offset: Any = 0
    existing_out: Any = None
    preferred_element_type: Any = None
    tiling: Tiling | None = None


@dataclass(frozen=True, kw_only=True)
class GmmOptions(ProductOptions):
    """The options of `gmm`."""

    transpose_rhs: bool = False


@dataclass(frozen=True, kw_only=True)
class TgmmOptions(ProductOptions):
    """The options of `tgmm`."""

    num_actual_groups: int | None = None


@dataclass(frozen=True)
class Problem:
    """A checked grouped matmul: its sizes and the name of its output dtype."""

    m: int
    k: int
    n: int
    groups: int  # G, in this shard
    experts: int  # E, in group_sizes
    out_dtype: str


class GroupMetadata(NamedTuple):
    """Which (group, row tile) pairs a kernel visits, in order. All int32.

    group_offsets [E + 1]: first row of each group, then the end of the last. group_ids [V], tile_ids [V]: the
    shard-local group and the row tile of each visit, V = ceil(m / tm) + num_groups; only the first num_visits [1]
    count, later entries repeat the last of them (0 where there is none).
    """

    group_offsets: Any
    group_ids: Any
    tile_ids: Any
    num_visits: Any


def check_gmm(
    lhs: Array,
    rhs: Array,
    groups: Groups,
    existing_out: Array | None,
    transpose_rhs: bool,
    preferred_element_type: Any,
    exact: bool = False,
) -> Problem:
    """Check the arguments of `gmm`.

    `exact` also lets float64 operands through: the goldens take them.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    of_rhs = "G, N, K" if transpose_rhs else "G, K, N"
    out_dtype = _check_operands(lhs, rhs, of_rhs, preferred_element_type, exact)
    return problem_of_gmm(lhs, rhs, groups, existing_out, transpose_rhs, out_dtype, exact)


def check_tgmm(
    lhs: Array,
    rhs: Array,
    groups: Groups,
    num_actual_groups: int | None,
    existing_out: Array | None,
    preferred_element_type: Any,
    exact: bool = False,
) -> Problem:
    """Check the arguments of `tgmm`; as `check_gmm`."""
    out_dtype = _check_operands(lhs, rhs, "M, N", preferred_element_type, exact)
    return problem_of_tgmm(lhs, rhs, groups, num_actual_groups, existing_out, out_dtype, exact)


def problem_of_gmm(
    lhs: Array,
    rhs: Array,
    groups: Groups,
    existing_out: Array | None,
    transpose_rhs: bool,
    out_dtype: str,
    exact: bool = False,
) -> Problem:
    """The problem of lhs [M, K] and rhs [G, K, N], or [G, N, K], after checking that sizes, groups and output fit."""
    m, k = lhs.shape
    count, *kn = rhs.shape
    rhs_k, n = reversed(kn) if transpose_rhs else kn
    if rhs_k != k:
        raise ValueError(f"rhs must have K = {k} as lhs does, got {rhs_k} (shape {list(rhs.shape)})")
    experts = check_groups(groups, count, m)
    _check_existing_out(existing_out, "M, N", (m, n), out_dtype, exact)
    return Problem(m, k, n, count, experts, out_dtype)


def problem_of_tgmm(
    lhs: Array,
    rhs: Array,
    groups: Groups,
    num_actual_groups: int | None,
    existing_out: Array | None,
    out_dtype: str,
    exact: bool = False,
) -> Problem:
    """The problem of lhs [M, K] and rhs [M, N]; as `problem_of_gmm`."""
    (m, k), (rhs_m, n) = lhs.shape, rhs.shape
    if rhs_m != m:
        raise ValueError(f"rhs must have M = {m} rows as lhs does, got {rhs_m}")
    count = check_num_actual_groups(num_actual_groups, groups.sizes)
    experts = check_groups(groups, count, m)
    _check_existing_out(existing_out, "G, K, N", (count, k, n), out_dtype, exact)
    return Problem(m, k, n, count, experts, out_dtype)


def check_group_metadata(
    group_sizes: Array, m: int, tm: int, group_offset: Any, num_groups: int, cover: str, sizes: Sequence[int] | None
) -> None:
    """Check the arguments of `make_group_metadata`; as `check_gmm`."""
    for name, value, least in (("m", m, 0), ("tm", tm, 1), ("num_groups", num_groups, 0)):
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if cover not in COVERS:
        raise ValueError(f"cover must be 'tiles' or 'groups', got {cover!r}")
    check_groups(Groups(group_sizes, group_offset, sizes), num_groups, m)


def _check_operands(lhs: Array, rhs: Array, of_rhs: str, preferred_element_type: Any, exact: bool) -> str:
    """The name of the output's dtype, after checking lhs [M, K] and rhs with the axes `of_rhs`."""
    check_array("lhs", lhs, "M, K", FLOATS, exact=exact)
    check_array("rhs", rhs, of_rhs, FLOATS, exact=exact)
    if dtype_name(lhs.dtype) != dtype_name(rhs.dtype):
        raise TypeError(f"rhs must have lhs's dtype {dtype_name(lhs.dtype)}, got {dtype_name(rhs.dtype)}")
    return check_output_dtype("preferred_element_type", preferred_element_type, lhs.dtype, FLOATS, exact=exact)


def check_num_actual_groups(num_actual_groups: int | None, group_sizes: Array) -> int:
    """G of a `tgmm`: num_actual_groups, or E where it is None."""
    check_array("group_sizes", group_sizes, "E", ("int32",))
    groups = group_sizes.shape[0] if num_actual_groups is None else num_actual_groups
    if type(groups) is not int:
        raise TypeError(f"num_actual_groups must be an int, got {type(groups).__name__}")
    if not 0 <= groups <= group_sizes.shape[0]:
        raise ValueError(f"num_actual_groups must be in [0, E = {group_sizes.shape[0]}], got {groups}")
    return int(groups)


def check_groups(groups: Groups, count: int, m: int) -> int:
    """E, after checking group_sizes, its values where they are known, and the place of a shard of `count` groups."""
    group_sizes, group_offset, sizes = groups
    check_array("group_sizes", group_sizes, "E", ("int32",))
    (experts,) = group_sizes.shape
    if count > experts:
        raise ValueError(f"group_sizes must name at least the {count} groups of the shard, got {experts}")
    if hasattr(group_offset, "dtype") and hasattr(group_offset, "shape"):
        if tuple(group_offset.shape) not in ((), (1,)):
            raise ValueError(f"group_offset must be a scalar, got shape {list(group_offset.shape)}")
        if dtype_name(group_offset.dtype) not in ("int32", "int64"):
            raise TypeError(f"group_offset must be int32, got {dtype_name(group_offset.dtype)}")
    elif type(group_offset) is not int:
        raise TypeError(f"group_offset must be an int or an int32 scalar, got {type(group_offset).__name__}")
    elif not 0 <= group_offset <= experts - count:
        raise ValueError(
            f"group_offset must be in [0, E - G] = [0, {experts - count}] "
            f"(E = {experts} groups, G = {count} in the shard), got {group_offset}"
        )
    if sizes is not None:
        for index, size in enumerate(sizes):
            if size < 0:
                raise ValueError(f"group_sizes must be >= 0, got {size} at index {index}")
        if sum(sizes) > m:
            raise ValueError(f"group_sizes must sum to at most M = {m}, got {sum(sizes)}")
    return experts


def _check_existing_out(
    existing_out: Array | None, axes: str, shape: tuple[int, ...], out_dtype: str, exact: bool
) -> None:
    """Refuse an existing_out that has not the shape and dtype of the output."""
    if existing_out is not None:
        check_array("existing_out", existing_out, axes, (out_dtype,), exact=exact)
        check_shape("existing_out", existing_out, axes, shape)
