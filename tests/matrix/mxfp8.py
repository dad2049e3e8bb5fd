"""The MXFP8 quantisers, compared bit for bit, and grouped_gemm: their cases, and how their inputs are drawn."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cpu_golden.grouped_gemm import grouped_gemm
from cpu_golden.mxfp8 import mxfp8_dequantize, mxfp8_dual_quantize, mxfp8_quantize
from cpu_golden.swizzle import swizzle_scales
from op_arguments.mxfp8 import E8M0, MX_BLOCK, swizzled_shape
from op_arguments.quantize import FP8
from parity import Array, Case, Contract, Groups, Op, Scales
from parity.op import Backend, Inputs
from tests.matrix import gmm as unquantised
from tests.matrix.gmm import DISTRIBUTIONS, PATTERNS, SMALL_TILES, grouped, groups_and_out, shapes, sums_rows
from tests.matrix.models import DEEPSEEK_V3, GPT_OSS_120B, Experts
from tests.matrix.ops import BF16, F16, F32, TRAINED
from tests.matrix.quantize import EMPTY, EXTREME, MATRIX, ODD, bit_exact, in_blocks, shape
from tests.matrix.quantized_gmm import E4M3, E5M2, rhs_dtype

# ------------------------------------------------------------------------------------------------------ quantisers


def blocks_of(size: int) -> int:
    return -(-size // MX_BLOCK)


def with_blocks(sizes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of the scales of an operand of these sizes."""
    axis %= len(sizes)
    return (*sizes[:axis], blocks_of(sizes[axis]), *sizes[axis + 1 :])


def in_mx_blocks(sizes: tuple[int, ...], axis: int) -> Mapping[str, np.ndarray]:
    return in_blocks(sizes, tuple(MX_BLOCK if a == axis % len(sizes) else 1 for a in range(len(sizes))))


def axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    """The block of each element of a payload."""
    if c.op == "mxfp8_dual_quantize":
        return {name: in_mx_blocks(shape(c), axis) for name, axis in (("rowwise", -1), ("columnwise", -2))}
    return {"qvalue" if c.op == "mxfp8_quantize" else "out": in_mx_blocks(shape(c), c.axis)}


def quantise_arguments(c: Case) -> Mapping[str, object]:
    along = {} if c.op == "mxfp8_dual_quantize" else {"axis": c.axis}
    return {**along, "dtype": c.out, "scale_rounding": c.rounding, "check_finite": False}


_QUANTIZE, _DUAL = (
    bit_exact(
        golden,
        inputs=lambda c: {"x": Array(shape(c), c.dtype, sum_over=-1)},
        arguments=quantise_arguments,
        axes=axes,
        defaults=dict(axis=-1, rounding="up"),
        spelled=("rounding",),
        indifferent=("check_finite", "interpret"),
    )
    for golden in (mxfp8_quantize, mxfp8_dual_quantize)
)
_DEQUANTIZE = bit_exact(
    mxfp8_dequantize,
    inputs=lambda c: {"qvalue": Array(shape(c), c.dtype), "scale": Array(with_blocks(shape(c), c.axis), E8M0)},
    arguments=lambda c: {"dtype": c.out},
    axes=axes,
    defaults=dict(axis=-1),
)
_SWIZZLE = bit_exact(
    swizzle_scales, inputs=lambda c: {"scale": Array(shape(c), E8M0)}, arguments=lambda c: {}, defaults={}
)

SHORT_BLOCKS = [dict(M=37, K=45)]
WEIGHTS = [dict(G=3, K=96, N=160)]
UP, FLOOR = "up", "floor"

