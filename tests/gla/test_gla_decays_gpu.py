# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Decays on the GPU, alone: their sums, their last bits and their limits are little of what a result is made of."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton
import triton.language as tl

from gpu_reference._lib.chunk_decays import block_decays, decay, gate_parts
from gpu_reference._lib.decays import Gates, step_decay
from gpu_reference._lib.layout import Rows
from gpu_reference.fused_recurrent import decay_and_add
from parity.backends.emulation.tensor_core import emulated
from tests.support.interpreter import interpreted

pytestmark = [pytest.mark.gpu, interpreted]

ROUNDOFF = 2.0**-24
EXP = 6  # roundoffs that an exp of float32 may be off by: NumPy's has three units in the last place
SMALLEST = 2.0**-126  # what is smaller may be zero
FLOAT32_MAX = float(np.finfo(np.float32).max)
GATES = {
    "slow": np.full((16, 32), -(2.0**-14) / 3),
    "half": np.full((16, 32), np.log(0.49) / 11) + np.linspace(0, 0.005, 32),
    "steep": -np.random.default_rng(0).gamma(1.0, 4.0, (16, 32)),
    "positive": np.random.default_rng(1).gamma(1.0, 2.0, (16, 32)),
    "resets": np.where(np.arange(16)[:, None] % 5 == 3, -90.0, -0.01) + np.zeros(32),
}


