"""Faults planted in the kernels of gated linear attention: most are ones that a public kernel has, or has had."""

import pytest

from tests.matrix.gla import GATED_LINEAR_ATTENTION, is_packed
from tests.meta.faults.planting import check_is_caught, gpu, having, named, pairs, tpu

bfloat16 = having(tier="smoke", dtype="bfloat16")
steep = having(decay="steep", dtype="float32")
both = having(gates="both")
two_chunks = having(gates="both", dtype="bfloat16", T=50)


def constant(c):
    """A constant decay, and a short last chunk whose state is returned."""
    return c.gates == "gamma" and c.T % c.chunk != 0 and c.ht


def packed(c):
    return is_packed(c) and c.dtype == "float32"


def several_sequences(c):
    return c.tier == "smoke" and c.B > 1


def empty_sequences(c):
    return is_packed(c) and c.lengths == "zeros_and_ones" and c.dtype == "float32"


FORWARD, BACKWARD = "chunk_simple_gla_fwd", "chunk_simple_gla_bwd"
CHANNEL_FORWARD, CHANNEL_BACKWARD = "chunk_gla_fwd", "chunk_gla_bwd"

FAULTS = named({
    # exp overflows above the diagonal, and inf times a mask of 0 is NaN
    "the mask comes after exp": [
        # XLA makes a product with a mask a choice
        tpu(FORWARD, "_parts(jnp.where(i >= j, sums, -jnp.inf), self._scan)",
            "(jnp.exp(sums) / jnp.where(i >= j, 1.0, jnp.inf),)", steep),
        gpu(FORWARD,
            'scalar_decay(tl.where(is_causal, pair_coarse, float("-inf")), tl.where(is_causal, pair_fine, 0.0), SPLIT)',
            "tl.exp(pair_coarse + pair_fine) * is_causal.to(tl.float32)", steep),
    ],
    # flash-linear-attention's and primatrix's: a short last chunk is decayed as a whole one
    "the last chunk decays by a whole chunk's length": [
        tpu(FORWARD, "live = self.live(i) if scan.masked else scan.chunk", "live = scan.chunk", constant),
        gpu(FORWARD, "tl.minimum(at + 1, rows.end - rows.first).to(tl.float32)", "(at + 1).to(tl.float32)", constant),
    ],
    # every public kernel's
    "the gradient of g_gamma is zero": [
        tpu(BACKWARD, 'return steps.sum((0, 1)) if name == "g_gamma"',
            'return jnp.zeros_like(gate) if name == "g_gamma"', both),
        gpu(BACKWARD, "step.sum((0, 1), dtype=torch.float64).float()", "torch.zeros_like(gates.g_gamma)", both),
    ],
    "the final state is missing from dg": [
        tpu(BACKWARD, 'store("dgate", through + jnp.sum(', 'store("dgate", jnp.sum('),
        gpu(BACKWARD, "return sums_across(pairs_t, read, written, SPLIT) + past",
            "return sums_across(pairs_t, read, written, SPLIT)"),
    ],
    "the final state is missing from dgk": [
        tpu(CHANNEL_BACKWARD,
            'dgk = probe("dgate", reduce(jnp.add, self.whole) * sum_rows(state[...] * dstate[...]))',
            "dgk = 0.0"),
        gpu(CHANNEL_BACKWARD, "past = (decays.kept + decays.lost) * past_block[:, None]",
            "past = tl.zeros_like(dq_tile)"),
    ],
    "a tile overwrites what it should add to": [
        tpu(FORWARD, "return reduce(lambda rest, part: part * state + rest, reversed(decay.whole), term)",
            "return term"),
        gpu(BACKWARD, "torch.add(total, part, out=total if nth else None)", "part"),
    ],
    "of two chunks at once each writes the other's keys": [
        tpu(BACKWARD, "[[key if n == m else", "[[key if n != m else", two_chunks),
    ],
    "rows beyond a sequence are not masked": [
        tpu(FORWARD,
            "return jnp.where(iota(x.shape, 1) < self.live(i), x, jnp.zeros_like(x)) if self.scan.masked else x",
            "return x", packed),
        # one row too many: further on the interpreter might leave the tensor's memory
        gpu(FORWARD, "mask=(row < rows.end) & (column < columns), other=0)",
            "mask=(row < rows.end + 1) & (column < columns), other=0)", packed),
    ],
    "the scan back is off by one chunk": [
        tpu(BACKWARD, "partial(block.store, i), states.at[i], dstate, scan, probe)",
            "partial(block.store, i), states.at[i + 1], dstate, scan, probe)"),
        gpu(BACKWARD, "slot = first_slot(sequence, sequence_start, ROWS) + (rows.first - sequence_start) // ROWS",
            "slot = first_slot(sequence, sequence_start, ROWS) + "
            "tl.maximum((rows.first - sequence_start) // ROWS - 1, 0)"),
    ],
    "the gate decays the new step too": [
        tpu("fused_recurrent_simple_gla_fwd", "two_sum(base, term)", "two_sum(base, sum(decay) * term)"),
        tpu("fused_recurrent_gla_fwd", "product(k, up)", "product(k, (jnp.ones_like(k), jnp.zeros_like(k)))", bfloat16),
        gpu("fused_recurrent_simple_gla_fwd", "def decay_and_add(state, update, kept, lost):",
            "def decay_and_add(before, new, kept, lost):\n    state = before + new\n    update = tl.zeros_like(new)"),
    ],
    "a step does not read what it writes": [
        tpu("fused_recurrent_gla_fwd", "else step >= before", "else step > before", bfloat16),
    ],
    "the decays of a group leave out its first step": [
        tpu("fused_recurrent_gla_bwd", "jnp.where(step >= before,", "jnp.where(step > before,", bfloat16),
    ],
    "the state is bfloat16": [
        tpu(FORWARD, "state[...] = probe(\"state\", _next_state(load, state[...], decay, scan))",
            "state[...] = _next_state(load, state[...], decay, scan).astype(jnp.bfloat16).astype(jnp.float32)",
            bfloat16),
        gpu(FORWARD, "state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)",
            "state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT).to(tl.bfloat16).to(tl.float32)",
            bfloat16),
    ],
    # flash-linear-attention returns garbage for both
    "g is ignored beside g_gamma": [
        tpu(FORWARD, "gate = two_sum(g, gamma)", 'gate = two_sum(0.0 * g if "g_gamma" in refs else g, gamma)', both),
        gpu(FORWARD, "    if gates.g is not None:\n        row = rows.first + at\n",
            "    if gates.g is not None and gates.g_gamma is None:\n        row = rows.first + at\n", both),
    ],
    "every sequence starts from the first one's state": [
        tpu(FORWARD, "return self.refs[name].at[sequence, ",
            "return self.refs[name].at[0 * sequence, ", several_sequences),
        gpu(FORWARD, "load_state(first_states, at_segment,",
            "load_state(first_states, state_offset(0 * segment, head, key, value, layout),", several_sequences),
    ],
    "an empty sequence's final state is not written": [
        tpu(FORWARD, "jnp.cumsum(jnp.maximum(-(-lengths // c), 1))", "jnp.cumsum(-(-lengths // c))", empty_sequences),
        gpu(FORWARD, "store_state(last_states, at_segment, state, in_state)",
            "store_state(last_states, at_segment, state, in_state & (key < tl.where(start < end, layout.k, 0)))",
            empty_sequences),
    ],
    "the gates of a channel are those of the first": [
        tpu(CHANNEL_FORWARD, 'return ChannelDecay(self.load(i, "gk"), scan)',
            'return ChannelDecay(jnp.broadcast_to(self.load(i, "gk")[:, :, :1], self.load(i, "gk").shape), scan)'),
    ],
})  # fmt: skip


@pytest.mark.parametrize(("fault", "op"), pairs(FAULTS, GATED_LINEAR_ATTENTION))
def test_a_planted_fault_is_caught(fault, op, tmp_path):
    check_is_caught(fault, op, tmp_path)