MXFP8_QUANTIZE = _QUANTIZE.with_cases(
    _QUANTIZE.grid(MATRIX, dtype=[(BF16, E4M3)], rounding=[UP, FLOOR], tier="smoke"),
    _QUANTIZE.grid(MATRIX, dtype=[(F32, E4M3)], data=EXTREME, axis=[0], rounding=[UP]),
    _QUANTIZE.grid(MATRIX, dtype=[(F32, E5M2)], data=["ranges"], axis=[1], rounding=[FLOOR]),
    _QUANTIZE.grid(SHORT_BLOCKS, dtype=[(F32, E4M3)], data=["bits"], axis=[0, 1], rounding=[FLOOR]),
    _QUANTIZE.grid(WEIGHTS, dtype=[(BF16, E4M3)], data=["wide"], axis=[1]),
    _QUANTIZE.grid(EMPTY, dtype=[(BF16, E4M3)], axis=[0, 1]),
    _QUANTIZE.grid(
        MATRIX + ODD + SHORT_BLOCKS, dtype=[(dtype, q) for dtype in (BF16, F32, F16) for q in FP8],
        data=["outliers", *EXTREME], axis=[0, 1], rounding=[UP, FLOOR], tier="full",
    ),
)  # fmt: skip
MXFP8_DUAL_QUANTIZE = _DUAL.with_cases(
    _DUAL.grid(MATRIX, dtype=[(BF16, E4M3)], tier="smoke"),
    _DUAL.grid(MATRIX, dtype=[(F32, E5M2)], data=["bits"], rounding=[FLOOR]),
    _DUAL.grid(WEIGHTS, dtype=[(BF16, E4M3)], data=["ranges"]),
    _DUAL.grid(SHORT_BLOCKS, dtype=[(F32, E4M3)], data=["bits"]),
    _DUAL.grid(MATRIX + SHORT_BLOCKS, dtype=[(BF16, E4M3), (F32, E4M3), (F16, E5M2)], data=["outliers", *EXTREME],
               rounding=[UP, FLOOR], tier="full"),
)  # fmt: skip
MXFP8_DEQUANTIZE = _DEQUANTIZE.with_cases(
    _DEQUANTIZE.grid(MATRIX, dtype=[(E4M3, F32)], data=["bits"], tier="smoke"),
    _DEQUANTIZE.grid(MATRIX, dtype=[(E5M2, F32), (E4M3, BF16)], data=["bits"], axis=[0]),
    _DEQUANTIZE.grid(SHORT_BLOCKS, dtype=[(E5M2, BF16)], data=["bits"], axis=[0, 1]),
    _DEQUANTIZE.grid(MATRIX + SHORT_BLOCKS, dtype=[(q, out) for q in FP8 for out in (F32, BF16)], data=["bits"],
                     axis=[0, 1], tier="full"),
)  # fmt: skip
SWIZZLE_SCALES = _SWIZZLE.with_cases(
    _SWIZZLE.grid([dict(M=256, K=8)], dtype=[(E8M0, E8M0)], data=["bits"], tier="smoke"),
    _SWIZZLE.grid([dict(M=130, K=5), dict(G=3, M=1, K=1)], dtype=[(E8M0, E8M0)], data=["bits"]),
)

MXFP8_QUANTIZERS = (MXFP8_QUANTIZE, MXFP8_DUAL_QUANTIZE, MXFP8_DEQUANTIZE, SWIZZLE_SCALES)

# ---------------------------------------------------------------------------------------------------- grouped_gemm


def wide_dtype(c: Case) -> str:
    """What both operands are dequantised to."""
    return F32 if F32 in (c.dtype, rhs_dtype(c)) else BF16


def contract(c: Case, backend: Backend) -> Contract:
    """Products of dequantised operands: a block-scaled matrix unit's are the same, and exact as well.

    What is summed over rows is cut where blocks are, which are those of all rows; where there are none it is tgmm.
    """
    name = "tgmm" if sums_rows(c) else "gmm"
    wide = unquantised.contract(replace(c, op=name, dtype=wide_dtype(c)), backend)
    has_blocks = c.dtype in FP8 or rhs_dtype(c) in FP8
    return replace(wide, schedule={"aligned": True}) if sums_rows(c) and has_blocks else wide


def scales(c: Case, name: str, dtype: str, sizes: tuple[int, ...], axis: int) -> Mapping[str, Scales]:
    """The scales of an operand, under its name; none for one that is not quantised."""
    if dtype not in FP8:
        return {}
    of_blocks = with_blocks(sizes, axis)
    if c.scale_layout == "swizzled":
        rest = [size for a, size in enumerate(of_blocks) if a != axis]
        of_blocks = swizzled_shape((*rest, of_blocks[axis]))
    return {f"{name}_scale": Scales(of_blocks, c.scales, E8M0)}


