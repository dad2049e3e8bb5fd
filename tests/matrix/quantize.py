"""The quantisers and dequantisers: their cases and how their inputs are drawn. All are compared bit for bit."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cpu_golden.quantize import fp8_dequantize, fp8_dual_quantize, fp8_quantize, int8_dequantize, int8_quantize
from op_arguments.quantize import Blocks, check_blocks
from parity import Array, Case, Contract, Op, Scales
from parity.op import Backend, Inputs
from tests.matrix.ops import BF16, F16, F32, op
from tests.matrix.quantized_gmm import E4M3, E5M2, I8, scale_shape


def contract(c: Case, backend: Backend) -> Contract:
    """The golden's bits; the name says what the scales are."""
    return Contract(dot="none", out=F32)


def shape(c: Case) -> tuple[int, ...]:
    return tuple(size for _, size in c.dims)


def quantise_arguments(c: Case) -> Mapping[str, object]:
    to_fp8 = {} if c.out == I8 else {"dtype": c.out}
    axis = {} if c.op == "fp8_dual_quantize" else {"axis": c.axis}
    return {**axis, "block_size": c.block_size, "check_finite": False, **to_fp8}


def in_blocks(sizes: tuple[int, ...], blocks: Blocks) -> Mapping[str, np.ndarray]:
    """The block of each element, as the index of its scale."""
    counts = [-(-size // block) for size, block in zip(sizes, blocks, strict=True)]
    names = np.array([str(list(index)) for index in np.ndindex(*counts)]).reshape(counts)
    for axis, (size, block) in enumerate(zip(sizes, blocks, strict=True)):
        names = np.take(np.repeat(names, block, axis), np.arange(size), axis)
    return {"block": names}


def quantiser_axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    x = inputs["x"]
    if c.op != "fp8_dual_quantize":
        return {"qvalue": in_blocks(x.shape, check_blocks(x, c.axis, c.block_size))}
    by_rows, by_columns = (check_blocks(x, axis, c.block_size) for axis in (-1, -2))
    return {"rowwise": in_blocks(x.shape, by_rows), "columnwise": in_blocks(x.shape, by_columns)}


def dequantiser_axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    sizes, counts = inputs["qvalue"].shape, inputs["scale"].shape
    return {"out": in_blocks(sizes, tuple(n // max(count, 1) for n, count in zip(sizes, counts, strict=True)))}


def bit_exact(golden: Callable[..., Any], **settings: Any) -> Op:
    """An op that is compared bit for bit."""
    return op(
        golden,
        contract=contract,
        representative=lambda c: False,
        bit_exact=True,
        **settings,
    )


def quantiser(golden: Callable[..., Any], **defaults: Any) -> Op:
    return bit_exact(
        golden,
        inputs=lambda c: {"x": Array(shape(c), c.dtype, sum_over=-1)},
        arguments=quantise_arguments,
        axes=quantiser_axes,
        defaults=defaults,
        indifferent=("check_finite", "interpret"),
    )


def dequantiser(golden: Callable[..., Any]) -> Op:
    return bit_exact(
        golden,
        inputs=lambda c: {
            "qvalue": Array(shape(c), c.dtype),
            "scale": Scales(scale_shape(c.blocks, shape(c)), c.scales),
        },
        arguments=lambda c: {},
        axes=dequantiser_axes,
        defaults=dict(blocks="1x128", scales="varied"),
        spelled=("blocks",),
    )


MATRIX = [dict(M=256, K=384)]
ODD = [dict(M=37, K=96)]
WEIGHTS = [dict(G=3, K=128, N=256)]
EMPTY = [dict(M=0, K=128)]
LONG = [dict(M=3, K=2**16 + 512)]  # rows of more than a TPU's tile
# Zero blocks, subnormal ones (tpu-inference#1867: absmax 1e-40 gives NaN), the smallest and the largest; every bit.
EXTREME = ["ranges", "bits"]
ALONG = [1, 0, (0, 1)]  # 1x128, 128x1, 128x128


def with_quantiser_cases(quantiser: Op, to: list[str]) -> Op:
    """A quantiser with its cases, to the dtypes `to`."""
    parts = [
        quantiser.grid(MATRIX, dtype=[(F32, to[0])], axis=[1], tier="smoke"),
        quantiser.grid(MATRIX, dtype=[(BF16, to[0])], data=EXTREME, axis=ALONG),
        quantiser.grid(MATRIX, dtype=[(F32, to[-1])], data=EXTREME, axis=[1]),
        quantiser.grid(ODD, dtype=[(F32, to[0])], data=["bits"], axis=[-1, (-2, -1)], block_size=[None]),
        quantiser.grid(ODD, dtype=[(F16, to[0])], data=["bits"], axis=[-1], block_size=[32]),
        quantiser.grid(WEIGHTS, dtype=[(BF16, to[0])], data=["wide"], axis=[(1, 2)]),
        quantiser.grid(EMPTY, dtype=[(BF16, to[0])], axis=[1]),
        quantiser.grid(LONG, dtype=[(BF16, to[0])], axis=[1], block_size=[None]),
        quantiser.grid(
            MATRIX, dtype=[(dtype, q) for dtype in (BF16, F32, F16) for q in to], axis=ALONG,
            data=EXTREME, block_size=[32, 128, None], tier="full",
        ),
    ]  # fmt: skip
    return quantiser.with_cases(*parts)


def with_dual_cases(dual: Op) -> Op:
    """fp8_dual_quantize with its cases."""
    parts = [
        dual.grid(MATRIX, dtype=[(BF16, E4M3)], tier="smoke"),
        dual.grid(MATRIX, dtype=[(BF16, E4M3)], data=["ranges"]),
        dual.grid(MATRIX, dtype=[(F32, E5M2)], data=["bits"]),
        dual.grid(WEIGHTS, dtype=[(F32, E4M3)], data=["ranges"], block_size=[32]),
        dual.grid(ODD, dtype=[(F16, E4M3)], data=["bits"], block_size=[None]),
        dual.grid(MATRIX, dtype=[(BF16, E4M3), (F32, E4M3), (F16, E5M2)], data=["outliers", *EXTREME],
                  block_size=[64, 128, None], tier="full"),
    ]  # fmt: skip
    return dual.with_cases(*parts)


def with_dequantiser_cases(dequantiser: Op, given: list[str]) -> Op:
    """A dequantiser with its cases, of the dtypes `given`."""
    into = [(dtype, F32) for dtype in given]
    parts = [
        dequantiser.grid(MATRIX, dtype=into[:1], data=["bits"], tier="smoke"),
        dequantiser.grid(MATRIX, dtype=into, data=["bits"], blocks=["1x128", "128x128"], scales=["extremes"]),
        dequantiser.grid(ODD, dtype=into[:1], data=["bits"], blocks=["MxK", "1xK"]),
        dequantiser.grid(MATRIX, dtype=into, data=["bits"], blocks=["Mx1", "32x1", "64x32"], tier="full"),
    ]
    return dequantiser.with_cases(*parts)


FP8_QUANTIZE = with_quantiser_cases(quantiser(fp8_quantize, axis=-1, block_size=128), [E4M3, E5M2])
INT8_QUANTIZE = with_quantiser_cases(quantiser(int8_quantize, axis=-1, block_size=128), [I8])
FP8_DUAL_QUANTIZE = with_dual_cases(quantiser(fp8_dual_quantize, block_size=128))
FP8_DEQUANTIZE = with_dequantiser_cases(dequantiser(fp8_dequantize), [E4M3, E5M2])
INT8_DEQUANTIZE = with_dequantiser_cases(dequantiser(int8_dequantize), [I8])

QUANTIZERS = (FP8_QUANTIZE, INT8_QUANTIZE, FP8_DUAL_QUANTIZE, FP8_DEQUANTIZE, INT8_DEQUANTIZE)
