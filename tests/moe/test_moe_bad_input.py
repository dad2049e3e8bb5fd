"""Bad input to permute, unpermute and the layer: the same words in all three packages."""

import numpy as np
import pytest

from cpu_golden import grouped_dense
from cpu_golden.moe import moe_layer_bwd
from op_arguments.gmm import Problem
from op_arguments.grouped_dense import check_dout
from op_arguments.moe import LayerOptions, check_expert_parallel, check_layer_dout, check_moe_layer
from op_arguments.permute import check_permute, check_unpermute
from parity.interop import to_numpy
from tests.support.bad_input import PACKAGES, f16, f32, i32, refusals
from tests.support.functions import public

TENSORS = dict(x=f32(6, 32), w_router=f32(32, 4), w_gate=f32(3, 32, 64), w_up=f32(3, 32, 64), w_down=f32(3, 64, 32))
LAYER = dict(TENSORS, top_k=2)
GOOD = {
    "permute": dict(x=f32(2, 3), indices=i32([0, 2], [1, 0]), num_experts=3),
    "unpermute": dict(rows=f32(4, 3), slots=i32([0, 2], [1, -1]), weights=f32(2, 2)),
    "moe_layer": LAYER,
    "moe_layer_bwd": dict(LAYER, dout=f32(6, 32)),
}
BAD = [
    ("permute", dict(x=f32(3)), ValueError, "x must have rank 2 [T, D], got shape [3]"),
    ("permute", dict(x=i32([1, 2])), TypeError, "x must be float32, bfloat16 or float16, got int32"),
    ("permute", dict(indices=f32(2, 2)), TypeError, "indices must be int32, got float32"),
    ("permute", dict(x=f32(3, 3)), ValueError, "indices must have T = 3 rows as x does, got 2"),
    ("permute", dict(num_experts=2), ValueError, "indices must be in [0, num_experts) = [0, 2), got 2"),
    ("permute", dict(indices=i32([0, -1], [1, 0])), ValueError,
     "indices must be in [0, num_experts) = [0, 3), got -1"),
    ("permute", dict(num_experts=-1), ValueError, "num_experts must be at least 0, got -1"),
    ("permute", dict(num_experts=2.0), TypeError, "num_experts must be an int, got float"),
    ("permute", dict(capacity=0), ValueError, "capacity must be at least 1, got 0"),
    ("permute", dict(capacity=1.5), TypeError, "capacity must be an int, got float"),
    ("unpermute", dict(rows=f32(2, 3)), ValueError, "slots must be in [-1, M) = [-1, 2), got 2"),
    ("unpermute", dict(slots=i32([0, -2], [1, 0])), ValueError, "slots must be in [-1, M) = [-1, 4), got -2"),
    ("unpermute", dict(weights=f32(2, 3)), ValueError, "weights must have shape [T, k] = [2, 2], got [2, 3]"),
    ("unpermute", dict(weights=f16(2, 2)), TypeError, "weights must be float32, got float16"),
    ("moe_layer", dict(w_router=f32(31, 4)), ValueError, "w_router must have shape [D, E] = [32, 4], got [31, 4]"),
    ("moe_layer", dict(w_gate=f32(3, 31, 64)), ValueError,
     "w_gate must have shape [G, D, F] = [3, 32, 64], got [3, 31, 64]"),
    ("moe_layer", dict(w_up=f32(3, 32, 63)), ValueError,
     "w_up must have shape [G, D, F] = [3, 32, 64], got [3, 32, 63]"),
    ("moe_layer", dict(w_down=f32(2, 64, 32)), ValueError,
     "w_down must have shape [G, F, D] = [3, 64, 32], got [2, 64, 32]"),
    ("moe_layer", dict(w_up=f16(3, 32, 64)), TypeError, "w_up must have x's dtype float32, got float16"),
    ("moe_layer", dict(w_router=f32(32, 2)), ValueError,
     "w_gate must have at most the E = 2 experts of w_router, got 3"),
    ("moe_layer", dict(top_k=5), ValueError, "top_k must be at most E = 4, got 5"),
    ("moe_layer", dict(top_k=0), ValueError, "top_k must be at least 1, got 0"),
    ("moe_layer", dict(quantize=True), ValueError, "quantize must be None, 'fp8' or 'mxfp8', got True"),
    ("moe_layer", dict(block_size=0), ValueError, "block_size must be positive, got 0"),
    ("moe_layer", dict(quantize="fp8", block_size=64), ValueError, "block_size must divide D = 32, got 64"),
    ("moe_layer", dict(quantize="fp8", block_size=32, w_gate=f32(3, 32, 48), w_up=f32(3, 32, 48),
                       w_down=f32(3, 48, 32)), ValueError, "block_size must divide F = 48, got 32"),
    ("moe_layer", dict(top_k=True), TypeError, "top_k must be an int, got bool"),
    ("moe_layer", dict(w_gate=f16(3, 32, 64)), TypeError, "w_gate must have x's dtype float32, got float16"),
    ("moe_layer", dict(w_down=f16(3, 64, 32)), TypeError, "w_down must have x's dtype float32, got float16"),
    ("moe_layer", dict(group_offset=-1), ValueError,
     "group_offset must be in [0, E - G] = [0, 1] (E = 4 groups, G = 3 in the shard), got -1"),
    ("moe_layer", dict(capacity=-1), ValueError, "capacity must be at least 1, got -1"),
    ("moe_layer", dict(group_offset=2), ValueError,
     "group_offset must be in [0, E - G] = [0, 1] (E = 4 groups, G = 3 in the shard), got 2"),
    ("moe_layer_bwd", dict(w_gate=None), TypeError, "w_gate must be an array [G, D, F], got NoneType"),
    ("moe_layer_bwd", dict(x=i32([1] * 32)), TypeError, "x must be float32, bfloat16 or float16, got int32"),
    ("moe_layer_bwd", dict(dout=f32(6, 31)), ValueError, "dout must have shape [T, D] = [6, 32], got [6, 31]"),
    ("moe_layer_bwd", dict(dout=f16(6, 32)), TypeError, "dout must be float32, got float16"),
]  # fmt: skip

