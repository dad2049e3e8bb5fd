"""Every kernel compiles for AMD's GPUs both as it is launched with little memory and with 2 GiB and more."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from parity.compilers.ptx import NEAR, case_of, compile_kernels
from tests.matrix import OPS
from tests.support.calls import launched
from tests.support.tiny import tiny

USUAL = ("gmm", "fused_chunk_simple_gla_bwd")


def far(argument):
    """An argument, its tensors of any size."""
    if isinstance(argument, dict):
        return {name: far(field) for name, field in argument.items()}
    return argument.removesuffix(NEAR) if isinstance(argument, str) else argument


@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx950", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in USUAL)) for op in OPS]
)
def test_compiles_with_memory_of_any_size(op, target):
    cases = [case_of(launch, target) for launch in launched(op, tiny(op), target)]
    both = compile_kernels([*cases, *(replace(case, arguments=far(case.arguments)) for case in cases)])
    assert [result.error for result in both] == [None] * 2 * len(cases)
    for result, is_near in zip(both, [True, False], strict=False):
        assert any(name.startswith("buffer_") for name in result.instructions) == is_near
