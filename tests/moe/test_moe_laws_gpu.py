# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What must hold of the layer in torch beside its error: drops, gradients that are not finite, what autograd keeps."""

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from gpu_reference import grouped_dense as dense
from gpu_reference import moe
from gpu_reference._lib import operands, visits
from gpu_reference._lib.operands import range_of
from gpu_reference.grouped_dense import grouped_dense, grouped_dense_bwd
from gpu_reference.moe import moe_layer, moe_layer_bwd
from gpu_reference.permute import permute, unpermute
from op_arguments.probe import probing
from parity.backends.emulation import tensor_core
from parity.contact.gpu import captured
from tests.support.interpreter import DEVICE, interpreted

pytestmark = pytest.mark.gpu
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
    with tensor_core.emulated():  # what the interpreter multiplies with gives equal rows other last bits on some CPUs
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


def test_of_many_equal_logits_as_well():
    """An unstable sort leaves few of them as they were: of 128 experts it takes one that it likes and the first two."""
    experts, chosen = 128, [70, 0, 1]
    given = {"x": torch.ones(2, 8, device=DEVICE), "w_router": torch.zeros(8, experts, device=DEVICE)}
    given["w_router"][:, 70] = 1
    weights = {name: torch.ones(experts, 8, 8, device=DEVICE) for name in ("w_gate", "w_up", "w_down")}
    others = torch.ones(experts, dtype=torch.bool, device=DEVICE)
    others[chosen] = False
    without = {name: w.masked_fill(others[:, None, None], 0) for name, w in weights.items()}
    out = moe_layer(**given, **weights, top_k=3)
    assert out.any() and torch.equal(out, moe_layer(**given, **without, top_k=3))


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(x, marks=pytest.mark.full) for x in (np.inf, -np.inf))])
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