test_the_good_arguments_are_good, test_bad_arguments_are_refused_in_the_same_words = refusals(GOOD, BAD)


def test_what_is_just_good_enough_is_good():
    for indices in (i32([0, 1], [1, 0]), i32([1, 1], [1, 1])):
        lowest, highest = int(indices.min()), int(indices.max())
        seen = dict(range_of=(lowest, highest), exact=False)
        assert check_permute(f32(2, 3), indices, 2, 1, **seen) == 2  # a row of each expert
        assert (
            check_permute(f32(2, 3), indices, 2, 3, **seen) == check_permute(f32(2, 3), indices, 2, None, **seen) == 4
        )
    assert check_permute(f32(0, 3), np.zeros((0, 2), np.int32), 0, None, range_of=None, exact=False) == 0
    for slots in (i32([-1, 3]), i32([-1, -1]), i32([3, 3])):
        check_unpermute(f32(4, 3), slots, None, range_of=(int(slots.min()), int(slots.max())), exact=False)
    for experts, offset in ((4, 1), (4, 0), (3, 0)):
        options = LayerOptions(top_k=experts, quantize="fp8", block_size=32, capacity=1)
        layer = check_moe_layer(**TENSORS | dict(w_router=f32(32, experts)), options=options, group_offset=offset)
        assert layer == (6, 32, 64, experts, 3, "float32")


@pytest.mark.parametrize("offset", [-1, 2, 5])
def test_a_shard_beyond_the_experts_is_refused_before_a_matmul_is_asked(offset):
    with pytest.raises(ValueError, match=rf"in \[0, E - G\] = \[0, 1\] \(E = 4 .*, G = 3 .*, got {offset}"):
        check_moe_layer(**TENSORS, options=LayerOptions(top_k=2), group_offset=offset)


@pytest.mark.parametrize("offset", [1, True, 0.0, None])
def test_devices_that_share_experts_have_no_shard_of_a_part(offset):
    layer = check_moe_layer(**TENSORS | dict(w_router=f32(32, 6)), options=LayerOptions(top_k=2), group_offset=0)
    check_expert_parallel(layer, 2, 0)
    with pytest.raises(ValueError, match=rf"group_offset must be 0 where .*, got {offset}"):
        check_expert_parallel(layer, 2, offset)


