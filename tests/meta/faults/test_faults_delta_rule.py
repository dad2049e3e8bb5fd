"""Faults planted in the kernels of the delta rules: most are ones that a public kernel has, or has had."""

import pytest

from tests.matrix.delta_rule import DELTA_RULES
from tests.matrix.gla import is_packed
from tests.meta.faults.planting import check_is_caught, first_of_all, gpu, having, named, tpu

float32 = having(tier="smoke", dtype="float32")
equal = having(tier="default", rho="equal", dtype="float32")
up_to_2 = having(beta="up_to_2", dtype="float32")
bound = having(tier="default", decay="bound", dtype="float32")


def packed(c):
    return is_packed(c) and c.lengths == "zeros_and_ones"


GDN, GDN_BACKWARD = "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"
STEPS, STEPS_BACKWARD = "fused_recurrent_gated_delta_rule_fwd", "fused_recurrent_gated_delta_rule_bwd"
TPU_POWERS = """\
    power, t = -a, jnp.where(iota(a.shape, 1) == iota(a.shape, 2), 1.0, 0.0) - a
    for _ in range(6):
        power = dot(power, power, (1, 0), scan, WHOLE)
        t += dot(t, power, (1, 0), scan, WHOLE)
    return t
"""
GPU_POWERS = """\
    at = tl.arange(0, a.shape[0])
    inverse = tl.where(at[:, None] == at[None, :], 1.0, 0.0) - a
    for level in tl.static_range(0, LEVELS + 3):
        a = dot(a, a, False)
        inverse += dot(inverse, a, False)
    return inverse
"""

FAULTS = named({
    # FlashKDA's, cuDNN's, vLLM's, tt-metal's and PTO's: exact on keys apart, infinite on equal ones
    "the inverse comes from powers": [
        tpu(GDN, "    beside =", TPU_POWERS + "    beside =", equal),
        *(gpu(op,
            "    inverse = _diagonal_inverses(a)\n    for level in tl.static_range(0, LEVELS):\n"
            "        inverse = _joined(inverse, a, DIAGONAL << level)\n    return inverse", GPU_POWERS, equal)
          for op in (GDN, "chunk_kda_bwd")),  # those with a case of equal keys in the default tier
    ],
    # tokamax's and tpu-inference's
    "blocks of the inverse meet in bfloat16 pieces": [
        gpu(GDN, "dot(inverse, dot(tl.where(is_below, a, 0.0), inverse, False), False)",
            "dot(inverse, dot(tl.where(is_below, a, 0.0), inverse, True), True)", equal),
    ],
    "the decay of a state is bfloat16": [
        gpu(GDN, "lost = (whole - kept).to(tl.float32)", "lost = (whole - kept).to(tl.bfloat16).to(tl.float32)",
            float32),
    ],
    "the decay comes after the error": [
        tpu(GDN, 'recalled = read_state(k, state, decay, "decay_from_start", scan, WHOLE)',
            "recalled = dot(k, state, (1, 1), scan)", float32),
        gpu(STEPS, "_sum_over_keys((kept + lost) * k_row * state)", "_sum_over_keys(k_row * state)", float32),
    ],
    # tpu-inference's
    "every sequence starts from the first one's state": [
        gpu(STEPS, "state = load_state(initial_state, at_state, in_state)",
            "state = load_state(initial_state, state_offset(0 * sequence, head, key[None, :], value[:, None], layout),"
            " in_state)", float32, within="_forward_kernel"),
    ],
    "dq and dk are those of the first of the heads that share them": [
        tpu(GDN_BACKWARD, "for n in range(p.group)])", "for n in range(1)])", float32),
        gpu(GDN_BACKWARD, "total = sum_in_order(total.view(*shape[:3], self.p.group, self.p.k).movedim(3, 0))",
            "total = total.view(*shape[:3], self.p.group, self.p.k)[..., 0, :]", float32),
    ],
    # flash-linear-attention's
    "the gate is that of the first head": [
        gpu(GDN, "tl.load(gates.g + row * rows.heads + rows.head, mask=row < rows.end, other=0)",
            "tl.load(gates.g + row * rows.heads, mask=row < rows.end, other=0)", float32),
    ],
    "gates beyond a sequence are not masked": [
        gpu(GDN_BACKWARD, "tl.load(gates.g + row * rows.heads + rows.head, mask=row < rows.end, other=0)",
            "tl.load(gates.g + row * rows.heads + rows.head, mask=row < tl.minimum(rows.end + 1, 70), other=0)",
            packed),
    ],
    # tokamax's option
    "beta is clipped at 1": [
        gpu(GDN, "_inverse(beta[:, None] * raw, LEVELS)", "_inverse(tl.minimum(beta, 1.0)[:, None] * raw, LEVELS)",
            up_to_2),
    ],
    "keys are divided by the root of the mean of squares": [
        tpu(GDN, "lax.rsqrt(_summed(x * x) + NORM_EPS)", "lax.rsqrt(_summed(x * x) / x.shape[-1] + NORM_EPS)", float32),
        gpu(GDN, "tl.sum(values * values, axis=1) + EPS", "tl.sum(values * values, axis=1) / columns + EPS", float32),
    ],
    "the inverse is not transposed": [
        gpu(GDN_BACKWARD, "t_columns = load_tile(pairs.t, row[None, :], at[:, None], rows, ROWS)",
            "t_columns = load_tile(pairs.t, row[:, None], at[None, :], rows, ROWS)", float32),
    ],
    "the inverse has no diagonal": [
        tpu(GDN, "inverse(probe(\"A\", beta * raw, 1, 2), scan)",
            "jnp.where(row > column, inverse(beta * raw, scan), 0.0)", float32),
        gpu(GDN, "inverse = _inverse(beta[:, None] * raw, LEVELS)",
            "inverse = tl.where(at[:, None] > at[None, :], _inverse(beta[:, None] * raw, LEVELS), 0.0)", float32),
    ],
    # tpu-inference's and tokamax's: 64 gates of -5 overflow above the diagonal, and inf times a mask of 0 is NaN
    "the mask comes after exp": [
        tpu(GDN_BACKWARD, "_parts(jnp.where(i >= j, sums, -jnp.inf), self._scan)",
            "(jnp.exp(sums) / jnp.where(i >= j, 1.0, jnp.inf),)", bound),
        gpu(GDN_BACKWARD,
            'scalar_decay(tl.where(is_causal, pair_coarse, float("-inf")), tl.where(is_causal, pair_fine, 0.0), SPLIT)',
            "tl.exp(pair_coarse + pair_fine) * is_causal.to(tl.float32)", bound),
    ],
    # attention-gym's
    "the gradient of A has a diagonal": [
        gpu(GDN_BACKWARD, "da = tl.where(at[:, None] > at[None, :], da", "da = tl.where(at[:, None] >= at[None, :], da",
            float32),
    ],
    "an empty sequence's final state is not written": [
        gpu("chunk_kda_fwd", "store_state(ht, at_sequence, state, in_state)",
            "store_state(ht, at_sequence, state, in_state & (key < tl.where(start < end, layout.k, 0)))", packed),
    ],
    "a recurrence takes two pieces of what is float32": [
        tpu(STEPS, "plan._replace(scan=plan.scan._replace(split=False, precise=True))", "plan",
            having(tier="smoke", dtype="bfloat16")),
    ],
    "what a state recalls is missing from dk": [
        gpu(STEPS_BACKWARD, "dk_row = _sum_over_values(dstate * v_new[:, None]) - recalled",
            "dk_row = _sum_over_values(dstate * v_new[:, None])", float32),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), first_of_all(FAULTS, DELTA_RULES))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
