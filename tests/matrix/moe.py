"""Layers of a mixture of experts: their cases, how their inputs are drawn, what their kernels promise.

`grouped_dense` and its gradients first, then `permute` and `unpermute`, and the whole layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cpu_golden.grouped_dense import grouped_dense, grouped_dense_bwd
from cpu_golden.moe import moe_layer, moe_layer_bwd
from cpu_golden.permute import permute, unpermute
from op_arguments.permute import permuted_rows
from parity import Array, Case, Contract, Groups, Op, abs_of
from parity.dtypes import UNIT_ROUNDOFF, numpy_dtype
from parity.inputs import DISTRIBUTIONS, stream
from parity.judging.passes import mxu_x6
from parity.op import Backend, Given, Inputs
from tests.matrix import gmm as unquantised
from tests.matrix.gmm import PATTERNS, SMALL_TILES, grouped, groups_and_out, longest_group, shapes
from tests.matrix.memories import Drawn
from tests.matrix.models import DEEPSEEK_V3, GPT_OSS_120B
from tests.matrix.ops import BF16, F32, MXU_DEPTH, TRAINED, in_turn, is_backward, of_unit, op
from tests.matrix.quantized_gmm import FP8_MMA_DEPTH, gpu_tile, with_narrow_sums


def contract(c: Case, backend: Backend) -> Contract:
    """As gmm_quantized where all operands are fp8, else as gmm of the wider ones.

    Quantising is exact to the bit, and so no part of the error. Gradients have the dtypes of what they are gradients
    of; in the backward pass the result's, which is dout's, is that of an operand.
    """
    backward = c.op == "grouped_dense_bwd"
    sums = {"dlhs": F32, "drhs": F32} if backward else {"acc": F32}
    scaling = {"inner": F32, "scale": F32, "scaled": F32, **sums}
    if c.bwd_quantize if backward else c.quantize:
        depth = MXU_DEPTH if backend == "tpu" else FP8_MMA_DEPTH
        sites = {"partial": F32, **scaling} if backend == "tpu" else scaling
        wide = Contract(dot="fp8", out=c.out, depth=depth, sites=sites, functions=of_unit(backend, "inner"))
    else:
        wide = unquantised.contract(replace(c, dtype=F32) if backward and c.out == F32 else c, backend)
        running = ["inner"] if c.quantize else ["dlhs", "drhs"] if backward else ["acc"]
        functions = {site: of for name in running for site, of in of_unit(backend, name).items()}
        wide = replace(wide, sites={**wide.sites, **scaling}, functions=wide.functions and functions)
    if not backward:
        own = gpu_tile(c, c.block_size, over_rows=False, size=2) if c.out == F32 else None
        return with_narrow_sums(wide, backend, own)
    tile, schedule = None, wide.schedule
    if c.quantize or c.bwd_quantize:  # rows are cut where blocks are, and a tile within a block is scaled by itself
        block = c.block_size or c.M
        tile = c.tiling[0] if c.tiling and c.tiling[0] < block else None
        if backend == "gpu" and wide.dot != "fp8" and c.tiling:
            size = numpy_dtype(F32 if c.out == F32 else c.dtype).itemsize
            tile = gpu_tile(c, c.block_size, over_rows=True, size=size)
        schedule = {"aligned": True}
    wide = replace(wide, out=c.dtype, outs={"existing_out": c.out}, tile=tile, schedule=schedule)
    return with_narrow_sums(wide, backend, gpu_tile(c, c.block_size, over_rows=True, size=2))


def chain(c: Case, inputs: Inputs) -> int:
    """Additions behind an element, however the kernel cuts its sum; and two products."""
    terms = max(c.N, longest_group(c, inputs)) if is_backward(c) else c.K
    return int(terms) + 1 + 2


def inputs(c: Case) -> dict[str, Array | Groups | None]:
    """As gmm's.

    The gradients' lhs and rhs as those sum over them: lhs over rows, rhs over N; then both sums with dout are sparse.
    """
    of, backward = shapes(c), is_backward(c)
    inside = bool(c.quantize or (backward and c.bwd_quantize))
    lhs_axis, rhs_axis = (0, 3 - of.rhs_axis) if backward else (of.lhs_axis, of.rhs_axis)
    given = {
        "lhs": Array(of.lhs, c.dtype, sum_over=lhs_axis, quantised_inside=inside),
        "rhs": Array(of.rhs, c.dtype, sum_over=rhs_axis, pair_sign=-1, quantised_inside=inside),
        **groups_and_out(c),
    }
    return given | ({"dout": Array(of.out, c.out, quantised_inside=inside)} if backward else {})


def unread(c: Case, inputs: Inputs) -> Mapping[str, np.ndarray]:
    """As for gmm; and dout in rows of no active group, unless it is the gradient of an existing_out there."""
    masks = dict(unquantised.inactive(c, inputs))
    if "dout" in inputs and not c.existing_out:
        rows = masks["lhs"][:, :1] if c.K else np.zeros((c.M, 1), bool)
        masks["dout"] = np.broadcast_to(rows, (c.M, c.N))
    return masks


def axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    """As gmm's; of the gradients those of lhs by rows, of rhs by groups."""
    if not is_backward(c):
        return unquantised.axes(c, inputs)
    by_row = unquantised.of_rows(c, inputs)
    return {"lhs": by_row, "existing_out": by_row, "rhs": {"group": np.arange(c.G)[:, None, None]}}


