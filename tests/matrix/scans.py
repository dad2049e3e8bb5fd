"""What the gated linear attentions and the delta rules have in common: their contracts' units, and labels by step."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from parity import Case, Contract
from parity.op import Backend, Inputs
from tests.matrix.ops import BF16, MMA_DEPTH, MXU_DEPTH, is_backward, of_unit

PIECE = 8  # products that a float32 dot of the GPU's chunked kernels sums one after the other; it adds these in float64
LANES = 128
"""Of a TPU's vector registers."""
OF_FEW_STEPS = "what leaves the MXU is rounded before it is added, and of few steps it is as large as the sum"
IN_DOTS = "pairs of steps are decayed in two factors, in dots of two bfloat16 pieces, which a GPU multiplies one by one"


def is_recurrent(c: Case) -> bool:
    return "recurrent" in c.op


def goes_step_by_step(c: Case, backend: Backend) -> bool:
    """Whether the kernel is a recurrence in fact: of the TPU's recurrent delta rules only those that decode are."""
    decodes = not is_backward(c) and not is_packed(c) and c.T == 1 and c.h0
    return is_recurrent(c) and (backend == "gpu" or "gla" in c.op or decodes)


def is_packed(c: Case) -> bool:
    return "N" in dict(c.dims)


def is_power_of_four(size: int) -> bool:
    """Whether the default scale, the reciprocal of the square root of K, is a power of two."""
    return math.log2(max(size, 1)) % 2 == 0


def scan_contract(c: Case, backend: Backend, dot: str, **promised: Any) -> Contract:
    """The contract of a scan whose dots are `dot`; what goes step by step has none."""
    by_step = goes_step_by_step(c, backend)
    depth = 1 if by_step else MXU_DEPTH if backend == "tpu" else MMA_DEPTH if c.dtype == BF16 else 1
    tile = PIECE if dot == "ieee" and not by_step else None
    return Contract(dot=dot, out=c.out, depth=depth, tile=tile, **promised)


def functions(c: Case, backend: Backend, split: bool, of_step: bool) -> Mapping[str, tuple[str, ...]]:
    """The decays, where they are no float64's nor a series' as in recurrent kernels, and the matrix unit's sums, of
    which what goes step by step has none. of_step: all channels have one gate."""
    if goes_step_by_step(c, backend):
        return {}
    exp = ["decay"] if split or (not is_recurrent(c) if backend == "tpu" else not of_step) else []
    exp += ["kept"] if backend == "tpu" and split else []
    return dict.fromkeys(exp, ("exp",)) | (of_unit(backend) if backend == "tpu" or split else {})


def exponent_sites(backend: Backend, *, is_split: bool, per_channel: bool) -> list[str]:
    """The sites at which the exponents of a chunk's decays are rounded.

    The TPU rounds each of its sums by halves of gates per channel. Other gates are summed in two float32, of which the
    difference is rounded; the GPU takes its exp in float64 if dots are not split.
    """
    if backend == "tpu":
        return ["c"] if per_channel else ["exponent", "kept_exponent"] if is_split else ["exponent"]
    return ["exponent"] if is_split or per_channel else []


def rows_of_chunk(c: Case) -> int:
    """Of the TPU's kernels, and at most of the GPU's: the largest power of two in what the case asks for.

    Of the recurrent ones what they take at a time.
    """
    return 16 if is_recurrent(c) else int(c.chunk & -c.chunk)


def chunks_fill_lanes(c: Case) -> bool:
    """Whether two chunks of rows fit a TPU's lanes: its matrix unit then sums the gates between two of these, if it
    takes bfloat16 pieces of what is float32."""
    return 2 * rows_of_chunk(c) <= LANES


def by_step(c: Case, inputs: Inputs, heads: int) -> dict[str, np.ndarray]:
    """Labels of what is [B, T, heads, channels]."""
    offsets = inputs["cu_seqlens"] if is_packed(c) else np.array([0, c.T])
    steps = np.arange(c.T)
    sequence = np.searchsorted(offsets[1:], steps, side="right")
    done = steps - offsets[np.minimum(sequence, len(offsets) - 2)]
    chunk = rows_of_chunk(c) if is_recurrent(c) else c.chunk
    border = np.where(done == 0, "first step", np.where(np.isin(steps + 1, offsets), "last step", "inside"))
    found = {"time chunk": done // chunk, "step of the chunk": done % chunk, "sequence boundary": border}
    if is_packed(c):
        found["sequence"] = sequence
    rows = {name: labels[:, None, None] for name, labels in found.items()} | {"head": np.arange(heads)[:, None]}
    if not is_packed(c):
        rows["sequence"] = np.arange(c.B)[:, None, None, None]
    return rows


def by_state(c: Case, heads: int) -> dict[str, np.ndarray]:
    """Labels of what is [N, heads, K, V]."""
    states = np.arange(c.N if is_packed(c) else c.B)
    return {"sequence": states[:, None, None, None], "head": np.arange(heads)[:, None, None]}
