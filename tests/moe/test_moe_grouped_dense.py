"""grouped_dense as a training step sees it: what it keeps for the backward pass, and what differentiates it."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from cpu_golden.grouped_dense import grouped_dense_bwd
from parity.interop import to_jax, to_numpy, to_torch
from tests.support.interpreter import DEVICE

M, K, N, GROUPS = 256, 256, 128, 4
SIZES = np.array([90, 0, 130, 20], np.int32)
RESIDUALS = 0.55  # of the bytes that bfloat16 lhs and rhs take


def draw():
    rng = np.random.default_rng(0)
    shapes = {"lhs": (M, K), "rhs": (GROUPS, K, N), "dout": (M, N)}
    return {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def allowed():
    return RESIDUALS * 2 * (M * K + GROUPS * K * N)


def check_gradients(lhs, rhs, options):
    """The framework's own differentiation gives the golden's gradients, in the dtypes of the primals."""
    given = draw()
    expected = grouped_dense_bwd(given["lhs"], given["rhs"], SIZES, given["dout"], **options)
    for got, golden in zip((lhs, rhs), expected[:2], strict=True):
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(got.astype(np.float64), golden, rtol=2**-8, atol=1e-4)


OPTIONS = [
    dict(quantize=True, bwd_quantize=True),
    dict(quantize=False, bwd_quantize=True),
    pytest.param(dict(quantize=True, bwd_quantize=False), marks=pytest.mark.full),
]


@pytest.mark.tpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_jax_keeps_fp8_alone(options):
    jax = pytest.importorskip("jax")
    from tpu_kernels.grouped_dense import grouped_dense

    given = {name: to_jax(x) for name, x in draw().items()}
    _, backward = jax.vjp(
        lambda lhs, rhs: grouped_dense(lhs, rhs, to_jax(SIZES), **options), given["lhs"], given["rhs"]
    )
    # A vjp function is a pytree whose leaves are its residuals.
    kept = [x for x in jax.tree.leaves(backward) if hasattr(x, "nbytes")]
    assert {str(x.dtype) for x in kept if x.size > GROUPS * K} <= {"float8_e4m3fn", "float32"}
    assert sum(x.nbytes for x in kept) <= allowed()
    assert sum(x.nbytes for x in kept) >= M * K + GROUPS * K * N  # it is the residuals that were counted
    check_gradients(*(to_numpy(x) for x in backward(given["dout"])), options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torch_keeps_fp8_alone(options):
    """And its gradients are those of `grouped_dense_bwd`, whose error the matrix judges: more on a Hopper."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from gpu_reference.grouped_dense import grouped_dense, grouped_dense_bwd

    given = {name: to_torch(x, device=DEVICE) for name, x in draw().items()}
    sizes = to_torch(SIZES, device=DEVICE)
    expected = grouped_dense_bwd(given["lhs"], given["rhs"], sizes, given["dout"], **options)
    lhs, rhs = given["lhs"].requires_grad_(), given["rhs"].requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = grouped_dense(lhs, rhs, sizes, **options)
    saved = list(kept.values())
    assert {str(x.dtype) for x in saved if x.numel() > GROUPS * K} <= {"torch.float8_e4m3fn", "torch.float32"}
    assert sum(x.nbytes for x in saved) <= allowed()
    assert sum(x.nbytes for x in saved) >= M * K + GROUPS * K * N
    assert all(map(torch.equal, torch.autograd.grad(out, (lhs, rhs), given["dout"]), expected[:2]))


@pytest.mark.tpu
def test_jax_differentiates_under_jit():
    jax = pytest.importorskip("jax")
    from tpu_kernels.grouped_dense import grouped_dense

    given = {name: to_jax(x) for name, x in draw().items()}
    options = dict(quantize=True, bwd_quantize=True)

    def loss(lhs, rhs, sizes):
        return (grouped_dense(lhs, rhs, sizes, **options) * given["dout"]).astype("float32").sum()

    grads = jax.jit(jax.grad(loss, (0, 1)))(given["lhs"], given["rhs"], to_jax(SIZES))
    check_gradients(*(to_numpy(x) for x in grads), options)


@pytest.mark.tpu
@pytest.mark.parametrize(("given", "meant"), [pytest.param(-3, 0, marks=pytest.mark.full), (9, 2)])
def test_a_traced_offset_beyond_the_experts_is_the_nearest(given, meant):
    """It cannot be refused; neither pass may read other rows than those of the shard that there is."""
    jax = pytest.importorskip("jax")
    from tpu_kernels.grouped_dense import grouped_dense

    x = {name: to_jax(x) for name, x in draw().items()}

    def step(offset):
        def loss(lhs, rhs, existing_out):
            out = grouped_dense(lhs, rhs, to_jax(SIZES), existing_out, group_offset=offset, quantize=False)
            return (out * x["dout"]).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x["lhs"], x["rhs"][:2], x["dout"])

    for got, expected in zip(jax.tree.leaves(jax.jit(step)(given)), jax.tree.leaves(step(meant)), strict=True):
        np.testing.assert_array_equal(to_numpy(got), to_numpy(expected))


@pytest.mark.parametrize(("package", "framework"), [("tpu_kernels", "jax"), ("gpu_reference", "triton")])
def test_auto_is_true_or_false_and_nothing_between(package, framework):
    pytest.importorskip(framework)
    from importlib import import_module

    layer = import_module(f"{package}.grouped_dense").grouped_dense
    convert = to_jax if framework == "jax" else partial(to_torch, device=DEVICE)
    given = {name: convert(x) for name, x in draw().items()}
    results = {
        choice: to_numpy(layer(given["lhs"], given["rhs"], convert(SIZES), quantize=choice)).tobytes()
        for choice in ("auto", True, False)
    }
    assert results[True] != results[False]
    assert results["auto"] in (results[True], results[False])
