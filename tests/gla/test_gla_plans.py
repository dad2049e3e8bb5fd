"""What the chunked forms plan: which route, in blocks of which sizes, and what those take of VMEM. No result depends on
it, so that no comparison would notice a plan that is many times as slow, or does not fit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("triton")

from gpu_reference._lib import chunk_plan as gpu
from op_arguments.gla import Problem
from op_arguments.probe import probing
from tpu_kernels._lib import chunk_decays, recurrent_layout
from tpu_kernels._lib import chunk_plan as tpu
from tpu_kernels._lib.decays import finite_exp

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


# what is not as usual; chunks of 64 steps in a block, blocks, and heads of a grid step. The backward pass keeps a state
# at the start of every block: of longer blocks there are fewer, and of fewer heads they are smaller.
LONG = [
    (dict(t=2**15), (8, 64, 4)),
    (dict(t=2**16), (16, 64, 4)),
    (dict(t=2**18), (32, 128, 2)),
    (dict(t=2**20), (64, 256, 1)),
]


@pytest.mark.parametrize(("changes", "expected"), LONG)
def test_longer_sequences_have_longer_blocks_that_fit_vmem_on_the_tpu(changes, expected):
    p = problem(**changes)
    scan = tpu.plan(GATES["step"], p, packed=False, chunk_size=64, backward=True, fused=True)
    assert (scan.chunks, scan.blocks, scan.heads) == expected
    assert scan.vmem_bytes <= 40 * 2**20


# As above, the size of chunks, and chunks of a block and blocks: 16 times as long as usual, which is the most.
LEAST = [
    (dict(b=1, t=2**21, h=32, k=512, v=1024, dtype="float32"), 64, (128, 256)),
    (dict(b=1, t=2**22, h=5, k=1024, v=1024), 128, (64, 512)),
]


@pytest.mark.parametrize(("changes", "chunk", "expected"), LEAST)
def test_blocks_that_do_not_fit_are_the_least_on_the_tpu(changes, chunk, expected):
    p = problem(**changes)
    scan = tpu.plan(GATES["constant"], p, packed=False, chunk_size=chunk, backward=True, fused=True)
    assert (scan.chunks, scan.blocks, scan.heads) == (*expected, 1)
    assert not tpu.chunk_route(GATES["constant"], p, chunk_size=chunk, backward=True).fused


# gate, the pass, the size of chunks, what is not as usual; the length of a chunk, and heads of a grid step
CHUNKS = [
    ("step", "forward", 48, dict(h=8), (16, 8)),
    ("step", "forward", 96, dict(h=8), (32, 8)),
    ("step", "backward", 128, {}, (128, 8)),
    ("step", "backward", 256, {}, (256, 4)),
    ("constant", "backward", 128, {}, (128, 8)),
    ("constant", "backward", 256, {}, (256, 4)),
    ("channel", "backward", 256, {}, (256, 1)),
    ("channel", "forward", 128, dict(dtype="float32"), (128, 1)),
    ("constant", "forward", 64, dict(h=48), (64, 16)),
    ("constant", "forward", 64, dict(h=15), (64, 5)),
]


@pytest.mark.parametrize(("gate", "direction", "size", "changes", "expected"), CHUNKS)
def test_chunks_are_powers_of_two_of_as_many_heads_as_a_program_takes_on_the_tpu(
    gate, direction, size, changes, expected
):
    """The largest power of two in the size; 1024 rows of all heads at once, or 128 with a gate per channel, and of
    float32 half of them."""
    scan = tpu.plan(
        GATES[gate], problem(**changes), packed=False, chunk_size=size, backward=direction == "backward", fused=True
    )
    assert (scan.chunk, scan.heads) == expected


@pytest.mark.parametrize(
    ("steps", "packed", "chunks", "blocks", "rows"),
    [
        (64, None, 2, 1, 128),
        (100, None, 2, 1, 128),
        (1000, None, 8, 2, 1000),
        (1000, 5, 8, 3, 1536),
        (512, 1, 8, 2, 1024),
    ],
)
def test_rows_of_blocks_on_the_tpu(steps, packed, chunks, blocks, rows):
    """A lone block is whole, and has two chunks at least; of several the last may be short. Packed sequences have each
    a chunk more at most than what all have as one, and whole blocks."""
    p = problem(b=1, t=steps, n=packed or 1)
    scan = tpu.plan(GATES["step"], p, packed=packed is not None, chunk_size=64, backward=False, fused=True)
    assert (scan.chunks, scan.blocks, scan.t) == (chunks, blocks, rows)
    assert scan.masked == (packed is not None or steps in (64, 100, 1000))


@pytest.mark.parametrize(
    ("gate", "direction", "split", "size", "pieces"),
    [
        ("step", "forward", True, 64, 2),
        ("step", "backward", True, 64, 3),
        ("step", "forward", True, 32, 2),
        ("step", "forward", True, 128, 0),
        ("step", "forward", False, 64, 0),
        ("constant", "forward", True, 64, 0),
        ("channel", "backward", True, 16, 0),
    ],
)
def test_gates_in_pieces_on_the_tpu(gate, direction, split, size, pieces):
    """The matrix unit sums those of steps, where it multiplies bfloat16 anyway and two chunks are no more than its
    lanes: of 16 bits for o, and of all 24 for their gradient."""
    backward = direction == "backward"
    scan = tpu.plan(GATES[gate], problem(), packed=False, chunk_size=size, backward=backward, fused=True)
    assert scan._replace(split=split).gate_terms == pieces


@pytest.mark.parametrize(("size", "lanes"), [(16, 128), (128, 128), (256, 256)])
def test_numbers_of_a_chunk_take_whole_registers_on_the_tpu(size, lanes):
    scan = tpu.plan(GATES["step"], problem(), packed=False, chunk_size=size, backward=True, fused=True)
    assert scan.step_shape == (2, 16, scan.blocks, scan.chunks, lanes)


@pytest.mark.parametrize(
    ("dtype", "precision", "split"),
    [("bfloat16", "ieee", True), ("float32", "ieee", False), ("float32", "bf16x3", True)],
)
def test_dots_are_of_bfloat16_unless_operands_and_precision_are_of_float32(dtype, precision, split):
    options = dict(packed=False, chunk_size=64, precision=precision, fused=None, backward=False)
    scan = tpu.make_scan(problem(dtype=dtype), GATES["step"], **options)
    assert scan.split == split


@pytest.mark.parametrize("gate", GATES)
def test_what_just_fits_vmem_is_one_kernel_in_the_same_blocks(gate, monkeypatch):
    p, options = problem(t=2**14), dict(packed=False, chunk_size=64, backward=True)
    scan = tpu.plan(GATES[gate], p, **options, fused=True)
    monkeypatch.setattr(tpu, "VMEM_BUDGET", scan.vmem_bytes)
    assert tpu.plan(GATES[gate], p, **options, fused=True) == scan
    assert tpu.chunk_route(GATES[gate], p, **options).fused
    monkeypatch.setattr(tpu, "VMEM_BUDGET", tpu.VMEM_BUDGET - 1)
    assert tpu.plan(GATES[gate], p, **options, fused=True) != scan
    monkeypatch.setattr(tpu, "VMEM_BUDGET", 1)
    assert not tpu.chunk_route(GATES[gate], p, **options).fused


K, V, STATE = 256, 384, 300 * 256 * 4  # lanes of 200 and 300 channels; bytes of a state
# gate, the pass, whether in one kernel, the dtype; bytes of a step in all rows, and states that are kept, by (chunks,
# blocks): twice those of a block that go to memory or come from there
BYTES: list[Any] = [
    ("step", "forward", True, "bfloat16", 2 * (2 * K + 2 * V), lambda chunks, blocks: 0),
    ("step", "forward", True, "float32", 4 * (2 * K + 2 * V), lambda chunks, blocks: 0),
    ("step", "backward", True, "bfloat16", 2 * (4 * K + 3 * V), lambda chunks, blocks: chunks + blocks + 1),
    ("channel", "backward", True, "bfloat16", 2 * (4 * K + 3 * V) + 8 * K, lambda chunks, blocks: chunks + blocks + 1),
    ("channel", "forward", False, "bfloat16", 2 * (2 * K + 2 * V) + 4 * K, lambda chunks, blocks: 2 * chunks),
    ("constant", "backward", False, "float32", 4 * (4 * K + 3 * V), lambda chunks, blocks: 4 * chunks),
]


@pytest.mark.parametrize(("gate", "direction", "fused", "dtype", "row", "kept"), BYTES)
def test_what_a_scan_takes_of_vmem(gate, direction, fused, dtype, row, kept):
    p, backward = problem(k=200, v=300, dtype=dtype), direction == "backward"
    scan = tpu.plan(GATES[gate], p, packed=False, chunk_size=64, backward=backward, fused=fused)
    pairs, values = 64 * 128 * 4, 8 * 64 * (2 * 128 + K + V) * 4
    of_head = 2 * scan.rows * row + (kept(scan.chunks, scan.blocks) + 1) * STATE + pairs
    assert scan.vmem_bytes == scan.heads * of_head + values


def test_exp_is_finite_and_grows_as_far_as_a_whole_exponent_does():
    beyond, last, before = (float(finite_exp(np.float32(x))) for x in (1e6, 88.0, 87.5))
    assert np.finfo(np.float32).max > beyond == last > before
    assert np.exp(89.0) > np.finfo(np.float32).max


@pytest.mark.parametrize(("shape", "size"), [((8, 128), 4096), ((3, 2, 9, 129), 3 * 2 * 16 * 256 * 4), ((1, 1), 4096)])
def test_an_array_takes_whole_registers_of_vmem(shape, size):
    assert recurrent_layout.vmem_bytes(shape) == size


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


def test_both_ends_of_a_chunk_are_shown():
    """What the decays are from its start, and to its end."""
    seen = []
    decay = SimpleNamespace(
        probe_sums=lambda probe: probe("c", "sums"),
        decay_from_start=lambda axis: "from",
        decay_to_end=lambda axis: "to",
    )
    with probing(lambda site, value, *_: value):
        chunk_decays.probe_decays(decay, lambda site, value, *_: seen.append((site, value)))
    assert seen == [("c", "sums"), ("decay", "from"), ("decay", "to")]