def test_rows_of_a_token_give_it_one_rounding_of_their_gradients():
    """Summed in bfloat16 those of 4 experts were rounded three times."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_normal((TOKENS, 16))).to(DEVICE, torch.bfloat16).requires_grad_()
    indices = torch.arange(4, dtype=torch.int32, device=DEVICE).expand(TOKENS, 4)
    permuted, slots, _ = permute(x, indices, num_experts=EXPERTS)
    drows = torch.from_numpy(rng.standard_normal(permuted.shape)).to(DEVICE, torch.bfloat16)
    expected = drows.double()[slots.long()].sum(1).to(torch.bfloat16)
    assert torch.equal(torch.autograd.grad(permuted, x, drows)[0], expected)


def test_gradients_of_unpermute_hold_no_float32_of_all_choices():
    """At 131072 tokens, 8 choices and 7168 columns it would be 28 GiB."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            made.extend(x.numel() * x.itemsize for x in (result,) if isinstance(x, torch.Tensor))
            return result

    rows = torch.ones(TOKENS * 8, 64, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    weights = torch.ones(TOKENS, 8, device=DEVICE).requires_grad_()
    slots = torch.arange(TOKENS * 8, dtype=torch.int32, device=DEVICE).reshape(TOKENS, 8)
    out = unpermute(rows, slots, weights)
    with Recording():
        torch.autograd.grad(out, (rows, weights), torch.ones_like(out))
    assert max(made) <= (rows.numel() + 64) * 2


def test_of_no_rows_the_sum_and_its_gradients_are_zero():
    rows, weights = torch.zeros(0, 5, device=DEVICE), torch.ones(4, 2, device=DEVICE).requires_grad_()
    slots = torch.full((4, 2), -1, dtype=torch.int32, device=DEVICE)
    out = unpermute(rows.requires_grad_(), slots, weights)
    assert out.tolist() == [[0.0] * 5] * 4
    drows, dweights = torch.autograd.grad(out, (rows, weights), torch.ones_like(out))
    assert drows.shape == (0, 5) and not dweights.any()


def test_float64_is_refused():
    """The goldens take it."""
    x, indices = torch.ones(2, 3, device=DEVICE), torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    for call in (lambda: permute(x.double(), indices, num_experts=1), lambda: unpermute(x.double(), indices),
                 lambda: unpermute(x, indices, torch.ones(2, 1, device=DEVICE).double())):  # fmt: skip
        with pytest.raises(TypeError, match="got float64"):
            call()


def test_tensors_of_several_devices_are_refused():
    given = draw()
    for other in (dict(w_up=given["w_up"].to("meta")), dict(group_offset=torch.zeros(1, dtype=torch.int32).to("meta"))):
        with pytest.raises(ValueError, match=r"on one device, got x on .*, w_router on"):
            moe_layer(**given | other, top_k=2)


def test_values_are_read_on_the_host_only_where_they_are_there():
    """Elsewhere it would wait for the device."""
    values = torch.tensor([3, -1, 2], dtype=torch.int32)
    assert range_of(values) == (-1, 3)
    assert [range_of(x) for x in (values.to("meta"), values.long(), values[:0], None)] == [None] * 4


SIZES = torch.tensor([9, 0, 13, 11], dtype=torch.int32, device=DEVICE)
ROWS = 40  # seven of which belong to no group, and no multiple of a block


def draw_dense():
    rng = np.random.default_rng(3)
    shapes = {"lhs": (ROWS, 32), "rhs": (4, 32, 32), "existing_out": (ROWS, 32)}
    return {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(DEVICE)
            for name, shape in shapes.items()}  # fmt: skip


@pytest.mark.parametrize("bwd_quantize", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_a_gradient_alone_is_the_same_and_keeps_nothing_for_others(quantize, bwd_quantize):
    given, dout = draw_dense(), draw_dense()["existing_out"].flip(0)
    options = dict(quantize=quantize, bwd_quantize=bwd_quantize, block_size=32)
    expected = grouped_dense_bwd(**given, group_sizes=SIZES, dout=dout, **options)
    for name, of_other in {"lhs": "rhs", "rhs": "lhs", "existing_out": None}.items():
        kept = []
        alone = {other: x.requires_grad_(other == name) for other, x in draw_dense().items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            out = grouped_dense(**alone, group_sizes=SIZES, **options)
        assert torch.equal(torch.autograd.grad(out, alone[name], dout)[0], getattr(expected, name))
        payloads = [x for x in kept if x.numel() >= ROWS * 32]
        assert [x.ndim for x in payloads] == ([given[of_other].ndim] if of_other else [])
        if payloads:
            assert (payloads[0].dtype == torch.float8_e4m3fn) == (quantize or bwd_quantize)


@pytest.mark.parametrize("native", [False, True])
def test_auto_quantises_where_the_matrix_unit_multiplies_fp8(native, monkeypatch):
    monkeypatch.setattr(dense, "supports_matmul", lambda dtype, target: native and dtype == torch.float8_e4m3fn)
    given, dout = draw_dense(), draw_dense()["existing_out"].flip(0)

    def both(**options):
        options |= dict(group_sizes=SIZES, block_size=32)
        return grouped_dense(**given, **options), *grouped_dense_bwd(**given, dout=dout, **options)

    for auto, explicit in zip(both(), both(quantize=native, bwd_quantize=native), strict=True):
        assert torch.equal(auto, explicit)


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("offset", [-3, 0, pytest.param(1, marks=pytest.mark.full), 3, 9])
def test_existing_rows_outside_of_a_shard_keep_their_gradient(offset, groups, monkeypatch):
    """An offset on a device cannot be refused: beyond the experts it is the nearest."""
    for module in (operands, visits):
        monkeypatch.setattr(module, "scalar", lambda offset: offset)
    given, dout = draw_dense(), draw_dense()["existing_out"].flip(0)
    given |= dict(rhs=given["rhs"][:groups], block_size=32)  # of the blocks where the matrix unit multiplies fp8
    first = min(max(offset, 0), 4 - groups)
    sizes = SIZES.tolist()
    expected = dout.clone()
    expected[sum(sizes[:first]) : sum(sizes[: first + groups])] = 0
    for dtype in (torch.int32, torch.int64):
        on_device = torch.tensor([offset], dtype=dtype, device=DEVICE)
        grads = grouped_dense_bwd(**given, group_sizes=SIZES, group_offset=on_device, dout=dout)
        assert torch.equal(grads.existing_out, expected)


@interpreted
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_a_backward_pass_shows_the_sums_of_its_matmuls_and_their_steps(quantize, transpose_rhs):
    """Of lhs's gradient they go along N, of rhs's along M, and the golden has but one size for both."""
    given, shown = draw_dense(), {}

    def shows(site, value, where=None, **steps):
        shown.setdefault(site, set()).add(steps.get("depth") or max(steps.get("tiling", [0])))
        return value

    options = dict(group_sizes=SIZES, transpose_rhs=transpose_rhs, quantize=quantize, bwd_quantize=quantize,
                   block_size=32, tiling=(64, 32, 16))  # fmt: skip
    with probing(shows):
        grouped_dense(**given, **options)
    assert "acc" in shown and not shown.keys() & {"dlhs", "drhs"}
    shown.clear()
    with probing(shows):
        grouped_dense_bwd(**given, dout=given["existing_out"], **options)
    assert shown.keys() == {"dlhs", "drhs"}
    if not quantize:
        assert shown == {"dlhs": {16}, "drhs": {64}}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantize", [None, "fp8", "mxfp8"])
def test_a_captured_graph_follows_another_routing(quantize):
    """Nothing of the routing is read on the host: a CUDA graph of the layer is replayed with other tokens."""
    given = draw(torch.bfloat16)
    options = dict(top_k=2, capacity=9, quantize=quantize, block_size=32)
    graph, out = captured(lambda: moe_layer(**given, **options))
    before = out.clone()
    for seed in range(3):
        given["x"].copy_(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed)) / 4)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, moe_layer(**given, **options))
        assert not torch.equal(out, before)


class Largest(TorchDispatchMode):
    """The bytes of the largest result of any operation while it is active."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **keywords or {})
        tensors = [x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, torch.Tensor)]
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in tensors)])
        return result


def test_gradients_of_unpermute_hold_one_choice_of_all_tokens_at_a_time():
    """At 131072 tokens of 8 experts and 7168 channels all choices' products in float32 are 28 GiB."""
    tokens, choices, channels = 32, 8, 64
    rows = torch.ones(tokens * choices, channels, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    slots = torch.arange(tokens * choices, dtype=torch.int32, device=DEVICE).reshape(tokens, choices)
    weights = torch.ones(tokens, choices, device=DEVICE, requires_grad=True)
    out = unpermute(rows, slots, weights)
    with Largest() as largest:
        out.backward(torch.ones_like(out))
    of_rows = rows.untyped_storage().nbytes()
    assert of_rows <= largest.bytes <= of_rows + channels * rows.element_size()  # and one of what is dropped
