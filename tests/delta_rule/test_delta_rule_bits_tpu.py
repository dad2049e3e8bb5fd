"""Laws that the TPU's delta rules keep bit for bit: what a step's result may depend on, and what is never read."""

import numpy as np
import pytest

from op_arguments.delta_rule import DeltaProblem
from parity.backends import load_kernel, runner
from parity.inputs import draw
from parity.op import outputs
from tests.matrix.delta_rule import CHUNK_GATED_DELTA_RULE, CHUNK_KDA, F32

ROWS = ("q", "k", "v", "g", "beta", "do")
LENGTHS = (0, 40, 1, 17, 0)
BORDER = 32
OPS = (*CHUNK_GATED_DELTA_RULE, *CHUNK_KDA)


@pytest.fixture(scope="module", params=[
    pytest.param(op, id=op.name, marks=[] if op.name == "chunk_gated_delta_rule_fwd" else [pytest.mark.full])
    for op in OPS
])  # fmt: skip
def kernel(request):
    pytest.importorskip("jax")
    op = request.param
    shape = dict(B=1, T=sum(LENGTHS), H=1, HV=2, K=20, V=24, N=len(LENGTHS))
    (case,) = op.grid([shape], dtype=[F32], chunk=[16], l2norm=[True], h0=[True], ht=[True])
    inputs = {name: None if x is None else np.asarray(x) for name, x in draw(op, case).items()}

    def call(given):
        return outputs(runner("tpu").run(load_kernel(op.tpu), given, op.arguments(case)))

    return call, inputs


def packed(inputs, lengths=LENGTHS):
    """A copy, cut into sequences of these lengths."""
    copy = {name: None if x is None else x.copy() for name, x in inputs.items()}
    return copy | {"cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)}


@pytest.fixture(scope="module")
def base(kernel):
    call, inputs = kernel
    return call(packed(inputs))


def same(got, expected, name):
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint32),
                                  np.ascontiguousarray(expected).view(np.uint32), err_msg=name)  # fmt: skip


@pytest.mark.tpu
def test_an_empty_sequence_passes_its_state_on(kernel, base):
    _, inputs = kernel
    for result, given in (("ht", "initial_state"), ("dh0", "dht")):
        if result in base:
            for n in (0, 4):
                same(base[result][n], inputs[given][n], result)


@pytest.mark.tpu
def test_nan_of_a_sequence_stays_in_it(kernel, base):
    call, inputs = kernel
    begin = sum(LENGTHS[:2])
    poisoned = packed(inputs)
    for name in poisoned.keys() & set(ROWS):
        poisoned[name][:, begin : begin + 1] = np.nan
    for name, x in call(poisoned).items():
        if name in ("ht", "dh0"):
            same(np.delete(x, 2, 0), np.delete(base[name], 2, 0), name)
        else:
            same(x[:, :begin], base[name][:, :begin], name)
            same(x[:, begin + 1 :], base[name][:, begin + 1 :], name)


@pytest.mark.tpu
def test_a_sequence_split_at_a_chunk_goes_on_from_its_state(kernel, base):
    """Sequence 1 as sequences 0 and 1, the state handed over; the later half first where time goes back."""
    call, inputs = kernel
    halves = (BORDER, LENGTHS[1] - BORDER, *LENGTHS[2:])
    given = packed(inputs, halves)
    state, carried = ("dht", "dh0") if "dht" in given else ("initial_state", "ht")
    given["initial_state"][0] = inputs["initial_state"][1]
    if state == "dht":
        given["dht"][1] = inputs["dht"][1]
        forward = next(op for op in OPS if op.name.startswith("chunk_kda" if given["g"].ndim == 4 else "chunk_gated")
                       and op.name.endswith("_fwd"))  # fmt: skip
        arguments = dict(chunk_size=16, use_qk_l2norm_in_kernel=True, output_final_state=True)
        tensors = {name: x for name, x in given.items() if name not in ("do", "dht")}
        middle = outputs(runner("tpu").run(load_kernel(forward.tpu), tensors, arguments))["ht"][0]
        given["initial_state"][1] = middle
        given["dht"][0] = call(given)["dh0"][1]
    else:
        given["initial_state"][1] = call(given)[carried][0]
    split = call(given)
    rows = slice(0, LENGTHS[1])
    for name, x in split.items():
        if name == "ht":
            same(x[1], base[name][1], name)
        elif name == "dh0":
            same(x[0], base[name][1], name)
        else:
            same(x[:, rows], base[name][:, rows], name)


@pytest.mark.tpu
@pytest.mark.full
@pytest.mark.parametrize("op", [CHUNK_GATED_DELTA_RULE[1], CHUNK_KDA[1]], ids=lambda op: op.name)
def test_states_kept_in_hbm_give_the_same_gradients(op, monkeypatch):
    """A backward pass whose states do not fit VMEM has other blocks, and another kernel for them."""
    pytest.importorskip("jax")
    from tpu_kernels._lib import chunk_plan, delta_plan

    shape = dict(B=1, T=300, H=1, HV=1, K=16, V=16)
    (case,) = op.grid([shape], dtype=[F32], chunk=[16], h0=[True], ht=[True])
    inputs, arguments = draw(op, case), op.arguments(case)
    expected = outputs(runner("tpu").run(load_kernel(op.tpu), inputs, arguments))
    problem = DeltaProblem(1, 300, 1, 1, 16, 16, 1, 0.25, F32, packed=False, l2norm=False)

    def is_fused(budget):
        monkeypatch.setattr(chunk_plan, "vmem_budget", lambda: budget)
        return delta_plan.make_plan(problem, op in CHUNK_KDA, backward=True, chunk_size=16).fused

    assert not all(is_fused(budget) for budget in range(2**21, 0, -(2**13)))  # ends at the first that is not
    for name, x in outputs(runner("tpu").run(load_kernel(op.tpu), inputs, arguments)).items():
        same(x, expected[name], name)
