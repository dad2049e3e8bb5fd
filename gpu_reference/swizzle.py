"""MXFP8's scales in the layout that block-scaled matrix units read; it is defined in `cpu_golden/swizzle.py`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from op_arguments.mxfp8 import SWIZZLED_COLUMNS, SWIZZLED_ROWS, check_swizzle, check_unswizzle


def swizzle_scales(scale: Tensor) -> Tensor:
    """Scales [..., R, C] as `cpu_golden.swizzle` defines them: [..., ceil(R / 128), ceil(C / 4), 32, 16]."""
    check_swizzle(scale)
    *lead, rows, columns = scale.shape
    whole = pad(scale.view(torch.uint8), (0, -columns % SWIZZLED_COLUMNS, 0, -rows % SWIZZLED_ROWS))
    tiles_r, tiles_c = whole.shape[-2] // SWIZZLED_ROWS, whole.shape[-1] // SWIZZLED_COLUMNS
    split = whole.reshape(*lead, tiles_r, SWIZZLED_ROWS // 32, 32, tiles_c, SWIZZLED_COLUMNS)
    tiles = split.transpose(-4, -2).reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32 * SWIZZLED_COLUMNS)
    return tiles.contiguous().view(scale.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The scales [..., rows, columns] of which `swizzled` is the `swizzle_scales`."""
    check_unswizzle(swizzled, rows, columns)
    *lead, tiles_r, tiles_c, _, _ = swizzled.shape
    tiles = swizzled.view(torch.uint8).reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32, SWIZZLED_COLUMNS)
    whole = tiles.transpose(-4, -2).reshape(*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS)
    return whole[..., :rows, :columns].contiguous().view(swizzled.dtype)
