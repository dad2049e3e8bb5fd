"""Grouped matmuls in Triton on this machine's GPU, next to PyTorch's own and to one dense cuBLAS matmul.

    python -m benchmarks.gpu_gmm                        every shape and kernel
    python -m benchmarks.gpu_gmm --rows 65536 --json

All of a shape's contenders get the same operands in the same run; each is checked against float64 before it is timed.
Times are medians of a captured graph by CUDA events, with a cold L2 cache; eager ones are of calls one after the other.
The dense matmul has the same multiplications and no groups: the bound.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import command
from benchmarks.command import Figure, figure
from gpu_reference.gmm import gmm, tgmm
from gpu_reference.quantize import fp8_quantize
from gpu_reference.quantized_gmm import gmm_quantized

SHAPES = [(k, n, groups) for k, n in ((2048, 512), (512, 2048)) for groups in (8, 64)]
WARM_UP, REPEATS = 10, 50
ALIGNMENT = 16  # rows: PyTorch's kernels want the groups of a weight gradient to start at multiples of 16 bytes

OURS, DENSE = "ours", "dense cuBLAS"
FASTER_THAN_PEERS, FASTER_THAN_BF16 = 0.9, 1.5


@dataclass(frozen=True)
class Row(command.Timed):
    """One contender at one shape."""

    m: int
    k: int
    n: int
    groups: int
    teraflops: Figure = figure("Tflop/s", ".0f")
    of_best_peer: Figure = figure("× best peer", ".2f")
    of_dense: Figure = figure("× dense", ".2f")
    of_bf16: Figure = figure("× our bf16", ".2f")  # our bf16 kernel's

    @property
    def shape(self) -> str:
        """As in "2048×512 8"."""
        return f"{self.k}×{self.n} {self.groups}"

    @property
    def result(self) -> str:
        """Whether a kernel of ours is as fast as asked: bf16 against the best peer, fp8 against our bf16."""
        if self.whose != OURS:
            return ""
        got, least, what = self.of_bf16, FASTER_THAN_BF16, "our bf16"
        if self.kernel.endswith("bf16"):
            got, least, what = self.of_best_peer, FASTER_THAN_PEERS, "best peer"
        if got is None:
            return f"no {what} to compare with"
        return "met" if got >= least else f"{1 - got / least:.0%} short of {least}× {what}"


Contender = tuple[str, Callable[[], Tensor]]


def measure(m: int) -> Iterator[list[Row]]:
    """The rows of each shape and kernel, for m rows in groups of random sizes."""
    for k, n, groups in SHAPES:
        bf16 = None
        for kernel, expected, contenders in problems(m, k, n, groups):
            flops = 2 * m * k * n
            timed = [_time(Row(kernel, whose, m, k, n, groups), run, expected, flops) for whose, run in contenders]
            seconds = {row.whose: row.microseconds for row in timed if row.microseconds}
            best_peer = min((t for whose, t in seconds.items() if whose not in (OURS, DENSE)), default=None)
            if kernel == "gmm bf16":
                bf16 = seconds.get(OURS)
            yield [_compared(row, best_peer, seconds.get(DENSE), bf16) for row in timed]


def problems(m: int, k: int, n: int, groups: int) -> Iterator[tuple[str, Tensor, list[Contender]]]:
    """Each kernel's name, float64 result and contenders."""
    torch.manual_seed(0)
    sizes = _group_sizes(m, groups)
    offsets = sizes.cumsum(0).to(torch.int32)
    lhs = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    rhs = torch.randn(groups, k, n, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

    yield (
        "gmm bf16",
        _grouped(lhs.double(), rhs.double(), sizes),
        [
            (OURS, lambda: gmm(lhs, rhs, sizes)),
            ("torch._grouped_mm", lambda: torch._grouped_mm(lhs, rhs, offs=offsets)),
            (DENSE, lambda: lhs @ rhs[0]),
        ],
    )
    starts = [0, *offsets.tolist()]
    expected = torch.stack([lhs[a:b].double().T @ dout[a:b].double() for a, b in pairwise(starts)])
    yield (
        "tgmm bf16",
        expected,
        [
            (OURS, lambda: tgmm(lhs, dout, sizes)),
            ("torch._grouped_mm", lambda: torch._grouped_mm(lhs.T, dout, offs=offsets)),
            (DENSE, lambda: lhs.T @ dout),
        ],
    )
    a, a_scale = fp8_quantize(lhs, 1, None)
    # cuBLAS and CUTLASS take fp8 weights with K contiguous; ours take any strides.
    b, b_scale = fp8_quantize(rhs.mT.contiguous(), 2, None)
    expected = _grouped(a.double() * a_scale, (b.double() * b_scale).mT, sizes)
    arguments = a, b.mT, a_scale.view(-1), b_scale.squeeze(2)
    yield (
        "gmm fp8 per channel",
        expected,
        [
            (OURS, lambda: gmm_quantized(a, a_scale, b, b_scale, sizes, transpose_rhs=True)),
            (
                "torch._scaled_grouped_mm",
                lambda: torch._scaled_grouped_mm(*arguments, offs=offsets, out_dtype=torch.bfloat16),
            ),
            (DENSE, lambda: torch._scaled_mm(a, b[0].T, a_scale, b_scale[0].T, out_dtype=torch.bfloat16)),
        ],
    )
    c, c_scale = fp8_quantize(lhs, 1, 128)
    d, d_scale = fp8_quantize(rhs.mT.contiguous(), (1, 2), 128)
    blocks = d_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    expected = _grouped(c.double() * c_scale.repeat_interleave(128, 1), (d.double() * blocks).mT, sizes)
    yield (
        "gmm fp8 1×128 · 128×128",
        expected,
        [
            (OURS, lambda: gmm_quantized(c, c_scale, d, d_scale, sizes, transpose_rhs=True)),
        ],
    )


def _group_sizes(m: int, groups: int) -> Tensor:
    """int32 [groups], uneven as a router's choices, multiples of ALIGNMENT, summing to m."""
    shares = torch.rand(groups).add(0.1)
    sizes = (shares / shares.sum() * (m // ALIGNMENT)).int() * ALIGNMENT
    sizes[0] += m - sizes.sum()
    return sizes.to("cuda", torch.int32)


def _grouped(lhs: Tensor, rhs: Tensor, sizes: Tensor) -> Tensor:
    return torch.cat([rows @ weights for rows, weights in zip(torch.split(lhs, sizes.tolist()), rhs, strict=True)])


def _time(row: Row, run: Callable[[], Tensor], expected: Tensor, flops: int) -> Row:
    """The row with its error and, if that is small enough, its time. A dense matmul has no groups to be right about."""
    try:
        result = run().double()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as refused:
        return replace(row, error=f"refused: {str(refused).splitlines()[0]}")
    if row.whose != DENSE:
        error = float((result - expected).norm() / expected.norm())
        row = replace(row, relative_error=error)
        if wrong := command.wrong(error):
            return replace(row, error=wrong)
    del result
    found = command.times(run, warm_up=WARM_UP, repeats=REPEATS)
    return replace(row, **found, teraflops=flops / found["microseconds"] * 1e-6)


def _compared(row: Row, best_peer: float | None, dense: float | None, bf16: float | None) -> Row:
    def faster_than(other: float | None) -> float | None:
        return other / row.microseconds if other and row.microseconds else None

    return replace(row, of_best_peer=faster_than(best_peer), of_dense=faster_than(dense), of_bf16=faster_than(bf16))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 where a kernel of ours is wrong or refused."""
    parser = command.gpu_parser(measure)
    parser.add_argument("--rows", type=int, default=32768, metavar="M", help="rows in all groups (default: 32768)")
    given = parser.parse_args(arguments)
    if given.rows < ALIGNMENT or given.rows % ALIGNMENT:
        parser.error(f"--rows must be a positive multiple of {ALIGNMENT}, got {given.rows}")
    command.check_device(parser)

    console = Console(stderr=True)
    table: list[Row] = []
    for rows in measure(given.rows):
        table += rows
        console.log(f"{rows[0].kernel}, K×N G {rows[0].shape}: {' · '.join(map(command.brief, rows))}")
    title = f"{command.device()}: median times, ratios of speed"
    names = {"K×N G": "shape", "kernel": "kernel", "whose": "whose"}
    view = command.table(title, table, names, ("result",))
    command.show(given, [asdict(row) for row in table], view)
    return int(any(row.error and row.whose == OURS for row in table))


if __name__ == "__main__":
    sys.exit(main())