def arguments(c: Case) -> Mapping[str, object]:
    quantising = {name: getattr(c, name) for name in ("quantize", "bwd_quantize", "block_size")}
    return {**unquantised.arguments(c), **quantising}


DEFAULTS = dict(
    quantize=True, bwd_quantize=True, block_size=128, transpose_rhs=False, existing_out=False, shard=None, tiling=None,
    groups="zipf",
)  # fmt: skip

dense = partial(grouped, inputs=inputs, arguments=arguments, contract=contract, chain=chain, axes=axes, unread=unread)
_FORWARD, _BACKWARD = (
    dense(
        golden,
        representative=lambda c: c.tier == "smoke" and not is_backward(c),
        magnitude=abs_of("lhs", "rhs", added),
        defaults=DEFAULTS,
    )
    for golden, added in ((grouped_dense, "existing_out"), (grouped_dense_bwd, "dout"))
)

DATA = ["one_signed", "wide", "outliers", "poison", "nonfinite", *TRAINED]
SMALL = dict(M=200, K=256, N=128, G=4)  # M is no multiple of the block
SQUARE = dict(M=150, K=128, N=128, G=4)


def with_dense_cases(op: Op) -> Op:
    """grouped_dense or its gradients with its cases."""
    forward = op.name == "grouped_dense"
    small = dict(tiling=[SMALL_TILES])
    parts = [
        op.grid([SMALL], dtype=[BF16], groups=["short"], tier="smoke", **small),
        # quantize and bwd_quantize on their own; block_size forwarded, and the whole axis; both orientations
        op.grid([SMALL], dtype=[BF16], quantize=[False], bwd_quantize=[True], groups=["straddle"], **small),
        op.grid([SMALL], dtype=[BF16], quantize=[True], bwd_quantize=[False], groups=["straddle"],
                tier="full" if forward else "default", **small),
        op.grid([SMALL], dtype=[F32], groups=["straddle"], tier="full", **small),
        op.grid([SMALL], dtype=[F32], block_size=[None], groups=["straddle"], tier="full" if forward else "default",
                **small),
        op.grid([SQUARE], dtype=[F32], block_size=[64], transpose_rhs=[True], groups=["zipf"]),
        # d/d existing_out is 0 on rows that were overwritten (megablox: 1); a shard's gradients
        op.grid([SMALL], dtype=[F32], existing_out=[True], groups=["short"], **small),
        op.grid([SMALL], dtype=[BF16], existing_out=[True], transpose_rhs=[True], shard=[(3, 8)], groups=["zipf"],
                **small),
        # a result that is wider than its operands, and so the gradient of it
        op.grid([SMALL], dtype=[(BF16, F32)], quantize=[False], bwd_quantize=[False], transpose_rhs=[True],
                existing_out=[True], groups=["zipf"], tier="full" if forward else "default", **small),
        in_turn(
            not forward,
            op.grid([SMALL], dtype=[BF16], data=["residuals"], groups=["short"], **small),
            # the gradient of an empty group is exactly zero (tokamax#887, #1016)
            op.grid([SMALL], dtype=[BF16], groups=["empty_runs"], **small),
        ),
        op.grid([SMALL], dtype=[F32], data=["poison"] if forward else ["poison", "nonfinite"],
                groups=["short"], **small),
        op.grid([SMALL], dtype=[(BF16, F32)], quantize=[False], bwd_quantize=[False], existing_out=[True],
                groups=["zipf"], tier="full", **small),
        op.grid([SQUARE], dtype=[F32], block_size=[32], groups=["straddle"], tier="full"),
        op.grid([SMALL], dtype=[F32, BF16], quantize=[False, True], bwd_quantize=[False, True],
                block_size=[64, 128, None], transpose_rhs=[False, True], groups=["zipf"], tier="full", **small),
        op.grid([SMALL], dtype=[F32, BF16], existing_out=[False, True], groups=PATTERNS, tier="full", **small),
        op.grid([SMALL], dtype=[F32, BF16], data=DATA, quantize=[True], bwd_quantize=[False, True],
                existing_out=[False, True], groups=["short"], tier="full", **small),
    ]  # fmt: skip
    return op.with_cases(*parts)


