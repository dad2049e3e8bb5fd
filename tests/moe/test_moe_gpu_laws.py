# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What must hold of the layer in torch beside its error: drops, gradients that are not finite, what autograd keeps."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import moe
from gpu_reference.moe import moe_layer, moe_layer_bwd, permute, unpermute
from parity.backends.emulation import tensor_core

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 24, 32, 32, 4


def draw(dtype=torch.float32):
    rng = np.random.default_rng(0)
    shapes = {"x": (TOKENS, HIDDEN), "w_router": (HIDDEN, EXPERTS), "w_gate": (EXPERTS, HIDDEN, INTERMEDIATE),
              "w_up": (EXPERTS, HIDDEN, INTERMEDIATE), "w_down": (EXPERTS, INTERMEDIATE, HIDDEN)}  # fmt: skip
    given = {name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    tensors = {name: torch.from_numpy(x).to(DEVICE) for name, x in given.items()}
    return {name: x if name == "w_router" else x.to(dtype) for name, x in tensors.items()}


def draw_dout(dtype=torch.float32):
    dout = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    return torch.from_numpy(dout).to(DEVICE, dtype)


def test_a_dropped_choice_adds_nothing_and_the_other_weights_stay():
    """Every token likes expert 0 best and 1 next, in weights that are the same for all; each takes five tokens."""
    given = draw()
    given["x"] = torch.ones_like(given["x"])
    given["w_router"] = torch.tensor([0.02, 0.01, 0, 0], device=DEVICE).expand(HIDDEN, EXPERTS)
    whole, few = moe_layer(**given, top_k=2), moe_layer(**given, top_k=2, capacity=5)
    assert torch.equal(few[:5], whole[:5])  # first come, first served
    assert whole[5:].any(1).all()
    assert not few[5:].any()


def test_of_equal_logits_the_lower_experts_are_chosen():
    given = draw()
    given["w_router"] = torch.zeros_like(given["w_router"])
    others = {name: given[name].clone() for name in ("w_gate", "w_up", "w_down")}
    for w in others.values():
        w[2:] = 0
    assert torch.equal(moe_layer(**given | others, top_k=2), moe_layer(**given, top_k=2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gradients_that_are_not_finite_propagate_unless_they_are_not_wanted(bad):
    given, dout = draw(), draw_dout()
    dout[3, 7] = bad
    passed = moe_layer_bwd(**given, dout=dout, top_k=2)
    cleaned = moe_layer_bwd(**given, dout=dout, top_k=2, sanitize_grads=True)
    for name, grad, clean in zip(passed._fields, passed, cleaned, strict=True):
        wrong = ~grad.isfinite()
        assert wrong.any() and not wrong.all(), name
        assert torch.equal(clean[~wrong], grad[~wrong])
        assert not clean[wrong].any()
    assert passed.x.isfinite().all(1).tolist() == [token != 3 for token in range(TOKENS)]


def test_autograd_gives_the_same_gradients():
    given, dout = draw(), draw_dout()
    primals = [tensor.requires_grad_() for tensor in given.values()]
    grads = torch.autograd.grad((moe_layer(*primals, top_k=2) * dout).sum(), primals)
    expected = moe_layer_bwd(**{name: tensor.detach() for name, tensor in given.items()}, dout=dout, top_k=2)
    for name, grad in zip(given, grads, strict=True):
        assert torch.equal(grad, getattr(expected, name)), name
    some = torch.autograd.grad((moe_layer(*primals, top_k=2) * dout).sum(), primals[2])[0]  # w_gate's alone
    assert torch.equal(some, grads[2])


@pytest.mark.parametrize("quantize", ["fp8", "mxfp8"])
def test_quantised_operands_are_all_that_is_kept_of_them(quantize):
    given = draw(torch.bfloat16)
    primals = [tensor.requires_grad_() for tensor in given.values()]
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr(), tensor.dtype, tensor.shape] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), tensor_core.emulated():
        moe_layer(*primals, top_k=2, quantize=quantize, block_size=32)
    rows, padding = TOKENS * 2, -TOKENS * 2 % 32 if quantize == "fp8" else 0
    payloads = sorted(x.numel() for x in kept.values() if x.dtype == torch.float8_e4m3fn)
    weights = [EXPERTS * HIDDEN * INTERMEDIATE] * 3
    assert payloads == sorted([(rows + padding) * HIDDEN, (rows + padding) * INTERMEDIATE, *weights])
    wide = [tuple(x.shape) for x in kept.values() if x.dtype == torch.bfloat16]
    assert wide == [(TOKENS, HIDDEN)]  # x, for the router


def test_nothing_is_kept_or_quantised_twice_where_nothing_is_trained(monkeypatch):
    from gpu_reference import moe

    given = draw(torch.bfloat16)

    def refuse(*args, **kwargs):
        raise AssertionError("quantised for a backward pass that never comes")

    with tensor_core.emulated():
        expected = moe_layer(**{name: x.requires_grad_() for name, x in draw(torch.bfloat16).items()}, top_k=2,
                             quantize="mxfp8")  # fmt: skip
        monkeypatch.setattr(moe, "mxfp8_dual_quantize", refuse)
        assert torch.equal(moe_layer(**given, top_k=2, quantize="mxfp8"), expected)


def test_permute_and_unpermute_are_each_others_gradients():
    rng = np.random.default_rng(2)

    def integers(low, high, *shape):
        return torch.from_numpy(rng.integers(low, high, shape).astype(np.float32)).to(DEVICE)

    x, weights = integers(-8, 8, TOKENS, 16).requires_grad_(), integers(1, 5, TOKENS, 2).requires_grad_()
    indices = torch.from_numpy(rng.random((TOKENS, EXPERTS)).argsort(1)[:, :2].astype(np.int32)).to(DEVICE)
    permuted, slots, _ = permute(x, indices, num_experts=EXPERTS, capacity=8)
    drows = integers(-8, 8, *permuted.shape).requires_grad_()
    assert torch.equal(torch.autograd.grad(permuted, x, drows)[0], unpermute(drows, slots))

    dout = integers(-8, 8, TOKENS, 16)
    back, dweights = torch.autograd.grad(unpermute(drows, slots, weights), (drows, weights), dout)
    where = slots.tolist()
    for token in range(TOKENS):
        for j in range(2):
            slot = where[token][j]
            assert dweights[token, j] == (0 if slot < 0 else drows[slot] @ dout[token])
            assert slot < 0 or torch.equal(back[slot], weights[token, j] * dout[token])
    assert (slots < 0).any()


def test_values_are_read_on_the_host_only_where_they_are_there():
    """Elsewhere it would wait for the device."""
    values = torch.tensor([3, -1, 2], dtype=torch.int32)
    assert moe._range_of(values) == (-1, 3)
    assert [moe._range_of(x) for x in (values.to("meta"), values.long(), values[:0], None)] == [None] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantize", [None, "fp8", "mxfp8"])
def test_a_captured_graph_follows_another_routing(quantize):
    """Nothing of the routing is read on the host: a CUDA graph of the layer is replayed with other tokens."""
    given = draw(torch.bfloat16)
    options = dict(top_k=2, capacity=9, quantize=quantize, block_size=32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moe_layer(**given, **options)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_layer(**given, **options)
    before = out.clone()
    for seed in range(3):
        given["x"].copy_(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)) / 4)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, moe_layer(**given, **options))
        assert not torch.equal(out, before)
