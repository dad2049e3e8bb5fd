"""Faults planted in the kernels of the causal convolution: each must be caught in the default tier."""

import pytest

from tests.matrix.delta_rule import CAUSAL_CONV1D
from tests.matrix.gla import is_packed
from tests.meta.faults.planting import check_is_caught, first_of_all, gpu, named, tpu


def long(c):
    return is_packed(c) and c.T == 300


FORWARD, BACKWARD = "causal_conv1d", "causal_conv1d_bwd"
FAULTS = named({
    "a sequence sees the end of the one before": [
        tpu(FORWARD, "pl.when(visit.start > -steps)", "pl.when(visit.start > 2**30)"),
        gpu(FORWARD, "mask=in_tile & (row >= start), other=0", "mask=in_tile & (row >= 0), other=0"),
    ],
    "taps are in the reverse order": [
        tpu(FORWARD, "read.weight[tap : tap + 1, at.columns] * seen",
            "read.weight[grid.width - 1 - tap : grid.width - tap, at.columns] * seen"),
        gpu(FORWARD, "conv.given.weight + column * WIDTH + tap", "conv.given.weight + column * WIDTH + WIDTH - 1 - tap",
            within="_convolved"),
    ],
    "the last tap is missing": [
        tpu(FORWARD, "for tap in range(grid.width)", "for tap in range(grid.width - 1)", within="_convolved"),
        gpu(FORWARD, "tl.static_range(WIDTH)", "tl.static_range(WIDTH - 1)", within="_convolved"),
    ],
    "a sequence has the state of the one before": [
        tpu(FORWARD, "(visits.group_ids[i], 0, column)", "(jnp.maximum(visits.group_ids[i] - 1, 0), 0, column)"),
    ],
    "silu comes before the bias": [
        tpu(FORWARD, "z * sigmoid(z) if silu else z",
            "(z - read.bias[:, at.columns]) * sigmoid(z - read.bias[:, at.columns]) + read.bias[:, at.columns]"),
        gpu(FORWARD, "result = z * sigmoid(z) if SILU else z",
            "bias = tl.load(conv.given.bias + column, mask=in_columns, other=0).to(tl.float32)\n"
            "    result = (z - bias) * sigmoid(z - bias) + bias"),
    ],
    "a tile's neighbour before it is itself": [
        tpu(FORWARD, "jnp.maximum(first - 1, 0)", "jnp.maximum(first, 0)", long),
    ],
    "the final state lacks what the initial one still has": [
        tpu(FORWARD, "_copy_steps(out.ht, seen, visit.end, at, grid)",
            "_copy_steps(out.ht, seen, jnp.maximum(visit.end, visit.start + grid.width - 1), at, grid)", long),
        gpu(FORWARD, "end - (WIDTH - 1) + step, column, in_state, WIDTH",
            "tl.maximum(end - (WIDTH - 1), start) + step, column, in_state, WIDTH", long),
    ],
    "the gradient of the bias is that of the first visit": [
        tpu(BACKWARD, "sum_rows_in_pairs(jnp.where(visited, dbias[0], 0.0))", "sum_rows_in_pairs(dbias[0][:FOLDED])"),
    ],
    "the gradient of a step comes from the next sequence too": [
        tpu(BACKWARD, "jnp.where(visit.own(at, later), weighted, 0.0) if masked else weighted", "weighted"),
        gpu(BACKWARD, "(later >= start) & (later < end)", "(later >= start) & (later < conv.count * conv.steps)"),
    ],
    "the gradient of a final state stops at its sequence's first step": [
        tpu(BACKWARD, "(row >= 0) & (row < dseen.shape[0])",
            "(row >= grid.halo + visit.start) & (row < dseen.shape[0])", long),
        gpu(BACKWARD, "mask=in_tile & (step >= 0), other=0", "mask=in_tile & (step >= 0) & (row >= start), other=0",
            long),
    ],
    "the gradient of the weight is summed in bfloat16": [
        tpu(BACKWARD, "fold_nearby(jnp.where(visit.own(at), term, 0.0) if masked else term, FOLDED)",
            "fold_nearby((jnp.where(visit.own(at), term, 0.0) if masked else term).astype(jnp.bfloat16), FOLDED)"
            ".astype(jnp.float32)"),
        gpu(BACKWARD, "sum_rows(tl.where(in_tile, seen * dz, 0.0), LEVELS)",
            "sum_rows(tl.where(in_tile, seen * dz, 0.0).to(tl.bfloat16), LEVELS).to(tl.float32)"),
    ],
    "a sequence has the state of the first": [
        gpu(FORWARD, "_at_state(conv, sequence, column, row - start + (WIDTH - 1), WIDTH)",
            "_at_state(conv, sequence * 0, column, row - start + (WIDTH - 1), WIDTH)"),
    ],
    "a segment's first steps see no step before it": [
        gpu(FORWARD, "start, _ = rows_of_sequence(sequence, conv)", "start = first", long),
    ],
    "the gradient of the bias is that of the first segment": [
        gpu(BACKWARD, "sum_rows_in_pairs(outs.dbias)", "sum_rows_in_pairs(outs.dbias[:1])"),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), first_of_all(FAULTS, CAUSAL_CONV1D))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