GROUPED_DENSE, GROUPED_DENSE_BWD = map(with_dense_cases, (_FORWARD, _BACKWARD))

# --- permute, unpermute ---


def drawn(c: Case, name: str, shape: tuple[int, ...], dtype: str, size: float = 1.0, one_in: int = 1) -> Given:
    """A tensor of the case's data, times a size; channels that are outliers are x's."""
    channels = -1 if (c.data, name) == ("outliers", "x") else None
    spec = Array(shape, dtype, channels, one_in=one_in)
    return Drawn(shape, dtype, lambda: DISTRIBUTIONS[c.data](spec, stream(c, name), c.out) * size)


def choices(c: Case) -> np.ndarray:
    """[T, k] int32: k different experts for each token, the more likely the lower their number."""
    words = stream(c, "indices")(c.T * c.E).reshape(c.T, c.E) >> np.uint64(12)
    keys = words.astype(np.float64) * np.arange(1, c.E + 1)
    return np.argsort(keys, axis=1, kind="stable")[:, : c.k].astype(np.int32)


def unpermute_inputs(c: Case) -> Mapping[str, Array | Given | None]:
    rows = permuted_rows(c.T, c.k, c.E, c.capacity)
    tokens = np.zeros((c.T, 1), np.float32)
    slots = permute(tokens, choices(c), num_experts=c.E, capacity=c.capacity).slots
    weights = Array((c.T, c.k), F32) if c.weights else None
    return {"rows": Array((rows, c.D), c.dtype), "slots": Given(slots), "weights": weights}


def of_no_slot(c: Case, inputs: Inputs) -> Mapping[str, np.ndarray]:
    """Rows that no slot names, and the weights of slots that name none."""
    rows = ~np.isin(np.arange(len(inputs["rows"])), inputs["slots"])
    masks = {"rows": np.broadcast_to(rows[:, None], inputs["rows"].shape)}
    return masks if inputs["weights"] is None else masks | {"weights": inputs["slots"] < 0}


_PERMUTE = op(
    permute,
    inputs=lambda c: {"x": Array((c.T, c.D), c.dtype), "indices": Given(choices(c))},
    arguments=lambda c: {"num_experts": c.E, "capacity": c.capacity},
    contract=lambda c, backend: Contract(dot="none", out=c.out),
    defaults=dict(capacity=None),
    bit_exact=True,
)

_UNPERMUTE = op(
    unpermute,
    inputs=unpermute_inputs,
    arguments=lambda c: {},
    contract=lambda c, backend: Contract(dot="ieee", out=c.out, sites={"product": F32, "sum": F32}),
    chain=lambda c, inputs: c.k + 1,
    representative=lambda c: c.tier == "smoke",
    magnitude=abs_of("rows", "weights"),
    unread=of_no_slot,
    defaults=dict(weights=True, capacity=None),
)

TOKENS = dict(T=150, D=96, E=6, k=2)
ODD = dict(T=37, D=40, E=5, k=3)
EVERY = dict(T=20, D=32, E=4, k=4)
FEW = dict(T=0, D=32, E=4, k=2)
WIDE = dict(T=64, D=DEEPSEEK_V3.hidden, E=16, k=DEEPSEEK_V3.top_k)

