"""What compilers are given of the kernels: production shapes of published models, and what chips refuse.

`PROGRAMS` are compiled and planned, `PLANNED` only planned: sizes at which a plan turns, too many to compile.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from parity import Op
from parity.compilers.chips import CHIPS
from parity.compilers.mosaic import Abstract
from parity.compilers.programs import Program
from tests.matrix.delta_rule import CAUSAL_CONV1D
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.models import DEEPSEEK_V3, GPT_OSS_120B, MODELS, QWEN3_30B, Experts
from tests.matrix.mxfp8 import GROUPED_GEMM
from tests.matrix.quantized_gmm import E4M3, GMM_QUANTIZED, TGMM_QUANTIZED
from tests.support.calls import deployed, point

ROWS = 8192  # tokens of a batch times the experts that each goes to, on one core
CORES = 32  # that share the experts of a model with many


def experts_on_a_core(model: Experts) -> int:
    """Experts whose weights one core holds; of a model with few all of them."""
    return max(model.experts // CORES, min(model.experts, 8))


def grouped(op: Op, words: str, dtype: str, model: Experts, *, out: str = "", **options: Any) -> Program:
    """A grouped matmul of a model's up projection: a shard of the experts, the router over all of them."""
    sizes = dict(M=ROWS, K=model.hidden, N=model.intermediate, G=experts_on_a_core(model))
    case = point(op, (dtype, out or dtype), **sizes, shard=(0, model.experts), **options)
    return Program(op.name, f"{model.name}-{words}", op.tpu, (), deployed(op, case), work=ROWS)


def plain(op: Op, dtype: str, model: Experts, **options: Any) -> Program:
    """gmm or tgmm."""
    return grouped(op, SHORT[dtype], dtype, model, **options)


def quantised(op: Op, blocks: str, lhs_blocks: str, rhs_blocks: str, model: Experts) -> Program:
    """gmm_quantized or tgmm_quantized in e4m3."""
    layout = dict(lhs_blocks=lhs_blocks, rhs_blocks=rhs_blocks)
    return grouped(op, f"e4m3-{blocks}", E4M3, model, out="bfloat16", **layout)


def mxfp8(ragged: str, model: Experts) -> Program:
    """grouped_gemm in e4m3."""
    return grouped(GROUPED_GEMM, f"mxfp8-{ragged}", E4M3, model, out="bfloat16", ragged=ragged)


def quantiser(op: str, model: Experts, **options: Any) -> Program:
    """A quantiser of a batch's activations, as they enter a model's up projection."""
    name = "-".join([model.name, *(f"{word}_{value}" for word, value in options.items())])
    arguments = (Abstract((ROWS, model.hidden), "bfloat16"),)
    module = "mxfp8" if op.startswith("mxfp8") else "quantize"
    return Program(op, name, f"tpu_kernels.{module}:{op}", arguments, {"interpret": False} | options, work=ROWS)


def linear_attention(
    op: str,
    gates: str,
    dtype: str,
    *,
    batch: int = 2,
    steps: int = 4096,
    heads: int = 16,
    key_size: int = 128,
    value_size: int = 128,
    states: bool = False,
    sequences: int = 0,
    chips: Sequence[str] | None = None,
    **options: Any,
) -> Program:
    """A pass of `simple_gla` (gates "none", "gamma", "g" or "both") or of `gla` (gates "gk").

    states: with those before the first steps, and those after the last. sequences: how many are packed, 0 for none.
    Its work is counted in STEPS of one head. chips: LINEAR_ATTENTION_CHIPS unless said.
    """
    backward = op.endswith("_bwd")
    keys, values = (Abstract((batch, steps, heads, size), dtype) for size in (key_size, value_size))
    arguments: dict[str, Any] = {"q": keys, "k": keys, "v": values, **({"do": values} if backward else {})}
    if gates == "gk":
        arguments["gk"] = Abstract(keys.shape, "float32")
    if gates in ("g", "both"):
        arguments["g"] = Abstract(keys.shape[:3], "float32")
    if gates in ("gamma", "both"):
        arguments["g_gamma"] = Abstract((heads,), "float32")
    if states:
        state = Abstract((sequences or batch, heads, key_size, value_size), "float32")
        arguments |= {"initial_state": state} | ({"dht": state} if backward else {"output_final_state": True})
    if sequences:
        arguments["cu_seqlens"] = Abstract((sequences + 1,), "int32")
    shape = f"B{batch}_T{steps}_H{heads}_K{key_size}_V{value_size}" + (f"_N{sequences}" if sequences else "")
    words = [shape, gates, SHORT[dtype], *(["states"] if states else [])]
    words += [f"{name}_{value}" for name, value in options.items()]
    module = "simple_gla" if "simple" in op else "gla"
    return Program(
        op,
        "-".join(words),
        f"tpu_kernels.{module}:{op}",
        (),
        arguments | {"interpret": False} | options,
        chips=tuple(chips or LINEAR_ATTENTION_CHIPS),
        work=batch * steps * heads // STEPS,
        unit=f"{STEPS} steps",
    )


