"""What the TPU's block-scaled matmuls fetch, keep and multiply, read from what is traced, chip by chip.

No result tells one plan from another: a block that is fetched once more, a dot that is less deep, a tile that does not
fit into VMEM.
"""

import math
from collections import Counter

import pytest

jax = pytest.importorskip("jax")

from parity.compilers.kernels import equations, kernels  # noqa: E402
from tests.matrix.mxfp8 import GROUPED_GEMM  # noqa: E402
from tests.matrix.quantized_gmm import (  # noqa: E402
    BF16,
    E4M3,
    E5M2,
    F32,
    GMM_QUANTIZED,
    I8,
    PLAIN,
    TGMM_QUANTIZED,
)
from tests.support.calls import point  # noqa: E402
from tests.support.calls import traced as jaxpr_of  # noqa: E402
from tests.support.chips import on  # noqa: E402

pytestmark = pytest.mark.tpu

M, K, N, G = 8192, 7168, 2048, 8
LANES, BLOCK = 128, 256  # of a register; of the matrix unit, and rows of a masked dot
MIB = {"TPU v5e": 16, "TPU v6e": 32, "TPU7x": 32}  # that a kernel has by default
V5E, V6E, V7X = MIB


def cut(size, width):
    """The slices of an axis: of `width`, and what is left."""
    return [min(width, size - first) for first in range(0, size, width)]


def multiplied(kernel):
    """How often each dot [rows, columns] of some depth is run, if every branch is."""
    dots = Counter()
    for dot in kernel.dots:
        dots[dot.rows, dot.depth, dot.columns] += dot.count
    return dots


def traced(kind, name, dtypes, layout, k, n, out=BF16, **options):
    """The kernels of a call with default tiles for a kind of TPU, by name, each with its scratch and its jaxpr."""
    options["rhs_dtype"] = dtypes[1]
    if layout == "mxfp8":
        op, options["ragged"] = GROUPED_GEMM, "contracting" if name == "tgmm" else "lhs"
    else:
        op = TGMM_QUANTIZED if name == "tgmm" else GMM_QUANTIZED
        options["lhs_blocks"], options["rhs_blocks"] = layout
    with on(kind):
        jaxpr = jaxpr_of(op, point(op, (dtypes[0], out), M=M, K=k, N=n, G=G, **options))
    calls = [call.params for call, _ in equations(jaxpr.jaxpr, "pallas_call")]
    found = []
    for kernel, call in zip(kernels(jaxpr, places=False), calls, strict=True):
        count = call["grid_mapping"].num_scratch_operands
        scratch = [v.aval for v in call["jaxpr"].invars[len(call["jaxpr"].invars) - count :]]
        found.append((kernel, [(x.shape, str(x.dtype)) for x in scratch], call))
    return [each for each in found if each[0].name != "group_metadata"]


def check_fits(kind, kernel, scratch):
    """Blocks of operands are there twice, what is kept once."""
    kept = sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize for shape, dtype in scratch)
    needed = kept + 2 * sum(block.nbytes for block in (*kernel.inputs, *kernel.outputs))
    assert needed <= MIB[kind] * 2**20


def widened(call):
    """What is made bfloat16 at a time: the dtypes it has before, by its shape."""
    found = {}
    for equation, _ in equations(call["jaxpr"], "convert_element_type"):
        (before,), (after,) = (x.aval for x in equation.invars), (x.aval for x in equation.outvars)
        if str(after.dtype) == BF16 and "float8" in str(before.dtype):
            found.setdefault(after.shape, set()).add(str(before.dtype))
    return found


def stored(call, dtype):
    """How often the program has a store of a shape, whether in a loop or not."""
    values = (equation.invars[1].aval for equation, _ in equations(call["jaxpr"], "swap"))
    return Counter(value.shape for value in values if str(value.dtype) == dtype)


def axes_of(block):
    return ["".join(map(str, sorted(axes))) for axes in block.axes]


DEEPSEEK, CHANNELS = ("1x128", "1x128x128"), ("1xK", "1xKx1")
COLUMNS, WHOLE_COLUMNS = ("128x1", "128x1"), ("Mx1", "Mx1")
FP8, MIXED = (E4M3, E4M3), (E4M3, E5M2)
ADDED = dict(existing_out=True)

