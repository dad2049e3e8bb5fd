"""Faults planted in the block-scaled kernels: each is one that a public kernel has, or has had."""

import pytest

from tests.matrix.moe import GROUPED_DENSE, GROUPED_DENSE_BWD
from tests.matrix.quantize import FP8_QUANTIZE, INT8_QUANTIZE
from tests.matrix.quantized_gmm import E4M3, GMM_QUANTIZED, TGMM_QUANTIZED
from tests.meta.faults.planting import check_is_caught, gpu, having, named, pairs, tpu

OPS = (GMM_QUANTIZED, TGMM_QUANTIZED, GROUPED_DENSE, GROUPED_DENSE_BWD, FP8_QUANTIZE, INT8_QUANTIZE)


block_scaled = having(tier="smoke", dtype=E4M3)
"""Both operands in fp8 with scales that change along the contraction."""


def boundaries_in_blocks(c):
    return block_scaled(c) and c.groups == "straddle"


def tiles_beyond_blocks(c):
    return bool(c.tiling) and c.scales == "steps" and c.tiling[0] > 128


def stepped(c):
    return c.scales == "steps" and c.rhs_blocks == "1x128x128" and c.lhs_blocks == "1x128" and not c.transpose_rhs


def stepped_in_tiles(c):
    """Tiles of a group alone, and several scales of the weights in each."""
    return stepped(c) and c.tiling == (128, 256, 256)


def stepped_and_transposed(c):
    return c.scales == "steps" and c.rhs_blocks == "1x128x128" and c.transpose_rhs


def k_tail(c):
    """K of 384 in tiles that do not divide it."""
    return c.K == 384 and c.scales == "steps" and c.tiling[1] == 256 and c.M == 80


def climbing(c):
    return c.dtype == "int8" and 4096 in (c.M, c.K)


zero_blocks = having(data="ranges", dtype="bfloat16")


def other_blocks(c):
    return c.block_size in (32, 64)


def tiled(c):
    """Groups of whole tiles."""
    return c.groups == "balanced" and c.M == 512


def in_tiles(c):
    """Blocks of more than a tile."""
    return c.block_size is None and c.K > 2**16


def overwritten(c):
    return c.existing_out and not c.shard


