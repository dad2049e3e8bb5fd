"""gmm and tgmm: their cases, how their inputs are drawn, what their kernels promise."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cpu_golden.gmm import gmm, tgmm
from parity import Array, Case, Contract, Expected, Groups, Op, abs_of
from parity.inputs import GROUPS
from parity.op import Backend, Inputs
from tests.matrix.models import GPT_OSS_120B, MODELS
from tests.matrix.ops import BF16, F16, F32, MMA_DEPTH, MXU_DEPTH, TRAINED, in_turn, of_unit, one_in, op, sizes


class Shapes(NamedTuple):
    """Of what a grouped product takes and returns, and the axis of each operand that is summed over."""

    lhs: tuple[int, ...]
    lhs_axis: int
    rhs: tuple[int, ...]
    rhs_axis: int
    out: tuple[int, ...]


def sums_rows(c: Case) -> bool:
    """Whether the sums are over the rows of each group, as tgmm's."""
    return c.op.startswith("tgmm") or dict(c.options).get("ragged") == "contracting"


def shapes(c: Case) -> Shapes:
    if sums_rows(c):
        return Shapes((c.M, c.K), 0, (c.M, c.N), 0, (c.G, c.K, c.N))
    rhs, axis = ((c.G, c.N, c.K), 2) if c.transpose_rhs else ((c.G, c.K, c.N), 1)
    return Shapes((c.M, c.K), 1, rhs, axis, (c.M, c.N))


def contract(c: Case, backend: Backend) -> Contract:
    """Float32 accumulation and one rounding of the output, everywhere.

    The MXU has no float16: float16 operands go the way of float32 there. What leaves it is rounded before it is added.
    """
    native = c.dtype == BF16 or (c.dtype == F16 and backend == "gpu")
    if backend == "tpu":
        sites = {"partial": F32, "acc": F32, "tiles": F32}
        # tgmm's tiles are of all rows, the GPU's of each group's.
        schedule = {"aligned": True} if c.op == "tgmm" else {}
        tile = c.tiling and c.tiling[0 if c.op == "tgmm" else 1]
        return Contract(
            "native" if native else "bf16x6", c.out, depth=MXU_DEPTH, tile=tile, sites=sites, schedule=schedule,
            functions=of_unit(backend),
        )  # fmt: skip
    if not native:  # a chain of FMAs
        return Contract(dot="ieee", out=c.out, depth=1, sites={"acc": F32})
    return Contract(dot="native", out=c.out, depth=MMA_DEPTH, sites={"acc": F32}, functions=of_unit(backend))


def shard(c: Case) -> tuple[int, int]:
    """(group_offset, E): the case's G groups are those from group_offset on, of E."""
    return c.shard or (0, c.G)


def active_rows(c: Case, inputs: Inputs) -> slice:
    """The rows of lhs that belong to a group of the shard."""
    offset, _ = shard(c)
    starts = np.concatenate([[0], np.cumsum(inputs["group_sizes"])])
    return slice(starts[offset], starts[offset + c.G])


def inactive(c: Case, inputs: Inputs) -> Mapping[str, np.ndarray]:
    """Rows of no active group, and the matrices of groups without rows: their values must not reach the output."""
    offset, _ = shard(c)
    rows = np.ones(c.M, bool)
    rows[active_rows(c, inputs)] = False
    masks = {"lhs": rows, "rhs": rows if inputs["rhs"].ndim == 2 else inputs["group_sizes"][offset : offset + c.G] == 0}
    return {
        name: np.broadcast_to(mask.reshape(-1, *[1] * (inputs[name].ndim - 1)), inputs[name].shape)
        for name, mask in masks.items()
    }


def longest_group(c: Case, inputs: Inputs) -> int:
    offset, _ = shard(c)
    return int(inputs["group_sizes"][offset : offset + c.G].max(initial=0)) + 1  # and existing_out


def terms(c: Case, inputs: Inputs) -> int:
    """Terms of an element's sum, at most."""
    return longest_group(c, inputs) if sums_rows(c) else int(c.K)