def delta_rule(
    op: str,
    dtype: str,
    *,
    batch: int = 2,
    steps: int = 4096,
    key_heads: int = 16,
    heads: int = 16,
    key_size: int = 128,
    value_size: int = 128,
    states: bool = False,
    sequences: int = 0,
    **options: Any,
) -> Program:
    """A pass of `gated_delta_rule` or of `kda`; arguments as `linear_attention`'s, heads: those of values."""
    backward, module = op.endswith("_bwd"), "kda" if "kda" in op else "gated_delta_rule"
    keys = Abstract((batch, steps, key_heads, key_size), dtype)
    values, beta = Abstract((batch, steps, heads, value_size), dtype), Abstract((batch, steps, heads), "float32")
    gate = Abstract((*beta.shape, key_size), "float32") if module == "kda" else beta
    arguments: dict[str, Any] = {"q": keys, "k": keys, "v": values, "g": gate, "beta": beta}
    arguments |= {"do": values} if backward else {}
    if states:
        state = Abstract((sequences or batch, heads, key_size, value_size), "float32")
        arguments |= {"initial_state": state} | ({"dht": state} if backward else {"output_final_state": True})
    if sequences:
        arguments["cu_seqlens"] = Abstract((sequences + 1,), "int32")
    shape = f"B{batch}_T{steps}_H{key_heads}_HV{heads}_K{key_size}_V{value_size}"
    words = [shape + (f"_N{sequences}" if sequences else ""), SHORT[dtype], *(["states"] if states else [])]
    words += [f"{name}_{value}" for name, value in options.items()]
    return Program(
        op,
        "-".join(words),
        f"tpu_kernels.{module}:{op}",
        (),
        arguments | {"interpret": False} | options,
        chips=LINEAR_ATTENTION_CHIPS,
        work=batch * steps * heads // STEPS,
        unit=f"{STEPS} steps",
    )


