# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Rows that the delta rules normalise, more than one program of the GPU's kernel takes."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference._lib.rows_norm import BLOCK_ELEMENTS, norm_gradient_launch, norm_launch
from op_arguments.delta_rule import NORM_EPS
from tests.support.interpreter import DEVICE

COLUMNS = 256
ROWS = 2 * BLOCK_ELEMENTS // COLUMNS + 3
"""Of three programs, the last of three rows."""


@pytest.mark.gpu
def test_each_row_is_normalised_and_has_its_gradient():
    """As PyTorch's autograd has both, to some roundoffs."""
    x, grad = torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    normal, rstd, out = torch.empty_like(x), torch.empty(ROWS, device=DEVICE), torch.empty_like(x)
    norm_launch(x, normal, rstd).run(x.device)
    norm_gradient_launch(normal, rstd, grad, out).run(x.device)
    leaf = x.double().requires_grad_()
    expected = leaf * (leaf.square().sum(dim=1, keepdim=True) + NORM_EPS) ** -0.5
    expected.backward(grad.double())
    for got, wanted in ((normal, expected), (out, leaf.grad)):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-7)
