"""What quantising to fp8 costs a layer: cosine, SNR and Frobenius error of its output and gradients, by block size.

Computed by the goldens on the CPU, so it shows the error of the recipe and of no kernel.
Run: python -m benchmarks.fp8_precision
"""

import argparse
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from cpu_golden import Array
from cpu_golden.grouped_dense import grouped_dense, grouped_dense_bwd

BLOCKS = (128, 256, 512)
OUTLIERS = 32, 64.0  # one channel of lhs in that many is that much larger (Dettmers et al. 2022, arXiv:2208.07339)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("rows", 1024), ("hidden", 1024), ("intermediate", 512), ("groups", 4)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"(default: {size})")
    given = parser.parse_args()
    print(f"M={given.rows} K={given.hidden} N={given.intermediate} G={given.groups}, e4m3, both passes quantised")
    print(f"{'data':<10} {'block':>5}  {'':<5} {'cosine':>10} {'SNR dB':>8} {'Frobenius':>10}")
    for data in ("normal", "outliers"):
        arguments = _draw(data, given.rows, given.hidden, given.intermediate, given.groups)
        exact = dict(_results(arguments, None))
        for block in BLOCKS:
            for name, got in _results(arguments, block):
                print(
                    f"{data:<10} {block:>5}  {name:<5} "
                    + "{:>10.6f} {:>8.1f} {:>9.2%}".format(*_compare(got, exact[name]))
                )


def _draw(data: str, m: int, k: int, n: int, groups: int) -> tuple[Array, Array, Array, Array]:
    """lhs, rhs, group_sizes, dout in bfloat16; weights are scaled as they are initialised."""
    rng = np.random.default_rng(0)
    lhs, rhs, dout = rng.standard_normal((m, k)), rng.standard_normal((groups, k, n)), rng.standard_normal((m, n))
    if data == "outliers":
        every, size = OUTLIERS
        lhs[:, rng.permutation(k)[: k // every]] *= size
    edges = np.sort(rng.integers(0, m + 1, groups - 1))
    sizes = np.diff(edges, prepend=0, append=m).astype(np.int32)
    lhs, rhs, dout = (x.astype(ml_dtypes.bfloat16) for x in (lhs, rhs / np.sqrt(k), dout))
    return lhs, rhs, sizes, dout


def _results(arguments: tuple[Array, Array, Array, Array], block: int | None) -> Iterator[tuple[str, Array]]:
    """The output and the gradients by name; unquantised where block is None."""
    lhs, rhs, sizes, dout = arguments
    options = {"quantize": block is not None, "bwd_quantize": block is not None, "block_size": block}
    yield "out", grouped_dense(lhs, rhs, sizes, **options)
    grads = grouped_dense_bwd(lhs, rhs, sizes, dout, **options)
    yield "dlhs", grads.lhs
    yield "drhs", grads.rhs


def _compare(got: Array, exact: Array) -> tuple[float, float, float]:
    """Cosine, signal-to-noise ratio in decibels, relative Frobenius error."""
    error, size = float(np.linalg.norm(got - exact)), float(np.linalg.norm(exact))
    cosine = float((got * exact).sum()) / (float(np.linalg.norm(got)) * size)
    return cosine, 20 * np.log10(size / error), error / size


if __name__ == "__main__":
    main()