def gemm_inputs(c: Case) -> Mapping[str, Array | Scales | Groups | None]:
    of = shapes(c)
    return {
        "lhs": Array(of.lhs, c.dtype, sum_over=of.lhs_axis),
        **scales(c, "lhs", c.dtype, of.lhs, of.lhs_axis),
        "rhs": Array(of.rhs, rhs_dtype(c), sum_over=of.rhs_axis, pair_sign=-1),
        **scales(c, "rhs", rhs_dtype(c), of.rhs, of.rhs_axis),
        **groups_and_out(c),
    }


def unread(c: Case, inputs: Inputs) -> Mapping[str, np.ndarray]:
    """As for gmm and tgmm; and the scales of nothing but such elements."""
    masks = dict(unquantised.inactive(c, inputs))
    of = shapes(c)
    for name, axis in (("lhs", of.lhs_axis), ("rhs", of.rhs_axis)):
        if inputs.get(f"{name}_scale") is not None and c.scale_layout == "plain":
            first = range(0, masks[name].shape[axis], MX_BLOCK)
            masks[f"{name}_scale"] = np.logical_and.reduceat(masks[name], first, axis=axis)
    return masks


_GEMM = grouped(
    grouped_gemm,
    inputs=gemm_inputs,
    arguments=lambda c: {**unquantised.arguments(c), "ragged": c.ragged, "scale_layout": c.scale_layout},
    contract=contract,
    representative=lambda c: c.tier == "smoke" and c.out == F32 and c.ragged == "lhs",
    unread=unread,
    defaults=dict(
        ragged="lhs", rhs_dtype=None, scales="varied", scale_layout="plain", transpose_rhs=False, existing_out=False,
        shard=None, tiling=None, groups="zipf",
    ),
    spelled=("ragged", "groups"),
)  # fmt: skip

SMALL = dict(M=300, K=256, N=160, G=6)
ROWS = dict(M=600, K=136, N=160, G=6)  # three tiles of 256 rows, the fewest that a tile of scales has on the TPU
WHOLE = dict(M=256, K=96, N=128, G=3)  # rows of whole registers: the TPU reads their scales transposed
ODD_K = dict(M=80, K=300, N=48, G=4)  # a short last block, in the second tile
ODD_M = dict(M=301, K=40, N=48, G=4)
SHARD, SHARD_ROWS = dict(M=200, K=96, N=64, G=2), dict(M=300, K=64, N=48, G=2)
ROW_TILES = (256, 64, 128)
FORWARD, BACKWARD = ["lhs"], ["contracting"]
# dtype of lhs and output, dtype of rhs
PAIRS = [((E4M3, F32), E5M2), ((E5M2, BF16), E4M3), ((BF16, F32), E4M3), ((E4M3, BF16), BF16), (F32, E4M3)]
PLAIN_PAIRS = [(BF16, BF16), (F32, F32)]


def pairs(op: Op, dtypes: list[object], shape: Mapping[str, int], **options: object) -> tuple[Case, ...]:
    """A case for every pair of operand dtypes."""
    parts = (op.grid([shape], dtype=[dtype], rhs_dtype=[rhs], **options) for dtype, rhs in dtypes)
    return tuple(case for part in parts for case in part)


