"""The gated linear attentions on the TPU, or its emulation, against the float64 golden."""

from collections.abc import Callable
from typing import Any

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.gla import (
    CHUNK_GLA,
    CHUNK_SIMPLE_GLA,
    F32,
    FUSED_RECURRENT_GLA,
    FUSED_RECURRENT_SIMPLE_GLA,
    GATED_LINEAR_ATTENTION,
    has_usual_decay,
)
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(*GATED_LINEAR_ATTENTION, backend="tpu")
test_is_exact_on_integers = are_exact(*GATED_LINEAR_ATTENTION, backend="tpu", where=has_usual_decay)
test_is_no_worse_than_the_gpu = are_no_worse(*GATED_LINEAR_ATTENTION)


def interpreted(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: call(*arguments, **(options | {"interpret": True}))


PACKED = dict(B=1, T=70, H=2, K=16, V=24, N=5)
SEVERAL_TILES = dict(B=1, T=70, H=1, K=300, V=24, N=3)  # of keys and, backward, of rows
LOOPS = [
    (CHUNK_SIMPLE_GLA[1], PACKED, dict(gates=["both"], chunk=[16], route=["fused"])),
    pytest.param(CHUNK_GLA[1], PACKED, dict(chunk=[16], route=["fused"]), marks=pytest.mark.full),
    (FUSED_RECURRENT_SIMPLE_GLA[0], SEVERAL_TILES, dict(gates=["both"])),
    pytest.param(FUSED_RECURRENT_GLA[1], SEVERAL_TILES, {}, marks=pytest.mark.full),
]


@pytest.mark.tpu
@pytest.mark.parametrize(("op", "shape", "options"), LOOPS)
def test_loops_that_are_unrolled_agree_with_golden(op, shape, options, monkeypatch):
    """A TPU has several chunks, or steps, in a turn of a loop, and an interpreter one: here as many as a TPU."""
    from tpu_kernels import chunk_scan, fused_recurrent
    from tpu_kernels._lib import chunk_layout, chunk_plan, recurrent_layout, scans

    monkeypatch.setattr(chunk_plan, "BLOCK_TOKENS", 64)  # four chunks, so that the loop takes all of them in one turn
    monkeypatch.setattr(scans, "resolve_interpret", lambda *_: False)
    for module in (chunk_scan, fused_recurrent):
        for name in ("_forward", "_backward"):  # without jit, which would keep what is traced here
            monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    for module, name in (
        (chunk_layout, "call_with_blocks"),
        (recurrent_layout, "call"),
        (recurrent_layout, "group_metadata"),
    ):
        monkeypatch.setattr(module, name, interpreted(getattr(module, name)))
    (case,) = op.grid([shape], dtype=[F32], h0=[True], ht=[True], **options)
    judged = judge(Trial(op, case, "tpu"))
    assert judged.verdict.passed, judged.verdict