def of_rows(c: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """What the rows of lhs belong to, [M, 1]: their group of the shard, its first or last row, a block of rows."""
    offset, _ = shard(c)
    ends = np.cumsum(inputs["group_sizes"])
    row = np.arange(c.M)
    group = np.searchsorted(ends, row, side="right")
    is_first, is_last = np.isin(row, ends - inputs["group_sizes"]), np.isin(row, ends - 1)
    rows = {
        "group": np.where((group >= offset) & (group < offset + c.G), (group - offset).astype(str), "none"),
        "expert boundary": np.where(is_first, "first row", np.where(is_last, "last row", "inside")),
        "row block": blocks(c, 0, c.M),
    }
    return {name: labels[:, None] for name, labels in rows.items()}


def blocks(c: Case, n: int, size: int) -> np.ndarray:
    """The number of each element's block along an axis: of the kernels' tile, the n-th size, or as the MXU is wide."""
    return np.arange(size) // (c.tiling[n] if c.tiling else MXU_DEPTH)


def axes(c: Case, inputs: Inputs) -> Mapping[str, Mapping[str, np.ndarray]]:
    if not sums_rows(c):
        return {"out": {**of_rows(c, inputs), "column block": blocks(c, 2, c.N)}, "lhs": {"K block": blocks(c, 1, c.K)}}
    offset, _ = shard(c)
    sizes = inputs["group_sizes"][offset : offset + c.G]
    groups = {
        "group": np.arange(c.G),
        "rows of the group": np.where(sizes == 0, "none", np.where(sizes < 16, "<16", "16+")),
    }
    out = {name: labels[:, None, None] for name, labels in groups.items()}
    out |= {"K block": blocks(c, 1, c.K)[:, None], "column block": blocks(c, 2, c.N)}
    return {"out": out, "lhs": of_rows(c, inputs)}


def inputs(c: Case) -> dict[str, Array | Groups | None]:
    of = shapes(c)
    return {
        "lhs": Array(of.lhs, c.dtype, sum_over=of.lhs_axis),
        "rhs": Array(of.rhs, c.dtype, sum_over=of.rhs_axis, pair_sign=-1),
        **groups_and_out(c),
    }


def groups_and_out(c: Case) -> dict[str, Array | Groups | None]:
    """What every grouped product takes beside its operands."""
    return {
        "group_sizes": Groups(shard(c)[1], rows=c.M, pattern=c.groups),
        "existing_out": Array(shapes(c).out, c.out) if c.existing_out else None,
    }


def arguments(c: Case) -> dict[str, Any]:
    groups = {"num_actual_groups": c.G} if sums_rows(c) else {"transpose_rhs": c.transpose_rhs}
    return {"group_offset": shard(c)[0], **groups, "preferred_element_type": c.out, "tiling": c.tiling}


def grouped(golden: Callable[..., Any], **settings: Any) -> Op:
    """The op of a grouped product, in whatever `settings` do not say as gmm or tgmm."""
    plain = dict(
        inputs=inputs,
        arguments=arguments,
        contract=contract,
        chain=terms,
        axes=axes,
        magnitude=abs_of("lhs", "lhs_scale", "rhs", "rhs_scale", "existing_out"),
        unread=inactive,
        spelled=("groups",),
    )
    return op(golden, **plain | settings)


def representative(c: Case) -> bool:
    """One case for each dtype that is in both tiers."""
    return c.tier == "smoke" and c.groups == "zipf" and not dict(c.options).get("transpose_rhs")


def compared(c: Case) -> bool:
    """One case of gmm, in bfloat16: its runs take a third of the time of float32's."""
    return representative(c) and c.dtype == BF16 and c.op == "gmm"


def a_row_or_two_each(c: Case) -> bool:
    """Whether most groups that have rows have no more than two: tgmm sums over rows."""
    return c.groups == "ones" or (c.groups, c.M) == ("zipf", 1) or (c.G == 64 and c.groups in ("zipf", "short"))


def tens_of_rows_each(c: Case) -> bool:
    """Whether most groups have some tens of rows: a tensor core sums 16 in one step, the MXU 128 but in four passes."""
    some = c.groups in ("balanced", "zipf", "straddle", "short") and (c.M == 150 or c.G == 32)
    return (some or (c.M, c.groups) == (300, "short")) and c.data != "cancellation"


# A loss is declared where the contracts explain one: their σ, TPU over GPU, come to as much as the measured ε do.
SHORT_SUMS = "a float32 product takes the MXU six roundings, a GPU's FMA one: 1.1 to 1.4 times as the contracts have it"
NO_FLOAT16 = (
    "the MXU has no float16: its passes round short sums more often than a tensor core: 1.05 times, by contract"
)


def without_transpose(defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of an op that sums over rows."""
    return {name: value for name, value in defaults.items() if name != "transpose_rhs"}


DEFAULTS = dict(transpose_rhs=False, existing_out=False, shard=None, tiling=None, groups="zipf")

_GMM = grouped(
    gmm,
    representative=compared,
    expected=(Expected(lambda c: c.dtype == F32 and c.K == 1, "LOSS", SHORT_SUMS),),
    defaults=DEFAULTS,
)
_TGMM = grouped(
    tgmm,
    representative=compared,
    expected=(
        Expected(lambda c: c.dtype == F32 and a_row_or_two_each(c), "LOSS", SHORT_SUMS),
        Expected(lambda c: (c.dtype, c.out) == (F16, F32) and tens_of_rows_each(c), "LOSS", NO_FLOAT16),
    ),
    defaults=without_transpose(DEFAULTS),
)

DTYPES = [F32, BF16, F16, (BF16, F32), (F16, F32)]
PATTERNS = list(GROUPS)
IN_SMOKE = ["zipf", "empty_middle", "short"]
SMALL_TILES = (64, 128, 128)  # several tiles along every axis of a small case, and boundaries inside them

SMALL = [dict(M=300, K=200, N=160, G=6)]
EDGES = [dict(M=m, K=k, N=n, G=5) for m in (128, 257) for k in (1, 130, 512) for n in (1, 96, 256)]
ONE_GROUP = [dict(M=m, K=k, N=96, G=1) for m in (128, 257) for k in (1, 130, 512)]
EMPTY = sizes("M K N G", (0, 64, 64, 3), (64, 0, 64, 3), (64, 64, 0, 3), (64, 64, 64, 0))
SHARD = [dict(M=200, K=130, N=96, G=2)]
SHARDS = [(0, 8), (3, 8), (6, 8)]
SQUARE = [dict(M=200, K=128, N=128, G=4)]  # where a forgotten transpose still fits
LONG_TILES = [(512, 128, 128), (512, 512, 512)]  # in blocks of rows and columns, and whole where they are one group's
LONG_GROUPS = [dict(M=1300, K=200, N=320, G=5)]
MANY_GROUPS = [dict(M=130, K=64, N=40, G=64)]
# What full adds: every option, pattern, dtype and distribution at a shape of few tiles (one comparison is 16 runs) …
CROSSED = [dict(M=150, K=130, N=96, G=6)]
# … and size with every dtype: one row, long sums, many groups.
LARGE = [
    dict(M=1, K=1024, N=160, G=3),
    dict(M=511, K=257, N=160, G=3),
    dict(M=511, K=1024, N=160, G=3),
    dict(M=1024, K=130, N=96, G=32),
]
SOME_TILES = [(128, 128, 128), (32, 256, 128), (100, 130, 90), (256, 512, 256), (16, 128, 256)]
DISTRIBUTIONS = ["one_signed", "wide", "outliers", "cancellation", "poison", "nonfinite"]


def models(op: Op) -> tuple[Case, ...]:
    """Each model's expert layer: the router over all its experts, a shard of at most 8 of them, and fewer rows.

    What is summed over stays whole; of the axes along which the same sum is only repeated there are fewer columns.
    `parity run` has those with a float32 result, whose error is that of the sum alone.
    """
    cases: tuple[Case, ...] = ()
    for model in MODELS:
        shape = dict(M=256, K=model.hidden if op.name == "gmm" else model.hidden // 8, N=128, G=8)
        held = (model.experts // 4, model.experts) if model.experts > 8 else None
        cases += op.grid([shape], dtype=[BF16], shard=[held], tier="default" if model is GPT_OSS_120B else "full")
        cases += op.grid([shape], dtype=[(BF16, F32)], shard=[held], model=model.name, tier="full")
    return cases


def with_cases(op: Op) -> Op:
    """gmm or tgmm with its cases."""
    flags = {"transpose_rhs": [False, True]} if "transpose_rhs" in op.defaults else {}
    small = dict(tiling=[SMALL_TILES])
    parts = [
        op.grid(SMALL, dtype=[F32, BF16], groups=IN_SMOKE, tier="smoke", **small, **flags),
        in_turn(
            op.name == "tgmm",
            op.grid(SMALL, dtype=[BF16], groups=[name for name in PATTERNS if name not in IN_SMOKE], **small),
            op.grid(SMALL, dtype=[F32], groups=["straddle", "one_hot", "none"], **small),
            op.grid(SMALL, dtype=[(F16, F32), (BF16, F32)], groups=["short", "straddle"], **small),
            op.grid(SMALL, dtype=[F32], data=DISTRIBUTIONS[1:], groups=["short"], **small),
            op.grid(SMALL, dtype=[(BF16, F32)], data=["one_signed", "nonfinite", *TRAINED], groups=["short"], **small),
            one_in(3, op.grid(SMALL, dtype=[BF16], existing_out=[True], groups=PATTERNS, **small), first=1),
            op.grid(SMALL, dtype=[F16], existing_out=[True], groups=["zipf", "ones"], **small),
            op.grid(SHARD, dtype=[F32], shard=SHARDS[1:], existing_out=[True], groups=["zipf", "straddle"], **small),
            op.grid(SHARD, dtype=[BF16], shard=SHARDS[:2], groups=["empty_runs", "short"], **small),
        ),
        one_in(7, op.grid(EDGES, dtype=[F32], groups=["straddle"])),  # M, K and N of both, all three and all three
        one_in(6, op.grid(ONE_GROUP, dtype=[F32], groups=["straddle"]), first=4),
        op.grid(EDGES[3:4], dtype=[BF16], groups=["straddle"]),
        one_in(3, op.grid(EMPTY, dtype=[F32, BF16], existing_out=[False, True], groups=["balanced"])),
        in_turn(
            op.name == "tgmm",
            op.grid(SMALL, dtype=[F32], tiling=[(100, 130, 90)], groups=["straddle"]),
            op.grid(SMALL, dtype=[BF16], tiling=[(32, 256, 128), (256, 512, 256)], groups=["straddle"]),
            op.grid(LONG_GROUPS, dtype=[BF16], tiling=LONG_TILES[:1], existing_out=[True], groups=["short"]),
            op.grid(LONG_GROUPS, dtype=[(BF16, F32)], tiling=LONG_TILES[1:], groups=["straddle"]),
        ),
        op.grid(SQUARE, dtype=[BF16], groups=["straddle"], **flags),
        op.grid(MANY_GROUPS, dtype=[F32], groups=["zipf", "short"]),
        models(op),
        # What full adds: the same in every dtype …
        op.grid(SMALL, dtype=[F32, BF16, (BF16, F32), F16, (F16, F32)], groups=PATTERNS, tier="full", **small, **flags),
        op.grid(SMALL, dtype=[BF16, F32, F16], existing_out=[True], groups=PATTERNS, tier="full", **small),
        op.grid(SMALL, dtype=[F32, (BF16, F32), BF16], data=DISTRIBUTIONS, groups=["short"], tier="full", **small),
        op.grid(EDGES, dtype=[BF16], groups=["straddle", "zipf"], tier="full"),
        op.grid(SHARD, dtype=[F32, BF16], shard=SHARDS, existing_out=[False, True],
                groups=["zipf", "empty_runs", "short"], tier="full", **small),
        op.grid(SMALL, dtype=[F32, BF16], tiling=SOME_TILES, groups=["straddle"], tier="full"),
        op.grid(SQUARE, dtype=[F32], groups=["straddle"], tier="full", **flags),
        op.grid(LONG_GROUPS, dtype=[F32, (BF16, F32)], tiling=LONG_TILES, groups=["straddle"], tier="full"),
        op.grid(LONG_GROUPS, dtype=[BF16], tiling=LONG_TILES, existing_out=[True], groups=["short"], tier="full"),
        op.grid(MANY_GROUPS, dtype=[F32, BF16], groups=["zipf", "ones", "empty_runs", "short"], tier="full"),
        # … and every option with every other.
        op.grid(LARGE, dtype=DTYPES, groups=["zipf", "short"], tier="full", **flags),
        op.grid(CROSSED, dtype=DTYPES, existing_out=[False, True], groups=PATTERNS, tier="full", **small, **flags),
        op.grid(
            CROSSED, dtype=DTYPES, data=DISTRIBUTIONS, existing_out=[False, True], groups=["short", "empty_runs"],
            tier="full", **small,
        ),
        op.grid(CROSSED, dtype=DTYPES, data=DISTRIBUTIONS + TRAINED, groups=["short"], tier="full", **small, **flags),
        op.grid(
            SHARD, dtype=[F32, (BF16, F32)], data=["poison", "nonfinite"], shard=SHARDS,
            groups=["zipf"], tier="full", **small,
        ),
    ]  # fmt: skip
    return op.with_cases(*parts)


GMM, TGMM = map(with_cases, (_GMM, _TGMM))
