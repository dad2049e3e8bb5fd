"""What ways to a delta rule's inverse cost: the error of o and of the final state, by how alike keys are and by gate.

The chunked golden in the steps of other kernels: dots take operands of bfloat16 and add in float32, u, w and o are
bfloat16, and only the way to T = (I + A)⁻¹ differs; kernel-parity's TPU kernel takes what is float32 in two pieces, or
in three, and meets the state before T. Computed in float64 on the CPU, with roundings put in: it shows the scheme, and
no kernel ran. Figures are relative rms errors against the recurrence.
Run: python -m benchmarks.delta_rule_schemes
"""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.chunks import chunks_of
from cpu_golden._lib.triangular import DOT_SITES, inverse
from cpu_golden.gated_delta_rule import chunk_gated_delta_rule_fwd, gated_delta_rule_fwd_definition
from cpu_golden.stages import Inverse, Stages, single_pass
from parity.dtypes import round_to
from parity.judging.passes import bf16x3, whole_float32

F32, BF16 = "float32", "bfloat16"


def by_powers(a: Array, stages: Stages) -> Array:
    """(I - A)(I + A²)(I + A⁴) …: exact in algebra; powers of A grow where keys are alike. Sites: T, and the dots'."""
    dot = stages.renamed(**DOT_SITES).dot
    t, power = np.eye(a.shape[-1]) - a, a
    for _ in range((a.shape[-1] - 1).bit_length() - 1):
        power = dot(power, power)
        t = stages("T", t + dot(t, power))
    return t


def by_powers_of_blocks(a: Array, stages: Stages) -> Array:
    """Diagonal blocks D of 8 rows by substitution, and I + A = D (I + N) by powers of N. Sites: T, and the dots'."""
    dot = stages.renamed(**DOT_SITES).dot
    t, below = np.broadcast_to(np.eye(a.shape[-1]), a.shape).copy(), a.copy()
    for rows in chunks_of(a, 8):
        t[..., rows, rows] = inverse(a[..., rows, rows], stages)
        below[..., rows, rows] = 0
    return stages("T", dot(by_powers(dot(t, below), stages), t))


def by_newton(rounds: int) -> Inverse:
    """X ← X (2 I - (I + A) X), from I, on diagonal blocks of 16 rows, and products between: of a block A^(2^rounds) is
    left, which is 0 from 4 on. Sites: T, and the dots'."""

    def of_block(a: Array, stages: Stages) -> Array:
        dot, unit = stages.renamed(**DOT_SITES).dot, np.eye(a.shape[-1])
        x = np.broadcast_to(unit, a.shape)
        for _ in range(rounds):
            x = stages("T", dot(x, 2 * unit - dot(unit + a, x)))
        return x

    return partial(inverse, of_block=of_block)


class Scheme(NamedTuple):
    """A way to T: its name, who has it, what T and the operands of its dots are rounded to, its steps, and how many
    pieces of bfloat16 all other dots take what is float32 in; with two those with T or a state take three."""

    name: str
    peer: str
    inverted: str = F32
    operands: str = F32
    inverse: Inverse | None = None
    pieces: int = 1

    def stages(self) -> Stages:
        """The golden's, in this scheme; everything but the way to T is the same."""
        narrow, stored = (BF16, BF16) if self.pieces == 1 else ("bf16x2", F32)
        sites = {"lhs": narrow, "rhs": narrow, "u": stored, "w": stored, "o": BF16, "acc": F32, "h": F32, "A": F32}
        sites |= {"T": self.inverted, "solve_lhs": self.operands, "solve_rhs": self.operands}
        sites |= dict.fromkeys(("solve_acc", "solve_sum", "solve_product"), F32)

        def rounding(site: str, value: Array) -> Array:
            return round_to(value, sites[site]).astype(np.float64) if site in sites else value

        if self.pieces == 1:
            return Stages(rounding, solve_passes=single_pass, inverse=self.inverse, wy=True)
        whole = {"solve_passes": whole_float32, "whole_passes": whole_float32}
        return Stages(rounding, passes=bf16x3, values_decayed=True, **whole)


SCHEMES = (
    Scheme("substitution, two or three pieces", "kernel-parity", pieces=2),
    Scheme("substitution, T in bf16", "fla", BF16),
    Scheme("substitution, products in one bf16 pass", "tokamax v2", operands=BF16),
    Scheme("powers of 8-row blocks, bf16", "sglang-jax mega_kda", operands=BF16, inverse=by_powers_of_blocks),
    Scheme("powers of 8-row blocks, float32", "its interpret mode", inverse=by_powers_of_blocks),
    Scheme("Newton, 3 rounds", "vllm #53864, before", inverse=by_newton(3)),
    Scheme("Newton, 4 rounds", "vllm #53864, after", inverse=by_newton(4)),
    Scheme("doubling", "tt-metal #54813", inverse=by_powers),
)
RHOS, GATES = (0.0, 0.5, 1.0, 2.0, np.inf), (0.0, 0.02, 0.5)
"""How long what keys have in common is, beside their own; and the mean log decay of a step, less its sign."""


def errors(scheme: Scheme, given: Mapping[str, Any], exact: tuple[Array, Array]) -> tuple[float, float]:
    """The relative rms errors of o and of the final state."""
    with np.errstate(all="ignore"):
        got = chunk_gated_delta_rule_fwd(**given, output_final_state=True, stages=scheme.stages())
        o, ht = (float(np.sqrt(np.mean((y - x) ** 2) / np.mean(x**2))) for y, x in zip(got, exact, strict=True))
    return o, ht


def draw(rho: float, gate: float, t: int, size: int, beta: float) -> dict[str, Array]:
    """q, k, v in bfloat16; unit keys with a component in common, rho times as long as their own."""
    rng = np.random.default_rng(0)
    own, common = rng.standard_normal((1, t, 2, size)), rng.standard_normal((2, size))
    k = np.broadcast_to(common, own.shape) if np.isinf(rho) else own + rho * common
    q, v = rng.standard_normal((2, 1, t, 2, size))
    tensors = {"q": q, "k": k / np.linalg.norm(k, axis=-1, keepdims=True), "v": v}
    given = {name: round_to(x, BF16) for name, x in tensors.items()}
    g = -gate * rng.exponential(size=(1, t, 2))
    return given | {"g": g.astype(np.float32), "beta": np.full((1, t, 2), beta, np.float32)}


def main() -> None:
    """Print a table of errors of o and of the state for each gate: a line for each scheme, a column for each rho."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("steps", 256), ("size", 128)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"(default: {size})")
    parser.add_argument("--beta", type=float, default=0.95, help="(default: 0.95)")
    given = parser.parse_args()
    print(f"T = {given.steps}, K = V = {given.size}, chunk 64, beta {given.beta}, bfloat16")
    for gate in GATES:
        columns = ("equal keys" if np.isinf(rho) else f"ρ = {rho:g}" for rho in RHOS)
        print(f"\n| mean gate {0.0 - gate:g}: o; state | {' | '.join(columns)} |")
        print("|---" * (len(RHOS) + 1) + "|")
        drawn = [draw(rho, gate, given.steps, given.size, given.beta) for rho in RHOS]
        exact = [gated_delta_rule_fwd_definition(**arguments, output_final_state=True) for arguments in drawn]
        for scheme in SCHEMES:
            found = (errors(scheme, *case) for case in zip(drawn, exact, strict=True))
            cells = " | ".join(f"{o:.1e}; {ht:.1e}" for o, ht in found)
            print(f"| {scheme.name} ({scheme.peer}) | {cells} |")


if __name__ == "__main__":
    main()
