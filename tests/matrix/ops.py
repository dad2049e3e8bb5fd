"""An op of this project: its golden and both kernels have one name, in modules of one name.

And what the cases of all families have in common.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parity import Case, Op
from parity.contact.assumptions import DOT_ROUNDS
from parity.op import Backend

MXU_DEPTH, MMA_DEPTH = 128, 16  # as `parity.backends.emulation` documents them
F32, BF16, F16 = "float32", "bfloat16", "float16"
TRAINED = ["correlated", "residuals"]  # as one_signed and outliers are, what trained models have


def op(golden: Callable[..., Any], name: str = "", **settings: Any) -> Op:
    """The op of a golden, without cases; of that name where the golden has several."""
    module, name = golden.__module__.partition(".")[2], name or golden.__name__
    return Op(name, golden=golden, tpu=f"tpu_kernels.{module}:{name}", gpu=f"gpu_reference.{module}:{name}", **settings)


def is_backward(c: Case) -> bool:
    """Whether the op returns gradients."""
    return c.op.endswith("_bwd")


def sizes(axes: str, *rows: tuple[int, ...]) -> list[dict[str, int]]:
    """A table of shapes: sizes("M K", (3, 4), (5, 6)) is [dict(M=3, K=4), dict(M=5, K=6)]."""
    return [dict(zip(axes.split(), row, strict=True)) for row in rows]


def one_in(n: int, cases: Sequence[Case], first: int = 0) -> tuple[Case, ...]:
    """Every n-th of the cases from the first on, the others in the full tier.

    Of a grid whose axes have sizes that share no factor with n, all values of any two axes meet within a few steps.
    """
    return tuple(case if k % n == first else replace(case, tier="full") for k, case in enumerate(cases))


def in_turn(second: bool, *grids: Sequence[Case]) -> tuple[Case, ...]:
    """The cases of the grids, every other one of the default tier moved to the full tier.

    Two ops that share their code call this, one of them with `second`: the default tier then has each case of one op.
    """
    turn = itertools.count()
    return tuple(
        case if case.tier == "full" or next(turn) % 2 == second else replace(case, tier="full")
        for case in itertools.chain(*grids)
    )


def of_unit(backend: Backend, running: str = "acc") -> Mapping[str, tuple[str, ...]]:
    """The site that a matrix unit's own sums are: on a GPU the running sum, on a TPU what leaves it and is added."""
    return {"partial" if backend == "tpu" else running: (DOT_ROUNDS,)}
