"""A replayed evaluation of Triton programs is the evaluation, bit for bit."""

import numpy as np
import pytest

from parity.trial import Trial
from tests.matrix import OPS
from tests.support.interpreter import interpreted

OP = {op.name: op for op in OPS}
FULL = pytest.mark.full
REPLAYED = [
    ("gmm", "bfloat16"),
    ("fused_recurrent_simple_gla_fwd", "float32"),
    pytest.param("chunk_gla_bwd", "float32", marks=FULL),
    pytest.param("chunk_gated_delta_rule_bwd", "float32", marks=FULL),
    pytest.param("grouped_gemm", "float8_e4m3fn", marks=FULL),
    pytest.param("causal_conv1d_bwd", "float32", marks=FULL),
    pytest.param("moe_layer_bwd", "bfloat16", marks=FULL),
]


def program_of(name, dtype):
    pytest.importorskip("triton")
    from parity.debugging.attribution import program

    op = OP[name]
    cases = [c for c in op.cases if c.tier != "full" and c.dtype == dtype]
    return program(Trial(op, min(cases, key=lambda c: c.tier != "smoke"), "gpu"))


def check_same(got, wanted):
    assert got.outputs.keys() == wanted.outputs.keys() and got.erring.keys() == wanted.erring.keys()
    for name, y in wanted.outputs.items():
        assert np.array_equal(got.outputs[name], y, equal_nan=True), name
    assert [(m.site, m.steps, m.place) for m in got.marks] == [(m.site, m.steps, m.place) for m in wanted.marks]
    assert all(np.array_equal(m.value, w.value, equal_nan=True) for m, w in zip(got.marks, wanted.marks, strict=True))


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize(("name", "dtype"), REPLAYED)
def test_a_replay_is_the_evaluation(name, dtype):
    recorded = program_of(name, dtype)
    exact = recorded.run(lambda place: False)
    everything = recorded.run(lambda place: True)
    check_same(everything, program_of(name, dtype).run(lambda place: True))
    line = sorted({place.line for place in everything.erring})[-1]
    check_same(
        recorded.run(lambda place: place.line == line), program_of(name, dtype).run(lambda place: place.line == line)
    )
    check_same(recorded.run(lambda place: False), exact)


@pytest.mark.gpu
@interpreted
def test_memory_that_is_written_again_is_as_the_evaluation_has_it():
    pytest.importorskip("triton")
    from parity.debugging.attribution import gpu
    from tests.meta.debugging.rewriting_kernel import scaled_twice

    inputs = {"x": np.linspace(0.1, 1.0, 16, dtype=np.float32)}
    recorded = gpu.make_program(scaled_twice, inputs, {})
    recorded.run(lambda place: False)
    everything = recorded.run(lambda place: True)
    lines = sorted({place.line for place in everything.erring})
    assert len(lines) == 4
    for line in lines:
        for _ in range(2):
            exact = recorded.run(lambda place: False)
        fresh = gpu.make_program(scaled_twice, inputs, {})
        check_same(recorded.run(lambda p, line=line: p.line == line), fresh.run(lambda p, line=line: p.line == line))
    check_same(recorded.run(lambda place: False), exact)


@pytest.mark.gpu
@interpreted
def test_a_replay_does_what_follows_the_line_that_errs_alone(monkeypatch):
    recorded, steps = program_of("fused_recurrent_simple_gla_fwd", "float32"), []
    recorded.run(lambda place: False)
    monkeypatch.setattr("parity.debugging.attribution.gpu.Errors.now_at", lambda errors, place: steps.append(place))
    everything = recorded.run(lambda place: True)
    count, last = len(steps), max(place.line for place in everything.erring)
    for _ in range(2):
        steps.clear()
        recorded.run(lambda place: place.line == last)
    assert 0 < len(steps) < count / 4


@pytest.mark.gpu
def test_a_kernel_that_triton_compiles_is_not_followed(monkeypatch):
    """As on a host with a GPU: the tool says what to do instead."""
    pytest.importorskip("triton")
    monkeypatch.setattr("parity.backends.emulation.tensor_core.interprets", lambda: False)
    with pytest.raises(NotImplementedError, match=r"in Triton's interpreter, .*: hide the GPU \(CUDA_VISIBLE"):
        program_of("gmm", "bfloat16")
