"""What scans make of gates, and what they round of it."""

import numpy as np

from cpu_golden import Array
from cpu_golden.stages import Stages, exact, tree_sum


def decay_of(exponent: Array, stages: Stages) -> Array:
    """exp. Sites: exponent, decay."""
    return stages("decay", np.exp(stages("exponent", exponent)))


def kept_of(exponent: Array, stages: Stages) -> Array:
    """exp, of what multiplies a state again and again. Sites: kept_exponent, kept (what is left).

    That is 0 or 1, whichever is nearer, and what is left, which alone is rounded: rounded as a whole, as with
    `kept_whole`, a decay near 1 errs by much of what a state forgets.
    """
    whole, rest = _parts(exponent, stages)
    return whole + rest


def decayed(exponent: Array, state: Array, written: Array | float, stages: Stages) -> Array:
    """exp · state + written. Sites: those of `kept_of`, lost (the rest times the state), and change (the sum of that
    and what is written, which is added to the state or to 0)."""
    whole, rest = _parts(exponent, stages)
    return whole * state + stages("change", stages("lost", rest * state) + written)


def _parts(exponent: Array, stages: Stages) -> tuple[Array, Array]:
    decay = np.exp(stages("kept_exponent", exponent))
    whole = np.where(stages.kept_whole | (decay < 0.5), 0.0, 1.0)
    return whole, stages("kept", decay - whole)


def sum_to_gate(channels: Array, gate: Array, stages: Stages = exact) -> Array:
    """The gradient by key channel [..., K], summed in pairs where one gate decays all of them. Site: dgate."""
    return stages("dgate", tree_sum(channels, stages.renamed(sum="dgate")) if gate.shape[-1] == 1 else channels)
