"""What a contract explains: how far kernels that keep it are from the golden, by rounding at random.

The staged golden runs several times with every site of the contract rounded stochastically (Parker 1997, Monte Carlo
arithmetic; Croci et al. 2022, Stochastic rounding): a value goes to one of its two neighbours in the site's dtype, with
the probabilities that make it right on average. A representable value stays as it is, so the model errs where kernels
do; and values with the same significand round alike, as in every kernel: what is computed once for a block, a group of
heads or equal keys errs in all of them by the same. Its variance is twice that of rounding to nearest (q²/6 against the
q²/12 of an error uniform in half a unit q); what all runs share is in both: products that a matrix unit leaves out, and
what hardware cuts off (`TOWARD_ZERO`), an error of one sign. With mean m and variance s² of R runs' differences from
the golden,

    σ² = (m² - s²/R) + s²/2

is the mean square error of kernels that round to nearest at these sites, free of bias for any R.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import chain, count
from typing import Any

import numpy as np

from parity.dtypes import OF_POWER, OFF_BY_ULPS, Floats, Words, stochastic
from parity.inputs import stream
from parity.judging.fit import RUNS, Allowance
from parity.judging.rounding import Rounding, on_unit, staged
from parity.op import Case, Contract, Inputs, Op

AT_ONCE = 2**18
"""Elements of an output, of all runs that are drawn together: more leave the caches."""
SIGNIFICAND = np.uint64(2**52 - 1)
MIXING = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]


def runs(
    op: Op, case: Case, inputs: Inputs, contract: Contract, golden: Mapping[str, Floats], *, off_grid: bool = False
) -> Iterator[dict[str, Floats]]:
    """What each output of one run after the other differs from the golden by, 0 where that is not finite.

    The same for the same case and contract. off_grid: at sites of `functions_of` a value errs as some other one of its
    size, unless float32 holds it. Only the model has a grid of ulps: a kernel errs as well where a value lies on it.
    """
    functions = functions_of(contract) if off_grid else ()
    for group in _groups(op, golden):
        rounding = _rounding(contract, case, group, functions, keeps_exact=True)
        yield from _drawn(op, case, inputs, contract, golden, group, rounding, **on_unit(contract))


def typical_runs(
    op: Op, case: Case, inputs: Inputs, contract: Contract, golden: Mapping[str, Floats]
) -> Iterator[dict[str, Floats]]:
    """As `runs`, but at each site a value errs as some other one of its size does, and dots leave nothing out.

    How near a value is to the next in the site's dtype is in σ, and in the error of a kernel that rounds it too. Of two
    kernels whose errors are as large, the one whose σ were the unit would look the better: by up to 2.2 times.
    """
    for group in _groups(op, golden):
        rounding = _rounding(contract, case, group, contract.sites, keeps_exact=False)
        yield from _drawn(op, case, inputs, contract, golden, group, rounding, tile=contract.tile)


def functions_of(contract: Contract) -> frozenset[str]:
    """The sites whose values a function returns that is off by ulps (`OFF_BY_ULPS`)."""
    return frozenset(site for site, dtype in contract.sites.items() if dtype.removesuffix(OF_POWER) in OFF_BY_ULPS)


def allowances(drawn: list[dict[str, Floats]], golden: Mapping[str, Floats], roundoff: float) -> dict[str, Allowance]:
    """The `Allowance` of each output that has elements."""
    return {name: Allowance.of(y, [run[name] for run in drawn], roundoff) for name, y in golden.items() if y.size}


def alike(key: np.uint64 | np.ndarray) -> Words:
    """Random words that are the same for values of one significand; another key gives others.

    key: one uint64, or [R] of those, one for each of the first axis of values.
    The finaliser of splitmix64 (Steele, Lea & Flood 2014), without its last step: only the low bits need that.
    """

    keys = np.reshape(key, -1)

    def words(values: Floats) -> np.ndarray:
        mixed = np.ascontiguousarray(values).view(np.uint64) & SIGNIFICAND
        mixed ^= keys.reshape((-1,) + (1,) * (mixed.ndim - 1))
        for bits, factor in MIXING:
            mixed ^= mixed >> bits
            mixed *= factor
        return mixed

    return words


def _groups(op: Op, golden: Mapping[str, Floats]) -> Iterator[range]:
    """The numbers of the runs that are drawn together: as many as a verdict asks for next, if they are small."""
    size = max((y.size for y in golden.values()), default=0)
    most = max(1, AT_ONCE // max(size, 1)) if op.at_once else 1
    first = 0
    for end in chain(RUNS, count(2 * RUNS[-1], RUNS[-1])):
        for begin in range(first, end, most):
            yield range(begin, min(begin + most, end))
        first = end


def _words(case: Case, label: str, group: range) -> Words:
    return alike(np.concatenate([stream(case, f"{label} {n}")(1) for n in group]))


def _drawn(
    op: Op, case: Case, inputs: Inputs, contract: Contract, golden: Mapping[str, Floats], group: range,
    rounding: Rounding, **steps: Any,
) -> Iterator[dict[str, Floats]]:  # fmt: skip
    """What each run of a group differs from the golden by."""
    rounded = staged(op, case, inputs, contract, rounding, len(group) if op.at_once else None, **steps)
    with np.errstate(invalid="ignore"):
        off = {name: np.nan_to_num(rounded[name] - y, nan=0.0, posinf=0.0, neginf=0.0) for name, y in golden.items()}
    for n in range(len(group)):
        yield {name: x[n] if op.at_once else x for name, x in off.items()}


def _rounding(
    contract: Contract, case: Case, group: range, as_others: Container[str], *, keeps_exact: bool
) -> Rounding:
    """The rounding of a group of runs, at random.

    At the sites `as_others` a value errs as one between half of it and itself, in proportion. keeps_exact: not one that
    float32 holds.
    """
    words, others = (_words(case, what, group) for what in ("run", "other"))

    def rounding(site: str, value: Floats) -> Floats:
        dtype = contract.sites.get(site)
        if dtype is None:
            return value
        if site not in as_others:
            return stochastic(value, dtype, words)
        share = 1 - others(value) * 2.0**-65
        other = value * share
        off = stochastic(other, dtype, words)
        off -= other
        off /= share
        errs = np.isfinite(off)
        if keeps_exact:
            errs &= value != value.astype(np.float32)
        if not errs.all():
            off = np.where(errs, off, 0.0)
        off += value
        return off

    return rounding
