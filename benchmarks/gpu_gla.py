"""Gated linear attentions and delta rules in Triton on this machine's GPU, next to flash-linear-attention's.

    pip install flash-linear-attention==0.6.0
    python -m benchmarks.gpu_gla                        bfloat16, 4096 and 65536 steps
    python -m benchmarks.gpu_gla --only chunk_kda --steps 4096 --dtype float32 --json

Both contenders get the same tensors in the same run. Each is checked before it is timed against the float64 golden of
two heads of one batch row: o, or the worst of dq, dk, dv and the gradient of a gate that differs from step to step.
The backward pass is what `torch.autograd.grad` runs after a forward pass. Times are medians of a captured graph by CUDA
events, with a cold L2 cache; eager ones are of calls one after the other. The peer tunes itself first, for minutes.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from benchmarks import command
from benchmarks.command import Figure, figure
from gpu_reference.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gpu_reference.gla import chunk_gla, fused_recurrent_gla
from gpu_reference.kda import chunk_kda, fused_recurrent_kda
from gpu_reference.simple_gla import chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_simple_gla

BATCH, HEADS, KEYS, VALUES = 2, 16, 128, 128
STEPS = (4096, 65536)
CHECKED_HEADS = (0, HEADS - 1)  # of batch row 0
DEVICE = "cuda"
WARM_UP, REPEATS = 5, 20

OURS, PEER = "ours", "flash-linear-attention"
FASTER_THAN_PEER = 1.0

Kernel = Callable[..., Any]
KERNELS: list[tuple[Kernel, str]] = [
    (chunk_simple_gla, "g_gamma"),
    (chunk_simple_gla, "g"),
    (fused_chunk_simple_gla, "g"),
    (chunk_gla, "gk"),
    (fused_recurrent_simple_gla, "g"),
    (fused_recurrent_gla, "gk"),
    (chunk_gated_delta_rule, "g"),
    (chunk_kda, "g"),
    (fused_recurrent_gated_delta_rule, "g"),
    (fused_recurrent_kda, "g"),
]
"""Each with the gate that it is given; the peer's have the same names."""
PER_CHANNEL, DELTA_RULES = ("gla", "kda"), ("gated_delta_rule", "kda")
"""Modules whose gate has a value for each channel, and those that take beta and keys of length 1."""


@dataclass(frozen=True)
class Row(command.Timed):
    """One contender in one direction."""

    direction: str
    steps: int
    of_peer: Figure = figure("× peer", ".2f")

    @property
    def result(self) -> str:
        """Whether a kernel of ours is as fast as asked."""
        if self.whose != OURS:
            return ""
        if self.of_peer is None:
            return "no peer to compare with"
        return "met" if self.of_peer >= FASTER_THAN_PEER else f"{1 - self.of_peer / FASTER_THAN_PEER:.0%} short of it"


def measure(kernels: Sequence[tuple[Kernel, str]], steps: int, dtype: torch.dtype) -> Iterator[list[Row]]:
    """The rows of each kernel, in both directions."""
    torch.manual_seed(0)
    sizes = {"q": KEYS, "k": KEYS, "v": VALUES, "do": VALUES}
    tensors = {name: torch.randn(BATCH, steps, HEADS, size, device=DEVICE, dtype=dtype) for name, size in sizes.items()}
    beta = torch.rand(BATCH, steps, HEADS, device=DEVICE, dtype=dtype)
    for ours, gate in kernels:
        module = _module(ours)
        inputs = {**tensors, gate: _log_decays(gate, steps, module in PER_CHANNEL)}
        if module in DELTA_RULES:
            inputs |= {"k": normalize(tensors["k"], dim=-1), "beta": beta}
        expected = _expected(module, inputs)
        for direction in ("forward", "backward"):
            blank = Row(f"{ours.__name__} {gate}", OURS, direction, steps)
            rows = [_measured(replace(blank, whose=whose), ours, inputs, expected) for whose in (OURS, PEER)]
            peer = rows[1].microseconds
            yield [replace(row, of_peer=peer / row.microseconds) if peer and row.microseconds else row for row in rows]


def _module(kernel: Kernel) -> str:
    """The name of the module that a kernel of ours and its golden are in."""
    return kernel.__module__.rpartition(".")[2]


def _log_decays(gate: str, steps: int, per_channel: bool) -> Tensor:
    """float32 gates as models have them: ALiBi's slopes, or a sigmoid's logarithm over 16."""
    if gate == "g_gamma":
        return -(2.0 ** (-8 / HEADS * torch.arange(1.0, HEADS + 1, device=DEVICE)))
    shape = (BATCH, steps, HEADS, *([KEYS] if per_channel else []))
    return logsigmoid(torch.randn(shape, device=DEVICE)) / 16


