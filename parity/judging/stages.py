"""What the staged goldens are for besides their value: the value at each site, each site's share of the error, and
kernels emulated under a contract, so that ε is predicted before any device runs.

A golden calls `stages(site, value)` wherever a kernel may round; everything here is a choice of `Stages.rounding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.dtypes import Floats, round_to
from parity.inputs import stream
from parity.judging import rounding as at_sites
from parity.judging.rounding import Rounding
from parity.op import Contract
from parity.trial import Trial

PERTURBATION = 1e-7
"""Relative size of the change at one site: far above float64's roundoff, far below what a site's own rounding does."""
DRAWS = 4
"""Random perturbations per site; their shares vary by about 1 %."""


def values(trial: Trial) -> dict[str, list[Floats]]:
    """The float64 values at every site, in the order in which a kernel with the backend's steps reaches them."""
    seen: dict[str, list[Floats]] = {}

    def watch(site: str, value: Floats) -> Floats:
        seen.setdefault(site, []).append(value.copy())
        return value

    staged(trial, watch)
    return seen


def budget(trial: Trial) -> dict[str, float]:
    """Each site's share of the error that equal relative roundings at all sites would cause (they sum to 1).

    The shares are of the mean square error over M, by perturbing one site at a time.
    """
    exact = staged(trial, lambda site, value: value)
    magnitude = {name: trial.scale(name).magnitude for name in exact}
    power: dict[str, float] = {}
    for site in values(trial):
        power[site] = float(np.mean([_power(_perturbed(trial, site, n), exact, magnitude) for n in range(DRAWS)]))
    total = sum(power.values()) or 1.0
    return {site: part / total for site, part in power.items()}


def emulate(trial: Trial) -> dict[str, np.ndarray]:
    """The outputs of a kernel that rounds exactly where and as its contract says, in the contract's output dtype."""
    return {
        name: round_to(y, trial.contract.dtype(name))
        for name, y in staged(trial, by_contract(trial.contract), **at_sites.on_unit(trial.contract)).items()
    }


def by_contract(contract: Contract) -> Rounding:
    """The rounding of every site to the dtype that the contract says."""

    def rounding(site: str, value: Floats) -> Floats:
        dtype = contract.sites.get(site)
        return value if dtype is None else round_to(value, dtype).astype(np.float64)

    return rounding


def staged(trial: Trial, rounding: Rounding, contract: Contract | None = None, **steps: Any) -> dict[str, Floats]:
    """The golden's outputs, in the steps of a kernel under the trial's contract, with a rounding at its sites.

    contract: another one than the trial's. steps: those of its steps that are otherwise.
    """
    return at_sites.staged(trial.op, trial.case, trial.inputs, contract or trial.contract, rounding, **steps)


def _perturbed(trial: Trial, site: str, draw: int) -> dict[str, Floats]:
    bits = stream(trial.case, f"{site}|{draw}")

    def rounding(at: str, value: Floats) -> Floats:
        if at != site:
            return value
        signs = 1.0 - 2.0 * (bits(value.size) & np.uint64(1)).reshape(value.shape)
        return value * (1 + PERTURBATION * signs)

    return staged(trial, rounding)


def _power(got: Mapping[str, Any], exact: Mapping[str, Floats], magnitude: Mapping[str, Floats]) -> float:
    """Mean square of the difference over M, all outputs together."""
    errors = [(got[name] - exact[name])[magnitude[name] > 0] / magnitude[name][magnitude[name] > 0] for name in exact]
    return float(np.mean(np.concatenate([e.ravel() for e in errors]) ** 2)) if any(e.size for e in errors) else 0.0
