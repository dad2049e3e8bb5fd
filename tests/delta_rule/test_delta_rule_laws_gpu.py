# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Laws of the GPU's kernels of the delta rules alone: autograd, NaN, sequences that know nothing of others."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from tests.delta_rule.test_delta_rule_cpu import problem
from tests.support.functions import public
from tests.support.interpreter import interpreted

pytestmark = [pytest.mark.gpu, pytest.mark.full, interpreted]
KERNELS = public("gpu_reference")
RULES = ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]
OF_STEPS = ("q", "k", "v", "g", "beta", "do")


def tensors(rule, **sizes):
    given = problem("kda" if "kda" in rule else "gated_delta_rule", **dict(b=1, t=20, h=1, hv=2, k=16, v=16) | sizes)
    return tuple({name: torch.from_numpy(x.astype(np.float32)) for name, x in part.items()} for part in given)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_backward_pass(rule):
    forward, backward = tensors(rule)
    leaves = {name: x.clone().requires_grad_() for name, x in forward.items()}
    options = dict(use_qk_l2norm_in_kernel=True)
    o, ht = KERNELS[rule](**leaves, **options, output_final_state=True)
    ((o * backward["do"]).sum() + (ht * backward["dht"]).sum()).backward()
    grads = KERNELS[f"{rule}_bwd"](**forward, **backward, **options)
    for name, gradient in zip(leaves, (*grads[:5], grads.dh0), strict=True):
        assert torch.equal(leaves[name].grad, gradient), name


@pytest.mark.parametrize("rule", RULES)
def test_an_input_that_is_changed_before_the_backward_pass_is_an_error(rule):
    forward, _ = tensors(rule, t=3)
    for name in forward:
        leaves = {name: x.clone().requires_grad_() for name, x in forward.items()}
        o = KERNELS[rule](**leaves).o
        with torch.no_grad():
            leaves[name] += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize("rule", RULES)
def test_nan_stays_in_its_sequence(rule):
    forward, backward = tensors(rule, t=41, n=3)
    forward["cu_seqlens"] = torch.tensor([0, 20, 20, 41], dtype=torch.int32)
    clean = forward | backward
    dirty = {name: x.clone() for name, x in clean.items()}
    for name in OF_STEPS:
        dirty[name][:, 20:] = float("nan")
    for way, names in (("fwd", forward), ("bwd", clean)):
        expected, got = (KERNELS[f"{rule}_{way}"](**{name: x[name] for name in names}) for x in (clean, dirty))
        for name, x, y in zip(expected._fields, expected, got, strict=True):
            if x is None:
                continue
            rows = (slice(0, 2),) if name == "dh0" else (slice(None), slice(0, 20))
            assert torch.equal(x[rows], y[rows]), name
            if name != "dh0":
                assert y[:, 20:].isnan().any(), name
