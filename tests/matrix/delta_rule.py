"""The delta rules, their gates and their convolution: cases, how their inputs are drawn, what their kernels promise."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from cpu_golden import causal_conv1d, gated_delta_rule, gates, kda
from cpu_golden.stages import single_pass
from parity import Array, Case, Contract, Expected, Gates, Given, Offsets, Op
from parity.inputs import DISTRIBUTIONS, OFFSETS, stream
from parity.judging.passes import whole_float32
from parity.op import Backend, Inputs
from tests.matrix import scans
from tests.matrix.memories import BETAS, RECALLED, RHOS, Drawn, betas, keys, recalled
from tests.matrix.models import KIMI_K3, KIMI_LINEAR, QWEN3_5, QWEN3_NEXT
from tests.matrix.ops import BF16, F32, TRAINED, in_turn, is_backward, op, sizes

# --- the rules ---


def is_per_channel(c: Case) -> bool:
    return "kda" in c.op


def is_normed(c: Case) -> bool:
    """Whether the kernel normalises q and k: not of integer data, since a root is not exact."""
    return c.l2norm and c.data != "integers"


def gate_dtype(c: Case) -> str:
    """That of g and beta."""
    return c.dtype if c.narrow_gates else F32


def inputs(c: Case) -> Mapping[str, Array | Offsets | Gates | Given | None]:
    """Keys are of length 1 unless the kernel normalises them: of longer ones what is stored would grow without end."""
    sequences = c.N if scans.is_packed(c) else c.B
    of_key, of_value = (c.B, c.T, c.H, c.K), (c.B, c.T, c.HV, c.V)
    values = Array(of_value, c.dtype, one_in=max(c.V // 8, 1) * max(c.T // 16, 1))
    state = Array((sequences, c.HV, c.K, c.V), F32, one_in=max(c.K * c.V // 32, 1))
    lengths = Offsets(c.N, c.T, c.lengths) if scans.is_packed(c) else None
    given = {
        "q": Array(of_key, c.dtype, sum_over=3, one_in=max(c.K // 4, 1)),
        "k": keys(c, of_key, unit=not c.l2norm),
        "v": values,
        "g": Gates((c.B, c.T, c.HV, *([c.K] if is_per_channel(c) else [])), c.decay, gate_dtype(c)),
        "beta": betas(c, (c.B, c.T, c.HV), gate_dtype(c)),
        "initial_state": state if c.h0 else None,
        "cu_seqlens": lengths,
    }
    if c.recall is not None and c.data != "integers":
        known = Drawn(state.shape, F32, lambda: DISTRIBUTIONS[c.data](state, stream(c, "initial_state"), c.out))
        offsets = None
        if lengths is not None:
            sizes = OFFSETS[c.lengths](c.N, c.T, stream(c, "cu_seqlens"))
            offsets = np.concatenate([[0], np.cumsum(sizes)])
        given |= {"initial_state": known, "v": recalled(c, of_value, given["k"], known, offsets)}
    if is_backward(c):
        given |= {"do": values, "dht": state if c.ht else None}
    return given


def arguments(c: Case) -> Mapping[str, Any]:
    exact = c.data == "integers" and c.scale is None and not scans.is_power_of_four(c.K)
    chosen: dict[str, Any] = {"scale": 0.25 if exact else c.scale, "use_qk_l2norm_in_kernel": is_normed(c)}
    if not is_backward(c):
        chosen["output_final_state"] = c.ht
    return chosen if scans.is_recurrent(c) else chosen | {"chunk_size": c.chunk}


def contract(c: Case, backend: Backend) -> Contract:
    """Float32 gates, scores, inverses, states and sums everywhere, and one rounding at the end.

    What goes step by step multiplies and adds in float32 whatever the operands. Of the other kernels dots of float32
    take six products of bfloat16 pieces, or FMAs of a GPU; beside bfloat16 operands what is float32 is in two such
    pieces, but for the products of the inverse, which are those of float32 always. On the TPU so are products with it,
    what is read of a state, and everything in the recurrent kernels, which are chunked ones of 16 steps.
    """
    by_step = scans.goes_step_by_step(c, backend)
    dot = "bf16x3" if is_split(c) else "ieee" if by_step or backend == "gpu" else "bf16x3x3"
    outs = {"dg": gate_dtype(c), "dbeta": gate_dtype(c), "dh0": F32} if is_backward(c) else {"ht": F32}
    of_norm = {"rstd": ("rsqrt",)} if backend == "tpu" and is_normed(c) else {}
    return scans.scan_contract(
        c,
        backend,
        dot,
        outs=outs,
        sites=recurrent_sites(c, backend) if by_step else chunk_sites(c, backend),
        schedule={} if by_step else schedule(c, backend),
        functions={**scans.functions(c, backend, is_split(c), not is_per_channel(c)), **of_norm},
    )


def is_split(c: Case) -> bool:
    """Whether dots take two bfloat16 pieces of what is float32."""
    return c.dtype == BF16 and not scans.is_recurrent(c)


def schedule(c: Case, backend: Backend) -> Mapping[str, Any]:
    """The GPU takes fewer rows at a time, as `gpu_reference._lib.chunk_plan` has it, and decays pairs one by one.

    The TPU takes powers of two, and decays pairs in dots. Where a step has one gate both decay values: beside
    bfloat16 keys that are exact."""
    if backend == "gpu":
        widest = 4096 // max(1 << (c.K - 1).bit_length(), 16)
        rows = min(scans.rows_of_chunk(c), 16 if is_per_channel(c) else 32, max(widest, 16))
        solve = {"solve_depth": 1, "solve_passes": single_pass}
        return {"chunk_size": rows, "values_decayed": not is_per_channel(c), **solve}
    of_gates = {"sub_block": 1} if is_per_channel(c) else {"values_decayed": True}
    whole = {"solve_passes": whole_float32, "whole_passes": whole_float32} if is_split(c) else {}
    chosen = {"chunk_size": scans.rows_of_chunk(c), "kept_whole": is_split(c), "by_halves": True}
    return chosen | of_gates | whole | ({"refined": True} if scans.is_recurrent(c) else {})


def chunk_sites(c: Case, backend: Backend) -> Mapping[str, str]:
    """Products of a GPU's dots and FMAs are exact; what leaves the MXU is rounded before it is added. Sums of gates are
    in two float32, but for those of two bfloat16 pieces that the MXU sums between two steps. A GPU's exp of float32 is
    off by two ulps (ex2.approx in the PTX ISA), and of scalar gates it is taken in float64 where dots are not split;
    there the TPU takes what decays a state from both float32."""
    names = ["decay", "kept", "lost", "change", "decayed", "sum", "acc",
             "raw", "A", "solve_sum", "T", "error", "update", "v_new", "h", "P"]  # fmt: skip
    names += ["product", "pairs"] if is_per_channel(c) else ["recalled"]
    names += ["read"] if is_backward(c) or not is_per_channel(c) else []
    names += ["partial", "solve_product"] if backend == "tpu" else []
    if not scans.is_recurrent(c):  # of blocks beyond the first 16 rows
        names += ["solve_acc", "solve_partial"] if backend == "tpu" else [] if is_per_channel(c) else ["solve_acc"]
    names += scans.exponent_sites(backend, is_split=is_split(c), per_channel=is_per_channel(c))
    names += ["rest"] if scans.is_recurrent(c) else []
    names += norm_sites(c)
    if is_backward(c):
        names += ["dv_new", "dupdate", "dv", "dP", "dA", "draw", "dh", "terms", "of_beta", "dgate"]
        names += ["up_to"] if is_per_channel(c) else ["pair_terms"]
        names += ["heads"]
    pieces = ["lhs", "rhs"] if is_split(c) else []
    if backend == "tpu" and is_split(c) and not is_per_channel(c) and scans.chunks_fill_lanes(c):
        pieces.append("pair_gate")
    exp = {"decay": "float32/2"} if backend == "gpu" and "exponent" in names else {}
    return dict.fromkeys(names, F32) | dict.fromkeys(pieces, "bf16x2") | exp


def recurrent_sites(c: Case, backend: Backend) -> Mapping[str, str]:
    """A TPU that decodes adds what is written to a state without rounding the change."""
    names = ["kept", "decayed", "partial", "acc", "error", "v_new", "written", "lost", "h", *norm_sites(c)]
    names += ["change"] if backend == "gpu" else []
    if is_backward(c):
        names += ["dwritten", "dh", "derror", "dchange", "of_beta", "dgate", "heads"]
    return dict.fromkeys(names, F32)


def norm_sites(c: Case) -> list[str]:
    if not is_normed(c):
        return []
    return ["square", "norm", "rstd", "normed", *(["projected"] if is_backward(c) else [])]


def axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    """As those of `tests.matrix.gla`; keys have their own heads."""
    of_keys, of_values = (scans.by_step(c, inputs, heads) for heads in (c.H, c.HV))
    scalar = {name: labels[..., 0] for name, labels in of_values.items()}  # without channels
    found = dict.fromkeys(("dq", "dk"), of_keys) | dict.fromkeys(("o", "dv"), of_values)
    found |= {"dg": of_values if is_per_channel(c) else scalar, "dbeta": scalar}
    found |= dict.fromkeys(("ht", "dh0"), scans.by_state(c, c.HV))
    return found | {"v": {"time chunk": of_values["time chunk"]}}


def is_usual(c: Case) -> bool:
    """Whether integer data make a twin of it that no other case has: they turn every kind of keys into one-hot ones,
    every decay into 0 or 1 and every beta into 0, 1 or 2, and normalise nothing."""
    return (c.decay, c.rho, c.beta, c.recall, c.l2norm) == ("sigmoid", 0.0, "gated", None, False)


def representative(c: Case) -> bool:
    """One case: backward, and step by step, many seeds take longest."""
    return c.tier == "smoke" and c.dtype == F32 and c.op == "chunk_gated_delta_rule_fwd"


DEFAULTS = dict(
    rho=0.0, decay="sigmoid", beta="gated", recall=None, l2norm=False, narrow_gates=False, h0=False, ht=False,
    lengths="ragged", scale=None,
)  # fmt: skip
CHUNKED = DEFAULTS | dict(chunk=64)

SMALL = dict(B=1, T=70, H=1, HV=2, K=32, V=48)  # two chunks of 64, the last of 6 rows
SMALL_CHANNELS = dict(B=1, T=40, H=1, HV=2, K=16, V=48)
STEPS = dict(B=2, T=20, H=1, HV=2, K=16, V=48)
PACKED = dict(B=1, T=70, H=1, HV=2, K=16, V=48, N=5)
STEPS_PACKED = dict(B=1, T=20, H=1, HV=2, K=16, V=48, N=5)
DECODE = dict(B=1, T=6, H=2, HV=4, K=16, V=48, N=6)
ONE_STEP = dict(B=1, T=1, H=2, HV=2, K=16, V=16)
# Lengths around a chunk's border; K and V that are no multiples of a tile, and up to the largest.
EDGES = sizes(
    "B T H HV K V",
    (2, 3, 1, 1, 32, 16),
    (1, 63, 2, 2, 16, 48),
    (1, 65, 1, 4, 48, 100),
    (1, 127, 1, 1, 100, 80),
    (2, 129, 1, 2, 80, 64),
)
WIDE = sizes("B T H HV K V", (1, 40, 1, 1, 128, 256), (1, 40, 1, 2, 192, 128), (1, 70, 1, 1, 256, 100))
LONG = dict(B=1, T=300, H=1, HV=2, K=32, V=32)
EMPTY = sizes(
    "B T H HV K V",
    (0, 20, 2, 2, 16, 16),
    (1, 0, 2, 4, 16, 16),
    (1, 20, 0, 0, 16, 16),
    (1, 20, 2, 2, 16, 0),
    (1, 20, 2, 0, 16, 16),
)
# One head of a model's keys.
OF_MODELS = {
    "gated_delta_rule": [
        (QWEN3_NEXT, dict(B=1, T=72, H=1, HV=2, K=128, V=128), dict(decay=["slow"])),
        (QWEN3_5, dict(B=1, T=72, H=1, HV=4, K=128, V=128), dict(decay=["mixed"])),
    ],
    "kda": [
        (KIMI_LINEAR, dict(B=1, T=72, H=1, HV=1, K=128, V=128), dict(decay=["slow"])),
        (KIMI_K3, dict(B=1, T=72, H=1, HV=1, K=128, V=128), dict(decay=["bound"])),
    ],
}
PACKINGS = ["even", "ragged", "zeros_and_ones", "one"]
DECAYS = ["zero", "slow", "mixed", "steep", "bound"]
STATES = dict(h0=[True], ht=[True])
NORMED = dict(l2norm=[True])


LONGER = (
    "what leaves the MXU is rounded before it is added, and the inverse of a chunk of 64 rows magnifies more than "
    "those of a GPU's blocks of 32 or 16"
)

rule = partial(op, inputs=inputs, arguments=arguments, contract=contract, axes=axes, representative=representative)


def without_cases(name: str, module: Any, defaults: Mapping[str, Any]) -> Op:
    """The op of a public function of that name."""
    spelled = tuple({"chunk"} & defaults.keys())
    reason = LONGER if spelled else scans.OF_FEW_STEPS
    expected: tuple[Expected, ...] = (Expected(lambda c: c.dtype == F32, "LOSS", reason, explained=True),)
    if spelled and "kda" in name:
        expected += (Expected(lambda c: c.dtype == BF16, "LOSS", scans.IN_DOTS, explained=True),)
    return rule(getattr(module, name), name, defaults=defaults, spelled=spelled, at_once=True, expected=expected)


def ladder(op: Op, shape: Mapping[str, int]) -> tuple[Case, ...]:
    """Keys from apart to equal, against every gate and beta; and states that have the values already."""
    chunk = dict(chunk=[64]) if "chunk" in op.defaults else {}
    return (
        *op.grid([shape], dtype=[F32], rho=RHOS, decay=DECAYS, beta=BETAS, **chunk, **STATES, tier="full"),
        *op.grid([shape], dtype=[BF16], rho=RHOS, decay=["zero", "mixed"], beta=BETAS[1:], **STATES, tier="full"),
        *op.grid([shape], dtype=[F32, BF16], rho=RHOS[::2], decay=["zero"], beta=BETAS[1:2], recall=RECALLED, **STATES,
                 tier="full"),
    )  # fmt: skip


def with_chunk_cases(op: Op) -> Op:
    """With the matrix of a chunked rule, forward or backward."""
    hard = dict(rho=["equal"], decay=["zero"], beta=["near1"])
    is_kda, is_bwd = "kda" in op.name, is_backward_op(op)
    small, chunk = (SMALL_CHANNELS, [32]) if is_kda else (SMALL, [64])
    of_one = "full" if is_kda else "default"  # the rules share what these are for
    parts = [
        op.grid([small], dtype=[F32, BF16], chunk=[32], tier="smoke", **NORMED, **STATES),
        in_turn(
            is_bwd != is_kda,
            op.grid([small], dtype=[F32], chunk=chunk, **hard, **STATES),
            op.grid([PACKED], dtype=[F32], chunk=[32], lengths=["zeros_and_ones"], **STATES),
        ),
        in_turn(
            is_bwd,
            op.grid([small], dtype=[F32], rho=[2.0], beta=["up_to_2"], decay=["mixed"], chunk=chunk, **STATES),
            op.grid([small], dtype=[F32], decay=["bound"], chunk=chunk, **STATES),
        ),
        in_turn(
            is_bwd,
            op.grid([small], dtype=[F32], rho=[1.0], decay=["zero"], beta=["near1"], recall=[0.01], chunk=chunk,
                    tier=of_one),
            op.grid([small], dtype=[BF16], chunk=chunk, **hard, **STATES, tier=of_one),
            op.grid(EMPTY[1:2], dtype=[F32], **STATES, tier=of_one),
        ),
        # What full adds: the ladder of keys, everything against everything, long sequences, wide heads.
        ladder(op, SMALL),
        op.grid([SMALL], dtype=[F32, BF16], chunk=[16, 48, 128], l2norm=[False, True], **STATES, tier="full"),
        op.grid([SMALL], dtype=[F32], h0=[False, True], ht=[False, True], tier="full"),
        op.grid([SMALL], dtype=[BF16], narrow_gates=[True], l2norm=[False, True], **STATES, tier="full"),
        op.grid([SMALL], dtype=[F32, BF16], data=TRAINED, **NORMED, tier="full"),
        op.grid([SMALL | dict(K=96)], dtype=[F32], data=["one_signed"], **NORMED, **STATES, tier="full"),
        op.grid(EDGES + WIDE, dtype=[F32, BF16], rho=[1.0], tier="full"),
        op.grid([LONG], dtype=[F32, BF16], decay=DECAYS, rho=[1.0], chunk=[64, 128], ht=[True], tier="full"),
        op.grid([PACKED], dtype=[F32, BF16], lengths=PACKINGS, chunk=[16], **STATES, tier="full"),
        op.grid([dict(B=1, T=1000, H=1, HV=2, K=64, V=64)], dtype=[F32, BF16], rho=[1.0], **STATES, tier="full"),
        op.grid([ONE_STEP, *EMPTY], dtype=[F32, BF16], **STATES, tier="full"),
        *(op.grid([shape], dtype=[dtype], rho=[1.0], **chosen, **NORMED, **STATES, tier="full",
                  model=model if dtype == F32 else "")
          for dtype in (F32, BF16) for model, shape, chosen in of_models(op)),
    ]  # fmt: skip
    return op.with_cases(*parts)


def with_recurrent_cases(op: Op) -> Op:
    """With the matrix of a fused recurrent rule, forward or backward."""
    parts = [
        op.grid([STEPS], dtype=[F32, BF16], tier="smoke", **NORMED, **STATES),
        op.grid([STEPS_PACKED], dtype=[F32], lengths=["zeros_and_ones"], **STATES),
        in_turn(
            is_backward_op(op),
            op.grid([STEPS], dtype=[F32], rho=["equal"], decay=["zero"], beta=["near1"], **STATES),
            op.grid([STEPS], dtype=[F32], rho=[2.0], decay=["bound"], beta=["up_to_2"], **STATES),
            op.grid([DECODE], dtype=[F32], lengths=["even"], **STATES),
        ),
        ladder(op, STEPS),
        op.grid([STEPS], dtype=[F32], h0=[False, True], ht=[False, True], tier="full"),
        op.grid([STEPS], dtype=[BF16], narrow_gates=[True], l2norm=[False, True], **STATES, tier="full"),
        op.grid(EDGES + WIDE, dtype=[F32, BF16], rho=[1.0], tier="full"),
        op.grid([STEPS_PACKED], dtype=[F32, BF16], lengths=PACKINGS, **STATES, tier="full"),
        op.grid([DECODE], dtype=[F32, BF16], lengths=["even"], l2norm=[True], **STATES, tier="full"),
        op.grid([LONG], dtype=[F32, BF16], rho=[1.0], decay=["slow"], **STATES, tier="full"),
        op.grid([ONE_STEP, *EMPTY], dtype=[F32], **STATES, tier="full"),
        *(op.grid([shape | dict(B=4, T=1)], dtype=[dtype], rho=[1.0], **chosen, **NORMED, **STATES, tier="full",
                  model=model if dtype == F32 else "")
          for dtype in (F32, BF16) for model, shape, chosen in of_models(op)),
    ]  # fmt: skip
    return op.with_cases(*parts)


def is_backward_op(op: Op) -> bool:
    return op.name.endswith("_bwd")


def of_models(op: Op) -> list[tuple[str, dict[str, int], dict[str, list[str]]]]:
    return OF_MODELS["kda" if "kda" in op.name else "gated_delta_rule"]


def both_passes(name: str, module: Any, defaults: Mapping[str, Any], with_cases: Callable[[Op], Op]) -> tuple[Op, ...]:
    return tuple(with_cases(without_cases(f"{name}_{way}", module, defaults)) for way in ("fwd", "bwd"))


CHUNK_GATED_DELTA_RULE = both_passes("chunk_gated_delta_rule", gated_delta_rule, CHUNKED, with_chunk_cases)
CHUNK_KDA = both_passes("chunk_kda", kda, CHUNKED, with_chunk_cases)
FUSED_RECURRENT_GATED_DELTA_RULE = both_passes(
    "fused_recurrent_gated_delta_rule", gated_delta_rule, DEFAULTS, with_recurrent_cases
)
FUSED_RECURRENT_KDA = both_passes("fused_recurrent_kda", kda, DEFAULTS, with_recurrent_cases)

# --- gates and convolution ---


def gate_inputs(c: Case) -> Mapping[str, Array | Drawn | None]:
    channels = [c.K] if "K" in dict(c.dims) else []
    shape = (c.B, c.T, c.HV, *channels)
    rates: Array | Drawn = Array((c.HV,), F32)
    if c.data == "wide":  # exp of which a float32 does not hold
        rates = Drawn((c.HV,), F32, lambda: DISTRIBUTIONS["normal"](Array((c.HV,), F32), stream(c, "A_log"), c.out))
    given = {
        "a": Array(shape, c.dtype),
        "A_log": rates if c.rate else None,
        "dt_bias": Array((c.HV, *channels), F32) if c.bias else None,
    }
    return given | ({"dg": Array(shape, F32)} if is_backward(c) else {})


def gate_contract(c: Case, backend: Backend) -> Contract:
    """Float32 from a to g; the sums over time to dA_log and ddt_bias in float32. A GPU's exp is off by two ulps."""
    is_softplus = c.op.startswith("softplus")
    of_sigmoid = ["above", "lesser", "sigmoid"]
    names = ["exp", *(["log", "softplus"] if is_softplus else of_sigmoid)]
    names += ["x"] * c.bias + ["rate"] * c.rate + ["scaled"] * (not is_softplus)
    outs = {}
    if is_backward(c):
        names += ["graded", *(of_sigmoid if is_softplus else ["curve", "slope"])]
        names += ["terms"] * c.rate + ["sum"] * (c.rate or c.bias)
        outs = {"dA_log": F32, "ddt_bias": F32}
    exp = dict.fromkeys(["exp"] + ["rate"] * c.rate, "float32/2") if backend == "gpu" else {}
    return Contract(out=c.dtype if is_backward(c) else F32, outs=outs, sites=dict.fromkeys(names, F32) | exp)