FAULTS = named({
    # primatrix/tokamax#4
    "the count of scale blocks is taken from the wrong axis": [
        tpu("tgmm_quantized", "part = grid.summed, grid.part",
            "part = grid.summed, min(grid.problem.block, grid.tile[1])", lambda c: c.lhs_blocks == "512x1"),
        gpu("tgmm_quantized", "_step(tm, path, p.block, p.m)",
            "_step(tm, path, tk, p.m)", tiles_beyond_blocks),
    ],
    "blocks of M are counted from the group's first row": [
        tpu("tgmm_quantized", "row = row_of(scale, i, columns)",
            "row = row_of(scale, jnp.maximum(i - self.own.start // part, 0), columns)", tiles_beyond_blocks),
        gpu("tgmm_quantized", "_scales_of_rows(lhs, region) + at // SCALING.lhs_block",
            "_scales_of_rows(lhs, region) + (at - region.start // 16 * 16) // SCALING.lhs_block", boundaries_in_blocks),
    ],
    # tpu-inference#2609
    "every other scale is skipped": [
        tpu("gmm_quantized", "row_of(scales.rhs, part, columns))",
            "row_of(scales.rhs, part // 2 * 2, columns))", stepped),
        gpu("gmm_quantized", "at // SCALING.rhs_block * rhs.scale_row",
            "at // SCALING.rhs_block // 2 * 2 * rhs.scale_row", stepped),
    ],
    "the scale is not transposed with rhs": [
        tpu("gmm_quantized", "by_columns = scale.swapaxes(1, 2) if grid.transpose_rhs else scale",
            "by_columns = scale", stepped_and_transposed),
        gpu("gmm_quantized", "None if rhs_scale is None else rhs_scale.transpose(1, 2)",
            "rhs_scale", stepped_and_transposed),
    ],
    "a scale of the weights serves the next columns too": [
        tpu("gmm_quantized", "pl.ds(columns.start + tile.start, LANES))",
            "pl.ds(columns.start, LANES))", stepped_in_tiles),
    ],
    "the K tail is dropped": [
        tpu("gmm_quantized", "pl.when(step == last_step)(lambda: body(rest))", "pass", k_tail),
        gpu("gmm_quantized", "range(first, end, DEPTH)", "range(first, (end - 1) // DEPTH * DEPTH, DEPTH)", k_tail),
    ],
    # tpu-inference's gmm_v2 below 256: 2.35e-3 instead of 5e-8
    "scales are applied before the dot, in bfloat16": [
        tpu("gmm_quantized",
            "sums = multiply(weights, x, contract[::-1]) if self.plan.transposed else multiply(x, weights, contract)",
            "scale = row_of(self.operands.lhs_scale, i, rows)[:1]\n"
            "        sums = 1 / scale.T * multiply("
            "(x.astype(jnp.float32) * scale.T).astype(jnp.bfloat16), weights, contract)", block_scaled),
        gpu("gmm_quantized", "partial = _dot_of_step(a, b, DOT)\n"
            "        at = tl.full((), 0, tl.int64) + first\n"
            "        if SCALING.lhs_block:\n"
            "            scales = _scales_of_rows(lhs, region) + at // SCALING.lhs_block * lhs.scale_column\n"
            "            partial *= tl.load(scales, mask=region.in_rows, other=0)\n",
            "at = tl.full((), 0, tl.int64) + first\n"
            "        scales = _scales_of_rows(lhs, region) + at // SCALING.lhs_block * lhs.scale_column\n"
            "        scale = tl.load(scales, mask=region.in_rows, other=0)\n"
            "        scaled = (a.to(tl.float32) * scale).to(tl.bfloat16)\n"
            '        partial = tl.dot(scaled.to(tl.float32), b.to(tl.float32), input_precision="ieee")\n',
            block_scaled),
    ],
    # gmm_v2's default: 4.2e-3 instead of 2.0e-3
    "the accumulator is bfloat16": [
        tpu("gmm_quantized", "return sums if total is None else total + sums",
            "return sums if total is None else (total + sums).astype(jnp.bfloat16).astype(sums.dtype)", block_scaled),
        tpu("tgmm_quantized", "self.acc[rows, columns] = total",
            "self.acc[rows, columns] = total.astype(jnp.bfloat16).astype(total.dtype)", block_scaled),
        gpu("gmm_quantized", "sums += partial", "sums = (sums + partial).to(tl.bfloat16).to(tl.float32)", block_scaled),
        gpu("tgmm_quantized", "sums += partial",
            "sums = (sums + partial).to(tl.bfloat16).to(tl.float32)", block_scaled),
    ],
    "a dot that waits for sums multiplies them": [
        tpu("gmm_quantized", "jnp.where(true, words[:8], bits[:, :width])", "bits[:, :width]",
            lambda c: c.K == 640 and c.N == 512),
        tpu("tgmm_quantized", "jnp.where(true, words[:8], bits[:, :width])", "bits[:, :width]",
            lambda c: c.K == 512 and c.N == 384),
    ],
    "the first tile of a group is taken for its only one": [
        tpu("tgmm_quantized", "only = whole & first_of_group & last_of_group", "only = whole & first_of_group", tiled),
    ],
    "the last tile of a group is taken for its only one": [
        tpu("tgmm_quantized", "only = whole & first_of_group & last_of_group", "only = whole & last_of_group", tiled),
    ],
    "a group's only tile is stored without what scales all of it": [
        tpu("tgmm_quantized", "            self.store(rows, columns, total, column)\n        else",
            "            self.out[rows, columns] = total.astype(self.out.dtype)\n        else",
            lambda c: tiled(c) and c.lhs_blocks == "Mx1"),
    ],
    "the group's boundary is masked in its first block alone": [
        tpu("tgmm_quantized", "self.own.copy(",
            "self.own._replace(end=jnp.where(rows.start <= self.own.start, self.own.end, self.own.tm)).copy(",
            lambda c: c.M >= 512 and c.lhs_blocks == "128x1"),
        gpu("tgmm_quantized", "region, TILE.m, SCALING is not None, False, ADDED",
            "region, TILE.m, SCALING is not None, True, ADDED", boundaries_in_blocks),
    ],
    "int8 is accumulated in float32 beyond 2^24": [
        tpu("gmm_quantized", "exact = lhs.dtype == rhs.dtype == jnp.int8 and not scaled",
            "exact = False", climbing, data="integers"),
        gpu("gmm_quantized", 'return path.dtype == "int8" and block >= size and size <= INT32_PRODUCTS',
            "return False", climbing, data="integers"),
        tpu("tgmm_quantized", "exact = lhs.dtype == rhs.dtype == jnp.int8 and not scaled",
            "exact = False", climbing, data="integers"),
        gpu("tgmm_quantized", 'return path.dtype == "int8" and block >= size and size <= INT32_PRODUCTS',
            "return False", climbing, data="integers"),
    ],
    # tokamax's in-kernel fp8: an all-zero row gives NaN
    "the scale of a zero block is 0": [
        tpu("fp8_quantize int8_quantize", "return jnp.where(absmax < SMALLEST, 1.0, scale)",
            "return jnp.where(absmax < SMALLEST, 0.0, scale)", zero_blocks),
        gpu("fp8_quantize int8_quantize", "tl.where(largest == 0, ONE,", "tl.where(largest == 0, 0,", zero_blocks),
    ],
    "a scale is that of the last tile alone": [
        tpu("fp8_quantize int8_quantize", "pl.when(step == 0)(partial(_clear, memory))", "_clear(memory)", in_tiles),
    ],
    "block_size is not forwarded": [
        tpu("grouped_dense grouped_dense_bwd", "fp8_quantize(x, axis, block_size",
            "fp8_quantize(x, axis, None", other_blocks),
        gpu("grouped_dense grouped_dense_bwd", "fp8_quantize(x, axis, block_size",
            "fp8_quantize(x, axis, None", other_blocks),
    ],
    # megablox: 1 on rows that it overwrote
    "the gradient of existing_out passes overwritten rows": [
        tpu("grouped_dense_bwd", "passed = _outside(dout, *shard, groups) if options.fills else None",
            "passed = dout if options.fills else None", overwritten),
        gpu("grouped_dense_bwd", "passed = _outside(dout, group_sizes, group_offset, ctx.groups)",
            "passed = dout", overwritten),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), pairs(FAULTS, OPS))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