def convolution(op: Op, **options: Any) -> Program:
    """The causal convolution of q, k and v of a delta rule in Qwen3-Next, two rows of 4096 steps."""
    case = point(op, "bfloat16", B=2, T=4096, D=(2 * 16 + 32) * 128, W=4, **options)
    name = f"B{case.B}_T{case.T}_D{case.D}_W{case.W}-bf16" + "".join(f"-{word}_{x}" for word, x in options.items())
    return Program(op.name, name, op.tpu, (), deployed(op, case), work=case.B * case.T // STEPS, unit=f"{STEPS} steps")


STEPS = 64
LINEAR_ATTENTION_CHIPS = tuple(chip for chip in CHIPS if chip != "v4")  # v4 has a quarter of the VMEM they may count on
SHORT = {"bfloat16": "bf16", "float32": "f32"}


def programs() -> Iterator[Program]:
    for op in (GMM, TGMM):
        for model in MODELS:
            yield plain(op, "bfloat16", model)
        yield plain(op, "float32", QWEN3_30B)
    for model in (DEEPSEEK_V3, QWEN3_30B):
        yield quantised(GMM_QUANTIZED, "block128", "1x128", "1x128x128", model)
        yield quantised(GMM_QUANTIZED, "channel", "1xK", "1xKx1", model)
        yield quantised(TGMM_QUANTIZED, "block128", "128x1", "128x1", model)
        yield quantised(TGMM_QUANTIZED, "channel", "Mx1", "Mx1", model)
    for model in (DEEPSEEK_V3, GPT_OSS_120B):
        yield mxfp8("lhs", model)
        yield mxfp8("contracting", model)
    for name in ("fp8_quantize", "mxfp8_quantize"):
        yield quantiser(name, DEEPSEEK_V3, axis=0)
        yield quantiser(name, DEEPSEEK_V3, axis=1)
    yield quantiser("fp8_dual_quantize", DEEPSEEK_V3)
    yield quantiser("mxfp8_dual_quantize", DEEPSEEK_V3)
    for direction in ("fwd", "bwd"):
        simple = f"chunk_simple_gla_{direction}"
        attention = partial(linear_attention, chips=tuple(CHIPS))
        for op, gates in ((simple, "gamma"), (f"chunk_gla_{direction}", "gk")):
            yield attention(op, gates, "bfloat16", chunk_size=64)
            yield attention(op, gates, "bfloat16", chunk_size=128)
            yield attention(op, gates, "float32", chunk_size=64)
            yield attention(op, gates, "bfloat16", batch=1, steps=65_536, chunk_size=128)
        yield attention(simple, "g", "bfloat16", chunk_size=64)
        yield attention(f"fused_recurrent_simple_gla_{direction}", "gamma", "bfloat16")
        yield attention(f"fused_recurrent_gla_{direction}", "gk", "bfloat16")
        for rule in ("gated_delta_rule", "kda"):
            yield delta_rule(f"chunk_{rule}_{direction}", "bfloat16", chunk_size=64)
            yield delta_rule(f"fused_recurrent_{rule}_{direction}", "bfloat16")
    for op in CAUSAL_CONV1D:
        yield convolution(op)


def planned() -> Iterator[Program]:
    """Sizes at which plans turn: of no whole tile, too long for a step or for VMEM, few rows, packed sequences."""
    for op in (GMM, TGMM):
        for k, n in ((513, 2048), (1024, 1025), (2049, 1024), (3073, 2049), (130, 96)):
            yield plain(op, "bfloat16", Experts(f"K{k}_N{n}", 8, 2, k, n))
        yield plain(op, "bfloat16", Experts("K3073_N4096_f32", 8, 2, 3073, 4096), out="float32")
    for direction in ("fwd", "bwd"):
        chunked = partial(linear_attention, f"chunk_simple_gla_{direction}", "g", "bfloat16")
        for chunk_size in (16, 48, 256):
            yield chunked(chunk_size=chunk_size)
        yield chunked(chunk_size=64, steps=100)
        yield chunked(chunk_size=64, heads=15)
        yield chunked(chunk_size=64, batch=1, sequences=5, states=True)
        yield chunked(chunk_size=64, key_size=200, value_size=300)
        yield chunked(chunk_size=64, key_size=1024, value_size=1024)
        yield chunked(chunk_size=64, batch=1, steps=2**18)
        yield linear_attention(f"chunk_simple_gla_{direction}", "both", "float32", chunk_size=64, precision="bf16x3")
        yield linear_attention(f"chunk_gla_{direction}", "gk", "bfloat16", chunk_size=64, key_size=256, value_size=512)
        yield linear_attention(f"fused_recurrent_gla_{direction}", "gk", "float32", key_size=100, value_size=2048)
        for name in ("chunk_gated_delta_rule", "chunk_kda"):
            rule = partial(delta_rule, f"{name}_{direction}")
            yield rule("bfloat16", heads=64, steps=8192, batch=1, chunk_size=64)
            yield rule("bfloat16", batch=1, steps=65_536, chunk_size=128)
            yield rule("bfloat16", key_size=256, value_size=256, chunk_size=64)
            yield rule("float32", chunk_size=64)
            yield rule("float32", batch=1, heads=32, sequences=5, states=True, chunk_size=64)
            yield rule("bfloat16", heads=15, key_heads=15, key_size=100, value_size=48, chunk_size=48)


PROGRAMS = tuple(programs())
PLANNED = tuple(planned())
