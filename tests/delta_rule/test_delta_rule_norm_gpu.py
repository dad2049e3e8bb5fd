# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Normalised rows of more sequences than one program of the GPU's kernel takes."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from tests.delta_rule.test_delta_rule_cpu import problem
from tests.support.functions import public
from tests.support.interpreter import DEVICE

KERNELS = public("gpu_reference")
SIZES = dict(b=20, t=1, h=2, hv=2, k=256, v=16)


@pytest.mark.gpu
def test_a_normalised_row_knows_nothing_of_other_sequences():
    """The first and the last of 20 sequences have the bits that they have alone, in both passes."""
    forward, backward = (
        {name: torch.from_numpy(x.astype(np.float32)).to(DEVICE) for name, x in part.items()}
        for part in problem("gated_delta_rule", **SIZES)
    )
    for way, given in (("fwd", forward), ("bwd", forward | backward)):
        function = KERNELS[f"fused_recurrent_gated_delta_rule_{way}"]
        whole = function(**given, use_qk_l2norm_in_kernel=True)
        for nth in (0, SIZES["b"] - 1):
            alone = function(**{name: x[nth : nth + 1] for name, x in given.items()}, use_qk_l2norm_in_kernel=True)
            for name, x, y in zip(whole._fields, whole, alone, strict=True):
                assert x is None or torch.equal(x[nth : nth + 1], y), (way, name)
