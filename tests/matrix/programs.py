"""What the TPU compiler must make of the kernels: production shapes of published models, and what chips refuse."""

from collections.abc import Iterator
from typing import Any

from parity.compilers.mosaic import Abstract
from parity.schedule import Program
from tests.matrix.models import MODELS, Experts

ROWS = 8192  # tokens of a batch times the experts that each goes to, on one core
CORES = 32  # that share the experts of a model with many


def experts_on_a_core(model: Experts) -> int:
    """Experts whose weights one core holds; of a model with few all of them."""
    return max(model.experts // CORES, min(model.experts, 8))


def grouped(op: str, dtype: str, model: Experts, **options: Any) -> Program:
    """gmm or tgmm of a model's up projection: a shard of the experts, the router over all of them."""
    k, n, groups = model.hidden, model.intermediate, experts_on_a_core(model)
    second = Abstract((ROWS, n), dtype) if op == "tgmm" else Abstract((groups, k, n), dtype)
    shard = {"num_actual_groups": groups} if op == "tgmm" else {}
    return Program(
        op,
        f"{model.name}-{SHORT[dtype]}",
        f"tpu_kernels.gmm:{op}",
        (Abstract((ROWS, k), dtype), second, Abstract((model.experts,), "int32")),
        {"group_offset": Abstract((), "int32"), "interpret": False} | shard | options,
        work=ROWS,
    )


SHORT = {"bfloat16": "bf16", "float32": "f32"}


def programs() -> Iterator[Program]:
    for op in ("gmm", "tgmm"):
        for model in MODELS:
            yield grouped(op, "bfloat16", model)
        yield grouped(op, "float32", MODELS[2])


PROGRAMS = tuple(programs())
