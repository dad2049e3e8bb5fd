"""Cases that no one chose: hypothesis draws them around an op's matrix, smallest first.

Each size is any number up to those of the default tier, each option any value that some case has, and so are dtypes
and data. What the golden refuses is no case. A drawn case is spelled like any other: its id reruns it alone. Needs
hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from parity.inputs import draw
from parity.judging.reference import reference
from parity.op import TIERS, Case, Op

LARGEST = 320
"""No size is drawn beyond this: several tiles along an axis."""
UNITS = (1, 16, 32, 128)
"""A size is a multiple of one of these, as blocks and lanes ask for."""
SEEDS = 2**16


def cases(op: Op) -> st.SearchStrategy[Case]:
    """Cases of an op whose matrix says what its options may be; those that its golden refuses are left out.

    Simplest first, which is what hypothesis shrinks to: sizes of 1 (0 where the matrix has 0), the options of the
    matrix's first cases, seed 0.
    """
    return _any_case(op).filter(lambda case: is_case(op, case))


def is_case(op: Op, case: Case) -> bool:
    """Whether there are such inputs, the golden takes them, and kernels go that way with that dtype in the matrix."""
    if not any(op.route(case) == op.route(known) and case.dtype == known.dtype for known in op.cases):
        return False
    try:
        draw(op, case)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # a pattern of no groups, data that a dtype has not
        return False
    try:
        reference(op, case)
    except (TypeError, ValueError):  # how arguments are refused
        return False
    return True


@st.composite
def _any_case(choose: st.DrawFn, op: Op) -> Case:
    known = sorted(op.cases, key=lambda case: TIERS.index(case.tier))
    like = choose(st.sampled_from(known))
    dims = {name: choose(_size(op, name)) for name, _ in like.dims}
    dtype = choose(_of(like, known, lambda case: (case.dtype, case.out)))
    data = choose(_of(like, known, lambda case: case.data))
    options: dict[str, Any] = {name: [choose(_option(like, known, name))] for name in op.defaults}
    (case,) = op.grid([dims], dtype=[dtype], data=[data], **options)
    return case.with_seed(choose(st.integers(0, SEEDS)))


def _size(op: Op, name: str) -> st.SearchStrategy[int]:
    of_cases = [(case, dict(case.dims)[name]) for case in op.cases if name in dict(case.dims)]
    usual = [size for case, size in of_cases if case.tier != "full" and not case.model]
    low, high = int(all(size for _, size in of_cases)), min(max(usual, default=1), LARGEST)
    units = st.sampled_from([unit for unit in UNITS if unit <= max(high, 1)])
    # The unit is applied to the number: a smaller one leaves it about where it is, and shrinking goes on from there.
    return st.builds(lambda number, unit: min(-(-number // unit), high // unit) * unit, st.integers(low, high), units)


def _option(like: Case, known: list[Case], name: str) -> st.SearchStrategy[Any]:
    """A value that some case has; a tiling's numbers each from another case."""
    if name != "tiling":
        return _of(like, known, lambda case: getattr(case, name))
    tilings = [case.tiling for case in known if case.tiling]
    if not tilings:
        return st.none()
    mixed = st.tuples(*(st.sampled_from(sorted(set(sizes))) for sizes in zip(*tilings, strict=True)))
    return st.just(like.tiling) | mixed


def _of(like: Case, known: list[Case], value: Callable[[Case], Any]) -> st.SearchStrategy[Any]:
    """That of `like`, whose values go together, or of any case."""
    return st.just(value(like)) | st.sampled_from(list(dict.fromkeys(map(value, known))))