GATE_SHAPES = [dict(B=2, T=20, HV=3), dict(B=1, T=33, HV=2, K=48)]


def with_gate_cases(op: Op) -> Op:
    """With the matrix of a gate, forward or backward."""
    rates = [True] if op.name.startswith("softplus") else [True, False]
    return op.with_cases(
        op.grid(GATE_SHAPES[:1], dtype=[(F32, F32)], tier="smoke"),
        op.grid(GATE_SHAPES[1:], dtype=[(BF16, F32)]),
        op.grid(GATE_SHAPES, dtype=[(F32, F32), (BF16, F32)], rate=rates, bias=[True, False], tier="full"),
        op.grid(GATE_SHAPES, dtype=[(F32, F32)], data=["wide", "one_signed"], tier="full"),
        op.grid([dict(B=1, T=1000, HV=4), dict(B=1, T=0, HV=4), dict(B=1, T=300, HV=4, K=128)], dtype=[(F32, F32)],
                tier="full"),
    )  # fmt: skip


def conv_inputs(c: Case) -> Mapping[str, Array | Offsets | None]:
    sequences = c.N if scans.is_packed(c) else c.B
    steps, state = Array((c.B, c.T, c.D), c.dtype), Array((sequences, c.D, c.W - 1), c.dtype)
    given = {
        "x": steps,
        "weight": Array((c.D, c.W), conv_dtype(c)),
        "bias": Array((c.D,), conv_dtype(c)) if c.bias else None,
        "initial_state": state if c.h0 else None,
        "cu_seqlens": Offsets(c.N, c.T, c.lengths) if scans.is_packed(c) else None,
    }
    return given | ({"dy": steps, "dht": state if c.ht else None} if is_backward(c) else {})