PERMUTE = _PERMUTE.with_cases(
    _PERMUTE.grid([TOKENS], dtype=[BF16], capacity=[None, 40], tier="smoke"),
    _PERMUTE.grid([ODD, EVERY, FEW, dict(T=64, D=32, E=16, k=8)], dtype=[F32], data=["bits"], capacity=[None, 7]),
    _PERMUTE.grid([TOKENS, ODD, EVERY], dtype=[F32, BF16, "float16"], data=["bits"], capacity=[None, 1, 7, 1000],
                  tier="full"),
)  # fmt: skip
UNPERMUTE = _UNPERMUTE.with_cases(
    _UNPERMUTE.grid([TOKENS], dtype=[BF16], capacity=[None, 40], tier="smoke"),
    _UNPERMUTE.grid([ODD], dtype=[F32], data=["normal", "one_signed", "poison", "residuals"], capacity=[7]),
    _UNPERMUTE.grid([EVERY, FEW], dtype=[F32], weights=[False, True]),
    _UNPERMUTE.grid([WIDE], dtype=[BF16]),
    _UNPERMUTE.grid([TOKENS, ODD, EVERY], dtype=[F32, BF16], weights=[False, True], capacity=[None, 7],
                    data=["normal", "one_signed", "wide", "poison", "nonfinite", *TRAINED], tier="full"),
)  # fmt: skip


# --- the whole layer ---

POWER = 2.0**10
"""What integer data of the router and of the gates are multiples of: differences beyond that leave of a softmax 0 and
1 alone, and of a silu 0 and its argument, in float64 and in float32."""


class Routing(NamedTuple):
    """Where tokens go. margin [T]: how far the chosen logits of each token are from the others, beyond the errors of
    both: a kernel in float32 chooses as the golden does where that is positive, and cannot be judged elsewhere."""

    group_sizes: np.ndarray
    margin: np.ndarray


def routing(c: Case, inputs: Inputs) -> Routing:
    x, w_router = (inputs[name].astype(np.float64) for name in ("x", "w_router"))
    logits = x @ w_router
    errors = UNIT_ROUNDOFF[F32] * Contract().bound(c.D) * (np.abs(x) @ np.abs(w_router))
    ranked = np.argsort(-logits, axis=1, kind="stable").astype(np.int32)
    chosen, left = (np.take_along_axis(logits, part, axis=1) for part in (ranked[:, : c.k], ranked[:, c.k :]))
    margin = chosen[:, -1] - left.max(axis=1, initial=-np.inf) - 2 * errors.max(axis=1, initial=0)
    indices = np.ascontiguousarray(ranked[:, : c.k])
    return Routing(permute(x, indices, num_experts=c.E, capacity=c.capacity).group_sizes, margin)


