"""gmm_quantized and tgmm_quantized: their cases, how their inputs are drawn, what their kernels promise.

Where scales lie is spelled as the block that shares one: `1x128` is 128 elements of a row, `1xKx1` a column of a
group's matrix, a letter standing for the whole axis; `plain` is an operand that is not quantised.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cpu_golden.quantized_gmm import gmm_quantized, tgmm_quantized
from op_arguments.quantize import Blocks
from op_arguments.quantized_gmm import dot_dtype
from parity import Array, Case, Contract, Groups, Op, Scales
from parity.contact.assumptions import FP8_SUMS
from parity.dtypes import numpy_dtype
from parity.judging.passes import fp8_in_14_digits
from parity.op import Backend, Inputs
from tests.matrix import gmm as unquantised
from tests.matrix.gmm import (
    DISTRIBUTIONS,
    PATTERNS,
    SMALL_TILES,
    grouped,
    groups_and_out,
    shapes,
    sums_rows,
    without_transpose,
)
from tests.matrix.models import DEEPSEEK_V3, QWEN3_30B, Experts
from tests.matrix.ops import BF16, F16, F32, MMA_DEPTH, MXU_DEPTH, TRAINED, in_turn, of_unit, one_in

E4M3, E5M2, I8 = "float8_e4m3fn", "float8_e5m2", "int8"
FP8_MMA_DEPTH = 32  # as `parity.backends.emulation` documents it
GPU_STEP = 128  # of a sum of 8-bit products, where a case has no tiling: `gpu_reference.quantized_gmm`
PLAIN = "plain"
INT32_CLIMB = 2100  # terms of 121² to 127² that take an int8 sum beyond 2^24 half-way


def rhs_dtype(c: Case) -> str:
    return str(c.rhs_dtype or c.dtype)


def blocks_of(spelled: str, shape: tuple[int, ...]) -> Blocks:
    """The elements along each axis that share a scale."""
    return tuple(max(n, 1) if b.isalpha() else int(b) for b, n in zip(spelled.split("x"), shape, strict=True))


def scale_shape(spelled: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many scales an operand of `shape` has along each axis."""
    return tuple(n // b for n, b in zip(shape, blocks_of(spelled, shape), strict=True))


def layouts(c: Case) -> tuple[str, str]:
    """Where the scales of lhs and rhs lie, along their own axes."""
    if sums_rows(c) or not c.transpose_rhs or c.rhs_blocks == PLAIN:
        return c.lhs_blocks, c.rhs_blocks
    group, k, n = c.rhs_blocks.split("x")
    return c.lhs_blocks, f"{group}x{n}x{k}"


def contraction(c: Case) -> int:
    """The length of the axis that is summed over."""
    of = shapes(c)
    return of.lhs[of.lhs_axis]


def block(c: Case) -> int:
    """Elements along the contraction over which no scale changes."""
    of = shapes(c)
    operands = zip(layouts(c), (of.lhs, of.rhs), (of.lhs_axis, of.rhs_axis), strict=True)
    return min(blocks_of(spelled, shape)[axis] for spelled, shape, axis in operands if spelled != PLAIN)


def swings(c: Case) -> bool:
    """Whether integer data go beyond 2^24 and back: an int32 sum over the whole axis, into a float32 output."""
    whole = block(c) >= contraction(c) > INT32_CLIMB
    return bool(whole and c.dtype == rhs_dtype(c) == I8 and c.out == F32)


def contract(c: Case, backend: Backend) -> Contract:
    """Each block's sum and its product with the scales in float32; a narrow operand beside a wide one is widened.

    What is summed over rows is cut where blocks are, which are those of all rows.
    """
    dot, over_rows = dot_dtype(c.dtype, rhs_dtype(c)), c.op == "tgmm_quantized"
    schedule = {"aligned": True} if over_rows else {}
    # A tile within a block is scaled by itself.
    own = GPU_STEP if backend == "gpu" and dot in ("fp8", "int8") else block(c)
    tile = c.tiling[0 if over_rows else 1] if c.tiling else own
    tile = tile if 0 < tile < block(c) else None
    scaling = {"inner": F32, "scale": F32, "scaled": F32, "acc": F32}
    if dot == "int8":  # exact in int32 as long as no scale changes, then converted
        return Contract(dot="int8", out=c.out, depth=max(block(c), 1), tile=tile, sites=scaling)
    if dot == "fp8":
        depth = MXU_DEPTH if backend == "tpu" else FP8_MMA_DEPTH
        sites = {"partial": F32, **scaling} if backend == "tpu" else scaling
        found = Contract(
            dot="fp8", out=c.out, depth=depth, tile=tile, sites=sites, schedule=schedule,
            functions=of_unit(backend, "inner"),
        )  # fmt: skip
        if over_rows or c.out == F32:
            tile = gpu_tile(c, block(c), over_rows, size=2) if block(c) < contraction(c) else None
        return with_narrow_sums(found, backend, tile, over_rows)
    wide = unquantised.contract(replace(c, op="tgmm" if over_rows else "gmm", dtype=dot), backend)
    functions = wide.functions and of_unit(backend, "inner")
    if backend == "gpu" and c.tiling and block(c) < contraction(c):
        tile = gpu_tile(c, block(c), over_rows, numpy_dtype(dot).itemsize)
    return replace(wide, tile=tile, sites={**wide.sites, **scaling}, schedule=schedule, functions=functions)


def with_narrow_sums(contract: Contract, backend: Backend, tile: int | None, over_rows: bool = False) -> Contract:
    """A contract of fp8 dots with that of tensor cores which keep 14 digits of such a sum; any other as it is.

    There a dot of a float32 result or over rows takes float16, which has every value of fp8; for others 14 digits are
    enough. tile: that of the contract there.
    """
    if backend != "gpu" or contract.dot != "fp8":
        return contract
    other = replace(contract, dot="native", depth=MMA_DEPTH, tile=tile)
    if contract.out != F32 and not over_rows:
        schedule = {**contract.schedule, "narrow": fp8_in_14_digits}
        other = replace(other, dot="fp8 in 14 digits", schedule=schedule)
    return replace(contract, unless={FP8_SUMS: other})


def gpu_tile(c: Case, block: int | None, over_rows: bool, size: int) -> int | None:
    """The products that a GPU sums by themselves where scales change after a block; None where they do not.

    A step of both tiles, of `size` bytes an element, is in 48 KiB of shared memory, and no longer than a block.
    """
    if block is None:
        return None
    tm, tk, tn = (min(t, GPU_STEP) for t in c.tiling or (GPU_STEP, 64, GPU_STEP))
    step, others = (tm, tk + tn) if over_rows else (tk, tm + tn)
    while size * others * step > 48 * 1024:
        step //= 2
    return step if step < block else None


def chain(c: Case, inputs: Inputs) -> int:
    """Additions behind an element: within a block, of the blocks, and two products.

    A block's sum is exact in int8. A tile shorter than a block may be scaled on its own.
    """
    length, axis = unquantised.terms(c, inputs), shapes(c).lhs_axis
    step = min(block(c), c.tiling[axis]) if c.tiling and block(c) < contraction(c) else block(c)
    within = 1 if dot_dtype(c.dtype, rhs_dtype(c)) == "int8" else min(block(c), length)
    # A group may begin inside a block: one more.
    return within + -(-length // max(step, 1)) + 1 + 2


def unread(c: Case, inputs: Inputs) -> Mapping[str, np.ndarray]:
    """As for gmm; and the scales of nothing but such elements."""
    masks = dict(unquantised.inactive(c, inputs))
    for name in ("lhs", "rhs"):
        scale = inputs.get(f"{name}_scale")
        if scale is not None:
            split = [x for n, s in zip(masks[name].shape, scale.shape, strict=True) for x in (s, n // max(s, 1))]
            masks[f"{name}_scale"] = masks[name].reshape(split).all(axis=tuple(range(1, len(split), 2)))
    return masks


def axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    """As gmm's or tgmm's, and what shares a scale: of the contraction."""
    plain = unquantised.axes(c, inputs)
    of_block = np.arange(contraction(c)) // max(block(c), 1)
    return {**plain, "lhs": {**plain["lhs"], "scale block": of_block[:, None] if sums_rows(c) else of_block}}


def representative(c: Case) -> bool:
    """One case, of tgmm, for fp8 into bfloat16."""
    return c.tier == "smoke" and sums_rows(c) and c.out == BF16


def scales(c: Case, name: str, spelled: str, shape: tuple[int, ...]) -> Mapping[str, Scales]:
    """The scales of an operand of `shape`, under its name; where it has none they are a None among the arguments."""
    return {} if spelled == PLAIN else {f"{name}_scale": Scales(scale_shape(spelled, shape), c.scales)}


def inputs(c: Case) -> Mapping[str, Array | Scales | Groups | None]:
    of, (lhs_blocks, rhs_blocks) = shapes(c), layouts(c)
    return {
        "lhs": Array(of.lhs, c.dtype, sum_over=of.lhs_axis, swings=swings(c)),
        **scales(c, "lhs", lhs_blocks, of.lhs),
        "rhs": Array(of.rhs, rhs_dtype(c), sum_over=of.rhs_axis, pair_sign=-1, swings=swings(c)),
        **scales(c, "rhs", rhs_blocks, of.rhs),
        **groups_and_out(c),
    }


def arguments(c: Case) -> Mapping[str, Any]:
    no_scales = {f"{name}_scale": None for name in ("lhs", "rhs") if getattr(c, f"{name}_blocks") == PLAIN}
    return no_scales | unquantised.arguments(c)


DEFAULTS = dict(
    rhs_dtype=None, lhs_blocks="", rhs_blocks="", scales="varied", transpose_rhs=False, existing_out=False, shard=None,
    tiling=None, groups="zipf",
)  # fmt: skip

scaled = partial(grouped, inputs=inputs, arguments=arguments, contract=contract, chain=chain, axes=axes, unread=unread)
_GMM = scaled(gmm_quantized, representative=representative, defaults=DEFAULTS)
_TGMM = scaled(tgmm_quantized, representative=representative, defaults=without_transpose(DEFAULTS))

SHARDS = [(0, 8), (3, 8), (6, 8)]
# Outputs of fp8 products are float32 where the post-scaling is to show: 5e-8 (tpu-inference's gmm_v2 dequantises blocks
# below 256 to bfloat16 before the dot: 2.35e-3), and bfloat16 where the accumulator's own width is (its default is
# bfloat16: 4.2e-3 instead of 2.0e-3).
FP8, FP8_BF16 = (E4M3, F32), (E4M3, BF16)
# dtype of lhs and output, dtype of rhs (None: the same)
PAIRS = [
    (FP8, E5M2),
    ((E5M2, BF16), None),
    ((I8, F32), None),
    # W8A16; a golden of scales rounded to bfloat16 (qwix.dequantize of bfloat16 inputs) errs by 2e-3 itself
    ((BF16, F32), I8),
    (BF16, E4M3),
    (F32, I8),
]
MORE_PAIRS = [((E5M2, F32), E4M3), ((I8, BF16), None), (BF16, I8), (F16, E4M3), ((BF16, F32), E5M2)]


def mixes(op: Op, shape: Mapping[str, int], layouts: list[tuple[str, str]], **options: object) -> tuple[Case, ...]:
    """One case for every pair of layouts (lhs, rhs)."""
    parts = (op.grid([shape], lhs_blocks=[lhs], rhs_blocks=[rhs], **options) for lhs, rhs in layouts)
    return tuple(case for part in parts for case in part)


def in_both(
    op: Op,
    small: Mapping[str, int],
    shard: Mapping[str, int],
    layouts: list[tuple[str, str]],
    data: str,
    **options: object,
) -> tuple[Case, ...]:
    """Groups, shards and data, in which gmm and tgmm differ by little: of the default tier each has half."""
    return in_turn(
        op is _TGMM,
        one_in(3, mixes(op, small, layouts, dtype=[FP8_BF16], groups=PATTERNS, **options)),
        one_in(2, mixes(op, shard, layouts, dtype=[FP8], shard=SHARDS, existing_out=[True], groups=["zipf"],
                        **options)),
        one_in(2, mixes(op, small, layouts, dtype=[FP8], data=[*DISTRIBUTIONS, data], groups=["short"], **options)),
    )  # fmt: skip


def pairs(
    op: Op, shape: Mapping[str, int], dtypes: list[object], layouts: list[tuple[str, str]], **options: object
) -> tuple[Case, ...]:
    """Every pair of operand dtypes in every pair of layouts; the unquantised operand of a pair has no scales."""
    cases: tuple[Case, ...] = ()
    for dtype, rhs in dtypes:
        wide = dtype[0] if isinstance(dtype, tuple) else dtype
        for left, right in layouts:
            layout = (PLAIN if wide in (F32, BF16, F16) else left, right)
            cases += mixes(op, shape, [layout], dtype=[dtype], rhs_dtype=[rhs], **options)
    # … and the weights' side unquantised.
    cases += mixes(op, shape, [(layouts[0][0], PLAIN)], dtype=[(E4M3, BF16)], rhs_dtype=[BF16], **options)
    return cases


def model(
    op: Op, experts: Experts, shape: Mapping[str, int], layout: tuple[str, str], name: str = "", **options: object
) -> tuple[Case, ...]:
    """A published model's expert layer in DeepSeek-V3's recipe: a shard of 8 experts, and fewer rows and columns.

    name: the model's, where the case is a line of `parity run`.
    """
    held = (experts.experts // 4, experts.experts)
    return mixes(op, {**shape, "G": 8}, [layout], shard=[held], groups=["zipf"], model=name, **options)


# 1x128 activations with 128x128 weights: DeepSeek-V3 (arXiv:2412.19437). Nobody has it in all three passes.
DEEPSEEK = ("1x128", "1x128x128")
ROW_CHANNEL = ("1xK", "1xKx1")
GMM_LAYOUTS = [
    DEEPSEEK,
    ROW_CHANNEL,
    ("MxK", "GxKxN"),
    ("1x32", "1x64x1"),
    ("1x64", "1x256x1"),
    ("1x256", "1x32x32"),
    ("1xK", "1x128x128"),
    ("MxK", "1x64x1"),
    ("1x128", "1xKxN"),
    ("20x64", "2x32x16"),
    ("1x128", "GxKx1"),
]
GMM_SMALL = dict(M=300, K=256, N=160, G=6)  # 160: marin#7484 picks a tile of 256 for it
GMM_MIX = dict(M=80, K=512, N=128, G=4)
GMM_LONG = dict(M=80, K=1024, N=128, G=4)
GMM_SHARD = dict(M=200, K=256, N=96, G=2)
GMM_SQUARE = dict(M=80, K=256, N=256, G=4)  # where a forgotten transpose still fits
GMM_TAIL = dict(M=80, K=384, N=128, G=4)  # K % tk != 0 (maxtext#1183)
GMM_TILES = dict(M=384, K=384, N=384, G=3)  # whole tiles of a group, and of one scale of the weights
GMM_DOTS = dict(M=512, K=640, N=512, G=2)  # more dots of a tile than there may be on their way on tpu7x, as TGMM_DOTS
GMM_CLIMB = dict(M=24, K=4096, N=24, G=2)


def with_gmm_cases(op: Op) -> Op:
    """gmm_quantized with its cases."""
    small, tiles = dict(tiling=[SMALL_TILES]), dict(tiling=[(128, 256, 256)])
    channels = ("1x128", "1x128x1")
    parts = [
        mixes(op, GMM_SMALL, [channels], dtype=[FP8, FP8_BF16], groups=["straddle"], tier="smoke", **small),
        mixes(op, GMM_SMALL, [ROW_CHANNEL], dtype=[(I8, F32)], groups=["straddle"], tier="smoke", **small),
        mixes(op, GMM_MIX, [DEEPSEEK], dtype=[FP8], scales=["steps"], groups=["straddle"]),
        one_in(3, mixes(op, GMM_MIX, GMM_LAYOUTS, dtype=[FP8], scales=["steps"], groups=["straddle"]), first=2),
        # tpu-inference#2609: lhs is quantised in blocks of 512 whatever rhs has, every other scale of rhs is ignored
        mixes(op, GMM_LONG, [("1x512", "1x256x1")], dtype=[FP8], scales=["steps"], groups=["straddle"]),
        one_in(2, pairs(op, GMM_SMALL, PAIRS, [channels], groups=["straddle"], **small)),
        # Orientation: blocks and steps differ along K and N.
        mixes(op, GMM_SQUARE, [("1x128", "1x64x32"), DEEPSEEK], dtype=[FP8], scales=["steps"], transpose_rhs=[True],
              groups=["straddle"]),
        mixes(op, GMM_SMALL, [ROW_CHANNEL], dtype=[(I8, BF16)], existing_out=[True], groups=["short"], **small),
        mixes(op, GMM_TAIL, [channels], dtype=[FP8], tiling=[(64, 32, 128)], scales=["steps"], groups=["straddle"]),
        mixes(op, GMM_TAIL, [("1x32", "1x64x1")], dtype=[FP8], tiling=[(32, 256, 128)], scales=["steps"],
              groups=["straddle"]),
        mixes(op, GMM_TILES, [DEEPSEEK], dtype=[FP8], scales=["steps"], groups=["straddle", "one_hot"], **tiles),
        mixes(op, GMM_TILES, [DEEPSEEK], dtype=[FP8_BF16], existing_out=[True], transpose_rhs=[True],
              groups=["one_hot"], **tiles),
        in_both(op, GMM_SMALL, GMM_SHARD, [channels], "residuals", **small),
        # flashinfer#3650: one NaN in a padded row corrupts its tile
        mixes(op, GMM_SMALL, [("20x64", "2x32x16")], dtype=[FP8], data=["poison"], groups=["short"], **small),
        mixes(op, GMM_SMALL, [ROW_CHANNEL], dtype=[(I8, F32)], data=["poison"], groups=["short"], **small),
        mixes(op, GMM_CLIMB, [ROW_CHANNEL], dtype=[(I8, F32)], tiling=[(16, 512, 32)], groups=["balanced"]),
        *(
            mixes(op, shape, [ROW_CHANNEL], dtype=[FP8_BF16], groups=["balanced"])
            for shape in (dict(M=0, K=128, N=64, G=3), dict(M=64, K=0, N=64, G=3), dict(M=64, K=128, N=0, G=3))
        ),
        model(op, DEEPSEEK_V3, dict(M=256, K=DEEPSEEK_V3.hidden, N=128), DEEPSEEK, DEEPSEEK_V3.name, dtype=[FP8],
              tier="full"),
        model(op, QWEN3_30B, dict(M=256, K=QWEN3_30B.hidden, N=128), DEEPSEEK, dtype=[FP8_BF16]),
        mixes(op, GMM_DOTS, [DEEPSEEK], dtype=[FP8], tiling=[(256, 640, 512)], transpose_rhs=[True],
              groups=["straddle"]),
        model(op, DEEPSEEK_V3, dict(M=256, K=DEEPSEEK_V3.hidden, N=128), ROW_CHANNEL, dtype=[(I8, F32)], tier="full"),
        # What full adds: everything against everything.
        mixes(op, GMM_LONG, [("1x512", "1x256x1")], dtype=[(I8, F32)], scales=["steps"], groups=["straddle"],
              tier="full"),
        mixes(op, GMM_SQUARE, [("1x128", "1x64x32")], dtype=[(I8, F32)], transpose_rhs=[True], groups=["zipf"],
              tier="full"),
        mixes(op, GMM_TAIL, [channels], dtype=[FP8], tiling=[(32, 256, 128), (128, 512, 128)], scales=["steps"],
              groups=["straddle"], tier="full"),
        mixes(op, GMM_TILES, [("1x64", "1x32xN")], dtype=[FP8], data=["wide", "poison"], groups=["short"],
              tier="full", **tiles),
        mixes(op, GMM_LONG, GMM_LAYOUTS, dtype=[FP8_BF16, (E5M2, F32), (I8, F32), (I8, BF16)],
              scales=["varied", "steps"], groups=["zipf"], tier="full"),
        mixes(op, GMM_SQUARE, GMM_LAYOUTS[:6], dtype=[FP8, (I8, BF16)], transpose_rhs=[True],
              existing_out=[False, True], groups=["short"], tier="full"),
        mixes(op, GMM_SMALL, [ROW_CHANNEL, ("20x64", "2x32x16")], dtype=[FP8], groups=PATTERNS,
              existing_out=[False, True], tier="full", **small),
        pairs(op, GMM_LONG, PAIRS + MORE_PAIRS, [ROW_CHANNEL, ("1x256", "1x32x32")], scales=["steps"], groups=["zipf"],
              tier="full"),
        pairs(op, GMM_SQUARE, PAIRS, [ROW_CHANNEL], transpose_rhs=[True], groups=["zipf"], tier="full"),
        mixes(op, GMM_SMALL, [channels], dtype=[FP8, FP8_BF16, (I8, F32)], data=TRAINED, groups=["short"], tier="full",
              **small),
        mixes(op, dict(M=64, K=128, N=64, G=0), [ROW_CHANNEL], dtype=[FP8_BF16], groups=["balanced"], tier="full"),
    ]  # fmt: skip
    return op.with_cases(*parts)


COLUMNS = ("128x1", "128x1")
TGMM_LAYOUTS = [
    COLUMNS,
    ("Mx1", "Mx1"),
    ("MxK", "MxN"),
    ("128x64", "128x32"),
    ("32x1", "64x1"),
    ("256x1", "64x32"),
    ("128x1", "Mx1"),
    ("32x32", "128x1"),
]
TGMM_SMALL = dict(M=384, K=160, N=128, G=5)
TGMM_SHARD = dict(M=256, K=96, N=64, G=2)
TGMM_MIX = dict(M=512, K=64, N=64, G=4)
TGMM_LONG = dict(M=1024, K=128, N=64, G=3)
TGMM_DOTS = dict(M=1024, K=512, N=384, G=2)


def with_tgmm_cases(op: Op) -> Op:
    """tgmm_quantized with its cases."""
    small = dict(tiling=[(128, 64, 128)])
    parts = [
        mixes(op, TGMM_SMALL, [COLUMNS], dtype=[FP8, FP8_BF16], groups=["straddle"], tier="smoke", **small),
        mixes(op, TGMM_SMALL, [("Mx1", "Mx1")], dtype=[(I8, F32)], groups=["straddle"], tier="smoke", **small),
        mixes(op, TGMM_MIX, [COLUMNS], dtype=[FP8], scales=["steps"], groups=["straddle"]),
        one_in(3, mixes(op, TGMM_MIX, TGMM_LAYOUTS, dtype=[FP8], scales=["steps"], groups=["straddle"]), first=2),
        mixes(op, TGMM_LONG, [("512x1", "256x1")], dtype=[FP8], scales=["steps"], groups=["straddle"]),
        one_in(2, pairs(op, TGMM_SMALL, PAIRS, [COLUMNS], groups=["straddle"], **small), first=1),
        # primatrix/tokamax#4: the count of sub-blocks is taken from tk instead of tm, wrong where tm > block
        mixes(op, TGMM_SMALL, [COLUMNS], dtype=[FP8], tiling=[(384, 128, 128), (64, 128, 64)], scales=["steps"],
              groups=["straddle"]),
        mixes(op, TGMM_SMALL, [("64x1", "32x1")], dtype=[FP8], tiling=[(256, 64, 128), (32, 256, 128)],
              scales=["steps"], groups=["straddle"]),
        in_both(op, TGMM_SMALL, TGMM_SHARD, [COLUMNS], "correlated", **small),
        mixes(op, TGMM_SMALL, [("128x128", "32x1")], dtype=[(I8, F32)], data=["poison"], groups=["short"]),
        mixes(op, dict(M=4096, K=24, N=16, G=2), [("Mx1", "Mx1")], dtype=[(I8, F32)], groups=["one_hot"]),
        *(
            mixes(op, shape, [("Mx1", "Mx1")], dtype=[FP8_BF16], groups=["balanced"])
            for shape in (dict(M=0, K=64, N=64, G=3), dict(M=64, K=0, N=64, G=3))
        ),
        mixes(op, TGMM_DOTS, [COLUMNS], dtype=[FP8], tiling=[(256, 512, 384)], groups=["straddle"]),
        # groups of one tile, and of two
        mixes(op, TGMM_MIX, [COLUMNS, ("Mx1", "Mx1")], dtype=[FP8], scales=["steps"], tiling=[(128, 64, 64)],
              groups=["balanced"]),
        mixes(op, TGMM_MIX, [COLUMNS], dtype=[FP8_BF16], scales=["steps"], tiling=[(64, 64, 64)], groups=["balanced"]),
        model(op, DEEPSEEK_V3, dict(M=256, K=DEEPSEEK_V3.hidden // 8, N=128), COLUMNS, DEEPSEEK_V3.name, dtype=[FP8],
              tier="full"),
        model(op, QWEN3_30B, dict(M=256, K=QWEN3_30B.hidden // 8, N=128), COLUMNS, dtype=[FP8_BF16], tier="full"),
        # What full adds: everything against everything.
        mixes(op, TGMM_LONG, TGMM_LAYOUTS, dtype=[FP8_BF16, (E4M3, F16), (E5M2, F32), (I8, F32)],
              scales=["varied", "steps"], groups=["zipf"], tier="full"),
        mixes(op, TGMM_SMALL, [("Mx1", "Mx1"), ("32x32", "128x1")], dtype=[FP8], groups=PATTERNS,
              existing_out=[False, True], tier="full", **small),
        mixes(op, TGMM_SMALL, [COLUMNS], dtype=[FP8, FP8_BF16], data=TRAINED, groups=["short"], tier="full", **small),
        pairs(op, TGMM_LONG, PAIRS + MORE_PAIRS, [("Mx1", "Mx1"), ("256x1", "64x32")], scales=["steps"],
              groups=["zipf"], tier="full"),
        *(
            mixes(op, shape, [("Mx1", "Mx1")], dtype=[FP8_BF16], groups=["balanced"], tier="full")
            for shape in (dict(M=64, K=64, N=0, G=3), dict(M=64, K=64, N=64, G=0))
        ),
    ]  # fmt: skip
    return op.with_cases(*parts)


GMM_QUANTIZED, TGMM_QUANTIZED = with_gmm_cases(_GMM), with_tgmm_cases(_TGMM)
