"""What compilers are given of the kernels: production shapes of published models, and what chips refuse.

`PROGRAMS` are compiled and planned, `PLANNED` only planned: sizes at which a plan turns, too many to compile.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from op_arguments.mxfp8 import E8M0
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


def quantised(op: Op, blocks: str, lhs_blocks: str, rhs_blocks: str, model: Experts, out: str = "bfloat16") -> Program:
    """gmm_quantized or tgmm_quantized in e4m3."""
    layout = dict(lhs_blocks=lhs_blocks, rhs_blocks=rhs_blocks)
    return grouped(op, f"e4m3-{blocks}" + "-f32" * (out == "float32"), E4M3, model, out=out, **layout)


def mxfp8(ragged: str, model: Experts, out: str = "bfloat16") -> Program:
    """grouped_gemm in e4m3."""
    words = f"mxfp8-{ragged}" + "-f32" * (out == "float32")
    return grouped(GROUPED_GEMM, words, E4M3, model, out=out, ragged=ragged)


def quantiser(op: str, model: Experts, **options: Any) -> Program:
    """A quantiser of a batch's activations, as they enter a model's up projection."""
    name = "-".join([model.name, *(f"{word}_{value}" for word, value in options.items())])
    arguments = (Abstract((ROWS, model.hidden), "bfloat16"),)
    return Program(op, name, _quantisation(op), arguments, {"interpret": False} | options, work=ROWS)


def dequantiser(op: str, model: Experts, axis: int) -> Program:
    """A dequantiser of the same activations, whose blocks lie along an axis."""
    block, scales = (32, E8M0) if op.startswith("mxfp8") else (128, "float32")
    of_blocks = (ROWS, model.hidden // block) if axis else (ROWS // block, model.hidden)
    codes = Abstract((ROWS, model.hidden), "int8" if op.startswith("int8") else E4M3)
    options: dict[str, Any] = {"interpret": False} | ({"dtype": "bfloat16"} if scales == E8M0 else {})
    arguments = (codes, Abstract(of_blocks, scales))
    return Program(op, f"{model.name}-axis_{axis}", _quantisation(op), arguments, options, work=ROWS)


def _quantisation(op: str) -> str:
    """The function of an op, as a compiler's process imports it."""
    return f"tpu_kernels.{'mxfp8' if op.startswith('mxfp8') else 'quantize'}:{op}"


class Heads(NamedTuple):
    """The sizes of a scan. key_heads: of q and k, where they have their own; sequences: that are packed, 0 for none."""

    batch: int = 2
    steps: int = 4096
    key_heads: int | None = None
    heads: int = 16
    key_size: int = 128
    value_size: int = 128
    sequences: int = 0

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.key_heads is None else f"H{self.key_heads}_HV{self.heads}"
        packed = f"_N{self.sequences}" if self.sequences else ""
        return f"B{self.batch}_T{self.steps}_{heads}_K{self.key_size}_V{self.value_size}{packed}"


def linear_attention(
    op: str, gates: str, dtype: str, *, states: bool = False, chips: Sequence[str] | None = None, **options: Any
) -> Program:
    """A pass of `simple_gla` (gates "none", "gamma", "g" or "both") or of `gla` (gates "gk").

    states: with those before the first steps, and those after the last. options: `Heads`, and the kernel's own.
    Its work is counted in STEPS of one head. chips: LINEAR_ATTENTION_CHIPS unless said.
    """
    sizes = Heads(**{name: options.pop(name) for name in Heads._fields if name in options})
    per_step = (sizes.batch, sizes.steps, sizes.heads)
    shapes = {"gk": (*per_step, sizes.key_size), "g": per_step, "g_gamma": (sizes.heads,)}
    given = {"gamma": ["g_gamma"], "g": ["g"], "both": ["g", "g_gamma"], "gk": ["gk"]}.get(gates, [])
    decays = {name: Abstract(shapes[name], "float32") for name in given}
    return _scan(op, sizes, dtype, decays, states, options, [gates], chips or LINEAR_ATTENTION_CHIPS)


def delta_rule(op: str, dtype: str, *, states: bool = False, **options: Any) -> Program:
    """A pass of `gated_delta_rule` or of `kda`; arguments as `linear_attention`'s, 16 heads of keys unless said."""
    sizes = Heads(**{"key_heads": 16} | {name: options.pop(name) for name in Heads._fields if name in options})
    beta = Abstract((sizes.batch, sizes.steps, sizes.heads), "float32")
    gate = Abstract((*beta.shape, sizes.key_size), "float32") if "kda" in op else beta
    return _scan(op, sizes, dtype, {"g": gate, "beta": beta}, states, options, [], LINEAR_ATTENTION_CHIPS)


def _scan(
    op: str,
    sizes: Heads,
    dtype: str,
    decays: Mapping[str, Abstract],
    states: bool,
    options: Mapping[str, Any],
    words: Sequence[str],
    chips: Sequence[str],
) -> Program:
    backward = op.endswith("_bwd")
    per_step = (sizes.batch, sizes.steps)
    keys = Abstract((*per_step, sizes.key_heads or sizes.heads, sizes.key_size), dtype)
    values = Abstract((*per_step, sizes.heads, sizes.value_size), dtype)
    arguments: dict[str, Any] = {"q": keys, "k": keys, "v": values, **({"do": values} if backward else {}), **decays}
    if states:
        count = sizes.sequences or sizes.batch
        state = Abstract((count, sizes.heads, sizes.key_size, sizes.value_size), "float32")
        arguments |= {"initial_state": state} | ({"dht": state} if backward else {"output_final_state": True})
    if sizes.sequences:
        arguments["cu_seqlens"] = Abstract((sizes.sequences + 1,), "int32")
    named = [str(sizes), *words, SHORT[dtype], *["states"] * states, *(f"{name}_{x}" for name, x in options.items())]
    module = next(name for name in ("simple_gla", "gla", "kda", "gated_delta_rule") if name in op)
    return Program(
        op,
        "-".join(named),
        f"tpu_kernels.{module}:{op}",
        (),
        arguments | {"interpret": False} | options,
        chips=tuple(chips),
        work=sizes.batch * sizes.steps * sizes.heads // STEPS,
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
    for name in ("fp8_dequantize", "int8_dequantize", "mxfp8_dequantize"):
        yield dequantiser(name, DEEPSEEK_V3, axis=0)
        yield dequantiser(name, DEEPSEEK_V3, axis=1)
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
        if direction == "fwd":
            for sequences in (64, 512):  # decoding: a step of each
                of_each = {"dtype": "bfloat16", "batch": sequences, "steps": 1, "states": True}
                yield linear_attention("fused_recurrent_simple_gla_fwd", "gamma", **of_each)
                yield linear_attention("fused_recurrent_gla_fwd", "gk", **of_each)
                yield delta_rule("fused_recurrent_gated_delta_rule_fwd", heads=32, **of_each)
                yield delta_rule("fused_recurrent_kda_fwd", key_heads=32, heads=32, **of_each)
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
    for model in (DEEPSEEK_V3, QWEN3_30B):  # as a layer's matmuls hand on
        yield quantised(GMM_QUANTIZED, "block128", "1x128", "1x128x128", model, out="float32")
        yield quantised(GMM_QUANTIZED, "channel", "1xK", "1xKx1", model, out="float32")
        yield mxfp8("lhs", model, out="float32")
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
