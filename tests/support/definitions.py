"""A golden of a grouped matmul beside its definition, row by row."""

import numpy as np
import pytest

from parity.inputs import draw

OF_KERNELS = ("tiling", "preferred_element_type")
"""Arguments that a golden only checks, and a definition has not."""


def distinct(*ops, dtypes=True):
    """A parameter (op, case) for all that a definition can tell apart, which has no tiles, and not always dtypes."""
    cases = {}
    for op in ops:
        for case in op.cases:
            if case.tier != "full" and not case.model:
                options = tuple(option for option in case.options if option[0] != "tiling")
                key = (op.name, case.dims, case.dtype if dtypes else None, case.data, options)
                cases[key] = pytest.param(op, case, id=case.id)
    return list(cases.values())


def check_definition(op, case, definition):
    """Refuse a golden that is not its definition to float64's roundoff, or not finite where that is."""
    inputs, arguments = draw(op, case), op.arguments(case)
    kept = {name: value for name, value in arguments.items() if name not in OF_KERNELS}
    with np.errstate(invalid="ignore"):
        golden, expected = op.golden(**inputs, **arguments), definition(**inputs, **kept)
        magnitude = op.magnitude(op, case, inputs)
    assert golden.dtype == expected.dtype == np.float64
    finite = np.isfinite(golden)
    assert np.array_equal(finite, np.isfinite(expected))
    assert np.all(np.abs(golden[finite] - expected[finite]) <= 1e-12 * magnitude[finite])
