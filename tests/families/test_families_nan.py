"""NaN in an argument is NaN in every element that the operation makes of it, and in no other.

What a scan by chunks is, the recurrence step by step says. Matrix products take whole chunks, in which 0 · NaN is NaN:
there alone NaN may reach rows, and of `chunk_kda_bwd` channels of dh0, that the recurrence keeps clear of it. So does
the TPU in its recurrent delta rules.
"""

from itertools import pairwise

import numpy as np
import pytest

from parity.backends import load_kernel, runner
from parity.inputs import draw
from parity.op import BACKENDS, Case, Inputs, Op, outputs
from tests.matrix import OPS
from tests.matrix.delta_rule import DELTA_RULES
from tests.matrix.scans import goes_step_by_step, rows_of_chunk
from tests.support.functions import FRAMEWORKS, public
from tests.support.tiny import tiny

SCANS = tuple(op.name for op in OPS if op.name.startswith(("chunk", "fused_chunk", "fused_recurrent")))
USUAL = {
    "tpu": ("gmm_quantized", "moe_layer", "chunk_simple_gla_fwd"),
    "gpu": ("tgmm", "grouped_gemm", "moe_layer_bwd", "causal_conv1d_bwd", "fp8_dual_quantize", "chunk_gla_fwd"),
}
USUAL_FIRST = ("tpu", "fused_recurrent_kda_fwd")
"""With NaN in the first element, whose sequence shares registers with the next."""
BFLOAT16 = ("bfloat16", "bfloat16")
SHARED = dict(HV=4)
"""Heads of values, of which two share one of keys."""
BLOCKS = dict(chunk=32)
"""Of a triangular matrix, several in a chunk."""
LATE = 0.8
"""Of an argument's elements those before the one that is NaN."""
CALLS = [
    pytest.param(
        op,
        backend,
        dtype,
        share,
        id="-".join([backend, op.name, *(dtype or ())[:1], *(["first"] if share == 0 else [])]),
        marks=[getattr(pytest.mark, backend)]
        + [pytest.mark.full]
        * ((backend, op.name) != USUAL_FIRST if share == 0 else op.name not in USUAL[backend] or bool(dtype)),
    )
    for backend in BACKENDS
    for op in OPS
    for dtype, share in ([(None, LATE), (None, 0.0), (BFLOAT16, LATE)] if op.name in SCANS else [(None, LATE)])
]


def is_nan(x: np.ndarray) -> np.ndarray:
    return np.isnan(x.astype(np.float64))


def of_definition(op: Op, case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """Where the result is NaN, by output."""
    name = op.name.replace("fused_chunk", "chunk").replace("chunk", "fused_recurrent")
    arguments = {key: value for key, value in op.arguments(case).items() if key != "chunk_size"}
    with np.errstate(all="ignore"):
        result = outputs(public("cpu_golden")[name](**inputs, **arguments))
    return {output: is_nan(x) for output, x in result.items()}


def value_heads(case: Case) -> int:
    """The heads of a scan: where several of values share one of keys, those of values."""
    return dict(case.dims).get("HV", case.H)


def rows_of(mask: np.ndarray, case: Case) -> np.ndarray:
    """The rows [1, T, heads of values] in which a mask of rows has any; a head of keys is in each that shares it."""
    if mask.ndim < 3 or mask.shape[:2] != (1, case.T):
        return np.zeros((1, case.T, value_heads(case)), bool)
    heads = mask.shape[2]
    return mask.reshape(1, case.T, heads, -1).any(-1).repeat(value_heads(case) // heads, axis=2)


def within_chunks(masks: dict[str, np.ndarray], argument: np.ndarray, case: Case, inputs: Inputs) -> np.ndarray:
    """The rows [1, T, heads of values] in chunks of a head in which the argument or a result of such a head is NaN."""
    results = [mask for mask in masks.values() if mask.ndim > 2 and mask.shape[2] == value_heads(case)]
    rows = np.any([rows_of(mask, case) for mask in (*results, argument)], axis=0)
    starts = inputs["cu_seqlens"]
    row = np.arange(case.T)
    sequence = np.searchsorted(starts, row, side="right") - 1
    chunk = sequence * case.T + (row - starts[sequence]) // rows_of_chunk(case)
    return np.stack([rows[:, chunk == which].any(1) for which in chunk], axis=1)


def within_states(argument: np.ndarray, case: Case, inputs: Inputs) -> np.ndarray:
    """The states [N, HV] of whose sequence and head of values a row of the argument is NaN."""
    (rows,) = rows_of(argument, case)
    return np.stack([rows[first:end].any(0) for first, end in pairwise(inputs["cu_seqlens"])])


@pytest.mark.parametrize(("op", "backend", "dtype", "share"), CALLS)
def test_nan_goes_where_the_definition_takes_it(op, backend, dtype, share):
    pytest.importorskip(FRAMEWORKS[backend])
    shared = SHARED | (BLOCKS if "chunk" in op.defaults else {})
    case = tiny(op, dtype, **(shared if op in DELTA_RULES and dtype is None else {}))
    drawn, arguments = draw(op, case), {**op.arguments(case), **op.route(case)}
    takes_chunks = op.name in SCANS and not goes_step_by_step(case, backend)
    for name, x in drawn.items():
        if x is None or x.dtype.kind in "iu":
            continue
        given = x.copy()
        given.reshape(-1)[int(x.size * share)] = np.nan
        inputs = {**drawn, name: given}
        expected = of_definition(op, case, inputs)
        got = outputs(runner(backend).run(load_kernel(getattr(op, backend)), inputs, arguments))
        for output, mask in expected.items():
            found = is_nan(got[output])
            assert not (mask & ~found).any(), f"NaN in {name} is lost in {output}"
            if takes_chunks and mask.shape[:2] == (1, case.T):
                rows = within_chunks(expected, is_nan(given), case, inputs)
                rows = rows.reshape(*mask.shape[:3], -1).any(-1)
                mask = mask | rows.reshape(*rows.shape, *[1] * (mask.ndim - 3))
            elif (
                takes_chunks and op.name.endswith("kda_bwd") and output == "dh0"
            ):  # a gate per channel, and products of all of them
                mask = mask | within_states(is_nan(given), case, inputs)[..., None, None]
            elif takes_chunks and output == "dg_gamma":
                mask = mask | within_chunks(expected, is_nan(given), case, inputs).any((0, 1))
            assert not (found & ~mask).any(), f"NaN in {name} spreads in {output}"
