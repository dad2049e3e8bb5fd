"""Faults planted in the whole layer and in what brings rows to experts and back."""

import pytest

from tests.matrix.moe import MOE_LAYER, MOE_LAYER_BWD, PERMUTE, UNPERMUTE
from tests.meta.faults.planting import check_is_caught, gpu, having, named, pairs, tpu

OPS = (PERMUTE, UNPERMUTE, MOE_LAYER, MOE_LAYER_BWD)


def drops(c):
    return bool(c.capacity) and c.tier == "smoke"


fp8 = having(quantize="fp8")
idle_experts = having(data="poison")
computed = having(T=128, data="normal")


def sanitized(c):
    return bool(c.sanitize_grads)


FAULTS = named({
    "the permutation is applied twice": [
        tpu("permute", "x[places.source // top_k]", "x[places.source[places.source // top_k] // top_k]"),
        gpu("permute", "x[source.clamp(min=0) // slots.shape[1]]",
            "x[source[source.clamp(min=0) // slots.shape[1]].clamp(min=0) // slots.shape[1]]"),
    ],
    "a weight is applied to the wrong slot": [
        tpu("unpermute", "taken * weights[:, j, None]", "taken * weights[:, j - 1, None]"),
        gpu("unpermute", "taken * weights[:, j, None]", "taken * weights[:, j - 1, None]"),
        tpu("moe_layer", "take(weights.reshape(-1, 1), plan.places",
            "take(weights[:, ::-1].reshape(-1, 1), plan.places"),
        gpu("moe_layer", "take(weights.reshape(-1, 1), plan.source",
            "take(weights.flip(1).reshape(-1, 1), plan.source"),
    ],
    "a dropped token is kept": [
        tpu("permute", "jnp.where(position < group_sizes[choices], starts_of(",
            "jnp.where(position >= 0, starts_of(", drops),
        gpu("permute", "torch.where(position < group_sizes[choices], starts_of(",
            "torch.where(position >= 0, starts_of(", drops),
    ],
    "dropped tokens are taken to have rows": [
        tpu("permute", "Places(inverse(slots, rows), slots.reshape(indices.shape))",
            "Places(inverse(slots, rows), slots.reshape(indices.shape), is_full=True)", drops),
        tpu("moe_layer_bwd", "Places(inverse(slots, rows), slots.reshape(indices.shape))",
            "Places(inverse(slots, rows), slots.reshape(indices.shape), is_full=True)", fp8),
    ],
    "rows' gradients lack one of their two parts": [
        tpu("moe_layer_bwd", "if operands.addend is not None:", "if operands.addend is not None and not masked:",
            idle_experts),
        tpu("moe_layer_bwd", "if addend is not None:", "if addend is not None and not self.masked:", fp8),
        gpu("moe_layer_bwd", "drows += _product(", "drows = _product(", fp8),
    ],
    "what is computed in a tile is not all of it": [
        tpu("moe_layer_bwd", "lax.fori_loop(0, tiles.rows // SUBLANES, compute_rows",
            "lax.fori_loop(0, tiles.rows // SUBLANES - 1, compute_rows", computed),
        tpu("moe_layer_bwd", "jnp.sum(fold_nearby(jnp.concatenate(terms), SUBLANES)", "jnp.sum(terms[0]", computed),
    ],
    "what is computed takes what is another's": [
        tpu("moe_layer_bwd", "[scratch.of_rows[rows, :]]", "[scratch.of_rows[pl.ds(0, SUBLANES), :]]", computed),
        tpu("moe_layer_bwd", "zip(arrays, out.results,", "zip(arrays[::-1], out.results,", computed),
    ],
    "isnan where isfinite is meant": [
        tpu("moe_layer_bwd", "jnp.where(jnp.isfinite(grad), grad,", "jnp.where(~jnp.isnan(grad), grad,", sanitized),
        gpu("moe_layer_bwd", "torch.where(grad.isfinite(), grad, 0)", "torch.where(~grad.isnan(), grad, 0)", sanitized),
    ],
    "the gradient of an empty group is left unwritten": [
        tpu("moe_layer_bwd", 'empty_tiles = 1 if cover == "groups" else 0', "empty_tiles = 0", idle_experts),
        gpu("moe_layer_bwd", "in_out = region.in_rows & region.in_columns",
            "in_out = region.in_rows & (region.column < tl.where(region.start < region.end, sizes.n, 0))",
            idle_experts),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), pairs(FAULTS, OPS))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