@triton.jit
def parts_kernel(gate, coarse, fine, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    gate_coarse, gate_fine = gate_parts(tl.load(gate + at))
    tl.store(coarse + at, gate_coarse)
    tl.store(fine + at, gate_fine)


@triton.jit
def decay_kernel(coarse, fine, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, decay(tl.load(coarse + at), tl.load(fine + at)))


@triton.jit
def block_kernel(g, g_gamma, from_start, to_end, kept, lost, end, heads, SPLIT: tl.constexpr):
    head = tl.program_id(0)
    results = block_decays(Gates(g, g_gamma, None), Rows(0, end, head, heads), 0, 0, 1, SPLIT, 16)
    at = tl.arange(0, 16) * heads + head
    tl.store(from_start + at, results[0])
    tl.store(to_end + at, results[1])
    tl.store(kept + head, results[2])
    tl.store(lost + head, results[3])


@triton.jit
def channel_block_kernel(gk, from_start, to_end, kept, lost, end, ROW_AXIS: tl.constexpr):
    at = tl.arange(0, 32)
    row = tl.expand_dims(tl.arange(0, 16), 1 - ROW_AXIS)
    key = tl.expand_dims(at, ROW_AXIS)
    results = block_decays(Gates(None, None, gk), Rows(0, end, 0, 1), key, 32, ROW_AXIS, False, 16)
    tl.store(from_start + row * 32 + key, results[0])
    tl.store(to_end + row * 32 + key, results[1])
    tl.store(kept + key, results[2])
    tl.store(lost + key, results[3])


@triton.jit
def row_kernel(gk, kept, rest, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    one, other = step_decay(Gates(None, None, gk), 0, 0, at, SIZE, 0)
    tl.store(kept + at[None, :], one)
    tl.store(rest + at[None, :], other)


@triton.jit
def add_kernel(state, update, kept, rest, result, residue, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    new, left = decay_and_add(tl.load(state + at), tl.load(update + at), tl.load(kept + at), tl.load(rest + at))
    tl.store(result + at, new)
    tl.store(residue + at, left)


def run(kernel, inputs, outs, programs=1, **arguments):
    tensors = [torch.from_numpy(np.array(x, np.float32)) for x in inputs]
    results = [torch.full(np.atleast_1d(shape).tolist(), float("nan")) for shape in outs]
    with emulated(), np.errstate(over="ignore"):  # as a GPU, which has no warnings
        kernel[(programs,)](*tensors, *results, **arguments)
    return [x.numpy().astype(np.float64) for x in results]


def test_a_gate_is_a_sum_of_two_whose_sums_are_exact_and_small():
    edges = [-np.inf, -1e30, -128.5, -128.0, -127.5, 0.0, 127.5, 128.0, 128.5, np.inf, 2.0**-11, -3 * 2.0**-11]
    gates = np.array([*edges, *np.random.default_rng(0).normal(size=52) * 40], np.float32)
    coarse, fine = run(parts_kernel, [gates], [64, 64], SIZE=64)
    assert (coarse % 2.0**-10 == 0).all()
    assert (abs(fine) <= 2.0**-11).all()
    assert (coarse + fine == np.clip(gates.astype(np.float64), -128, 128)).all()
    assert np.isnan(sum(run(parts_kernel, [np.full(16, np.nan)], [16, 16], SIZE=16))).all()


def test_a_decay_is_exact_to_the_roundings_of_its_sum_and_never_infinite():
    coarse = np.arange(-128.0, 128.0)
    fine = np.resize([-(2.0**-12), 0.0, 2.0**-12], 256)
    (got,) = run(decay_kernel, [coarse, fine], [256], SIZE=256)
    exponent = np.minimum(coarse + fine, 88.0)
    assert np.isfinite(got).all()
    assert (abs(got - np.exp(exponent)) <= (abs(exponent) + EXP) * ROUNDOFF * np.exp(exponent) + SMALLEST).all()


def assert_decays(got, summed, end, split):
    """Of gates summed, [rows, ...], of which the last are constant from row `end` on."""
    from_start, to_end, kept, lost = got
    last = summed[-1]
    for found, exponent in ((from_start, summed), (to_end, last - summed)):
        roundings = 1.25 + split * (abs(exponent) + EXP)  # a quarter: of what is less than 2^-10 of 16 gates
        assert (abs(found - np.exp(exponent)) <= roundings * ROUNDOFF * np.exp(exponent) + SMALLEST).all()
    whole = np.exp(last)
    assert (kept == (whole >= 0.5)).all()
    assert (abs(kept + lost - whole) <= ROUNDOFF * (abs(lost) + whole / 4) + SMALLEST).all()
    assert (to_end[end:] == 1).all()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("end", [11, 16])
@pytest.mark.parametrize("name", GATES)
def test_a_block_of_steps_decays_as_its_gates_say(name, end, split):
    """A decay near 1 as its difference from 1. Gates of steps and of heads add."""
    g = GATES[name][:, :3].astype(np.float32)
    gamma = np.array([-0.25, 0.0, -1e-4], np.float32)
    got = run(
        *(block_kernel, [g, gamma], [(16, 3), (16, 3), (3,), (3,)], 3),
        **dict(end=end, heads=3, SPLIT=split),
    )
    stepped = np.where(np.arange(16)[:, None] < end, g.astype(np.float64) + gamma, 0.0)
    assert_decays(got, np.cumsum(stepped, axis=0), end, split)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("end", [11, 16])
@pytest.mark.parametrize("name", GATES)
def test_a_block_of_steps_decays_as_the_gates_of_its_channels_say(name, end, axis):
    gk = GATES[name].astype(np.float32)
    got = run(channel_block_kernel, [gk], [(16, 32), (16, 32), (32,), (32,)], end=end, ROW_AXIS=axis)
    stepped = np.where(np.arange(16)[:, None] < end, gk.astype(np.float64), 0.0)
    assert_decays(got, np.cumsum(stepped, axis=0), end, split=True)


def test_a_step_decays_as_its_gate_says_and_never_infinitely():
    gates = np.array([-1e4, -90, -5, np.log(0.4999), np.log(0.5001), -0.3, -(2.0**-12), -(2.0**-26), 0, 0.4, 0.7, 80,
                      88, 89, 1000, -0.1], np.float32)  # fmt: skip
    kept, rest = run(row_kernel, [gates], [16, 16], SIZE=16)
    exact = np.exp(np.minimum(gates.astype(np.float64), np.log(FLOAT32_MAX)))
    assert (kept == (exact >= 0.5)).all()
    assert (abs(kept + rest - exact) <= ROUNDOFF * abs(rest) + exact * 2.0**-40 + SMALLEST).all()
    assert np.isfinite(rest).all()


def test_what_an_addition_to_the_state_loses_is_its_residue():
    rng = np.random.default_rng(0)
    state, update = (rng.normal(size=64).astype(np.float32) * scale for scale in (1, 1e-4))
    kept = np.resize([1.0, 0.0], 64)
    rest = np.resize([-(2.0**-9), 0.375], 64)
    result, residue = run(add_kernel, [state, update, kept, rest], [64, 64], SIZE=64)
    change = (rest * state.astype(np.float64) + update).astype(np.float32).astype(np.float64)
    assert (result + residue == kept * state + change).all()
    assert (result == (kept * state + change).astype(np.float32)).all()
    assert residue[::2].any()
