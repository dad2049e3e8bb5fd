"""The goldens of gmm and tgmm: against their definition, against exact arithmetic, and their metadata and stages."""

from collections import Counter
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_golden._lib.arguments import one_tile, scalar, values
from cpu_golden._lib.visits import make_group_metadata
from cpu_golden.gmm import gmm, gmm_definition, tgmm, tgmm_definition
from cpu_golden.stages import Stages, exact
from tests.matrix.gmm import GMM, TGMM
from tests.support.definitions import check_definition, distinct
from tests.support.sites import watched


@pytest.mark.parametrize(("op", "case"), distinct(GMM, TGMM, dtypes=False))
def test_golden_is_its_definition(op, case):
    check_definition(op, case, {GMM: gmm_definition, TGMM: tgmm_definition}[op])


def exact_dot(a, b):
    return float(sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_golden_against_exact_rationals(dtype):
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((9, 300)).astype(dtype), rng.standard_normal((2, 300, 7)).astype(dtype)
    sizes = np.array([4, 3], np.int32)
    out = gmm(lhs, rhs, sizes)
    wgrad = tgmm(lhs, out.astype(dtype), sizes)
    for m, n in [(0, 0), (3, 6), (4, 0), (6, 3)]:
        assert out[m, n] == pytest.approx(exact_dot(lhs[m], rhs[int(m >= 4), :, n]), rel=1e-12, abs=1e-12)
    assert np.all(out[7:] == 0)
    for group, rows in enumerate([slice(0, 4), slice(4, 7)]):
        expected = exact_dot(lhs[rows, 17], out.astype(dtype)[rows, 5])
        assert wgrad[group, 17, 5] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_worked_example():
    lhs = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    rhs = np.array([[[1], [0]], [[0], [10]]], np.float32)
    sizes = np.array([1, 0, 2], np.int32)
    kept = np.full((4, 1), -1.0, np.float32)
    assert gmm(lhs, rhs, sizes, group_offset=1).tolist() == [[0], [40], [60], [0]]
    assert gmm(lhs, rhs, sizes, group_offset=1, existing_out=kept).tolist() == [[-1], [40], [60], [-1]]
    assert gmm(lhs, rhs.transpose(0, 2, 1), sizes, group_offset=0, transpose_rhs=True).tolist() == [[1], [0], [0], [0]]
    grads = tgmm(lhs, lhs[:, :1], sizes, num_actual_groups=3, existing_out=np.full((3, 2, 1), 0.5, np.float32))
    assert grads.tolist() == [[[1.5], [2.5]], [[0.5], [0.5]], [[9 + 25 + 0.5], [12 + 30 + 0.5]]]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    spare=st.integers(0, 60),
    tm=st.integers(1, 50),
    data=st.data(),
    cover=st.sampled_from(["tiles", "groups"]),
)
@settings(derandomize=True, max_examples=300)
def test_metadata_visits_what_it_must_once(sizes, spare, tm, data, cover):
    m = sum(sizes) + spare
    offset = data.draw(st.integers(0, len(sizes)))
    groups = data.draw(st.integers(0, len(sizes) - offset))
    got = make_group_metadata(
        np.array(sizes, np.int32), m=m, tm=tm, group_offset=offset, num_groups=groups, cover=cover
    )
    tiles = -(-m // tm)
    count = int(got.num_visits[0])
    assert got.group_ids.shape == got.tile_ids.shape == (tiles + groups,)
    assert count <= tiles + groups
    visits = list(zip(got.group_ids[:count].tolist(), got.tile_ids[:count].tolist(), strict=True))
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    assert got.group_offsets.tolist() == edges.tolist()
    needed = {(g, row // tm) for g in range(groups) for row in range(edges[offset + g], edges[offset + g + 1])}
    assert needed <= set(visits)
    assert len(set(visits)) == count
    assert visits == sorted(visits, key=lambda v: (v[1], v[0]) if cover == "tiles" else v)
    if cover == "tiles":
        assert {tile for _, tile in visits} == set(range(tiles))
        assert len(visits) == len(needed) + len(set(range(tiles)) - {tile for _, tile in needed})
    else:
        starts = edges[offset : offset + groups + 1]
        empty = {(g, min(starts[g] // tm, tiles - 1)) for g in range(groups) if starts[g] == starts[g + 1]}
        assert set(visits) - needed == (empty if tiles else set())
        assert {group for group, _ in visits} == (set(range(groups)) if tiles else set())


def test_stages_see_every_site_and_change_nothing_by_themselves():
    rng = np.random.default_rng(1)
    lhs, rhs = rng.standard_normal((12, 10)).astype(np.float32), rng.standard_normal((3, 10, 4)).astype(np.float32)
    sizes = np.array([5, 0, 7], np.int32)
    stages, seen = watched(depth=4)
    staged = gmm(lhs, rhs, sizes, stages=stages)
    assert Counter(seen) == {"lhs": 2, "rhs": 2, "partial": 6, "acc": 6, "out": 1}
    np.testing.assert_allclose(staged, gmm_definition(lhs, rhs, sizes), rtol=1e-12, atol=1e-12)
    staged = tgmm(lhs, lhs, sizes, stages=stages)
    np.testing.assert_allclose(staged, tgmm_definition(lhs, lhs, sizes), rtol=1e-12, atol=1e-12)


def test_rounding_one_site_emulates_a_kernel_that_rounds_there():
    rng = np.random.default_rng(2)
    lhs, rhs = rng.standard_normal((16, 256)).astype(np.float32), rng.standard_normal((1, 256, 8)).astype(np.float32)
    sizes = np.array([16], np.int32)

    def bfloat16_at(*sites):
        return lambda site, value: value.astype(ml_dtypes.bfloat16).astype(np.float64) if site in sites else value

    exact = gmm(lhs, rhs, sizes)
    errors = {
        sites: np.sqrt(np.mean((gmm(lhs, rhs, sizes, stages=Stages(bfloat16_at(*sites), 32)) - exact) ** 2))
        for sites in [("out",), ("acc",), ("lhs", "rhs")]
    }
    assert errors["out",] < errors["lhs", "rhs"] < errors["acc",] * 2
    rounded = gmm(lhs, rhs, sizes, stages=Stages(bfloat16_at("lhs", "rhs")))
    narrow = gmm(lhs.astype(ml_dtypes.bfloat16), rhs.astype(ml_dtypes.bfloat16), sizes)
    np.testing.assert_allclose(rounded, narrow, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("first", "lengths"), [(0, [8, 8, 4]), (3, [5, 8, 7]), (8, [8, 8, 4]), (15, [1, 8, 8, 3])])
def test_steps_of_a_staged_sum_end_at_multiples_of_their_length(first, lengths):
    """Of 20 products, the first of which is the `first` of what is cut into steps of 8."""
    partial = []

    def rounding(site, value):
        if site == "partial":
            partial.append(int(value[0, 0]))
        return value

    assert Stages(rounding, depth=8).dot(np.ones((1, 20)), np.ones((20, 1)), first=first) == [[20]]
    assert partial == lengths


def test_without_a_tiling_the_whole_problem_is_one_tile_and_a_tile_holds_something():
    assert [one_tile(*size) for size in ((3, 5, 7), (1, 1, 1), (0, 0, 0))] == [(3, 5, 7), (1, 1, 1), (1, 1, 1)]


def test_the_offset_of_a_shard_is_an_int_however_it_is_given():
    for one in (2, np.int32(2), np.array(2), np.array([2], np.int32)):
        assert scalar(one) == 2 and type(scalar(one)) is int
    for other in (2.0, np.float32(2), np.array([2, 3]), np.array([2.0])):  # for the check to judge
        assert scalar(other) is other
    assert values(np.array([2, 3], np.int32)) == [2, 3]
    for other in ([2, 3], np.array([2, 3]), np.array([[2, 3]], np.int32)):
        assert values(other) is None


def test_a_sum_without_a_depth_is_one_step_wherever_it_begins():
    stages, seen = watched()
    assert stages.dot(np.ones((2, 1, 3)), np.ones((3, 1)), running="inner", first=2).tolist() == [[[3]]] * 2
    assert seen == ["lhs", "rhs", "partial", "inner"]
    assert exact.dot(np.ones((2, 0)), np.ones((0, 3))).tolist() == [[0] * 3] * 2


def test_renamed_stages_keep_their_steps_and_show_their_sites_to_the_first_ones():
    seen = []
    inner = Stages(lambda site, value: seen.append(site) or value + 1, depth=4).renamed(acc="dlhs").renamed(out="acc")
    assert inner.depth == 4 and [inner(site, 0) for site in ("lhs", "acc", "out")] == [1, 1, 1]
    assert seen == ["lhs", "dlhs", "dlhs"]
