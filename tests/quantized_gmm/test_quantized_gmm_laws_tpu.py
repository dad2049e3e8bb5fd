"""Calls of the TPU's block-scaled matmuls that the matrix has no case for: integers, so that results are exact."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from op_arguments.probe import probing
from parity.interop import to_jax, to_numpy
from tests.support.functions import public

jax = pytest.importorskip("jax")

from jax.experimental import pallas as pl  # noqa: E402

from tpu_kernels._lib import narrow, products  # noqa: E402
from tpu_kernels._lib import powers as powers_of_two  # noqa: E402

pytestmark = pytest.mark.tpu

E4M3, E8M0, F32, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, np.float32, ml_dtypes.bfloat16
RNG = partial(np.random.default_rng, 0)


def integers(shape, dtype, rng):
    return rng.integers(-3, 4, shape).astype(dtype)


def powers(shape, dtype, rng):
    return (2.0 ** rng.integers(-1, 2, shape)).astype(dtype)


def call(function, arrays, **options):
    """What the kernel returns, in float32."""
    given = {name: None if x is None else to_jax(x) for name, x in arrays.items()}
    return to_numpy(public("tpu_kernels")[function](**given, preferred_element_type="float32", **options))


def check(function, arrays, **options):
    of_golden = {name: x for name, x in options.items() if name != "tiling"} | {"preferred_element_type": "float32"}
    np.testing.assert_array_equal(
        call(function, arrays, **options), public("cpu_golden")[function](**arrays, **of_golden)
    )


@pytest.mark.parametrize(
    ("dtypes", "ragged"),
    [
        ((F32, E4M3), "lhs"),
        ((F32, E4M3), "transposed"),
        ((F32, E4M3), "contracting"),
        ((E4M3, F32), "contracting"),
        ((BF16, BF16), "transposed"),
        ((BF16, BF16), "contracting"),
    ],
)
def test_a_fallback_is_given_all_that_the_call_was(dtypes, ragged):
    """A shard of the groups, something to add to, and either operand with scales."""
    rng, (m, k, n, groups) = RNG(), (72, 64, 40, 2)
    contracting = ragged == "contracting"
    rhs = (m, n) if contracting else (groups, n, k) if ragged == "transposed" else (groups, k, n)
    arrays = {"group_sizes": np.array([7, 20, 30, 5], np.int32)}
    axes = (0, 0) if contracting else (1, 2 if ragged == "transposed" else 1)
    for name, shape, dtype, axis in zip(("lhs", "rhs"), ((m, k), rhs), dtypes, axes, strict=True):
        arrays[name] = integers(shape, dtype, rng)
        if dtype == E4M3:
            of_blocks = [-(-size // 32) if a == axis else size for a, size in enumerate(shape)]
            arrays[f"{name}_scale"] = powers(of_blocks, E8M0, rng)
    arrays["existing_out"] = integers((groups, k, n) if contracting else (m, n), F32, rng)
    options = {"group_offset": 1}
    options |= dict(ragged=ragged, num_actual_groups=groups) if contracting else dict(transpose_rhs=ragged != "lhs")
    check("grouped_gemm", arrays, **options)


def operands(function, m, k, n, groups, rng):
    """Of a call without options: one scale for all, or MXFP8's."""
    contracting = function != "gmm_quantized"
    rhs = (m, n) if contracting else (groups, k, n)
    scales = [np.ones([1] * ndim, F32) for ndim in (2, len(rhs))]
    if function == "grouped_gemm":
        scales = [powers((m // 32, size), E8M0, rng) for size in (k, n)]
    named = dict(lhs=integers((m, k), E4M3, rng), rhs=integers(rhs, E4M3, rng))
    return named | dict(zip(("lhs_scale", "rhs_scale"), scales, strict=True))


@pytest.mark.parametrize("function", ["gmm_quantized", "tgmm_quantized", "grouped_gemm"])
def test_an_offset_that_is_traced_does_not_leave_the_groups(function):
    arrays = {name: to_jax(x) for name, x in operands(function, 64, 64, 24, 2, RNG()).items()}
    arrays["group_sizes"] = to_jax(np.array([20, 10, 30], np.int32))
    options = {} if function == "gmm_quantized" else {"num_actual_groups": 2}
    options |= {"ragged": "contracting"} if function == "grouped_gemm" else {}
    shard = jax.jit(lambda at: public("tpu_kernels")[function](**arrays, group_offset=at, **options))
    for beyond, last in ((7, 1), (-2, 0)):
        np.testing.assert_array_equal(to_numpy(shard(beyond)), to_numpy(shard(last)))
    assert not np.array_equal(to_numpy(shard(0)), to_numpy(shard(1)))


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("function", ["gmm_quantized", "tgmm_quantized"])
@pytest.mark.parametrize(("m", "k", "n", "groups"), [(64, 64, 24, 0), (0, 64, 24, 2), (64, 64, 0, 2), (64, 0, 24, 2)])
def test_of_nothing_there_is_zero_or_what_was_there(function, m, k, n, groups, existing):
    arrays = operands(function, m, k, n, groups, RNG())
    arrays["group_sizes"] = np.array([m, 0][:groups], np.int32)
    if existing:
        arrays["existing_out"] = integers((m, n) if function == "gmm_quantized" else (groups, k, n), F32, RNG())
    for side in ("lhs", "rhs"):
        arrays[f"{side}_scale"] = np.ones([min(size, 1) for size in arrays[side].shape], F32)
    check(function, arrays)


@pytest.mark.parametrize(("k", "n"), [(20, 2048), (50, 2048), (1024, 64), (2048, 200)])
def test_tgmm_in_blocks_is_exact_however_few_rows_or_columns(k, n):
    """Of a whole tile and of parts of one, with as many dots as wait for sums: 20 rows are no whole register."""
    rng, m = RNG(), 2048
    arrays = dict(lhs=integers((m, k), E4M3, rng), rhs=integers((m, n), E4M3, rng))
    arrays |= dict(lhs_scale=powers((m // 128, k), F32, rng), rhs_scale=powers((m // 128, n), F32, rng))
    check("tgmm_quantized", arrays | {"group_sizes": np.array([1200, 848], np.int32)})


@pytest.mark.parametrize(
    ("sizes", "existing"), [([40], False), ([40], True), ([32, 5], True), ([0, 0], True), ([3, 90], False)]
)
def test_rows_of_no_group_are_zero_or_what_was_there(sizes, existing):
    """In whichever visit their tile, of 32 rows, is seen first."""
    rng = RNG()
    arrays = operands("gmm_quantized", 96, 64, 24, len(sizes), rng) | {"group_sizes": np.array(sizes, np.int32)}
    if existing:
        arrays["existing_out"] = integers((96, 24), F32, rng)
    check("gmm_quantized", arrays, tiling=(32, 128, 128))


@pytest.mark.parametrize(
    ("function", "generation"), [("tgmm_quantized", 6), ("tgmm_quantized", 7), ("grouped_gemm", 7)]
)
def test_a_block_that_begins_where_a_group_ends_counts_for_nothing(function, generation, monkeypatch):
    """Its scale may be NaN, before the group and after it, in a whole tile or not, and inside a block of rows."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    rng, m, sizes = RNG(), 768, np.array([64, 96, 0, 288, 64, 256], np.int32)  # 448 to 512 are of the fifth group
    k, n = 64 + generation, 24 + generation  # no other test has these sizes: a compiled kernel would be found again
    of_scale = E8M0 if function == "grouped_gemm" else F32
    arrays = dict(lhs=integers((m, k), E4M3, rng), rhs=integers((m, n), E4M3, rng), group_sizes=sizes)
    arrays |= dict(lhs_scale=powers((m // 32, k), of_scale, rng), rhs_scale=powers((m // 32, n), of_scale, rng))
    options = dict(group_offset=1, num_actual_groups=3)
    if function == "grouped_gemm":
        options["ragged"] = "contracting"
    expected = public("cpu_golden")[function](**arrays, **options)
    for name in ("lhs", "rhs"):
        for rows in (slice(0, 2), slice(14, 24)):
            arrays[f"{name}_scale"][rows] = np.nan
            arrays[name][32 * rows.start : 32 * rows.stop] = np.nan
    np.testing.assert_array_equal(call(function, arrays, tiling=(256, 128, 128), **options), expected)


@pytest.mark.parametrize("generation", [6, 7])
@pytest.mark.parametrize(
    ("function", "blocks"),
    [
        ("tgmm_quantized", (128, 128)),
        ("tgmm_quantized", (128, None)),
        ("tgmm_quantized", (None, 64)),
        ("tgmm_quantized", (None, None)),
        ("tgmm_quantized", (32, 32)),  # more parts than are added up at once
        ("grouped_gemm", (32, 32)),
    ],
)
def test_a_group_of_one_tile_is_as_exact_as_one_of_two(function, blocks, generation, monkeypatch):
    """Beside an empty one, and two that share a tile: its sums are results, and are not kept."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    rng, m, tm = RNG(), 1792, 512
    k, n = 130 + generation, 140 + generation  # no other test has these sizes: a compiled kernel would be found again
    of_scale, options = (E8M0, {"ragged": "contracting"}) if function == "grouped_gemm" else (F32, {})
    arrays = dict(lhs=integers((m, k), E4M3, rng), rhs=integers((m, n), E4M3, rng))
    for name, block, columns in zip(("lhs", "rhs"), blocks, (k, n), strict=True):
        arrays[f"{name}_scale"] = powers((m // block if block else 1, columns), of_scale, rng)
    if function == "tgmm_quantized":
        arrays["existing_out"] = integers((5, k, n), F32, rng)
    arrays["group_sizes"] = np.array([tm, 0, 2 * tm, 100, 156], np.int32)
    check(function, arrays, tiling=(tm, 128, 128), **options)


@pytest.mark.parametrize(
    ("generation", "block", "columns", "tile", "n"),
    [
        (7, 128, 1, (1024, 256, 128), 130),  # passes of 256 rows in a loop
        pytest.param(7, 256, 1, (1024, 512, 128), 130, marks=pytest.mark.full),  # of 512
        pytest.param(7, 128, 128, (1024, 256, 128), 256, marks=pytest.mark.full),  # of 512, sums as [columns, rows]
        (7, 128, 1, (640, 256, 128), 130),  # of 256, and a last one of less
        pytest.param(7, 512, 1, (1024, 1024, 128), 130, marks=pytest.mark.full),  # no loop
        pytest.param(7, None, 1, (1024, 512, 128), 130, marks=pytest.mark.full),
        pytest.param(6, 256, 1, (256, 512, 1024), 1100, marks=pytest.mark.full),
        (6, 128, 1, (256, 256, 1024), 1100),  # lhs widened under the products of the first columns
        (6, 128, 128, (512, 256, 512), 512),  # and of all, sums as [columns, rows]
        pytest.param(6, None, 1, (256, 512, 1024), 1100, marks=pytest.mark.full),
    ],
)
def test_a_whole_tile_is_multiplied_pass_by_pass(generation, block, columns, tile, n, monkeypatch):
    """All of its rows and columns, once, in the last step along K too, which is shorter."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    tm, tk, _ = tile
    rng, m, k = RNG(), tm + 90, tk + tk // 2
    n += generation if columns == 1 else 0  # no other test has these sizes: a compiled kernel would be found again
    parts = k // block if block else 1
    arrays = dict(lhs=integers((m, k), E4M3, rng), rhs=integers((2, k, n), E4M3, rng))
    arrays |= dict(lhs_scale=powers((m, parts), F32, rng), rhs_scale=powers((2, parts, n // columns), F32, rng))
    check("gmm_quantized", arrays | {"group_sizes": np.array([tm + 20, 60], np.int32)}, tiling=tile)


@pytest.mark.parametrize(
    ("generation", "value", "exponent"),
    [
        (7, 256.0, -70),  # 2^-140 times sums of 2^23: the product alone has 9 bits
        (6, 2.0**-9, 62),  # of 16 times them: 2^132 is infinite
    ],
    ids=["subnormal", "infinite"],
)
def test_scales_whose_product_is_out_of_range_multiply_in_turn(generation, value, exponent, monkeypatch):
    """Where one scale of the weights serves 128 columns, and both are multiplied first."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    m, k, n = 1034, 256, 384 if generation == 7 else 256  # a compiled kernel would be found again
    arrays = dict(lhs=np.full((m, k), value, E4M3), rhs=np.full((1, k, n), value, E4M3))
    arrays |= dict(group_sizes=np.array([m], np.int32))
    scales = (1.1 * 2.0**exponent, 1.3 * 2.0**exponent)
    arrays |= dict(lhs_scale=np.full((m, 2), scales[0], F32), rhs_scale=np.full((1, 2, n // 128), scales[1], F32))
    got = call("gmm_quantized", arrays, tiling=(1024, 256, 128))
    expected = public("cpu_golden")["gmm_quantized"](**arrays, preferred_element_type="float32")
    np.testing.assert_allclose(got, expected, rtol=2.0**-22)


@pytest.mark.parametrize("side", ["lhs_scale", "rhs_scale"])
def test_a_group_without_rows_is_zero_whatever_its_channels_have(side):
    arrays = operands("tgmm_quantized", 64, 40, 24, 3, RNG()) | {"group_sizes": np.array([0, 64, 0], np.int32)}
    arrays |= dict(lhs_scale=np.ones((1, 40), F32), rhs_scale=np.ones((1, 24), F32))
    arrays[side][:, 3] = np.nan
    got = call("tgmm_quantized", arrays)
    assert np.isnan(got[1]).any()
    assert not got[[0, 2]].any()


def test_scales_of_what_lies_beyond_4096_elements_are_in_the_next_register():
    rng = RNG()
    x, scale = integers((32, 256), BF16, rng), powers((1, 32, 136), E8M0, rng)

    def multiply(x, powers, out):
        out[...] = powers_of_two.times_lanes(x[...], powers, pl.ds(0, 32), 4096)

    words = powers_of_two.powers_in_lanes(to_jax(scale), 4352, 4352, True)[0, 0]
    assert words.shape == (8, 256)
    got = pl.pallas_call(multiply, out_shape=jax.ShapeDtypeStruct(x.shape, BF16), interpret=True)(to_jax(x), words)
    expected = x.astype(F32) * scale[0, :, 128:].astype(F32).repeat(32, axis=1)
    np.testing.assert_array_equal(to_numpy(got).astype(F32), expected)


@pytest.mark.parametrize("is_nan", [False, True])
def test_each_of_many_rows_and_columns_has_its_own_scales(is_nan):
    """Of both operands: 640 rows are in two tiles of scales, the second shorter, and whole registers of both."""
    rng, (m, k, n) = RNG(), (640, 768, 256)
    arrays = dict(
        lhs=integers((m, k), E4M3, rng), rhs=integers((1, n, k), E4M3, rng), group_sizes=np.array([m], np.int32)
    )
    scales = dict(lhs_scale=powers((m, k // 32), E8M0, rng), rhs_scale=powers((1, n, k // 32), E8M0, rng))
    if is_nan:
        scales["lhs_scale"][[70, 600], [3, 20]] = scales["rhs_scale"][0, 200, 7] = np.nan
    check("grouped_gemm", arrays | scales, transpose_rhs=True, tiling=(128, 384, 128))


@pytest.mark.parametrize("nan", [None, 0, 40, 131])
def test_tiles_share_a_register_of_scales_as_far_as_its_lanes_go(nan):
    """Ten tiles of 384 columns, of twelve scales each, and an eleventh in the next register."""
    rng, (m, k, n) = RNG(), (32, 11 * 384, 128)
    arrays = dict(
        lhs=integers((m, k), E4M3, rng), rhs=integers((1, n, k), E4M3, rng), group_sizes=np.array([m], np.int32)
    )
    scales = dict(lhs_scale=powers((m, k // 32), E8M0, rng), rhs_scale=powers((1, n, k // 32), E8M0, rng))
    if nan is not None:
        scales["lhs_scale"][5, nan] = scales["rhs_scale"][0, 9, nan] = np.nan
    check("grouped_gemm", arrays | scales, transpose_rhs=True, tiling=(32, 384, 128))


@pytest.mark.parametrize("contract", [(0, 0), (1, 0), (1, 1)])
def test_sums_of_int8_are_exact_where_float32_would_not_be(contract):
    """In bfloat16, as tpu7x multiplies them: 2100 products of 127² are beyond 2^24."""
    a, b = (np.full((2100, 40), value, np.int8) for value in (127, 126))
    a[::3], b[::5] = 125, 127
    given = [x if axis == 0 else np.ascontiguousarray(x.T) for x, axis in zip((a, b), contract, strict=True)]
    got = narrow.product(*map(to_jax, given), contract)
    assert got.dtype == "int32"
    np.testing.assert_array_equal(to_numpy(got), a.astype(int).T @ b)


@pytest.mark.parametrize(
    ("lhs", "rhs", "contract", "multiplied"),
    [
        ((32, 64), (1, 64), (1, 1), "float32"),
        ((32, 64), (2, 64), (1, 1), "float8_e4m3fn"),
        ((32, 1), (8, 1), (1, 1), "float8_e4m3fn"),
        ((32, 1), (1, 64), (1, 0), "float8_e4m3fn"),
        ((1, 32), (1, 64), (0, 0), "float8_e4m3fn"),
    ],
)
def test_a_single_row_of_transposed_weights_is_multiplied_in_float32(lhs, rhs, contract, multiplied):
    """Pallas lowers no other such product."""
    shapes = (jax.ShapeDtypeStruct(shape, E4M3) for shape in (lhs, rhs))
    traced = jax.make_jaxpr(lambda a, b: narrow.product(a, b, contract))(*shapes)
    (dot,) = [equation for equation in traced.eqns if equation.primitive.name == "dot_general"]
    assert [str(operand.aval.dtype) for operand in dot.invars] == [multiplied] * 2


@pytest.mark.parametrize(
    ("size", "width", "loops"), [(0, 4, 0), (3, 4, 0), (4, 4, 0), (5, 4, 0), (6, 4, 0), (8, 4, 1), (12, 4, 1)]
)
def test_blocks_are_walked_in_a_loop_where_all_are_whole(size, width, loops):
    def walk(x):
        found = [x]

        def body(rows):
            found[0] = None if loops else found[0].at[rows.start : rows.start + rows.size].add(1)
            seen.append(rows.size)

        seen = []
        products.for_blocks(size, width, body)
        assert (
            set(seen) == {width} if loops else seen == [width] * (size // width) + [size % width] * (size % width > 0)
        )
        return x if loops else found[0]

    traced = jax.make_jaxpr(walk)(np.zeros(max(size, 1), np.int32))
    found = [equation.params["length"] for equation in traced.eqns if equation.primitive.name == "scan"]
    assert found == [size // width] * loops


@pytest.mark.parametrize("function", ["gmm_quantized", "tgmm_quantized"])
def test_what_is_watched_is_said_to_be_there_where_a_group_has_rows(function):
    sizes = np.array([20, 0, 33, 0], np.int32)
    arrays = operands(function, 64, 40, 24, 4, RNG()) | {"group_sizes": sizes}
    sites = set()

    def watched(site, value, where=None):
        sites.add(site)
        return where.astype(value.dtype)

    with probing(watched):
        got = call(function, arrays, tiling=(32, 128, 128))
    there = np.arange(64) < sizes.sum() if function == "gmm_quantized" else sizes > 0
    np.testing.assert_array_equal(got, np.broadcast_to(there.reshape(-1, *[1] * (got.ndim - 1)), got.shape))
    assert sites == {"acc"}