def has_silu(c: Case) -> bool:
    """Not of integer data, since a sigmoid is not exact."""
    return c.activation == "silu" and c.data != "integers"


def conv_arguments(c: Case) -> Mapping[str, Any]:
    chosen = {"activation": "silu" if has_silu(c) else None}
    return chosen if is_backward(c) else chosen | {"output_final_state": c.ht}


def conv_contract(c: Case, backend: Backend) -> Contract:
    """Products and sums in float32, and one rounding at the end; a GPU's products are those of an FMA, and its exp is
    off by two ulps. A TPU rounds products, and of float32 the last sum alone."""
    names = ["acc"] if backend == "gpu" else ["product", "z"] if c.dtype == F32 else ["product", "acc"]
    names += ["exp", "above", "lesser", "sigmoid"] if has_silu(c) else []
    outs = {}
    if is_backward(c):
        names += ["terms", "sum", *(["curve", "slope", "graded", "dz"] if has_silu(c) else [])]
        outs = dict.fromkeys(["dweight", "dbias"], conv_dtype(c))
    exp = {"exp": "float32/2"} if backend == "gpu" and has_silu(c) else {}
    return Contract(out=c.dtype, outs=outs, sites=dict.fromkeys(names, F32) | exp)


def conv_dtype(c: Case) -> str:
    """That of weight and bias."""
    return F32 if c.wide_weight else c.dtype


