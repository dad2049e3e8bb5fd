"""Bad input to gmm, tgmm and make_group_metadata: the same exception with the same words in all three packages."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from op_arguments import resolve_tiling
from op_arguments.gmm import Groups, check_gmm, check_group_metadata, check_groups, check_num_actual_groups, check_tgmm
from parity.interop import to_jax
from tests.support.bad_input import PACKAGES, f16, f32, i8, i32, refusals

VISITS = "_lib.visits:make_group_metadata"
GMM = dict(lhs=f32(8, 4), rhs=f32(3, 4, 5), group_sizes=i32(2, 3, 3))
TGMM = dict(lhs=f32(8, 4), rhs=f32(8, 5), group_sizes=i32(2, 3, 3))
METADATA = dict(group_sizes=i32(2, 3, 3), m=8, tm=4, num_groups=3, cover="tiles")
GOOD = {"gmm": GMM, "tgmm": TGMM, VISITS: METADATA}

BAD = [
    ("gmm", dict(lhs=[1.0]), TypeError, "lhs must be an array [M, K], got list"),
    ("gmm", dict(lhs=f32(8)), ValueError, "lhs must have rank 2 [M, K], got shape [8]"),
    ("gmm", dict(rhs=f32(4, 5)), ValueError, "rhs must have rank 3 [G, K, N], got shape [4, 5]"),
    ("gmm", dict(lhs=i8(8, 4)), TypeError, "lhs must be float32, bfloat16 or float16, got int8"),
    ("gmm", dict(rhs=f16(3, 4, 5)), TypeError, "rhs must have lhs's dtype float32, got float16"),
    ("gmm", dict(rhs=f32(3, 6, 5)), ValueError, "rhs must have K = 4 as lhs does, got 6 (shape [3, 6, 5])"),
    ("gmm", dict(transpose_rhs=True), ValueError, "rhs must have K = 4 as lhs does, got 5 (shape [3, 4, 5])"),
    ("gmm", dict(preferred_element_type="int8"), TypeError,
     "preferred_element_type must be float32, bfloat16 or float16, got int8"),
    ("gmm", dict(existing_out=f32(8, 4)), ValueError, "existing_out must have shape [M, N] = [8, 5], got [8, 4]"),
    ("gmm", dict(existing_out=f16(8, 5)), TypeError, "existing_out must be float32, got float16"),
    ("gmm", dict(tiling=lambda m, k, n: None), ValueError,
     "tiling must give (tm, tk, tn) for every shape, got None for (m, k, n) = (8, 4, 5)"),
    ("gmm", dict(tiling=(8, 8)), TypeError, "tiling must be three ints (tm, tk, tn), got (8, 8)"),
    ("gmm", dict(tiling=(8, 0, 8)), ValueError, "tiling must be three positive ints (tm, tk, tn), got (8, 0, 8)"),
    ("gmm", dict(tiling=(8, 8, 8.0)), TypeError, "tiling must be three ints (tm, tk, tn), got (8, 8, 8.0)"),
    ("tgmm", dict(lhs=[1.0]), TypeError, "lhs must be an array [M, K], got list"),
    ("tgmm", dict(rhs=f32(8)), ValueError, "rhs must have rank 2 [M, N], got shape [8]"),
    ("tgmm", dict(lhs=i8(8, 4)), TypeError, "lhs must be float32, bfloat16 or float16, got int8"),
    ("tgmm", dict(rhs=i8(8, 5)), TypeError, "rhs must be float32, bfloat16 or float16, got int8"),
    ("tgmm", dict(rhs=f16(8, 5)), TypeError, "rhs must have lhs's dtype float32, got float16"),
    ("tgmm", dict(group_sizes=[2, 3, 3]), TypeError, "group_sizes must be an array [E], got list"),
    ("tgmm", dict(num_actual_groups=-1), ValueError, "num_actual_groups must be in [0, E = 3], got -1"),
    (VISITS, dict(m=-1), ValueError, "m must be at least 0, got -1"),
    (VISITS, dict(num_groups=-1), ValueError, "num_groups must be at least 0, got -1"),
    ("tgmm", dict(rhs=f32(7, 5)), ValueError, "rhs must have M = 8 rows as lhs does, got 7"),
    ("tgmm", dict(num_actual_groups=4), ValueError, "num_actual_groups must be in [0, E = 3], got 4"),
    ("tgmm", dict(num_actual_groups=2.0), TypeError, "num_actual_groups must be an int, got float"),
    ("tgmm", dict(existing_out=f32(8, 5)), ValueError, "existing_out must have rank 3 [G, K, N], got shape [8, 5]"),
    (VISITS, dict(cover="rows"), ValueError, "cover must be 'tiles' or 'groups', got 'rows'"),
    (VISITS, dict(tm=0), ValueError, "tm must be at least 1, got 0"),
    (VISITS, dict(m=8.0), TypeError, "m must be an int, got float"),
]  # fmt: skip

# What every one of the three functions refuses of its groups. All hold 3 groups.
BAD_GROUPS = [
    (dict(group_sizes=np.ones(3, np.int16)), TypeError, "group_sizes must be int32, got int16"),
    (dict(group_sizes=np.ones((3, 1), np.int32)), ValueError, "group_sizes must have rank 1 [E], got shape [3, 1]"),
    (dict(group_sizes=i32(2, -1, 3)), ValueError, "group_sizes must be >= 0, got -1 at index 1"),
    (dict(group_sizes=i32(2, 3, 4)), ValueError, "group_sizes must sum to at most M = 8, got 9"),
    (dict(group_offset=1), ValueError,
     "group_offset must be in [0, E - G] = [0, 0] (E = 3 groups, G = 3 in the shard), got 1"),
    (dict(group_offset=-1), ValueError,
     "group_offset must be in [0, E - G] = [0, 0] (E = 3 groups, G = 3 in the shard), got -1"),
    (dict(group_offset=i32(1)), ValueError,
     "group_offset must be in [0, E - G] = [0, 0] (E = 3 groups, G = 3 in the shard), got 1"),
    (dict(group_offset=1.0), TypeError, "group_offset must be an int or an int32 scalar, got float"),
    (dict(group_offset=i32(0, 0)), ValueError, "group_offset must be a scalar, got shape [2]"),
    (dict(group_offset=np.float32(0)), TypeError, "group_offset must be int32, got float32"),
]  # fmt: skip
BAD += [
    (function, {**({"num_actual_groups": 3} if function == "tgmm" else {}), **change}, error, message)
    for function in GOOD
    for change, error, message in BAD_GROUPS
]
BAD += [
    ("gmm", dict(group_sizes=i32(2)), ValueError, "group_sizes must name at least the 3 groups of the shard, got 1")
]

test_the_good_arguments_are_good, test_bad_arguments_are_refused_in_the_same_words = refusals(GOOD, BAD)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("offset", [np.int64(1), np.array(1, np.int32), np.array([1])])
def test_a_group_offset_of_numpy_is_judged(package, offset):
    """As it comes, and not as a tensor: what is not judged is clipped."""
    arguments = {name: PACKAGES[package](x) for name, x in GOOD["tgmm"].items()}
    with pytest.raises(ValueError, match=r"^group_offset must be in \[0, E - G\] = \[0, 0\] .*, got 1$"):
        importlib.import_module(f"{package}.gmm").tgmm(**arguments, group_offset=offset)


def test_what_is_just_good_enough_is_good():
    for tiling in ((1, 1, 1), [1, 2, 3], lambda m, k, n: [m, k, n]):
        assert resolve_tiling(tiling, None, 1, 2, 3) == ((1, 1, 1) if type(tiling) is tuple else (1, 2, 3))
    for groups in (0, 3):
        assert check_num_actual_groups(groups, i32(2, 3, 3)) == groups
    least = dict(m=0, tm=1, num_groups=0, cover="groups")
    check_group_metadata(i32(), group_offset=0, sizes=[], **least)
    for offset in (0, 1, i32(1), np.int64(1)):
        assert check_groups(Groups(i32(2, 3, 3), offset, [2, 3, 3]), 2, 8) == 3
    assert check_groups(Groups(i32(0, 8, 0), 0, [0, 8, 0]), 3, 8) == 3


@pytest.mark.parametrize(("check", "given"), [(check_gmm, GMM), (check_tgmm, TGMM)])
def test_float64_is_let_through_only_where_the_goldens_ask_for_it(check, given):
    options = dict(groups=Groups(given["group_sizes"], 0, None), existing_out=None, preferred_element_type=None)
    options |= dict(transpose_rhs=False) if check is check_gmm else dict(num_actual_groups=None)
    given = {name: given[name] for name in ("lhs", "rhs")}
    wide = {name: x.astype(np.float64) for name, x in given.items()}
    assert check(**wide, **options, exact=True).out_dtype == "float64"
    with pytest.raises(TypeError, match="lhs must be float32, bfloat16 or float16, got float64"):
        check(**wide, **options)
    with pytest.raises(TypeError, match="preferred_element_type must be float32, bfloat16 or float16, got float64"):
        check(**given, **options | dict(preferred_element_type="float64"))


@pytest.mark.parametrize("offset", [SimpleNamespace(shape=()), SimpleNamespace(dtype=np.int32)])
def test_an_offset_that_is_no_array_is_refused_as_that(offset):
    with pytest.raises(TypeError, match="group_offset must be an int or an int32 scalar, got SimpleNamespace"):
        check_groups(Groups(i32(2, 3, 3), offset, None), 2, 8)


def test_values_are_not_checked_under_tracing_and_bad_ones_harm_nothing():
    jax = pytest.importorskip("jax")
    from tpu_kernels.gmm import gmm

    good = {name: to_jax(x) for name, x in GMM.items()}
    traced = jax.jit(lambda sizes: gmm(good["lhs"], good["rhs"], sizes))
    assert traced(to_jax(i32(2, -1, 99))).shape == (8, 5)
    assert np.array_equal(np.asarray(traced(good["group_sizes"])), np.full((8, 5), 4, np.float32))
