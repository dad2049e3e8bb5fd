"""Faults planted in the TPU's kernels of the delta rules: most are ones that a public kernel has, or has had."""

import pytest

from tests.matrix.delta_rule import DELTA_RULES
from tests.meta.faults.planting import check_is_caught, first_of_all, named, tpu


def float32(c):
    return c.tier == "smoke" and c.dtype == "float32"


def equal(c):
    return c.rho == "equal" and c.dtype == "float32" and c.tier == "default"


FORWARD, BACKWARD = "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"
POWERS = """\
    power, t = -a, jnp.where(iota(a.shape, 1) == iota(a.shape, 2), 1.0, 0.0) - a
    for _ in range(6):
        power = dot(power, power, (1, 0), scan, WHOLE)
        t += dot(t, power, (1, 0), scan, WHOLE)
    return t
"""

FAULTS = named({
    # FlashKDA's, cuDNN's, vLLM's, tt-metal's and PTO's: exact on keys apart, infinite on equal ones
    "the inverse comes from powers": [
        tpu(FORWARD, "    heads, c, _ = a.shape\n    beside =", POWERS + "    beside =", equal),
    ],
    "the decay comes after the error": [
        tpu(FORWARD, "recalled = read_state(k, state, decay, decay.decay_from_start, scan, WHOLE)",
            "recalled = dot(k, state, (1, 1), scan)", float32),
    ],
    "keys are divided by the root of the mean of squares": [
        tpu(FORWARD, "lax.rsqrt(_summed(x * x) + NORM_EPS)", "lax.rsqrt(_summed(x * x) / x.shape[-1] + NORM_EPS)",
            float32),
    ],
    "dq and dk are those of the first of the heads that share them": [
        tpu(BACKWARD, "for n in range(p.group)])", "for n in range(1)])", float32),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), first_of_all(FAULTS, DELTA_RULES))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
