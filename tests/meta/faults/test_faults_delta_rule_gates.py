"""Faults planted in the kernels of what delta rules are fed with."""

import pytest

from tests.matrix.delta_rule import GATES
from tests.meta.faults.planting import check_is_caught, gpu, named, pairs, tpu

FAULTS = named({
    "rows beyond the last one are summed": [
        tpu("softplus_gate_bwd", "jnp.where(row < self.shape[0], x, 0.0)", "x"),
        gpu("softplus_gate_bwd", "at_sums = tile_row * x.channels + column",
            "at_sums = tile_row * x.channels + column\n    da += tl.where(in_tile, 0.0, 1.0)\n"
            "    in_tile = in_tile | True"),
    ],
    "gradients are summed in bfloat16": [
        tpu("bounded_gate_bwd", "fold_rows(grid.own(terms), FOLDED)",
            "fold_rows(grid.own(terms).astype(jnp.bfloat16), FOLDED).astype(jnp.float32)"),
        gpu("bounded_gate_bwd", "sum_rows(tl.where(in_tile, da, 0.0), LEVELS)",
            "sum_rows(tl.where(in_tile, da, 0.0), LEVELS).to(tl.bfloat16).to(tl.float32)"),
    ],
    "every head has the first one's rate": [
        tpu("softplus_gate", "jnp.repeat(x.A_log,", "jnp.repeat(x.A_log[:1] + 0.0 * x.A_log,"),
        gpu("softplus_gate", "x.A_log + column // x.per_head", "x.A_log + column * 0"),
    ],
    "softplus is that of a ReLU beyond zero": [
        tpu("softplus_gate", "jnp.maximum(x, 0.0) + (e - s * (e - 2.0 * square * series))",
            "jnp.where(x > 0.0, x, e - s * (e - 2.0 * square * series))"),
        gpu("softplus_gate", "tl.where(x < 0, 0.0, x) + (e - s * (e - 2.0 * square * series))",
            "tl.where(x > 0, x, e - s * (e - 2.0 * square * series))"),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), pairs(FAULTS, GATES))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