def layer_inputs(c: Case) -> Mapping[str, Array | Given]:
    """Weights of such a size that what a matmul returns is about as large as what it is given.

    Integer data are sparse, those of the router and of the gates multiples of `POWER`. Weights are then 0, ½ and 1; or,
    where equal logits would make other fractions of more experts, or a gradient of x that is too long for bfloat16, a
    router of large numbers, hardly ever equal, makes them 0 and 1.
    """
    backward = c.op == "moe_layer_bwd"
    _, held = layer_shard(c)
    shapes = {"w_gate": (held, c.D, c.F), "w_up": (held, c.D, c.F), "w_down": (held, c.F, c.D)}
    if c.data == "integers":
        few = max(c.D // 16, 1)
        sparse = {"x": few, "w_router": 16, "w_gate": 16, "w_up": 16, "w_down": max(c.F, 1), "dout": few}
        sizes = {"w_router": POWER, "w_gate": POWER}
    else:
        sparse = {}
        lengths = {"w_router": c.D, "w_gate": c.D, "w_up": c.D, "w_down": c.F}
        sizes = {name: 4 / n if c.data == "one_signed" else n**-0.5 for name, n in lengths.items()}

    def given(name: str, shape: tuple[int, ...], dtype: str) -> Given:
        return drawn(c, name, shape, dtype, sizes.get(name, 1.0), sparse.get(name, 1))

    tensors = {"x": given("x", (c.T, c.D), c.dtype), "w_router": given("w_router", (c.D, c.E), F32)}
    if c.data == "integers" and (c.k > 2 or (backward and c.dtype != F32)):
        words = stream(c, "w_router")(c.D * c.E).reshape(c.D, c.E) % np.uint64(2**11)
        tensors["w_router"] = Given(((words - 2.0**10) * POWER).astype(np.float32))
    if c.data != "integers":
        # A token between two experts cannot be judged: it gets the values of one that is not.
        x = tensors["x"].array
        decided = routing(c, {name: tensor.array for name, tensor in tensors.items()}).margin > 0
        x[~decided] = np.resize(x[decided], x[~decided].shape)
    tensors |= {name: given(name, shape, c.dtype) for name, shape in shapes.items()}
    if c.data == "one_signed":
        # Experts of several sizes: those of one size return nearly the same, whose difference is the router's gradient.
        size = tensors["w_down"].array
        size *= (2.0 ** -(np.arange(held) % 3)).astype(size.dtype)[:, None, None]
    if backward:
        tensors["dout"] = given("dout", (c.T, c.D), c.out)
        if c.data == "nonfinite":
            tensors["dout"].array[-1:, :1] = np.inf  # of w_down's gradient a column, and not only NaN
    return tensors


def layer_shard(c: Case) -> tuple[int, int]:
    """(group_offset, G): the experts that the case has, of the router's E."""
    return c.shard or (0, c.E)


def layer_arguments(c: Case) -> dict[str, Any]:
    """Integer data are quantised only where the quantisers are tested: here their products would not be exact."""
    integers = c.data == "integers"
    return {
        "top_k": c.k,
        "quantize": None if integers else c.quantize,
        "block_size": c.block_size,
        "capacity": c.capacity,
        "renormalize": c.renormalize or integers,
        "group_offset": layer_shard(c)[0],
        "sanitize_grads": c.sanitize_grads,
        "tiling": c.tiling,
    }


def layer_contract(c: Case, backend: Backend) -> Contract:
    """Float32 sums; what a matmul hands on in x's dtype, in float32 where the next one quantises it.

    The router's matmuls are of float32, whatever those of the experts are: six passes, or products added one by one.
    """
    between = c.dtype if c.quantize is None else F32
    sites = {
        **dict.fromkeys(("logits", "below", "grown", "total", "inverse", "weights"), F32),
        "gate": between,
        "up": between,
        "sigmoid": "float32/2",  # of an exp
        **dict.fromkeys(("silu", "factor"), F32),
        "hidden": between,
        "rows": c.out,
        "sum": F32,
    }
    if c.op == "moe_layer_bwd":
        sites |= {"dhidden": between, "dterms": F32, "dweights": F32, "dchosen": F32, "dmean": F32,
                  "dshared": F32, "slope": F32, "dgate": between, "dup": between, "dtaken": F32, "dlogits": F32,
                  "drows": c.out, "dexperts": c.out, "drouter": c.out}  # fmt: skip
    scaling = {"inner": F32, "scale": F32, "scaled": F32, "acc": F32}
    outs = {"w_router": F32} if c.op == "moe_layer_bwd" else {}
    schedule = {"router_depth": MXU_DEPTH, "router_passes": mxu_x6} if backend == "tpu" else {"router_depth": 1}
    own = {"sigmoid": ("exp", "reciprocal"), "grown": ("exp",), "inverse": ("reciprocal",)}
    wide = replace(unquantised.contract(c, backend), outs=outs, schedule=schedule)
    if c.quantize is None:
        return replace(wide, sites={**wide.sites, **sites}, functions={**wide.functions, **own})
    wide = replace(wide, schedule={**schedule, "aligned": True})
    sites |= scaling
    functions = {**of_unit(backend, "inner"), **own}
    if c.quantize == "fp8":
        depth = MXU_DEPTH if backend == "tpu" else FP8_MMA_DEPTH
        fp8 = replace(wide, dot="fp8", depth=depth, sites={"partial": F32, **sites}, functions=functions)
        return with_narrow_sums(fp8, backend, None)
    return replace(wide, dot="native", sites={**wide.sites, **sites}, functions=functions)


def layer_unread(c: Case, inputs: Inputs) -> Mapping[str, np.ndarray]:
    """The weights of experts without a token. (In `nonfinite` data all else of them, and of dout, is spoilt.)"""
    first, held = layer_shard(c)
    idle = routing(c, inputs).group_sizes[first : first + held] == 0
    masks = {name: np.broadcast_to(idle[:, None, None], inputs[name].shape) for name in ("w_gate", "w_up", "w_down")}
    return masks | ({"dout": np.zeros(inputs["dout"].shape, bool)} if "dout" in inputs else {})


LAYER_DEFAULTS = dict(
    quantize=None, block_size=128, capacity=None, renormalize=True, shard=None, sanitize_grads=False, tiling=None
)

_LAYER, _LAYER_BWD = (
    op(
        golden,
        inputs=layer_inputs,
        arguments=layer_arguments,
        contract=layer_contract,
        representative=lambda c: c.tier == "smoke",
        unread=layer_unread,
        defaults=LAYER_DEFAULTS,
    )
    for golden in (moe_layer, moe_layer_bwd)
)

LAYER = dict(T=60, D=128, F=128, E=4, k=2)
IDLE = dict(T=9, D=72, F=40, E=12, k=2)  # experts without a token, and multiples of nothing
DROPS = dict(T=33, D=72, F=40, E=5, k=3)
TILED = dict(T=128, D=128, F=512, E=4, k=2)  # what lies between matmuls fills the tiles of a fused quantiser
TILES = dict(T=144, D=128, F=256, E=16, k=8)  # and two of them, which share columns


def with_layer_cases(op: Op) -> Op:
    """moe_layer or its gradients with its cases."""
    deepseek = dict(T=16, D=DEEPSEEK_V3.hidden, F=128, E=16, k=DEEPSEEK_V3.top_k)
    gpt_oss = dict(T=16, D=GPT_OSS_120B.hidden, F=96, E=8, k=GPT_OSS_120B.top_k)
    if op.name == "moe_layer":
        some = [
            op.grid([LAYER], dtype=[BF16], tier="smoke"),
            op.grid([LAYER], dtype=[F32], data=["normal", "residuals"]),
            op.grid([LAYER], dtype=[BF16], quantize=["mxfp8"], capacity=[20]),
            op.grid([deepseek], dtype=[BF16], quantize=["fp8"], shard=[(4, 1)], tier="full"),
            op.grid([gpt_oss], dtype=[BF16], shard=[(4, 1)], tier="full", model=GPT_OSS_120B.name),
            op.grid([gpt_oss], dtype=[BF16], quantize=["mxfp8"], shard=[(4, 1)], tier="full"),
        ]
    else:
        some = [
            op.grid([LAYER], dtype=[BF16], quantize=["fp8"], capacity=[20], data=["normal", "residuals"]),
            op.grid([IDLE], dtype=[F32], data=["poison"]),
            op.grid([IDLE], dtype=[BF16], data=["nonfinite"], sanitize_grads=[True]),
            op.grid([gpt_oss], dtype=[BF16], shard=[(4, 1)], tier="full", model=GPT_OSS_120B.name),
            op.grid([gpt_oss], dtype=[BF16], quantize=["mxfp8"], shard=[(4, 1)], tier="full"),
        ]
    parts = [
        *some,
        op.grid([DROPS], dtype=[F32], capacity=[None, 11], renormalize=[False, True], tier="full"),
        op.grid([LAYER], dtype=[F32, BF16], quantize=[None, "fp8", "mxfp8"], data=["normal", "one_signed"],
                shard=[None, (1, 2)], tier="full"),
        op.grid([LAYER], dtype=[F32, BF16], quantize=[None, "fp8"], data=["outliers", *TRAINED], tier="full"),
        op.grid([LAYER], dtype=[BF16], quantize=["fp8"], block_size=[32, None], tier="full"),
        op.grid([IDLE], dtype=[F32, BF16], quantize=[None, "mxfp8"], data=["poison", "nonfinite"],
                sanitize_grads=[False, True], tier="full"),
        op.grid([dict(T=0, D=32, F=32, E=4, k=2), dict(T=1, D=32, F=32, E=4, k=4)], dtype=[F32], tier="full"),
        op.grid([TILED], dtype=[BF16], quantize=["fp8", "mxfp8"],
                tier="full" if op.name == "moe_layer" else "default"),
        op.grid([TILED], dtype=[BF16], quantize=["fp8", "mxfp8"], data=["outliers", *TRAINED], tier="full"),
        op.grid([TILED], dtype=[F32], quantize=["fp8"], data=["outliers"], tier="full"),
        op.grid([TILES], dtype=[BF16], quantize=["fp8"], block_size=[None],
                data=["normal", "outliers", *TRAINED], tier="full"),
    ]  # fmt: skip
    return op.with_cases(*parts)


MOE_LAYER, MOE_LAYER_BWD = map(with_layer_cases, (_LAYER, _LAYER_BWD))
MOE_LAYERS = (PERMUTE, UNPERMUTE, MOE_LAYER, MOE_LAYER_BWD)