def _expected(module: str, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """o and the gradients of CHECKED_HEADS in float64."""
    sampled = {name: _sample(x).numpy() for name, x in inputs.items()}
    do = sampled.pop("do")
    golden = importlib.import_module(f"cpu_golden.{module}")
    forward, backward = (getattr(golden, f"chunk_{module}_{way}") for way in ("fwd", "bwd"))
    gradients = backward(**sampled, do=do)._asdict()
    return {"o": forward(**sampled).o, **gradients}


def _sample(x: Tensor) -> Tensor:
    """CHECKED_HEADS of the first batch row, or of a tensor [H], in float64 on the host."""
    heads = x[list(CHECKED_HEADS)] if x.ndim == 1 else x[:1, :, list(CHECKED_HEADS)]
    return heads.detach().double().cpu()


def _peer(ours: Kernel) -> Kernel:
    """The peer's kernel of this name, with our names of the arguments. Raises ImportError where it has none."""
    module = importlib.import_module(f"fla.ops.{_module(ours)}")
    if not hasattr(module, ours.__name__):
        raise ImportError(f"{module.__name__} has no {ours.__name__}")
    kernel: Kernel = getattr(module, ours.__name__)
    if ours is chunk_gla:
        return lambda q, k, v, gk: kernel(q, k, v, g=gk)
    return kernel


def _measured(row: Row, ours: Kernel, inputs: Mapping[str, Tensor], expected: Mapping[str, Any]) -> Row:
    """The row with its error and, if that is small enough, its time."""
    try:
        attention = ours if row.whose == OURS else _peer(ours)
        run, results = (_forward if row.direction == "forward" else _backward)(attention, inputs)
    except (ImportError, RuntimeError, ValueError, TypeError) as refused:
        if row.whose == OURS:  # what a peer cannot do is a line of the table; what we cannot is a fault
            raise
        return replace(row, error=f"refused: {refused}".splitlines()[0])
    error = max(_relative_error(result, expected[name]) for name, result in results.items())
    row = replace(row, relative_error=error)
    if wrong := command.wrong(error):
        return replace(row, error=wrong)
    del results
    return replace(row, **command.times(run, warm_up=WARM_UP, repeats=REPEATS))


def _forward(attention: Kernel, inputs: Mapping[str, Tensor]) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """The forward pass, and o."""
    arguments = {name: x for name, x in inputs.items() if name != "do"}
    return lambda: attention(**arguments), {"o": attention(**arguments)[0]}


def _backward(attention: Kernel, inputs: Mapping[str, Tensor]) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """The backward pass, and the gradients, but that of g_gamma: it sums over more than the golden is given."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if name != "do"}
    o = attention(**leaves)[0]
    differentiated = {f"d{name}": x for name, x in leaves.items() if name != "g_gamma"}

    def run() -> Any:
        return torch.autograd.grad(o, list(differentiated.values()), inputs["do"], retain_graph=True)

    return run, dict(zip(differentiated, run(), strict=True))


def _relative_error(result: Tensor, expected: Any) -> float:
    return float(np.linalg.norm(_sample(result).numpy() - expected) / np.linalg.norm(expected))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 where a kernel of ours is wrong or refused."""
    parser = command.gpu_parser(measure)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, metavar="T", help="default: 4096 65536")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name contains TEXT")
    given = parser.parse_args(arguments)
    kernels = [(kernel, gate) for kernel, gate in KERNELS if given.only in kernel.__name__]
    if not kernels:
        parser.error(f"--only must be part of a kernel's name, got {given.only!r}")
    if min(given.steps) < 1:
        parser.error(f"--steps must be positive, got {min(given.steps)}")
    command.check_device(parser)

    console = Console(stderr=True)
    table: list[Row] = []
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for steps in given.steps:
            for rows in measure(kernels, steps, getattr(torch, given.dtype)):
                table += rows
                console.log(f"T {steps}, {rows[0].kernel} {rows[0].direction}: {' · '.join(map(command.brief, rows))}")
    shape = f"B {BATCH}, H {HEADS}, K {KEYS}, V {VALUES}"
    title = f"{command.device()}, {given.dtype}, {shape}: median times, ratios of speed"
    names = {"T": "steps", "kernel": "kernel", "pass": "direction", "whose": "whose"}
    view = command.table(title, table, names, ("result",))
    command.show(given, [asdict(row) for row in table], view)
    return int(any(row.error and row.whose == OURS for row in table))


if __name__ == "__main__":
    sys.exit(main())
