"""The gated linear attentions: their cases, how their inputs are drawn, what their kernels promise."""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cpu_golden import gla, simple_gla
from parity import Array, Case, Contract, Expected, Gates, Offsets, Op
from parity.op import Backend, Inputs
from tests.matrix.models import GLA_1B, RING_LINEAR
from tests.matrix.ops import BF16, F32, TRAINED, in_turn, is_backward, op, sizes
from tests.matrix.scans import (
    IN_DOTS,
    OF_FEW_STEPS,
    by_state,
    by_step,
    chunks_fill_lanes,
    exponent_sites,
    functions,
    is_packed,
    is_power_of_four,
    is_recurrent,
    rows_of_chunk,
    scan_contract,
)


@lru_cache(maxsize=16)
def build_alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head (Press et al. 2022, arXiv:2108.12409): 2^(-8 i / H), i = 1 … H, for a power of two;
    else those of the next lower power, and every other one of the next higher.

    Square roots and products alone, which every host rounds alike.
    """
    if not num_heads:
        return ()
    lower = 2 ** (num_heads.bit_length() - 1)
    if lower < num_heads:
        return build_alibi_slopes(lower) + build_alibi_slopes(2 * lower)[::2][: num_heads - lower]
    ratio = 2.0**-8
    for _ in range(lower.bit_length() - 1):
        ratio = math.sqrt(ratio)
    slopes = [ratio]
    while len(slopes) < num_heads:
        slopes.append(slopes[-1] * ratio)
    return tuple(slopes)


@lru_cache(maxsize=4)
def make_alibi_g_gamma(num_heads: int, num_layers: int, layer_idx: int) -> tuple[float, ...]:
    """The constant log decay of each head in a layer: the slopes, smaller from layer to layer."""
    share = 1 - (layer_idx - 1) / (num_layers - 1) + 1e-5
    return tuple(-slope * share for slope in build_alibi_slopes(num_heads))


def is_simple(c: Case) -> bool:
    return "simple" in c.op


def has_usual_decay(c: Case) -> bool:
    """Whether the case has the default pattern of decays.

    Integer data turn every pattern into decays of 0 and 1, so that other patterns would repeat the same twin.
    """
    return c.decay == "sigmoid"


def gate_dtype(c: Case) -> str:
    return c.dtype if c.narrow_gates else F32


def gates(c: Case) -> Mapping[str, Gates | None]:
    if not is_simple(c):
        return {"gk": Gates((c.B, c.T, c.H, c.K), c.decay, gate_dtype(c))}
    return {
        "g": Gates((c.B, c.T, c.H), c.decay, gate_dtype(c)) if c.gates in ("g", "both") else None,
        "g_gamma": Gates((c.H,), make_alibi_g_gamma(c.H, *c.alibi)) if c.gates in ("gamma", "both") else None,
    }


def inputs(c: Case) -> Mapping[str, Array | Offsets | Gates | None]:
    """Integer data are sparse along K, V and T together: every output sums over two or three of them, dg over all."""
    kept = c.K if c.dtype == F32 else min(c.K, 32)  # what the sum over K keeps of it, so that it is exact
    keys = {"dtype": c.dtype, "sum_over": 3, "one_in": max(kept // 8, 1)}
    values = {"dtype": c.dtype, "one_in": max(c.V // 8, 1) * max(c.T // (8 if c.narrow_gates else 32), 1)}
    sequences = c.N if is_packed(c) else c.B
    state = Array((sequences, c.H, c.K, c.V), F32, one_in=max(c.K * c.V // (16 if c.narrow_gates else 64), 1))
    given = {
        "q": Array((c.B, c.T, c.H, c.K), **keys),
        "k": Array((c.B, c.T, c.H, c.K), pair_sign=-1, **keys),
        "v": Array((c.B, c.T, c.H, c.V), **values),
        **gates(c),
        "initial_state": state if c.h0 else None,
        "cu_seqlens": Offsets(c.N, c.T, c.lengths) if is_packed(c) else None,
    }
    if is_backward(c):
        given |= {"do": Array((c.B, c.T, c.H, c.V), **values), "dht": state if c.ht else None}
    return given


def arguments(c: Case) -> Mapping[str, Any]:
    exact = c.data == "integers" and c.scale is None and not is_power_of_four(c.K)
    chosen: dict[str, Any] = {"scale": 0.25 if exact else c.scale}
    if not is_backward(c):
        chosen["output_final_state"] = c.ht
    return chosen | ({"reverse": c.reverse} if is_recurrent(c) else {"chunk_size": c.chunk})


def route(c: Case) -> Mapping[str, Any]:
    chosen = {} if is_recurrent(c) else {"precision": c.precision}
    return chosen | ({"fused": WAYS[c.route]} if c.op.startswith("chunk") else {})


WAYS = {"": None, "fused": True, "unfused": False}


def contract(c: Case, backend: Backend) -> Contract:
    """Float32 states, scores and sums everywhere.

    The recurrent kernels multiply and add in float32 whatever the operands. In the chunked ones a float32 operand meets
    a bfloat16 one in two pieces; with a gate per channel q·exp(c) meets the state, both float32, in three products.
    """
    if is_recurrent(c):
        dot = "ieee"
    elif c.dtype == BF16:
        dot = "bf16x2" if is_simple(c) else "bf16x3"
    elif c.precision == "bf16x3":
        dot = "bf16x3"
    else:
        dot = "bf16x3x3" if backend == "tpu" else "ieee"
    outs = {"dg": gate_dtype(c), "dgk": gate_dtype(c), "dg_gamma": F32, "dh0": F32} if is_backward(c) else {"ht": F32}
    return scan_contract(
        c,
        backend,
        dot,
        outs=outs,
        sites=sites(c, backend),
        schedule=schedule(c, backend),
        functions=functions(c, backend, is_split(c), is_simple(c)),
    )


def schedule(c: Case, backend: Backend) -> Mapping[str, Any]:
    """With a decay per step chunked kernels decay v where a state is written. The GPU's take fewer rows at a time, and
    backwards a tile of K.

    As `gpu_reference._lib.chunk_plan` has it; the TPU's take powers of two, and in dots all pairs of two rows.
    """
    if is_recurrent(c):
        return {}
    if backend == "tpu":
        of_gates = {"values_decayed": True} if is_simple(c) else {"sub_block": 1}
        return {"chunk_size": rows_of_chunk(c), "kept_whole": is_split(c), "by_halves": True} | of_gates
    rows = min(rows_of_chunk(c), 32 if is_simple(c) else 16, max(4096 // max(1 << (c.K - 1).bit_length(), 16), 16))
    chosen: dict[str, Any] = {"chunk_size": rows}
    if is_simple(c):
        chosen["values_decayed"] = True
    if is_backward(c):
        chosen["channels"] = 64 if is_split(c) and is_simple(c) else 32
    return chosen


def sites(c: Case, backend: Backend) -> Mapping[str, str]:
    """Every intermediate is float32, but for the sum of the gates, which the kernels carry in two; and what a dot takes
    is two bfloat16, unless its products are those of float32. Sums of the TPU's chunk_gla_bwd are dots with ones.

    Products of a dot are exact on a GPU; what leaves the MXU is rounded before it is added. The GPU takes exp of scalar
    gates in float64 where dots are not split (in float32 its exp is off by two ulps: ex2.approx in the PTX ISA), and
    what decays a state from exact sums, as the TPU does of scalar gates.
    The TPU's recurrent kernels add what is written to a state without rounding the change.
    Of gates that the MXU sums it takes two pieces forward, and three, which are a float32, backward.
    """
    split = is_split(c)
    names = ["kept", "state", "acc", *(["dstate", "dgate"] if is_backward(c) else [])]
    if is_recurrent(c):
        names += ["partial", "written", "lost" if backend == "tpu" else "change"]
        names += ["dwritten", "dchange", "decayed"] if is_backward(c) else []
    else:
        names += ["lost", "change", "decay", "decayed", "sum", "A"]
        names += ["read"] if is_simple(c) or is_backward(c) else []
        names += [] if is_simple(c) else ["product", "pairs"]
        names += ["dA", "terms", "pair_terms" if is_simple(c) else "up_to"] if is_backward(c) else []
        names += ["partial"] if backend == "tpu" else []
        names += exponent_sites(backend, is_split=split, per_channel=not is_simple(c))
    pieces = ["lhs", "rhs"] if split else []
    if is_backward(c) and not is_simple(c) and backend == "tpu" and not is_recurrent(c):
        names.remove("up_to")
        pieces += ["terms"] if split else []
    exp = ["decay"] if backend == "gpu" and "exponent" in names else []
    if backend == "tpu" and split and is_simple(c) and c.gates in ("g", "both") and chunks_fill_lanes(c):
        (names if is_backward(c) else pieces).append("pair_gate")
    return dict.fromkeys(names, F32) | dict.fromkeys(pieces, "bf16x2") | dict.fromkeys(exp, "float32/2")


def is_split(c: Case) -> bool:
    """Whether dots take bfloat16 pieces of what is float32."""
    return not is_recurrent(c) and (c.dtype == BF16 or c.precision == "bf16x3")


def axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    """Of what has a row per step: its chunk and its step in it, both counted from where its sequence begins; its head
    and its sequence. Of what has a state per sequence: head and sequence. v is what is written into states."""
    rows, of_state = by_step(c, inputs, c.H), by_state(c, c.H)
    scalar = {name: labels[..., 0] for name, labels in rows.items()}  # without channels
    found = dict.fromkeys(("o", "dq", "dk", "dv", "dgk"), rows) | {"dg": scalar}
    return found | dict.fromkeys(("ht", "dh0"), of_state) | {"v": {"time chunk": rows["time chunk"]}}


def representative(c: Case) -> bool:
    """One case: backward, and step by step, many seeds take longest."""
    return c.tier == "smoke" and c.dtype == F32 and c.op == "chunk_simple_gla_fwd"


DEFAULTS = dict(
    gates="g", decay="sigmoid", alibi=(20, 1), narrow_gates=False, h0=False, ht=False, lengths="ragged", scale=None,
)  # fmt: skip
CHUNKED = DEFAULTS | dict(chunk=64, precision="ieee")
ROUTED = CHUNKED | dict(route="")
RECURRENT = DEFAULTS | dict(reverse=False)


NOT_FUSED = "what a decay takes off a state is rounded before it is added: no TPU fuses the two"
WHOLE_DECAY = "beside bfloat16 a TPU rounds the decay of a state as a whole, and in one step nothing else is as large"

scan = partial(op, inputs=inputs, arguments=arguments, contract=contract, axes=axes, representative=representative)


def without_cases(name: str, module: Any, defaults: Mapping[str, Any]) -> Op:
    """The op of a public function of that name."""
    expected = []
    if "precision" in defaults:
        expected.append(
            Expected(lambda c: c.dtype == F32 and c.precision == "ieee", "LOSS", OF_FEW_STEPS, explained=True)
        )
    elif name.endswith("_bwd"):  # of sums of one sign little else is as large
        expected.append(
            Expected(lambda c: c.dtype == F32 and c.data == "one_signed", "LOSS", NOT_FUSED, explained=True)
        )
    if name == "chunk_gla_fwd":
        expected.append(Expected(lambda c: is_split(c) and c.T == 1, "LOSS", WHOLE_DECAY, explained=True))
        # ε is the result's own rounding
        expected.append(Expected(lambda c: is_split(c) and c.data == "cancellation", "TAIL", IN_DOTS))
    if name == "chunk_gla_bwd":
        expected.append(Expected(is_split, "LOSS", IN_DOTS, explained=True))
    return scan(
        getattr(module, name),
        name,
        defaults=defaults if module is simple_gla else {n: d for n, d in defaults.items() if n not in SCALAR_GATES},
        route=route,
        at_once=True,
        spelled=tuple({"gates", "chunk"} & defaults.keys()),
        expected=tuple(expected),
    )


SCALAR_GATES = ("gates", "alibi")

# Lengths around a chunk's border, K and V that are no multiples of a tile, and of 128, and on either side of it.
ONE_STEP = dict(B=1, T=1, H=2, K=16, V=16)
EDGES = sizes(
    "B T H K V", (2, 3, 1, 32, 16), (1, 63, 2, 16, 48), (2, 64, 1, 64, 32), (1, 65, 2, 32, 100), (1, 129, 1, 100, 64)
)
WIDE = sizes("B T H K V", (1, 40, 1, 128, 256), (1, 40, 1, 256, 100))
SMALL = dict(B=2, T=40, H=1, K=64, V=48)
SMALL_CHANNELS = dict(B=1, T=40, H=2, K=16, V=48)
FOUR_BLOCKS = dict(B=1, T=50, H=1, K=100, V=20)  # of 16 rows; K and V are multiples of nothing
LONG = dict(B=1, T=300, H=2, K=32, V=32)
PACKED = dict(B=1, T=70, H=2, K=16, V=48, N=5)
STEPS = dict(B=2, T=20, H=1, K=16, V=48)
INEXACT = STEPS | dict(K=96)  # a scale that no float32 is
SEVERAL_TILES = dict(B=1, T=8, H=1, K=300, V=20)  # of keys, three: no power of two
DECODED = dict(B=9, T=1, H=2, K=16, V=48)  # states for a group and part of one
STEPS_PACKED = dict(B=1, T=20, H=2, K=16, V=48, N=5)
HEADS = [dict(B=1, T=300, H=heads, K=16, V=16) for heads in (16, 64)]
GROUPS_OF_HEADS = [dict(B=2, T=40, H=16, K=16, V=16), PACKED | dict(H=32)]
EMPTY = sizes("B T H K V", (0, 20, 2, 16, 16), (1, 0, 2, 16, 16), (1, 20, 0, 16, 16), (1, 20, 2, 16, 0))
RING = dict(B=1, T=8, H=16, K=128, V=128)  # of models: all that is summed over, and few steps
GLA = dict(B=1, T=8, H=1, K=256, V=128)
PACKINGS = ["even", "ragged", "zeros_and_ones", "one"]
DECAYS = ["steep", "resets", "zero", "positive", "mixed"]
DISTRIBUTIONS = ["one_signed", "outliers", "cancellation", "wide", *TRAINED]
STATES = dict(h0=[True], ht=[True])
BOTH_WAYS = dict(route=["fused", "unfused"])


def small_cases(op: Op, shape: Mapping[str, int], **options: Any) -> tuple[Case, ...]:
    """One shape in all kinds of data, which share a compiled kernel."""
    return (
        *op.grid([shape], dtype=[F32, BF16], tier="smoke", **STATES, **options),
        *op.grid([shape], dtype=[F32], decay=["steep"], **STATES, **options),
        *in_one_pass(
            op,
            op.grid([shape], dtype=[F32], decay=["positive", "resets"], **STATES, **options),
            op.grid([shape], dtype=[F32], data=["cancellation", *TRAINED], **STATES, **options),
            op.grid([shape], dtype=[F32], decay=["mixed"], **STATES, **options),
            op.grid([shape], dtype=[BF16], decay=["steep"], **STATES, **options),
        ),
    )


def in_one_pass(op: Op, *grids: tuple[Case, ...]) -> tuple[Case, ...]:
    """Cases that the default tier has in one pass alone, the forward and the backward one in turn."""
    return in_turn(op.name.endswith("_bwd"), *grids)


def with_simple_cases(op: Op) -> Op:
    """With the matrix of chunk_simple_gla, forward or backward."""
    is_bwd = op.name.endswith("_bwd")
    parts = [
        small_cases(op, SMALL, chunk=[16]),
        op.grid([PACKED], dtype=[F32], gates=["both"], chunk=[16], lengths=["zeros_and_ones"], **STATES),
        in_one_pass(
            op,
            op.grid([SMALL], dtype=[F32], gates=["none"], scale=[0.5], chunk=[32]),
            op.grid([ONE_STEP], dtype=[F32], gates=["both"], **STATES),
            op.grid([SMALL], dtype=[F32], chunk=[16], precision=["bf16x3"], **STATES),
            op.grid(WIDE[:1], dtype=[BF16], gates=["gamma"]),
            op.grid(EDGES[4:5], dtype=[BF16], gates=["gamma"], chunk=[128], ht=[True]),
            op.grid([PACKED], dtype=[BF16], chunk=[32], lengths=["zeros_and_ones"], narrow_gates=[True],
                    route=["unfused"], **STATES),
            op.grid(EMPTY[1:2], dtype=[F32], **STATES),
            op.grid([SMALL], dtype=[F32], gates=["both"], chunk=[32], route=["unfused"], **STATES),
            op.grid([SMALL], dtype=[BF16], data=["one_signed"], chunk=[16], **STATES),
            op.grid([PACKED], dtype=[F32], gates=["both"], chunk=[16], lengths=["ragged"], **STATES),
        ),
        # The TPU's backward pass takes two chunks at once.
        *([op.grid([FOUR_BLOCKS], dtype=[BF16], gates=["both"], chunk=[16], **STATES)] if is_bwd else []),
        # What full adds: everything against everything, long sequences, wide heads, ALiBi in many heads and layers.
        op.grid([SMALL], dtype=[F32], gates=["gamma", "both"], chunk=[32], **BOTH_WAYS, **STATES, tier="full"),
        op.grid(EDGES, dtype=[F32], gates=["g", "gamma"], tier="full"),
        op.grid([SMALL], dtype=[F32, BF16], gates=["none", "g", "gamma", "both"], chunk=[16], **BOTH_WAYS, **STATES,
                tier="full"),
        op.grid([SMALL], dtype=[F32], gates=["both"], h0=[False, True], ht=[False, True], tier="full"),
        op.grid(EDGES + WIDE, dtype=[F32, BF16], chunk=[16, 128], tier="full"),
        op.grid(EDGES + WIDE, dtype=[F32, BF16], gates=["gamma"], ht=[True], tier="full"),
        op.grid([LONG], dtype=[F32, BF16], decay=DECAYS, chunk=[64, 256], ht=[True], tier="full"),
        op.grid([PACKED], dtype=[F32, BF16], lengths=PACKINGS, chunk=[16], **BOTH_WAYS, **STATES, tier="full"),
        op.grid([SMALL], dtype=[F32, BF16], data=DISTRIBUTIONS, chunk=[16], **STATES, tier="full"),
        op.grid([INEXACT], dtype=[F32], data=["one_signed"], **STATES, tier="full"),
        op.grid([dict(B=1, T=1000, H=2, K=64, V=64)], dtype=[F32, BF16], gates=["g", "gamma"], **STATES, tier="full"),
        op.grid([dict(B=1, T=4096, H=1, K=64, V=64)], dtype=[F32, BF16], gates=["g", "gamma"], chunk=[128],
                tier="full"),
        op.grid(HEADS, dtype=[F32, BF16], gates=["gamma"], ht=[True], chunk=[64, 128, 256], alibi=[(20, 1), (70, 1)],
                tier="full"),
        op.grid(HEADS, dtype=[F32], gates=["gamma"], ht=[True], alibi=[(20, 10), (20, 20), (70, 35), (70, 70)],
                tier="full"),
        op.grid(GROUPS_OF_HEADS, dtype=[BF16], gates=["gamma"], chunk=[16, 64], **STATES, tier="full"),
        op.grid([ONE_STEP, *EMPTY], dtype=[F32, BF16], **STATES, tier="full"),
        *(
            op.grid([RING | dict(T=steps)], dtype=[F32], gates=["gamma"], chunk=[chunk], **STATES, tier="full",
                    model=RING_LINEAR)
            for chunk, steps in ((64, 72), (128, 32))
        ),
        *(
            op.grid([RING | dict(T=steps)], dtype=[BF16], gates=["gamma"], chunk=[chunk], **STATES, tier="full")
            for chunk, steps in ((64, 72), (128, 136))
        ),
    ]  # fmt: skip
    return op.with_cases(*parts)


def with_fused_cases(op: Op) -> Op:
    """With the matrix of fused_chunk_simple_gla, whose arithmetic is that of chunk_simple_gla where it is fused."""
    parts = [
        op.grid([SMALL], dtype=[F32, BF16], chunk=[16], tier="smoke", **STATES),
        op.grid([PACKED], dtype=[F32], gates=["gamma"], chunk=[16], lengths=["zeros_and_ones"], **STATES, tier="full"),
        op.grid(EDGES + WIDE, dtype=[F32, BF16], tier="full"),
        op.grid([LONG], dtype=[F32, BF16], decay=DECAYS, **STATES, tier="full"),
        op.grid([PACKED], dtype=[F32, BF16], lengths=PACKINGS, chunk=[32], **STATES, tier="full"),
    ]
    return op.with_cases(*parts)


def with_per_channel_cases(op: Op) -> Op:
    """With the matrix of chunk_gla, forward or backward: a chunk has at least two blocks of 16 rows."""
    parts = [
        small_cases(op, SMALL_CHANNELS, chunk=[32]),
        op.grid([PACKED], dtype=[F32], chunk=[32], lengths=["zeros_and_ones"], **STATES),
        op.grid([FOUR_BLOCKS], dtype=[BF16], narrow_gates=[True], scale=[0.25]),
        in_one_pass(
            op,
            op.grid([SMALL_CHANNELS], dtype=[F32], chunk=[32], precision=["bf16x3"], **STATES),
            op.grid(EMPTY[1:2], dtype=[F32], **STATES),
            op.grid([SMALL_CHANNELS], dtype=[F32], chunk=[32], route=["unfused"], **STATES),
        ),
        # What full adds: everything against everything, long sequences, many heads, wide heads.
        op.grid([SMALL_CHANNELS], dtype=[F32, BF16], h0=[False, True], ht=[False, True], **BOTH_WAYS, tier="full"),
        op.grid([PACKED], dtype=[F32], chunk=[32], lengths=PACKINGS, **STATES, tier="full"),
        op.grid(EDGES[3:4], dtype=[F32], tier="full"),
        op.grid(EDGES[4:5], dtype=[BF16], chunk=[128], narrow_gates=[True], tier="full"),
        op.grid(EDGES + WIDE, dtype=[F32, BF16], chunk=[16, 128], tier="full"),
        op.grid([LONG], dtype=[F32, BF16], decay=DECAYS, chunk=[64, 256], **STATES, tier="full"),
        op.grid([LONG], dtype=[BF16], decay=DECAYS, narrow_gates=[True], tier="full"),
        op.grid([PACKED], dtype=[F32, BF16], lengths=PACKINGS, chunk=[32], **BOTH_WAYS, **STATES, tier="full"),
        op.grid([SMALL_CHANNELS], dtype=[F32, BF16], data=DISTRIBUTIONS, tier="full"),
        op.grid([INEXACT], dtype=[F32], data=["one_signed"], **STATES, tier="full"),
        op.grid([dict(B=1, T=1000, H=2, K=64, V=64)], dtype=[F32, BF16], **STATES, tier="full"),
        op.grid([dict(B=1, T=4096, H=1, K=64, V=64)], dtype=[F32, BF16], chunk=[128], tier="full"),
        op.grid(HEADS[:1], dtype=[F32, BF16], ht=[True], tier="full"),
        op.grid([ONE_STEP, *EMPTY], dtype=[F32, BF16], **STATES, tier="full"),
        op.grid([GLA | dict(T=72)], dtype=[F32], **STATES, tier="full", model=GLA_1B),
        op.grid([GLA | dict(T=72)], dtype=[BF16], **STATES, tier="full"),
    ]
    return op.with_cases(*parts)


def with_recurrent_cases(op: Op) -> Op:
    """With the matrix of fused_recurrent_simple_gla or fused_recurrent_gla, forward or backward."""
    every_gate = dict(gates=["none", "g", "gamma", "both"]) if "gates" in op.defaults else {}
    last_gate = {name: choices[-1:] for name, choices in every_gate.items()}
    directions = dict(reverse=[False, True])
    is_bwd = op.name.endswith("_bwd")
    decoded, model = (RING, RING_LINEAR) if "gates" in op.defaults else (GLA, GLA_1B)
    gamma = {name: choices[2:3] for name, choices in every_gate.items()}
    parts = [
        op.grid([STEPS], dtype=[F32, BF16], tier="smoke", **STATES),
        op.grid([STEPS], dtype=[F32], decay=["steep"], **STATES),
        in_one_pass(
            op,
            op.grid([STEPS], dtype=[F32], reverse=[True], **last_gate, **STATES),
            op.grid([STEPS], dtype=[F32], data=["residuals"], **STATES),
        ),
        *([] if is_bwd else [op.grid([DECODED], dtype=[F32, BF16], **last_gate, **STATES)]),
        # Of the forward passes each has one of the two: they share their code.
        op.grid(
            [SEVERAL_TILES],
            dtype=[F32],
            scale=[0.25],
            **last_gate,
            **STATES,
            tier="default" if is_bwd or not every_gate else "full",
        ),
        op.grid(
            [STEPS_PACKED],
            dtype=[F32],
            lengths=["zeros_and_ones"],
            reverse=[True],
            **last_gate,
            **STATES,
            tier="default" if is_bwd or every_gate else "full",
        ),
        op.grid([INEXACT], dtype=[F32], data=["one_signed"], **STATES, tier="full" if is_bwd else "default"),
        # What full adds: everything against everything.
        op.grid([STEPS], dtype=[F32, BF16], ht=[True], **directions, **every_gate, tier="full"),
        op.grid([SEVERAL_TILES], dtype=[F32], **every_gate, **STATES, tier="full"),
        op.grid(EDGES[:1], dtype=[F32], **gamma, tier="full"),
        op.grid([STEPS], dtype=[F32], h0=[False, True], ht=[False, True], **directions, tier="full"),
        op.grid(EDGES + WIDE, dtype=[F32, BF16], **last_gate, tier="full"),
        op.grid([STEPS_PACKED], dtype=[F32, BF16], lengths=PACKINGS, **directions, **STATES, tier="full"),
        op.grid([STEPS], dtype=[F32, BF16], decay=DECAYS, **STATES, tier="full"),
        op.grid([STEPS], dtype=[BF16], narrow_gates=[True], **directions, tier="full"),
        op.grid([STEPS], dtype=[F32, BF16], data=DISTRIBUTIONS, tier="full"),
        op.grid([dict(B=1, T=1000, H=1, K=32, V=32)], dtype=[F32, BF16], **STATES, tier="full"),
        op.grid([ONE_STEP, *EMPTY], dtype=[F32], **STATES, tier="full"),
        op.grid([decoded], dtype=[F32], **gamma, **STATES, tier="full", model=model),
        op.grid([decoded], dtype=[BF16], **gamma, **STATES, tier="full"),
    ]
    return op.with_cases(*parts)


def both_passes(name: str, module: Any, defaults: Mapping[str, Any], with_cases: Callable[[Op], Op]) -> tuple[Op, ...]:
    return tuple(with_cases(without_cases(f"{name}_{way}", module, defaults)) for way in ("fwd", "bwd"))


CHUNK_SIMPLE_GLA = both_passes("chunk_simple_gla", simple_gla, ROUTED, with_simple_cases)
FUSED_CHUNK_SIMPLE_GLA = both_passes("fused_chunk_simple_gla", simple_gla, CHUNKED, with_fused_cases)
FUSED_RECURRENT_SIMPLE_GLA = both_passes("fused_recurrent_simple_gla", simple_gla, RECURRENT, with_recurrent_cases)
CHUNK_GLA = both_passes("chunk_gla", gla, ROUTED, with_per_channel_cases)
FUSED_RECURRENT_GLA = both_passes("fused_recurrent_gla", gla, RECURRENT, with_recurrent_cases)

GATED_LINEAR_ATTENTION = (
    *CHUNK_SIMPLE_GLA,
    *FUSED_CHUNK_SIMPLE_GLA,
    *FUSED_RECURRENT_SIMPLE_GLA,
    *CHUNK_GLA,
    *FUSED_RECURRENT_GLA,
)