def test_float64_is_let_through_only_where_the_goldens_ask_for_it():
    layer = {name: x.astype(np.float64) for name, x in TENSORS.items()}
    options = dict(options=LayerOptions(top_k=2), group_offset=0)
    seen, slots = dict(range_of=None), i32([0, 1])
    checks = [
        lambda **exact: check_moe_layer(**layer, **options, **exact),
        lambda **exact: check_moe_layer(**TENSORS | dict(w_router=layer["w_router"]), **options, **exact),
        lambda **exact: check_layer_dout(f32(2, 3).astype(np.float64), f32(2, 3), **exact),
        lambda **exact: check_dout(f32(2, 3).astype(np.float64), Problem(2, 1, 3, 1, 1, "float32"), **exact),
        lambda exact=False: check_permute(f32(1, 3).astype(np.float64), slots, 2, None, **seen, exact=exact),
        lambda exact=False: check_unpermute(f32(2, 3).astype(np.float64), slots, None, **seen, exact=exact),
        lambda exact=False: check_unpermute(f32(2, 3), slots, np.ones((1, 2)), **seen, exact=exact),
    ]
    for check in checks:
        check(exact=True)
        with pytest.raises(TypeError, match=r"must be float32.*, got float64"):
            check()


def with_infinities():
    """A training step of the layer, one of which is in its tokens, its gradient and each matrix of its experts."""
    x = f32(6, 32)
    x[3, 5] = np.inf
    weights = {name: LAYER[name].copy() for name in ("w_gate", "w_up", "w_down")}
    for w in weights.values():
        w[1, 7, 9] = np.inf
    return LAYER | weights | dict(x=x, dout=x)


@pytest.mark.filterwarnings("ignore:invalid value")  # in the interpreter, of the router's infinities
@pytest.mark.parametrize(
    ("package", "quantize"),
    [
        pytest.param("tpu_kernels", "fp8", marks=pytest.mark.full),
        pytest.param("tpu_kernels", "mxfp8", marks=pytest.mark.full),
        ("gpu_reference", "fp8"),
        ("gpu_reference", "mxfp8"),
    ],
)
def test_infinities_of_a_training_step_are_refused_nowhere(package, quantize):
    """Where they could be seen as well: a step does the same on every device, and under a trace."""
    given = with_infinities()
    arrays = {name: PACKAGES[package](value) for name, value in given.items() if isinstance(value, np.ndarray)}
    public(package)["moe_layer_bwd"](**given | arrays, quantize=quantize, block_size=32)


@pytest.mark.parametrize("quantize", ["fp8", "mxfp8"])
def test_infinities_of_a_golden_training_step_saturate_as_well(quantize):
    with np.errstate(invalid="ignore"):  # in the router, which is not quantised
        moe_layer_bwd(**with_infinities(), quantize=quantize, block_size=32)


@pytest.mark.parametrize("quantized", [(True, False), (False, True), (True, True)])
def test_infinities_saturate_in_both_passes_of_the_golden_matmul(quantized):
    lhs, rhs, dout = f32(8, 32), f32(2, 32, 32), f32(8, 32)
    for x in (lhs, rhs[1], dout):
        x[5, 7] = np.inf
    options = dict(quantize=quantized[0], bwd_quantize=quantized[1], block_size=32)
    with np.errstate(invalid="ignore"):  # where one pass takes them as they are
        grouped_dense.grouped_dense(lhs, rhs, i32(4, 4), **options)
        grouped_dense.grouped_dense_bwd(lhs, rhs, i32(4, 4), dout, **options)


@pytest.mark.parametrize("package", ["tpu_kernels", "gpu_reference"])
def test_infinities_of_a_matmul_saturate_as_the_goldens_do(package):
    """Also those of dout, whose values are at hand in the backward pass."""
    lhs, rhs, dout = f32(8, 32), f32(2, 32, 32), f32(8, 32)
    for x in (lhs, rhs[1], dout):
        x[5, 7] = np.inf
    given, options = (lhs, rhs, i32(4, 4), dout), dict(quantize=True, bwd_quantize=True, block_size=32)
    found = public(package)["grouped_dense_bwd"](*map(PACKAGES[package], given), **options)
    for got, expected in zip(found[:2], grouped_dense.grouped_dense_bwd(*given, **options)[:2], strict=True):
        np.testing.assert_allclose(to_numpy(got), expected, rtol=1e-6)
