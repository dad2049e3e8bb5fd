"""What the chunked forms plan: which route, in blocks of which sizes, and what those take of VMEM. No result depends on
it, so that no comparison would notice a plan that is many times as slow, or does not fit."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("triton")

from gpu_reference import chunk_scan as gpu
from op_arguments.gla import Problem
from tpu_kernels import chunk_scan as tpu
from tpu_kernels import fused_recurrent

GATES: dict[str, Any] = {"constant": {"g": None, "g_gamma": 1}, "step": {"g": 1, "g_gamma": None}, "channel": {"gk": 1}}

pytestmark = pytest.mark.smoke


def problem(**changes: Any) -> Problem:
    return Problem(b=2, t=4096, h=16, k=128, v=128, n=2, scale=1.0, dtype="bfloat16")._replace(**changes)


# gate, the pass, what is not as usual; chunks of 64 steps in a block, blocks, and heads of a grid step
SCANS = [
    ("constant", "forward", {}, (4, 16, 16)),
    ("constant", "forward", dict(b=1), (8, 8, 8)),
    ("constant", "forward", dict(b=1, h=32), (4, 16, 16)),
    ("constant", "forward", dict(dtype="float32"), (8, 8, 8)),
    ("step", "forward", {}, (4, 16, 16)),
    ("constant", "backward", {}, (8, 8, 8)),
    ("channel", "backward", {}, (8, 8, 2)),
    ("channel", "forward", dict(dtype="float32"), (8, 8, 1)),
    ("step", "forward", dict(dtype="float32", h=12), (8, 8, 6)),
    ("step", "forward", dict(t=100), (2, 1, 16)),
    ("step", "forward", dict(t=1000, h=24), (8, 2, 8)),
    ("constant", "backward", dict(k=256, v=512), (8, 8, 2)),
]


@pytest.mark.parametrize(("gate", "direction", "changes", "expected"), SCANS)
def test_blocks_of_a_scan_on_the_tpu(gate, direction, changes, expected):
    backward = direction == "backward"
    scan = tpu.plan(GATES[gate], problem(**changes), packed=False, chunk_size=64, backward=backward, fused=True)
    assert (scan.chunks, scan.blocks, scan.heads) == expected


@pytest.mark.parametrize(
    ("changes", "chunk", "expected"),
    [({}, 64, 2), ({}, 128, 8), ({}, 16, 8), (dict(h=8), 64, 8), (dict(b=1), 64, 8), (dict(dtype="float32"), 64, 8)],
)
def test_groups_of_heads_on_the_tpu(changes, chunk, expected):
    gates, p = GATES["constant"], problem(**changes)
    of = {
        (backward, fused): tpu.plan(gates, p, packed=False, chunk_size=chunk, backward=backward, fused=fused)
        for backward in (False, True)
        for fused in (False, True)
    }
    assert of[False, True].group == expected
    assert all(scan.group == scan.heads for key, scan in of.items() if key != (False, True))


# For each head: rows of q, k, v, o and their gradients and the gates of channels, twice; the states of the chunks and
# blocks of the backward pass; one state and the decays within a chunk; and eight times the values of a chunk.
VMEM = [
    ("step", "forward", {}, True, "16 blocks of 256 steps and 16 heads needs 10.5"),
    ("step", "backward", {}, True, "8 blocks of 512 steps and 8 heads needs 24.2"),
    ("channel", "forward", {}, True, "8 blocks of 512 steps and 2 heads needs 4.2"),
    ("channel", "backward", {}, True, "8 blocks of 512 steps and 2 heads needs 8.8"),
    ("step", "backward", dict(k=1024, v=1024), False, "8 blocks of 512 steps and 1 heads needs 90.5"),
]


@pytest.mark.parametrize(("gate", "direction", "changes", "fused", "needs"), VMEM)
def test_a_scan_is_one_kernel_where_it_fits_vmem(gate, direction, changes, fused, needs):
    route = tpu.chunk_route(GATES[gate], problem(**changes), backward=direction == "backward")
    assert route == (fused, f"the {direction} pass in {needs} MiB of VMEM, and may have 40")


@pytest.mark.parametrize(("shape", "size"), [((8, 128), 4096), ((3, 2, 9, 129), 3 * 2 * 16 * 256 * 4), ((1, 1), 4096)])
def test_an_array_takes_whole_registers_of_vmem(shape, size):
    assert fused_recurrent._vmem_bytes(shape) == size


# dtype, precision, whether the gate is of each channel, K and V: the blocks (rows, keys, values) of both passes
BLOCKS = [
    ("bfloat16", "ieee", False, 128, 128, (32, 128, 32), (32, 64, 16)),
    ("bfloat16", "ieee", True, 128, 128, (16, 128, 16), (16, 32, 32)),
    ("float32", "ieee", False, 256, 128, (16, 256, 16), (16, 32, 16)),
    ("float32", "tf32", False, 64, 20, (32, 64, 16), (32, 64, 16)),
    ("bfloat16", "ieee", False, 20, 24, (32, 32, 32), (32, 32, 16)),
]


@pytest.mark.parametrize(("dtype", "precision", "per_channel", "k", "v", "forward", "backward"), BLOCKS)
def test_blocks_on_the_gpu(dtype, precision, per_channel, k, v, forward, backward):
    p = problem(dtype=dtype, k=k, v=v)
    assert gpu.forward_block(p, 96, per_channel=per_channel)[:3] == forward
    assert gpu.backward_block(p, 96, precision, per_channel=per_channel)[:3] == backward


# backward, steps, multiprocessors: of 2 sequences of 16 heads, with 4 tiles of V in the forward pass and 2 of K in the
# backward pass
BUSY, IDLE = "at least one for each of {} multiprocessors", "would leave some of {} multiprocessors idle"
OF_V, OF_K = (
    "2 sequences x 16 heads x 4 tiles of V = 128 programs",
    "2 sequences x 16 heads x 2 tiles of K = 64 programs",
)
ROUTES = [
    (False, 4096, 128, f"fused: {OF_V}, {BUSY.format(128)}"),
    (False, 4096, 129, f"chunks apart: {OF_V} {IDLE.format(129)}"),
    (True, 65, 64, f"fused: {OF_K}, {BUSY.format(64)}"),
    (True, 65, 65, f"chunks apart: {OF_K} {IDLE.format(65)}"),
    (True, 64, 999, "fused: no sequence is longer than a chunk of 64"),
]


@pytest.mark.parametrize(("backward", "steps", "processors", "explain"), ROUTES)
def test_a_pass_is_one_kernel_where_that_keeps_a_gpu_busy(backward, steps, processors, explain):
    route = gpu.chunk_route(problem(t=steps), 64, processors, per_channel=False, backward=backward)
    assert route == (explain.startswith("fused"), explain)


def test_both_ends_of_a_chunk_are_watched():
    """What the decays are from its start, and to its end."""
    seen = []
    decay = SimpleNamespace(
        watch_sums=lambda watch: watch("c", "sums"), from_start=lambda axis: "from", to_end=lambda axis: "to"
    )
    tpu._watch_decays(decay, lambda site, value, *_: seen.append((site, value)))
    assert seen == [("c", "sums"), ("decay", "from"), ("decay", "to")]
