"""MXFP8's scales in the layout that block-scaled matrix units read; it is defined in `cpu_golden/swizzle.py`.

No TPU reads them so; here it is for what is shared with GPUs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from op_arguments.mxfp8 import E8M0, SWIZZLED_COLUMNS, SWIZZLED_ROWS, check_swizzle, check_unswizzle, swizzled_shape


def swizzle_scales(scale: jax.Array) -> jax.Array:
    """Scales [..., R, C] as `cpu_golden.swizzle` defines them: [..., ceil(R / 128), ceil(C / 4), 32, 16]."""
    check_swizzle(scale)
    *lead, rows, columns = scale.shape
    missing = [(0, 0)] * len(lead) + [(0, -rows % SWIZZLED_ROWS), (0, -columns % SWIZZLED_COLUMNS)]
    whole = jnp.pad(lax.bitcast_convert_type(scale, jnp.uint8), missing)
    tiles_r, tiles_c = whole.shape[-2] // SWIZZLED_ROWS, whole.shape[-1] // SWIZZLED_COLUMNS
    split = whole.reshape(*lead, tiles_r, SWIZZLED_ROWS // 32, 32, tiles_c, SWIZZLED_COLUMNS)
    tiles = split.swapaxes(-4, -2).reshape(swizzled_shape(scale.shape))
    return lax.bitcast_convert_type(tiles, jnp.dtype(E8M0))


def unswizzle_scales(swizzled: jax.Array, rows: int, columns: int) -> jax.Array:
    """The scales [..., rows, columns] of which `swizzled` is the `swizzle_scales`."""
    check_unswizzle(swizzled, rows, columns)
    *lead, tiles_r, tiles_c, _, _ = swizzled.shape
    in_bytes = lax.bitcast_convert_type(swizzled, jnp.uint8)
    tiles = in_bytes.reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32, SWIZZLED_COLUMNS)
    whole = tiles.swapaxes(-4, -2).reshape(*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS)
    return lax.bitcast_convert_type(whole[..., :rows, :columns], jnp.dtype(E8M0))