CONV, CONV_PACKED = dict(B=2, T=20, D=33, W=4), dict(B=1, T=20, D=16, W=4, N=5)
CONV_LONG = dict(B=1, T=300, D=16, W=4, N=5)  # several tiles of rows, on both backends
CONV_TILES = dict(B=1, T=1536, D=136, W=4)  # tiles that are a sequence's alone, and more columns than a register has
CONV_OF_ONE = dict(B=1, T=72, D=512, W=4)  # q, k and v of one head of a model's keys
CONV_DEFAULTS = dict(activation="silu", bias=True, wide_weight=False, h0=True, ht=True, lengths="zeros_and_ones")


def with_conv_cases(op: Op) -> Op:
    """With the matrix of the convolution, forward or backward."""
    return op.with_cases(
        op.grid([CONV], dtype=[F32], tier="smoke"),
        op.grid([CONV_PACKED], dtype=[BF16]),
        op.grid([CONV_LONG], dtype=[F32], activation=[""]),
        op.grid([CONV_TILES], dtype=[BF16], wide_weight=[True]),
        op.grid([CONV, CONV_PACKED], dtype=[F32, BF16], activation=["", "silu"], bias=[False, True], h0=[False, True],
                ht=[False, True], tier="full"),
        op.grid([CONV_TILES], dtype=[F32], bias=[False, True], h0=[False], ht=[False], tier="full"),
        op.grid([CONV_TILES], dtype=[BF16], wide_weight=[True], h0=[False], ht=[False], tier="full"),
        op.grid([CONV_PACKED], dtype=[BF16], wide_weight=[True], tier="full"),
        op.grid([CONV_PACKED], dtype=[F32, BF16], lengths=PACKINGS, tier="full"),
        op.grid([CONV], dtype=[F32, BF16], data=["wide", *TRAINED], tier="full"),
        op.grid([dict(B=1, T=7, D=8, W=width) for width in (1, 2, 3, 8)], dtype=[F32], tier="full"),
        op.grid([dict(B=1, T=300, D=256, W=4), dict(B=1, T=0, D=8, W=4)], dtype=[F32, BF16], tier="full"),
        op.grid([CONV_OF_ONE], dtype=[F32], bias=[False], tier="full", model=QWEN3_NEXT),
        op.grid([CONV_OF_ONE], dtype=[BF16], bias=[False], tier="full"),
    )  # fmt: skip