# kind, dtypes, layout, K, N, options; tile, how deep a dot is, parts of the scales that change, dtype of the sums,
# whether lhs is widened ahead
GMM = [
    (V5E, FP8, DEEPSEEK, K, N, {}, (256, 1024, 512), 128, (8, 8), F32, True),
    (V6E, FP8, DEEPSEEK, K, N, {}, (512, 1024, 2048), 128, (8, 8), F32, True),
    (V7X, FP8, DEEPSEEK, K, N, {}, (1024, 1024, 2048), 128, (8, 8), F32, False),
    (V7X, FP8, DEEPSEEK, K, N, dict(transpose_rhs=True), (1024, 1024, 2048), 128, (8, 8), F32, False),
    (V5E, (I8, I8), DEEPSEEK, K, N, {}, (256, 1024, 512), 128, (8, 8), F32, False),
    (V7X, MIXED, ("1xK", "1x64x1"), K, N, {}, (1024, 1024, 1024), 64, (0, 16), F32, False),
    (V7X, MIXED, ("1x64", "1xKx1"), K, N, dict(out=F32), (1024, 1024, 1024), 64, (16, 0), F32, False),
    (V6E, FP8, CHANNELS, K, N, {}, (1024, 1792, 1024), 256, (0, 0), F32, True),
    (V7X, FP8, CHANNELS, K, N, {}, (1024, 1792, 1024), 1792, (0, 0), F32, False),
    (V7X, FP8, CHANNELS, K, N, ADDED, (512, 1792, 512), 1792, (0, 0), F32, False),
    (V7X, FP8, CHANNELS, 2880, 2880, {}, (1024, 1536, 1024), 1536, (0, 0), F32, False),
    (V5E, (I8, I8), CHANNELS, K, N, {}, (256, 1024, 512), 256, (0, 0), "int32", False),
    (V6E, (I8, I8), CHANNELS, K, N, {}, (1024, 1792, 1024), 512, (0, 0), "int32", False),
    (V7X, (I8, I8), CHANNELS, K, N, {}, (1024, 1792, 1024), 1024, (0, 0), "int32", True),
    (V7X, (I8, I8), ("1xK", "1x256x1"), K, N, {}, (1024, 1792, 1024), 256, (0, 7), F32, True),
    (V5E, (BF16, I8), (PLAIN, "1xKx1"), K, N, {}, (256, 1024, 512), 256, (None, 0), F32, False),
    (V7X, (BF16, I8), (PLAIN, "1xKx1"), K, N, {}, (512, 1792, 512), 1792, (None, 0), F32, False),
    (V7X, (E4M3, BF16), ("1xK", PLAIN), K, N, {}, (512, 1792, 512), 1792, (0, None), F32, False),
    (V6E, (BF16, E4M3), (PLAIN, "1x128x1"), 2048, N, {}, (512, 2048, 512), 128, (None, 16), F32, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtypes", "layout", "k", "n", "options", "tile", "deep", "parts", "sums", "wide"), GMM
)
def test_gmm_fetches_keeps_and_multiplies_what_its_tile_says(
    kind, dtypes, layout, k, n, options, tile, deep, parts, sums, wide
):
    ((kernel, scratch, call),) = traced(kind, "gmm", dtypes, layout, k, n, **options)
    (tm, tk, tn), transposed = tile, options.get("transpose_rhs", False)
    assert kernel.grid == (-(-n // tn), None, -(-k // tk))
    blocks = [((tm, tk), ["1", "2"]), ((1, tn, tk), ["1", "0", "2"]) if transposed else ((1, tk, tn), ["1", "2", "0"])]
    if parts[0] is not None:
        blocks.append(((1, 1, parts[0] or 1, tm), ["2" if parts[0] else "", "1", "", ""]))
    if parts[1] is not None:
        blocks.append(((1, 1, parts[1] or 1, tn), ["1", "2" if parts[1] else "", "", "0"]))
    blocks += [((tm, tn), ["1", "0"])] * (2 if options.get("existing_out") else 1)
    assert [(block.shape, axes_of(block)) for block in (*kernel.inputs, *kernel.outputs)] == blocks
    turned = layout == DEEPSEEK  # sums are [columns, rows]
    kept = [((tn, tm) if turned else (tm, tn), sums)]
    kept += [((parts[0] or 1, tm, LANES), F32)] if parts[0] is not None and not turned else []
    kept += [((-(-tk // LANES), tm, LANES), BF16)] if wide else []
    assert scratch == kept
    check_fits(kind, kernel, scratch)
    is_native = not wide and BF16 not in dtypes
    assert multiplied(kernel) == Counter(
        (columns, depth, some) if turned else (some, depth, columns)
        for rows, width in ((tm, 2 * BLOCK if turned and is_native and tn == 2 * BLOCK else BLOCK), (BLOCK, BLOCK))
        for whole in {tk, k % tk or tk}
        for depth in cut(whole, deep)
        for columns in cut(tn, width)
        for some in cut(rows, BLOCK if is_native else rows)
    )
    assert call["cost_estimate"].transcendentals == 0
    # With masks columns are walked in a loop; so are, if blocks of scales are short, the rows of a whole tile.
    height = tm if not is_native or deep >= 2 * BLOCK or not any(parts) else 2 * BLOCK if turned else BLOCK
    assert {dot.count for dot in kernel.dots} == {max(tm // height, 1), tn // BLOCK}
    assert not wide or not stored(call, E4M3)
    if parts[0] is not None and not turned:  # a column for each part of the scales and 128 rows, once for every branch
        steps = sum(-(-whole // deep) if parts[0] else 1 for whole in {tk, k % tk or tk})
        assert stored(call, F32)[LANES, LANES] == (height + BLOCK) // LANES * steps
    if wide and dtypes[0] == E4M3:  # with masks in few registers, without a part under the products before
        narrow = {"float8_e4m3b11fnuz"} if kind in (V5E, V6E) else {E4M3}  # that older chips have an instruction for
        found = {shape: before for shape, before in widened(call).items() if shape[0] in (tm, 64)}
        assert found == {(64, tk): narrow, (tm, deep): narrow}
        made = [equation.outvars[0].aval for equation, _ in equations(call["jaxpr"], "convert_element_type")]
        assert [(x.shape, str(x.dtype)) for x in made].count(((64, tk), BF16)) == 1  # with masks alone


def dots_of_tgmm(tile, dot, own, width_of_own=4 * BLOCK, at_once=True):
    """Of a whole tile, and of a block of own rows; at_once: of a tile that is a whole group too, which is not kept."""
    tm, tk, tn = tile
    return Counter(
        (rows, depth, columns)
        for whole, deep, height, width in ((tm, *dot), *[(tm, *dot)] * at_once, (BLOCK, *own, width_of_own))
        for depth in cut(whole, deep)
        for rows in cut(tk, height)
        for columns in cut(tn, width)
    )


# kind, dtypes, layout, K, N, options; tile, a whole tile's dot [depth, rows, columns], how deep one of own rows is and
# how many rows of the result it has, parts of the scales, dtype of the sums, what both are widened to
TGMM = [
    (V5E, FP8, COLUMNS, K, N, {}, (512, 512, 512), (128, 512, 512), (128, 256), (4, 4), F32, BF16),
    (V6E, FP8, COLUMNS, K, N, {}, (1024, 1024, 1024), (128, 512, 512), (128, 256), (8, 8), F32, BF16),
    (V6E, FP8, WHOLE_COLUMNS, K, N, {}, (1024, 1024, 2048), (256, 512, 512), (256, 256), (0, 0), F32, BF16),
    (V7X, FP8, COLUMNS, K, N, {}, (1024, 1024, 2048), (128, 128, 256), (128, 128), (8, 8), F32, None),
    (V7X, FP8, COLUMNS, K, N, ADDED, (1024, 1024, 1024), (128, 128, 256), (128, 128), (8, 8), F32, None),
    (V7X, FP8, WHOLE_COLUMNS, K, N, {}, (1024, 1024, 2048), (1024, 896, 1024), (256, 896), (0, 0), F32, None),
    (V7X, FP8, ("Mx1", "64x1"), K, 512, {}, (1024, 2048, 512), (64, 128, 256), (64, 128), (0, 16), F32, None),
    (V7X, MIXED, ("64x1", "Mx1"), 512, N, {}, (1024, 512, 2048), (64, 128, 256), (64, 128), (16, 0), F32, None),
    (V5E, (I8, I8), WHOLE_COLUMNS, K, N, {}, (512, 512, 512), (256, 256, 1024), (256, 256), (0, 0), "int32", None),
    (V7X, (I8, I8), WHOLE_COLUMNS, K, N, {}, (1024, 1024, 2048), (1024, 896, 1024), (256, 896), (0, 0), "int32", None),
    (V7X, (I8, I8), ("Mx1", "256x1"), K, N, {}, (1024, 1024, 2048), (256, 256, 256), (256, 256), (0, 4), F32, None),
    (V7X, (BF16, I8), (PLAIN, "Mx1"), K, N, {}, (512, 1024, 1024), (512, 512, 512), (256, 256), (None, 0), F32, BF16),
    (V7X, (E4M3, BF16), ("Mx1", PLAIN), K, N, {}, (512, 1024, 1024), (512, 512, 512), (256, 256), (0, None), F32, BF16),
    (V7X, (F32, E4M3), (PLAIN, "128x1"), K, N, {}, (512, 1024, 1024), (128, 512, 512), (128, 256), (None, 4), F32, F32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtypes", "layout", "k", "n", "options", "tile", "dot", "own", "parts", "sums", "wide"), TGMM
)
def test_tgmm_fetches_keeps_and_multiplies_what_its_tile_says(
    kind, dtypes, layout, k, n, options, tile, dot, own, parts, sums, wide
):
    ((kernel, scratch, call),) = traced(kind, "tgmm", dtypes, layout, k, n, **options)
    tm, tk, tn = tile
    assert kernel.grid == (-(-n // tn), -(-k // tk), None)
    blocks = [((tm, tk), ["2", "1"]), ((tm, tn), ["2", "0"])]
    for part, columns, axis in zip(parts, (tk, tn), "10", strict=True):
        if part is not None:
            blocks.append(((1, part or 1, columns), ["2" if part else "", "", axis]))
    blocks += [((1, tk, tn), ["2", "1", "0"])] * (2 if options.get("existing_out") else 1)
    assert [(block.shape, axes_of(block)) for block in (*kernel.inputs, *kernel.outputs)] == blocks
    kept = [((tk, tn), sums), ((BLOCK, tk), dtypes[0]), ((BLOCK, tn), dtypes[1])]
    assert scratch == kept + ([((BLOCK, tk), wide), ((tm, tn), wide)] if wide else [])
    check_fits(kind, kernel, scratch)
    at_once = bool(wide) or not any(parts) or tm <= (2 if dtypes[0] == I8 else 8) * dot[0]
    assert multiplied(kernel) == dots_of_tgmm(tile, dot, own, BLOCK if any(parts) else 4 * BLOCK, at_once)
    if any(parts) and not wide:
        loops = {dot.count for dot in kernel.dots}
        if dtypes[0] == I8:  # parts of the scales are walked in a loop, by twos
            assert loops == {tm // (2 * dot[0]), max(BLOCK // (2 * dot[0]), 1)}
        else:  # 256 dots are straight-line code
            whole, of_own = (depth // dot[0] * tk * tn // (dot[1] * dot[2]) for depth in (tm, BLOCK))
            assert loops == {max(whole // 256, 1), max(of_own // 256, 1)}
    # The result: in strips of 128 rows, eight at a time, where scales of whole columns are taken along.
    strips, height = (1, BLOCK) if parts[0] != 0 else (min(8, tk // LANES), LANES)
    of_out = stored(call, BF16)
    of_only = {(rows, columns) for rows in cut(tk, dot[1]) for columns in cut(tn, dot[2])} if at_once else set()
    assert of_only <= of_out.keys()
    assert of_out.pop((height, 512)) >= strips * tn // 512 > 0
    of_wide = {(32, tk), (32, tn), (dot[0], 512)} if wide == BF16 else set()
    own = {(32, tk) for dtype in dtypes[:1] if dtype == BF16} | {(32, tn) for dtype in dtypes[1:] if dtype == BF16}
    assert of_out.keys() <= of_wide | own | of_only
    assert call["cost_estimate"].transcendentals == 0


# kind, dtypes, K, N, options; tile, how deep a dot is
MXFP8 = [
    (V5E, FP8, K, N, {}, (256, 1024, 512), 256),
    (V6E, FP8, K, N, {}, (1024, 1024, 1024), 256),
    (V7X, FP8, K, N, {}, (1024, 1024, 1024), 1024),
    (V7X, FP8, K, N, dict(transpose_rhs=True), (1024, 1024, 1024), 1024),
    (V7X, FP8, K, N, ADDED, (512, 1792, 512), 1792),
    (V7X, FP8, 2880, 2880, dict(out=F32), (1024, 1024, 1024), 1024),
    (V7X, (BF16, E4M3), K, N, {}, (512, 1792, 512), 1792),
    (V7X, (E4M3, BF16), K, N, dict(transpose_rhs=True), (512, 1792, 512), 1792),
]


@pytest.mark.parametrize(("kind", "dtypes", "k", "n", "options", "tile", "deep"), MXFP8)
def test_a_forward_pass_of_mxfp8_has_its_scales_in_whole_registers(kind, dtypes, k, n, options, tile, deep):
    """A word has the scales of four rows, or one twice; those of a step over K lie in the lanes of one register.

    What packs words reads scales column by column, as quantisers store them.
    """
    *packed, (kernel, scratch, call) = traced(kind, "gmm", dtypes, "mxfp8", k, n, **options)
    (tm, tk, tn), transposed, steps = tile, options.get("transpose_rhs", False), -(-k // tile[1])
    assert kernel.grid == (-(-n // tn), None, steps)
    blocks = [((tm, tk), ["1", "2"]), ((1, tn, tk), ["1", "0", "2"]) if transposed else ((1, tk, tn), ["1", "2", "0"])]
    expected, registers = [], -(-steps // (LANES * 32 // tk))
    if dtypes[0] == E4M3:
        blocks.append(((1, tm // 4, LANES), ["2", "1", ""]))
        expected.append(("powers_in_lanes", (1, M // 512), (1, k // 32, 512), (1, registers, 128, LANES), "01"))
    if dtypes[1] == E4M3:
        if transposed:
            blocks.append(((1, 1, tn // 4, LANES), ["1", "2", "0", ""]))
            of_columns = (1, k // 32, 512), (1, registers, 128, LANES)
            expected.append(("powers_in_lanes", (G, n // 512), *of_columns, "01"))
        else:
            blocks.append(((1, k // 32, tn), ["1", "", "0"]))
            of_rows = (1, -(-k // 32 // 32) * 32, 1024)
            expected.append(("powers_in_rows", (G, 1, -(-n // 1024)), of_rows, of_rows, "012"))
    blocks += [((tm, tn), ["1", "0"])] * (2 if options.get("existing_out") else 1)
    assert [(block.shape, axes_of(block)) for block in (*kernel.inputs, *kernel.outputs)] == blocks
    assert scratch == [((tm, tn), F32), *([((-(-tk // LANES), tm, LANES), BF16)] if dtypes[0] == E4M3 else [])]
    check_fits(kind, kernel, scratch)
    assert multiplied(kernel) == Counter(
        (rows, depth, columns)
        for rows in (tm, BLOCK)
        for whole in {tk, k % tk or tk}
        for depth in cut(whole, deep)
        for columns in cut(tn, BLOCK)
    )
    if dtypes[0] == E4M3:
        assert {shape for shape in widened(call) if shape[0] == 64} == {(64, tk)}
    check_packed(packed, expected)


@pytest.mark.parametrize(
    ("kind", "dtypes", "tile", "dot", "own"),
    [
        (V5E, FP8, (512, 512, 512), (256, 256, 512), (256, 256)),
        (V6E, FP8, (1024, 1024, 1024), (256, 256, 512), (256, 256)),
        (V7X, FP8, (1024, 1024, 1024), (1024, 256, 512), (256, 256)),
        (V7X, (BF16, E4M3), (512, 1024, 1024), (512, 256, 512), (256, 256)),
        (V7X, (E4M3, BF16), (512, 1024, 1024), (512, 256, 512), (256, 256)),
    ],
)
def test_a_weight_gradient_of_mxfp8_has_a_row_of_scales_for_32(kind, dtypes, tile, dot, own):
    *packed, (kernel, scratch, _) = traced(kind, "tgmm", dtypes, "mxfp8", K, N)
    tm, tk, tn = tile
    assert kernel.grid == (-(-N // tn), -(-K // tk), None)
    blocks = [((tm, tk), ["2", "1"]), ((tm, tn), ["2", "0"])]
    expected = []
    for dtype, size, columns, axis in zip(dtypes, (K, N), (tk, tn), "10", strict=True):
        if dtype == E4M3:
            blocks.append(((tm // 32, columns), ["2", axis]))
            expected.append(("powers_in_rows", (1, 1, size // 1024), (1, 256, 1024), (1, 256, 1024), "012"))
    blocks.append(((1, tk, tn), ["2", "1", "0"]))
    assert [(block.shape, axes_of(block)) for block in (*kernel.inputs, *kernel.outputs)] == blocks
    kept = [((BLOCK, tk), dtypes[0]), ((BLOCK, tn), dtypes[1]), ((BLOCK, tk), BF16), ((tm, tn), BF16)]
    assert scratch == [((tk, tn), F32), *kept]
    check_fits(kind, kernel, scratch)
    assert multiplied(kernel) == dots_of_tgmm(tile, dot, own)
    check_packed(packed, expected)


def check_packed(found, expected):
    """Every tile of scales is read once and its words are written once, in any order."""
    assert [
        (kernel.name, kernel.grid, kernel.inputs[0].shape, kernel.outputs[0].shape, "".join(axes_of(kernel.inputs[0])))
        for kernel, _, _ in found
    ] == expected
    for kernel, _, call in found:
        assert "".join(axes_of(kernel.outputs[0])) == "".join(axes_of(kernel.inputs[0]))
        assert call["compiler_params"].dimension_semantics == ("parallel",) * len(kernel.grid)
        assert call["cost_estimate"].transcendentals == 0
