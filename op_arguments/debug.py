"""The `debug` argument of kernels: what shows each intermediate result, and takes its place."""

from collections.abc import Callable
from typing import Any

Debug = Callable[..., Any] | None
"""debug(site, value, where=None, **steps) takes the place of each named intermediate result: its value at that site of
the golden, which is one where `where` is, in the steps that the golden goes with these arguments. Triton's kernels show
them where they are interpreted only."""


def named(shown: Debug, output: str) -> Debug:
    """The debug of a quantiser that is one of two: its sites have the output's name before theirs."""
    return shown and (lambda site, *values: shown(f"{output}_{site}", *values))


def sums_at(gradient: str, shown: Debug) -> Debug:
    """The debug of a backward matmul: its sums, in steps of which the golden has but one size for both matmuls."""

    def of_gradient(site: str, value: Any, where: Any = None, **steps: Any) -> Any:
        if shown is None or site != "acc":
            return value
        if "tiling" in steps:
            return shown(gradient, value, where, tiling=(max(steps["tiling"]),) * 3)
        return shown(gradient, value, where, **{name: step for name, step in steps.items() if name == "depth"})

    return shown and of_gradient


def backward_alone(shown: Debug) -> Debug:
    """The debug of a gradient, whose golden has no forward pass."""

    def of_backward(site: str, value: Any, where: Any = None, **steps: Any) -> Any:
        return shown(site, value, where, **steps) if shown and site in ("dlhs", "drhs") else value

    return shown and of_backward
