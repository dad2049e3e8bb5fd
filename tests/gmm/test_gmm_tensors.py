"""Tensors as callers have them: strided, expanded, on other devices, under a tracer, on a shard of a mesh."""

import numpy as np
import pytest

from cpu_golden import gmm as golden
from parity.backends import runner
from parity.interop import to_jax, to_numpy, to_torch
from tests.support.interpreter import DEVICE

SIZES = np.array([9, 0, 20, 3], np.int32)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.gpu
def test_strided_and_expanded_tensors_are_read_where_they_are():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from gpu_reference.gmm import gmm, tgmm

    lhs, weights, sizes = draw(40, 60, seed=1), draw(48, 24, seed=2), SIZES
    strided = to_torch(draw(80, 120, seed=1), device=DEVICE)[::2, ::2]
    strided.copy_(to_torch(lhs))
    spread = torch.zeros(8, dtype=torch.int32, device=DEVICE)[::2]
    spread.copy_(to_torch(sizes))
    expanded = to_torch(weights, device=DEVICE)[:, :].t()[:, :].unsqueeze(0).expand(4, 24, 48)
    assert not any(t.is_contiguous() for t in (strided, spread, expanded))
    expected = golden.gmm(lhs[:, :48], np.broadcast_to(weights, (4, 48, 24)), sizes)
    got = gmm(strided[:, :48], expanded, spread, transpose_rhs=True)
    np.testing.assert_allclose(to_numpy(got), expected, rtol=1e-5, atol=1e-5)
    grads = tgmm(strided, strided[:, :24], spread)
    np.testing.assert_allclose(to_numpy(grads), golden.tgmm(lhs, lhs[:, :24], sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_tensors_on_several_devices_are_refused():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from gpu_reference.gmm import gmm

    elsewhere = torch.empty(4, 60, 24, device="meta")
    with pytest.raises(ValueError, match="all tensors must be on one device, got lhs on cpu, rhs on meta"):
        gmm(to_torch(draw(40, 60)), elsewhere, to_torch(SIZES))


def test_an_offset_on_the_host_goes_to_where_the_kernel_is_and_any_other_stays():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from gpu_reference._lib.operands import on_device

    offset, elsewhere = torch.tensor([1], dtype=torch.int32), torch.device("meta")
    assert on_device(offset, elsewhere).device == elsewhere
    assert on_device(offset, offset.device) is offset


def test_goldens_read_any_layout():
    lhs, rhs = draw(80, 120)[::2, ::-2], np.asfortranarray(draw(4, 60, 24))
    plain = golden.gmm(lhs.copy(), np.ascontiguousarray(rhs), SIZES)
    np.testing.assert_allclose(golden.gmm(lhs, rhs, SIZES), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.tpu
def test_sizes_and_offset_may_be_traced():
    jax = pytest.importorskip("jax")
    from tpu_kernels.gmm import gmm, tgmm

    lhs, rhs = draw(40, 64), draw(2, 64, 24)
    fwd = jax.jit(lambda sizes, offset: gmm(lhs, rhs, sizes, group_offset=offset))
    bwd = jax.jit(lambda sizes, offset: tgmm(lhs, lhs[:, :24], sizes, group_offset=offset, num_actual_groups=2))
    for given in (-1, 0, 1, 2, 7):  # what could not be checked is clipped to the first shard or the last
        traced, offset = (to_jax(SIZES), to_jax(np.array(given, np.int32))), min(max(given, 0), 2)
        np.testing.assert_allclose(fwd(*traced), golden.gmm(lhs, rhs, SIZES, group_offset=offset), rtol=1e-5, atol=1e-5)
        wgrad = golden.tgmm(lhs, lhs[:, :24], SIZES, group_offset=offset, num_actual_groups=2)
        np.testing.assert_allclose(bwd(*traced), wgrad, rtol=1e-5, atol=1e-5)
    assert fwd._cache_size() == bwd._cache_size() == 1


@pytest.mark.tpu
def test_strict_memory_is_never_read_before_it_is_written():
    """The TPU's memories simulated: what was not written is NaN, reads out of bounds are errors, races are found."""
    pytest.importorskip("jax")
    from jax.experimental.pallas import tpu as pltpu

    from tpu_kernels.gmm import gmm, tgmm

    strict = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    lhs, rhs, sizes = draw(70, 200), draw(4, 200, 130), np.array([9, 0, 37, 3], np.int32)
    got = gmm(lhs, rhs, sizes, tiling=(16, 128, 128), interpret=strict)
    np.testing.assert_allclose(got, golden.gmm(lhs, rhs, sizes), rtol=1e-4, atol=1e-4)
    grads = tgmm(lhs, lhs[:, :130], sizes, tiling=(16, 128, 128), interpret=strict)
    np.testing.assert_allclose(grads, golden.tgmm(lhs, lhs[:, :130], sizes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_runners_say_what_they_are(backend):
    pytest.importorskip({"tpu": "jax", "gpu": "triton"}[backend])
    here = runner(backend)
    assert ("emulated" in here.describe()) == (not here.real)
