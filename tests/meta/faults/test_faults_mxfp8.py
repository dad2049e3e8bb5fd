"""Faults planted in the MXFP8 kernels: each is one that a public kernel has had, or that the format invites."""

import pytest

from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_DEQUANTIZE, MXFP8_DUAL_QUANTIZE, MXFP8_QUANTIZE, WHOLE
from tests.meta.faults.planting import check_is_caught, gpu, having, named, pairs, tpu

OPS = (GROUPED_GEMM, MXFP8_QUANTIZE, MXFP8_DUAL_QUANTIZE, MXFP8_DEQUANTIZE)


rounded_up = having(tier="smoke", rounding="up")
boundaries_in_blocks = having(tier="smoke", ragged="contracting")
empty_groups = having(ragged="contracting", groups="empty_first")


FAULTS = named({
    "the scale's exponent is off by one": [
        tpu("mxfp8_quantize", "return (254 - (bits_of(kept) >> 23)).astype(jnp.int8)",
            "return (255 - (bits_of(kept) >> 23)).astype(jnp.int8)", rounded_up),
        gpu("mxfp8_quantize", "FORMAT), exponent.to(tl.uint8)", "FORMAT), (exponent + 1).to(tl.uint8)", rounded_up),
    ],
    "the exponent is rounded down where up is asked for": [
        tpu("mxfp8_quantize", 'if self.rounding == "up" else 0', 'if self.rounding == "down" else 0', rounded_up),
        gpu("mxfp8_quantize", "exponent += ((largest & 0x007FFFFF) > 0x00600000).to(tl.int32)",
            "exponent += 0", rounded_up),
    ],
    "a row has another row's scale": [
        tpu("mxfp8_quantize", "stored.T if transposed", "stored.T[:, ::-1] if transposed"),
        tpu("mxfp8_dual_quantize", "stored.T if transposed", "stored.T[:, ::-1] if transposed"),
        tpu("mxfp8_dequantize", "(bits.T if transposed", "(bits.T[::-1] if transposed"),
        tpu("grouped_gemm", "(bits.T if transposed", "(bits.T[::-1] if transposed", having(**WHOLE)),
    ],
    "no product counts as subnormal": [
        tpu("mxfp8_dequantize", "(jnp.min(found) >= USUAL) & (jnp.max(found) <= 1 / USUAL)", "jnp.min(found) >= 0"),
    ],
    "the columnwise payload is the rowwise one": [
        tpu("mxfp8_dual_quantize", "dual.columnwise[..., :m, :k]", "dual.rowwise[..., :m, :k]", rounded_up),
        gpu("mxfp8_dual_quantize", "*_as_mxfp8(results[1], name))",
            "*_as_mxfp8(results[1]._replace(qvalue=results[0].qvalue), name))", rounded_up),
    ],
    # TransformerEngine#2966: groups that are no multiple of 32
    "a group that begins inside a block takes the scale before it": [
        tpu("grouped_gemm", "of_rows = first_block + rows.start // MX_BLOCK",
            "at = first_block + rows.start // MX_BLOCK\n"
            "                    of_rows = jnp.where(self.own.start > at * MX_BLOCK, jnp.maximum(at - 1, 0), at)",
            boundaries_in_blocks),
        gpu("grouped_gemm", "is_block = (block * BLOCK + BLOCK > region.start) & (block * BLOCK < region.end)",
            "is_block = (block * BLOCK + BLOCK > region.start) & (block * BLOCK < region.end)\n"
            "    block = tl.maximum(block - (block * BLOCK < region.start).to(tl.int32), 0)", boundaries_in_blocks),
    ],
    "an empty group's gradient is left unwritten": [
        tpu("grouped_gemm", 'empty_tiles = 1 if cover == "groups" else 0', "empty_tiles = 0", empty_groups),
        gpu("grouped_gemm", "store_group(sums, task, region)",
            "if region.start < region.end:\n"
            "        store_group(sums, task, region)", empty_groups, within="multiply_groups"),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), pairs(FAULTS, OPS))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
