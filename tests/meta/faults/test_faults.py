"""Planted faults: each is put into a copy of a kernel's source, and cases of the default tier must catch it."""

import pytest

from tests.matrix.gmm import GMM, TGMM
from tests.meta.faults.planting import check_is_caught, gpu, having, named, pairs, tpu


def empty_groups(c):
    return c.groups.startswith("empty")


boundaries_in_tiles = having(groups="straddle", M=300)


def sharded(c):
    return bool(c.shard) and not c.model


def square(c):
    return c.transpose_rhs and c.K == c.N


def existing(c):
    return c.existing_out and c.M == 300


narrow_output = having(tier="smoke", out="bfloat16")


SWAP = "jax.numpy.where(visits.group_ids[visit] < 2, 1 - visits.group_ids[visit], visits.group_ids[visit])"

FAULTS = named({
    "the last tile is never visited": [
        tpu("gmm tgmm", "num_visits[0] = visit", "num_visits[0] = visit - 1"),
        gpu("gmm", "if nth >= tl.load(task.groups.num_visits):", "if nth >= tl.load(task.groups.num_visits) - 1:"),
        gpu("tgmm", "range(first, end, DEPTH)", "range(first, first + (end - first) // DEPTH * DEPTH, DEPTH)"),
    ],
    "a partial K tile is dropped": [
        tpu("gmm", "pl.when(step == last_step)(lambda: body(rest))", "pass"),
        gpu("gmm", "range(first, end, DEPTH)", "range(first, end // DEPTH * DEPTH, DEPTH)"),
    ],
    "the K remainder is not masked": [
        tpu("gmm", "lambda: body(rest)", "lambda: body(tk)"),
        # one element too late, in both operands: further on the interpreter might leave the tensor's memory
        gpu("gmm", "in_a &= along < region.end - first\n"
            "        in_b &= down < region.end - first",
            "in_a &= along <= region.end - first\n"
            "        in_b &= down <= region.end - first"),
    ],
    "an empty group is left unwritten": [
        tpu("tgmm", 'empty_tiles = 1 if cover == "groups" else 0', "empty_tiles = 0", empty_groups),
        gpu("tgmm", "in_out = region.in_rows & region.in_columns",
            "in_out = region.in_rows & (region.column < tl.where(region.start < region.end, sizes.n, 0))",
            empty_groups),
    ],
    "inactive rows are not zeroed": [
        tpu("gmm", "out[...] = jnp.zeros_like(out) if existing_out is None else existing_out[...]",
            "out[...] = out[...] if existing_out is None else existing_out[...]"),
        gpu("gmm", "is_stored = (region.in_rows | is_unclaimed) & region.in_columns",
            "is_stored = region.in_rows & region.in_columns"),
    ],
    "existing_out is added, not kept": [
        tpu("gmm", "jnp.where(own, result, out[rows, columns])",
            "jnp.where(own, result, 0) + out[rows, columns]", existing),
        gpu("gmm", "result = tl.where(region.in_rows, result, existing)",
            "result += tl.load(existing_tile, mask=(region.in_rows | is_unclaimed) & region.in_columns, other=0)",
            existing),
    ],
    "existing_out is overwritten, not added": [
        tpu("tgmm", "total += existing_out[...].astype(jnp.float32)", "pass", existing),
        gpu("tgmm", "sums += tl.load(existing_tile, mask=in_out, other=0).to(tl.float32)", "pass", existing),
    ],
    "transpose_rhs is ignored": [
        tpu("gmm", "(1, 1 if transpose_rhs else 0)", "(1, 0)", square),
        gpu("gmm", "rhs.transpose(1, 2)", "rhs", square),
    ],
    "group_offset is off by one": [
        tpu("gmm tgmm", "return jnp.asarray(group_offset, jnp.int32).reshape(1)",
            "return jnp.maximum(jnp.asarray(group_offset, jnp.int32).reshape(1) - 1, 0)", sharded),
        gpu("gmm", "start = tl.load(shard_offsets + group)\n"
            "    end = tl.load(shard_offsets + group + 1)",
            "start = tl.load(shard_offsets + group - 1)\n"
            "    end = tl.load(shard_offsets + group)", sharded),
        gpu("tgmm", "this = first_group + group", "this = tl.maximum(first_group - 1, 0) + group", sharded),
    ],
    "the accumulator is bfloat16": [
        tpu("gmm", "sums += jnp.where(step == 0, 0.0, acc[rows, columns])",
            "sums = sums.astype(jnp.bfloat16) + jnp.where(step == 0, 0.0, acc[rows, columns])"),
        tpu("tgmm", "rhs[part, columns], contract=(0, 0))",
            "rhs[part, columns], contract=(0, 0)).astype(jnp.bfloat16)"),
        gpu("gmm tgmm", "sums = ADDED(sums, a, b, lhs, rhs, region, step, SCALING)",
            "sums = ADDED(sums, a, b, lhs, rhs, region, step, SCALING).to(tl.bfloat16).to(tl.float32)", narrow_output),
    ],
    "the accumulator is cut to bfloat16 by its bits": [
        tpu("gmm", "sums += jnp.where(step == 0, 0.0, acc[rows, columns])",
            "sums += jnp.where(step == 0, 0.0, acc[rows, columns])\n    sums = jax.lax.bitcast_convert_type("
            "jax.lax.bitcast_convert_type(sums, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32)", narrow_output),
        gpu("gmm tgmm", "sums = ADDED(sums, a, b, lhs, rhs, region, step, SCALING)",
            "sums = ADDED(sums, a, b, lhs, rhs, region, step, SCALING)\n"
            "        sums = ((sums.to(tl.int32, bitcast=True) >> 16) << 16).to(tl.float32, bitcast=True)",
            narrow_output),
    ],
    "the output is rounded twice": [
        tpu("gmm", "result = sums.astype(out.dtype)",
            "result = jax.lax.reduce_precision(sums, 8, 10).astype(out.dtype)", narrow_output),
        tpu("tgmm", "out[...] = total.astype(out.dtype)",
            "out[...] = jax.lax.reduce_precision(total, 8, 10).astype(out.dtype)", narrow_output),
        gpu("gmm", "result = sums.to(out.dtype.element_ty)",
            "result = sums.to(tl.float16).to(out.dtype.element_ty)", narrow_output),
        gpu("tgmm", "tl.store(out_tile, sums.to(out.dtype.element_ty), mask=in_out)",
            "tl.store(out_tile, sums.to(tl.float16).to(out.dtype.element_ty), mask=in_out)", narrow_output),
    ],
    "a group boundary inside a tile is off by one": [
        tpu("gmm tgmm", "return OwnRows(jnp.maximum(start, 0),",
            "return OwnRows(jnp.maximum(start - 1, 0),", boundaries_in_tiles),
    ],
    "a group boundary inside a tile is ignored": [
        gpu("gmm", "in_group = (row >= visit.start) & (row < visit.end)",
            "in_group = row < visit.end", boundaries_in_tiles),
        gpu("tgmm", "end = tl.minimum(tl.sum(tl.where(expert <= this, counts, 0)), sizes.m).to(tl.int32)",
            "end = tl.minimum((start + TILE.m - 1) // TILE.m * TILE.m, sizes.m).to(tl.int32)", boundaries_in_tiles),
    ],
    "two groups are swapped": [
        tpu("gmm tgmm", "return tuple(of_visit[axis][visit] if",
            f"return tuple({SWAP} if axis == 'g' else of_visit[axis][visit] if"),
        gpu("gmm", "first += group.to(tl.int64) * operand.group",
            "first += tl.where(group < 2, 1 - group, group).to(tl.int64) * operand.group"),
        gpu("tgmm", "store_group(sums, task, region)",
            "region = region._replace(group=tl.where(region.group < 2, 1 - region.group, region.group))\n"
            "    store_group(sums, task, region)", within="multiply_groups"),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), pairs(FAULTS, (GMM, TGMM)))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
