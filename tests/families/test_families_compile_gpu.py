"""Every kernel compiles for AMD's GPUs both as it is launched with little memory and with 2 GiB and more."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from parity.compilers.ptx import NEAR, case_of, compile_kernels
from tests.matrix import OPS
from tests.support.calls import launched
from tests.support.tiny import tiny

USUAL = ("gmm",)
OF_OTHERS = ("permute", "unpermute", "swizzle_scales", "grouped_dense_bwd", "moe_layer", "moe_layer_bwd")
"""What they launch, if anything, are the kernels of other operations, which are compiled as those. (And a PyTorch
without CUDA refuses to index tensors of a GPU, or ends the process where autograd takes one, be it without data.)"""


def far(argument):
    """An argument, its tensors of any size."""
    if isinstance(argument, dict):
        return {name: far(field) for name, field in argument.items()}
    return argument.removesuffix(NEAR) if isinstance(argument, str) else argument


@pytest.mark.full
@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx950", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in USUAL))
        for op in OPS
        if op.name not in OF_OTHERS
    ],
)
def test_compiles_with_memory_of_any_size(op, target):
    cases = [case_of(launch, target) for launch in launched(op, tiny(op), target)]
    assert cases
    near = compile_kernels(cases)
    anywhere = compile_kernels([replace(case, arguments=far(case.arguments)) for case in cases])
    assert [result.error for result in (*near, *anywhere)] == [None] * 2 * len(cases)
    # An offset that is known to be small is one of 32 bits in either case.
    assert buffer_accesses(near) >= buffer_accesses(anywhere) + (op.name == "gmm")


def buffer_accesses(results):
    """Loads and stores that have an offset of 32 bits."""
    return sum(n for result in results for name, n in result.instructions.items() if name.startswith("buffer_"))