def model(op: Op, experts: Experts, ragged: str, name: str = "", **options: object) -> tuple[Case, ...]:
    """A published model's expert layer: a shard of 4 experts, fewer rows and columns; the summed axis stays whole.

    name: the model's, where the case is a line of `parity run`.
    """
    held = (experts.experts // 4, experts.experts)
    k = experts.hidden if ragged == "lhs" else experts.hidden // 32
    shape = dict(M=128 if ragged == "lhs" else 512, K=k, N=64, G=4)
    return op.grid([shape], ragged=[ragged], shard=[held], groups=["zipf"], model=name, **options)


def with_gemm_cases(op: Op) -> Op:
    """grouped_gemm with its cases."""
    forward = dict(ragged=FORWARD, tiling=[SMALL_TILES])
    backward = dict(ragged=BACKWARD, tiling=[ROW_TILES])
    mxfp8 = [(E4M3, F32)]
    in_swizzled = dict(scale_layout=["swizzled"], shard=[(3, 8)], existing_out=[True])
    parts = [
        op.grid([SMALL], dtype=[(E4M3, F32), (E4M3, BF16)], groups=["straddle"], tier="smoke", **forward),
        op.grid([ROWS], dtype=[(E4M3, F32)], groups=["straddle"], tier="smoke", **backward),
        op.grid([SMALL], dtype=mxfp8, scales=["steps"], transpose_rhs=[True], groups=["zipf"], **forward),
        op.grid([WHOLE], dtype=mxfp8, scales=["steps"], transpose_rhs=[True], groups=["zipf"], **forward),
        op.grid([ODD_K], dtype=mxfp8, ragged=FORWARD, tiling=[(32, 256, 128)], scales=["steps"], groups=["ones"]),
        op.grid([ODD_M], dtype=mxfp8, scales=["steps"], groups=["straddle"], **backward),
        op.grid([SMALL], dtype=mxfp8, data=["poison", "residuals"], groups=["short"], **forward),
        op.grid([ROWS], dtype=mxfp8, data=["one_signed", "poison"], groups=["short"], **backward),
        op.grid([SHARD], dtype=mxfp8, groups=["zipf"], **in_swizzled, **forward),
        op.grid([SHARD_ROWS], dtype=[(E4M3, BF16)], groups=["zipf"], **in_swizzled, **backward),
        op.grid([SHARD_ROWS], dtype=[(E4M3, BF16)], groups=["empty_first"], **backward),
        pairs(op, PAIRS[2:3], SHARD, groups=["straddle"], **forward),
        model(op, GPT_OSS_120B, "contracting", GPT_OSS_120B.name, dtype=[(E4M3, F32)], tier="full"),
        model(op, DEEPSEEK_V3, "contracting", dtype=[(E4M3, F32)], tier="full"),
        model(op, DEEPSEEK_V3, "lhs", dtype=[(E4M3, BF16)], tier="full"),
        model(op, GPT_OSS_120B, "lhs", GPT_OSS_120B.name, dtype=[(E4M3, F32)], tier="full"),
        # What full adds: everything against everything.
        op.grid([SHARD], dtype=mxfp8, groups=["straddle"], tier="full", **in_swizzled, **forward),
        op.grid([SHARD], dtype=mxfp8, shard=[(3, 8)], existing_out=[True], groups=["zipf"], tier="full", **forward),
        op.grid([SHARD_ROWS], dtype=mxfp8, shard=[(3, 8)], existing_out=[True], groups=["zipf"], tier="full",
                **backward),
        op.grid([SHARD], dtype=mxfp8, scale_layout=["swizzled"], groups=["short"], tier="full", **forward),
        op.grid([SHARD_ROWS], dtype=mxfp8, scale_layout=["swizzled"], groups=["short"], tier="full", **backward),
        pairs(op, PAIRS[1:2], SHARD, groups=["straddle"], tier="full", **forward),
        pairs(op, PAIRS + PLAIN_PAIRS, SMALL, groups=["zipf"], transpose_rhs=[False, True], tier="full", **forward),
        pairs(op, PAIRS + PLAIN_PAIRS, ROWS, groups=["zipf"], tier="full", **backward),
        pairs(op, PLAIN_PAIRS, ROWS, data=["cancellation"], groups=["straddle"], tier="full", **backward),
        op.grid([SMALL], dtype=mxfp8, groups=PATTERNS, existing_out=[False, True], tier="full", **forward),
        op.grid([ROWS], dtype=mxfp8, groups=PATTERNS, existing_out=[False, True], tier="full", **backward),
        op.grid([SMALL], dtype=mxfp8, data=DISTRIBUTIONS + TRAINED, groups=["short"], scales=["varied", "steps"],
                   tier="full", **forward),
        op.grid([ROWS], dtype=mxfp8, data=DISTRIBUTIONS + TRAINED, groups=["short"], scales=["varied", "steps"],
                   tier="full", **backward),
        op.grid([SHARD], dtype=mxfp8, shard=[(0, 8), (6, 8)], groups=["zipf", "short"],
                   scale_layout=["plain", "swizzled"], transpose_rhs=[False, True], tier="full", **forward),
        op.grid([dict(M=0, K=64, N=48, G=3), dict(M=64, K=0, N=48, G=3), dict(M=64, K=64, N=0, G=3),
                    dict(M=64, K=64, N=48, G=0)],
                   dtype=[(E4M3, BF16)], ragged=FORWARD + BACKWARD, groups=["balanced"], tier="full"),
    ]  # fmt: skip
    return op.with_cases(*parts)


GROUPED_GEMM = with_gemm_cases(_GEMM)
