"""`moe_layer` forward and backward by program on the real TPU compiler: what quantising it saves, without a TPU.

    python -m benchmarks.moe_layer_static                               every chip, model and format
    python -m benchmarks.moe_layer_static --chip v6e --only DeepSeek    some of them, beside the bf16 layer
    python -m benchmarks.moe_layer_static --json                        for programs

1024 tokens in bfloat16, each through 8 experts of those that one core of many holds: 8192 rows. A kernel's cycles are
its static ones (`parity/compilers/bundles.py`), all grid steps counted, beside those in which HBM moves its bytes. Of
what XLA makes (routing, sums of rows, activation, layouts of scales) they are XLA's own estimate, which has none of
sorts and gathers; its bytes are XLA's too, of a gather all that it is taken from.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import command
from benchmarks.command import Done, Figure, figure
from parity.compilers.chips import CHIPS
from parity.compilers.mosaic import Abstract, Compilation, Compiled, CompiledKernel, roofline

TOKENS, TOP_K = 1024, 8
SHAPES = {"DeepSeek-V3": (7168, 2048, 8), "Qwen3-30B-A3B": (2048, 768, 8)}
"""Hidden and intermediate size, and the experts that a core holds, by model."""
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"quantize": None},
    "fp8 per channel": {"quantize": "fp8", "block_size": None},
    "fp8 blocks of 128": {"quantize": "fp8", "block_size": 128},
    "mxfp8": {"quantize": "mxfp8"},
}
MOST_OF_BF16 = {"fp8 per channel": 0.75, "fp8 blocks of 128": 0.75, "mxfp8": 0.85}
LAYER, OF_XLA = "layer", "XLA"
HERE = __spec__.name if __spec__ else Path(__file__).stem  # what a compiler process imports; a script has no spec


class Layer(NamedTuple):
    """A layer of the table."""

    chip: str
    model: str
    form: str

    def compilation(self) -> Compilation:
        """What the compiler is given."""
        hidden, intermediate, experts = SHAPES[self.model]
        shapes = {"x": (TOKENS, hidden), "dout": (TOKENS, hidden), "w_down": (experts, intermediate, hidden)}
        shapes |= dict.fromkeys(("w_gate", "w_up"), (experts, hidden, intermediate))
        arrays = {name: Abstract(shape, "bfloat16") for name, shape in shapes.items()}
        arrays["w_router"] = Abstract((hidden, experts), "float32")
        return Compilation(f"{HERE}:both_passes", self.chip, (), arrays | FORMATS[self.form])


def both_passes(*, dout: Any, quantize: str | None, block_size: int | None = 128, **primals: Any) -> Any:
    """The layer's result and all its gradients."""
    import jax

    from tpu_kernels.moe import moe_layer

    options: dict[str, Any] = {"top_k": TOP_K, "quantize": quantize, "block_size": block_size, "interpret": False}
    out, backward = jax.vjp(lambda primals: moe_layer(**primals, **options), primals)
    return out, backward(dout)


@dataclass(frozen=True)
class Row(command.Row):
    """A program of a layer, or with the name `LAYER` all of them."""

    model: str
    form: str
    program: str
    calls: Figure = figure("calls", ".0f")
    cycles: Figure = figure("cycles", ",.0f")  # static, of all calls; XLA's by its estimate
    hbm: Figure = figure("HBM", ",.0f")  # cycles in which HBM moves the bytes of all calls
    share: Figure = figure("share", ".0%")  # of the layer's cycles
    of_bf16: Figure = figure("× bf16", ".2f")  # of a layer: its cycles over the bf16 layer's


def measure(chips: Sequence[str], only: str, jobs: int | None, done: Done) -> list[Row]:
    """The table: each layer and its programs, as `command.Measure`."""
    shown = [
        Layer(chip, model, form) for chip in chips for model in SHAPES for form in FORMATS if only in f"{model} {form}"
    ]
    wanted = list(dict.fromkeys(layer for given in shown for layer in (given._replace(form="bf16"), given)))
    answers = command.compile_each(wanted, Layer.compilation, jobs, done)
    return [row for layer in shown for row in _rows(layer, answers[layer], answers[layer._replace(form="bf16")])]


def _rows(layer: Layer, answer: Compiled, of_bf16_layer: Compiled) -> list[Row]:
    """The layer, and its programs, those that take most first."""
    if answer.reason:
        return [Row(*layer, LAYER, error=answer.reason)]
    programs, cycles = _programs(layer, answer), _cycles(answer, layer.chip)
    of_bf16 = cycles / _cycles(of_bf16_layer, layer.chip) if of_bf16_layer.ok else None
    limits = [(" × bf16", of_bf16, MOST_OF_BF16[layer.form])] if layer.form in MOST_OF_BF16 else []
    target, result = command.judged(limits)
    whole = Row(
        *layer,
        LAYER,
        calls=len(answer.kernels),
        cycles=cycles,
        hbm=sum(row.hbm or 0 for row in programs),
        of_bf16=of_bf16,
        target=target,
        result=result,
    )
    ranked = sorted(programs, key=lambda row: -(row.cycles or 0))
    return [whole, *(replace(row, share=row.cycles and row.cycles / cycles) for row in ranked)]


def _cycles(answer: Compiled, chip: str) -> float:
    return sum(roofline(kernel, chip).schedule for kernel in answer.kernels) + (answer.xla_cycles or 0)


def _programs(layer: Layer, answer: Compiled) -> list[Row]:
    """The kernels of a layer by name and size, and what XLA makes of the rest."""
    calls: dict[str, list[CompiledKernel]] = {}
    for kernel in answer.kernels:
        calls.setdefault(_name(kernel), []).append(kernel)
    rows = []
    for name, kernels in calls.items():
        spans = [roofline(kernel, layer.chip) for kernel in kernels]
        cycles, hbm = sum(span.schedule for span in spans), sum(span.hbm for span in spans)
        rows.append(Row(*layer, name, calls=len(kernels), cycles=cycles, hbm=hbm))
    peaks = CHIPS[layer.chip]
    left = (answer.hbm_bytes or 0) - sum(kernel.call.hbm_bytes for kernel in answer.kernels)
    return [*rows, Row(*layer, OF_XLA, cycles=answer.xla_cycles, hbm=max(left, 0) / peaks.hbm_gbs * peaks.ghz)]


def _name(kernel: CompiledKernel) -> str:
    """As in "gmm_quantized 8192×2048": the kernel and its first output."""
    return f"{kernel.name} {'×'.join(map(str, kernel.call.outputs[0].array))}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 where the compiler refused a layer."""
    given, table = command.measured(arguments, measure, 'layers ("DeepSeek-V3 fp8 per channel")')
    names = {"chip": "chip", "model": "model", "format": "form", "program": "program"}
    view = command.table("static cycles", table, names, apart=("chip", "model", "form"))
    command.show(given, [asdict(row) for row in table], view)
    return int(any(row.error for row in table))


if __name__ == "__main__":
    sys.exit(main())
