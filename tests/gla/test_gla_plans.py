"""What holds for every plan of the chunked forms on the TPU: blocks, heads, VMEM, and whether a pass is one kernel. No
result depends on it; the choices themselves are recorded (`parity plans`)."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax")

from op_arguments.gla import Problem
from op_arguments.probe import probing
from parity.compilers import plans
from parity.compilers.kernels import kernels as kernels_of
from tests.matrix.programs import linear_attention
from tpu_kernels._lib import chunk_decays, recurrent_layout
from tpu_kernels._lib import chunk_plan as tpu
from tpu_kernels._lib.decays import finite_exp

GATES = {"gamma": {"g": None, "g_gamma": 1}, "g": {"g": 1, "g_gamma": None}, "gk": {"gk": 1}}
BUDGET = 40 * 2**20  # bytes of VMEM, for which the scans ask


def program(gates, direction, dtype="bfloat16", chunk_size=64, **sizes):
    op = f"chunk_{'gla' if gates == 'gk' else 'simple_gla'}_{direction}"
    return linear_attention(op, gates, dtype, chunk_size=chunk_size, **sizes)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    "sizes",
    [{}, dict(steps=100, heads=15), dict(steps=1000, heads=12), dict(batch=1, sequences=5, chunk_size=48)],
    ids=str,
)
def test_blocks_of_a_scan_cover_the_steps_by_whole_chunks_of_whole_groups_of_heads(gates, direction, sizes):
    """Packed sequences have each a chunk more at most than what all have as one, and whole blocks."""
    given = {"chunk_size": 64, "steps": 4096, "heads": 16, "sequences": 0} | sizes
    for kernel in kernels_of(plans.trace(program(gates, direction, **given), "tpu7x")):
        for block in kernel.outputs:
            if len(block.shape) == 4 and block.array[1] == given["heads"]:
                _, heads, rows, _ = block.shape
                steps = block.array[2]
                assert given["heads"] % heads == 0
                assert rows == steps or rows % 128 == 0  # two chunks of 64 at least
                assert steps >= given["steps"]
                spare = rows + given["sequences"] * (given["chunk_size"] + rows)
                assert steps < given["steps"] + spare


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("gates", "sizes"),
    [("g", {}), ("gk", {}), ("g", dict(key_size=1024, value_size=1024)), ("gk", dict(key_size=512, value_size=1024))],
)
def test_a_pass_is_one_kernel_where_it_fits_vmem(gates, sizes, direction):
    k, v = sizes.get("key_size", 128), sizes.get("value_size", 128)
    p = Problem(b=2, t=4096, h=16, k=k, v=v, n=2, scale=1.0, dtype="bfloat16")
    route = tpu.chunk_route(GATES[gates], p, backward=direction == "bwd")
    kernels = plans.tpu_plan(program(gates, direction, **sizes), "tpu7x").kernels
    assert route.fused == (len(kernels) == 1)
    assert all(kernel["vmem_bytes"] <= BUDGET for kernel in kernels)
    assert "MiB of VMEM, and may have 40" in route.explain


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("steps", [2**15, 2**18, 2**20])
def test_longer_sequences_have_longer_blocks_that_fit_vmem(gates, steps):
    """The backward pass keeps a state at the start of every block: of longer blocks there are fewer."""
    kernels = plans.tpu_plan(program(gates, "bwd", steps=steps), "tpu7x").kernels
    assert len(kernels) == 1 or steps > 2**18
    assert all(kernel["vmem_bytes"] <= BUDGET for kernel in kernels)


def test_exp_is_finite_and_grows_as_far_as_a_whole_exponent_does():
    beyond, last, before = (float(finite_exp(np.float32(x))) for x in (1e6, 88.0, 87.5))
    assert np.finfo(np.float32).max > beyond == last > before
    assert np.exp(89.0) > np.finfo(np.float32).max


@pytest.mark.parametrize(("shape", "size"), [((8, 128), 4096), ((3, 2, 9, 129), 3 * 2 * 16 * 256 * 4), ((1, 1), 4096)])
def test_an_array_takes_whole_registers_of_vmem(shape, size):
    assert recurrent_layout.vmem_bytes(shape) == size


def test_both_ends_of_a_chunk_are_shown():
    """What the decays are from its start, and to its end, of the steps that there are."""
    seen = []
    decay = SimpleNamespace(
        probe_sums=lambda probe: probe("c", "sums"),
        columns=lambda way, width: (way, width),
    )
    with probing(lambda site, value, *_: value):
        chunk_decays.probe_decays(decay, lambda *shown: seen.append(shown))
    assert seen == [("c", "sums"), ("decay", ("decay_from_start", 1), 1), ("decay", ("decay_to_end", 1), 1)]
