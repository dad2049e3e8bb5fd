"""MXFP8's scales in the layout that block-scaled matrix units read."""

import numpy as np

from cpu_golden import Array
from op_arguments.mxfp8 import SWIZZLED_COLUMNS, SWIZZLED_ROWS, check_swizzle, check_unswizzle, swizzled_shape


def swizzle_scales(scale: Array) -> Array:
    """Scales [..., R, C] as block-scaled matrix units read them: [..., ceil(R / 128), ceil(C / 4), 32, 16].

    scale: float8_e8m0fnu, R rows (or columns) of an operand with C scales each along the axis that is summed over.
    Tiles of 128 rows and 4 scales, one behind the other; that of row r and column c of a tile is its byte
    (r % 32) · 16 + (r // 32) · 4 + c. What is missing of a whole tile is 0, which stands for 2^-127.
    Source: cuBLAS, "1D Block Scaling Factors Layout". Raises TypeError and ValueError for any other array.
    """
    check_swizzle(scale)
    *lead, rows, columns = scale.shape
    tiles_r, tiles_c = -(-rows // SWIZZLED_ROWS), -(-columns // SWIZZLED_COLUMNS)
    whole = np.zeros((*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS), np.uint8)
    whole[..., :rows, :columns] = scale.view(np.uint8)
    split = whole.reshape(*lead, tiles_r, SWIZZLED_ROWS // 32, 32, tiles_c, SWIZZLED_COLUMNS)
    tiles = split.swapaxes(-4, -2)  # [..., tiles_r, tiles_c, 32, 4, 4]
    return np.ascontiguousarray(tiles).reshape(swizzled_shape(scale.shape)).view(scale.dtype)


def unswizzle_scales(swizzled: Array, rows: int, columns: int) -> Array:
    """The scales [..., rows, columns] of which `swizzled` is the `swizzle_scales`. Raises as it does."""
    check_unswizzle(swizzled, rows, columns)
    *lead, tiles_r, tiles_c, _, _ = swizzled.shape
    tiles = swizzled.view(np.uint8).reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32, SWIZZLED_COLUMNS)
    whole = tiles.swapaxes(-4, -2).reshape(*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS)
    return np.ascontiguousarray(whole[..., :rows, :columns]).view(swizzled.dtype)