GATES = tuple(
    with_gate_cases(
        op(getattr(gates, name), name, inputs=gate_inputs, contract=gate_contract, defaults=dict(rate=True, bias=True),
           twin=False)
    )
    for name in ("softplus_gate", "softplus_gate_bwd", "bounded_gate", "bounded_gate_bwd")
)  # fmt: skip
OF_STATES = "the gradient of a state is a sum of one to three products, of which a GPU's FMA rounds one fewer"
CONV_LOSSES = (
    # Of the cases without SiLU where eight seeds tell; by contract √(11 / 10).
    Expected(lambda c: c.dtype == F32 and c.D == 33 and c.h0 and c.bias and not c.activation, "LOSS", OF_STATES,
             output="dh0", ratio=1.05),
)  # fmt: skip
CAUSAL_CONV1D = tuple(
    with_conv_cases(
        op(getattr(causal_conv1d, name), name, inputs=conv_inputs, arguments=conv_arguments, contract=conv_contract,
           defaults=CONV_DEFAULTS, representative=lambda c: c.tier == "smoke" and is_backward(c),
           expected=CONV_LOSSES if name.endswith("_bwd") else ())
    )
    for name in ("causal_conv1d", "causal_conv1d_bwd")
)  # fmt: skip

DELTA_RULES = (*CHUNK_GATED_DELTA_RULE, *CHUNK_KDA, *FUSED_RECURRENT_GATED_DELTA_RULE, *FUSED_RECURRENT_KDA)
