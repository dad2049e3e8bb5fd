"""grouped_dense and its gradients: their cases, how their inputs are drawn, what their kernels promise."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cpu_golden.moe import grouped_dense, grouped_dense_bwd
from parity import Array, Case, Contract, Groups, Op, abs_of
from parity.inputs import GROUPS
from parity.op import Backend, Inputs
from tests.matrix import gmm as unquantised
from tests.matrix.gmm import BF16, F32, MXU_DEPTH, longest_group, shard
from tests.matrix.quantized_gmm import FP8_MMA_DEPTH, SMALL_TILES


def contract(c: Case, backend: Backend) -> Contract:
    """As gmm_quantized where everything is fp8, else as the pass that is not: it has the wider operands.

    Quantising is exact to the bit, and so no part of the error.
    """
    scaling = {"inner": F32, "scale": F32, "scaled": F32, "acc": F32}
    backward = c.op == "grouped_dense_bwd"
    if c.quantize and (c.bwd_quantize or not backward):
        depth = MXU_DEPTH if backend == "tpu" else FP8_MMA_DEPTH
        return Contract(dot="fp8", out=c.out, depth=depth, sites={"partial": F32, **scaling})
    wide = unquantised.contract(c, backend)
    return replace(wide, sites={**wide.sites, **scaling})


def chain(c: Case, length: int) -> int:
    """Additions behind an element whose sum has `length` terms, however the kernel cuts it; and two products."""
    return length + 1 + 2


def quantises(c: Case) -> bool:
    return bool(c.quantize or c.bwd_quantize)


def forward_inputs(c: Case) -> Mapping[str, Array | Groups | None]:
    rhs, axis = ((c.G, c.N, c.K), 2) if c.transpose_rhs else ((c.G, c.K, c.N), 1)
    inside = bool(c.quantize)
    return {
        "lhs": Array((c.M, c.K), c.dtype, sum_over=1, quantised_inside=inside),
        "rhs": Array(rhs, c.dtype, sum_over=axis, pair_sign=-1, quantised_inside=inside),
        "group_sizes": Groups(shard(c)[1], rows=c.M, pattern=c.groups),
        "existing_out": Array((c.M, c.N), c.out) if c.existing_out else None,
    }


def backward_inputs(c: Case) -> Mapping[str, Array | Groups | None]:
    """lhs and rhs as the gradients sum over them: lhs over rows, rhs over N; then both sums with dout are sparse."""
    rhs, axis = ((c.G, c.N, c.K), 1) if c.transpose_rhs else ((c.G, c.K, c.N), 2)
    inside = quantises(c)
    return {
        "lhs": Array((c.M, c.K), c.dtype, sum_over=0, quantised_inside=inside),
        "rhs": Array(rhs, c.dtype, sum_over=axis, pair_sign=-1, quantised_inside=inside),
        "group_sizes": Groups(shard(c)[1], rows=c.M, pattern=c.groups),
        "dout": Array((c.M, c.N), c.out, quantised_inside=inside),
        "existing_out": Array((c.M, c.N), c.out) if c.existing_out else None,
    }


def unread(c: Case, inputs: Inputs) -> Mapping[str, np.ndarray]:
    """As for gmm; and dout in rows of no active group, unless it is the gradient of an existing_out there."""
    masks = dict(unquantised.inactive(c, inputs))
    if "dout" in inputs and not c.existing_out:
        rows = masks["lhs"][:, :1] if c.K else np.zeros((c.M, 1), bool)
        masks["dout"] = np.broadcast_to(rows, (c.M, c.N))
    return masks


def arguments(c: Case) -> Mapping[str, object]:
    return {
        "group_offset": shard(c)[0],
        "transpose_rhs": c.transpose_rhs,
        "quantize": c.quantize,
        "bwd_quantize": c.bwd_quantize,
        "block_size": c.block_size,
        "preferred_element_type": c.out,
        "tiling": c.tiling,
    }


DEFAULTS = dict(
    quantize=True, bwd_quantize=True, block_size=128, transpose_rhs=False, existing_out=False, shard=None, tiling=None,
    groups="zipf",
)  # fmt: skip

_FORWARD = Op(
    "grouped_dense",
    golden=grouped_dense,
    naive=grouped_dense,
    tpu="tpu_kernels.moe:grouped_dense",
    gpu="gpu_reference.moe:grouped_dense",
    inputs=forward_inputs,
    arguments=arguments,
    contract=contract,
    chain=lambda c, inputs: chain(c, c.K),
    steps=lambda c, contract: {"tiling": (1, contract.depth, 1)},
    representative=lambda c: c.tier == "smoke",
    magnitude=abs_of("lhs", "rhs", "existing_out"),
    unread=unread,
    defaults=DEFAULTS,
    spelled=("groups",),
)

_BACKWARD = Op(
    "grouped_dense_bwd",
    golden=grouped_dense_bwd,
    naive=grouped_dense_bwd,
    tpu="tpu_kernels.moe:grouped_dense_bwd",
    gpu="gpu_reference.moe:grouped_dense_bwd",
    inputs=backward_inputs,
    arguments=arguments,
    contract=contract,
    chain=lambda c, inputs: chain(c, max(c.N, longest_group(c, inputs))),
    steps=lambda c, contract: {"tiling": (contract.depth, contract.depth, contract.depth)},
    representative=lambda c: c.tier == "smoke",
    magnitude=abs_of("lhs", "rhs", "dout"),
    unread=unread,
    defaults=DEFAULTS,
    spelled=("groups",),
)

PATTERNS = list(GROUPS)
DISTRIBUTIONS = ["one_signed", "wide", "outliers", "poison", "nonfinite"]
SMALL = dict(M=200, K=256, N=128, G=4)  # M is no multiple of the block
SQUARE = dict(M=150, K=128, N=128, G=4)


def cases(op: Op) -> tuple[Case, ...]:
    """The matrix of grouped_dense or its gradients."""
    forward = op.name == "grouped_dense"
    small = dict(tiling=[SMALL_TILES])
    parts = [
        op.grid([SMALL], dtype=[BF16], groups=["short"], tier="smoke", **small),
        # quantize and bwd_quantize on their own; block_size forwarded, and the whole axis; both orientations
        op.grid([SMALL], dtype=[BF16], quantize=[False], bwd_quantize=[True], groups=["straddle"], **small),
        op.grid([SMALL], dtype=[BF16], quantize=[True], bwd_quantize=[False], groups=["straddle"], **small),
        op.grid([SMALL], dtype=[BF16], quantize=[False], bwd_quantize=[False], groups=["zipf"], **small),
        op.grid([SMALL], dtype=[F32], block_size=[128, None], groups=["straddle"], **small),
        op.grid([SQUARE], dtype=[F32], block_size=[32], groups=["straddle"]),
        op.grid([SQUARE], dtype=[F32], block_size=[64], transpose_rhs=[True], groups=["zipf"]),
        # d/d existing_out is 0 on rows that were overwritten (megablox: 1); a shard's gradients
        op.grid([SMALL], dtype=[F32], existing_out=[True], groups=["short"], **small),
        op.grid([SMALL], dtype=[BF16], existing_out=[True], transpose_rhs=[True], shard=[(3, 8)], groups=["zipf"],
                **small),
        # the gradient of an empty group is exactly zero (tokamax#887, #1016)
        op.grid([SMALL], dtype=[BF16], groups=["empty_runs"], **small),
        op.grid([SMALL], dtype=[F32], data=["poison"] if forward else ["poison", "nonfinite", "outliers"],
                groups=["short"], **small),
        op.grid([SMALL], dtype=[F32, BF16], quantize=[False, True], bwd_quantize=[False, True],
                block_size=[64, 128, None], transpose_rhs=[False, True], groups=["zipf"], tier="full", **small),
        op.grid([SMALL], dtype=[F32, BF16], existing_out=[False, True], groups=PATTERNS, tier="full", **small),
        op.grid([SMALL], dtype=[F32, BF16], data=DISTRIBUTIONS, quantize=[True], bwd_quantize=[False, True],
                existing_out=[False, True], groups=["short"], tier="full", **small),
    ]  # fmt: skip
    return op.with_cases(*parts).cases


GROUPED_DENSE = replace(_FORWARD, cases=cases(_FORWARD))
GROUPED_DENSE_BWD = replace(_BACKWARD, cases=cases(_BACKWARD))
