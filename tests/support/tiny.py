"""Each operation at its smallest, with every tensor that it may be given: for laws that hold of all of them."""

from typing import Any

from parity.op import Case, Op

SIZES = {"M": 64, "K": 64, "N": 32, "G": 2, "T": 40, "D": 32, "F": 32, "E": 4, "k": 2, "B": 1, "H": 2, "HV": 2, "V": 16}
SIZES |= {"W": 4}
HEADS = {"K": 16, "N": 3}
"""Of scans, which are of packed sequences."""
OPTIONS: dict[str, Any] = dict(
    existing_out=True, shard=(1, 4), block_size=32, capacity=25, gates="both", h0=True, ht=True, chunk=16, blocks="1x32"
)
OF_OP: dict[str, dict[str, Any]] = {
    "gmm_quantized": dict(lhs_blocks="1x32", rhs_blocks="1x32x1"),
    "tgmm_quantized": dict(lhs_blocks="32x1", rhs_blocks="32x1"),
    "moe_layer": dict(shard=(1, 2)),
    "moe_layer_bwd": dict(shard=(1, 2)),
}
SCALED = dict.fromkeys(("gmm_quantized", "tgmm_quantized", "grouped_gemm"), ("float8_e4m3fn", "float32"))

ABSENT = dict(existing_out=False, shard=None, capacity=None, weights=False, bias=False, h0=False, ht=False)
"""Of the tensors that an op may be given none."""
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("chunk", dict(K=160, V=24, T=20)),  # channels of keys in several tiles
    ("chunk_gated_delta_rule", dict(K=160, V=24, T=20, HV=4, l2norm=True)),  # rows that are normalised, too
    ("tgmm", dict(M=640)),  # sums of more than a unit's depth
    ("simple_gla", dict(H=3, T=20, gates="gamma")),
    ("bounded_gate", dict(rate=False)),
    ("causal_conv1d", dict(W=1)),
    ("grouped_dense_bwd", dict(bwd_quantize=False)),  # dout as it is, beside weights that are quantised
    ("moe_layer", dict(quantize="fp8")),
    ("moe_layer", dict(quantize="mxfp8")),
]
"""What else there is of ops whose names have such a part."""


def tiny(op: Op, dtype: tuple[str, str] | None = None, **settings: Any) -> Case:
    """The smallest case of an op with all its tensors; settings: other options, or sizes (capital letters).

    dtype, of inputs and outputs: by default float32 where the op takes it, e4m3 where it has scales.
    """
    names = dict(op.cases[0].dims)
    more = HEADS if "B" in names else {}
    sizes = {name: settings.pop(name, (SIZES | more)[name]) for name in {**names, **more}}
    usual = {name: value for name, value in OPTIONS.items() if name in op.defaults}
    options = usual | OF_OP.get(op.name, {}) | settings
    pairs = [(case.dtype, case.out) for case in op.cases]
    wide = next((pair for pair in pairs if pair[0] == "float32"), pairs[0])
    chosen = dtype or SCALED.get(op.name, wide)
    (case,) = op.grid([sizes], dtype=[chosen], **{name: [value] for name, value in options.items()})
    return case


def in_every_way(op: Op) -> list[Case]:
    """The smallest with all tensors that there are, with as few as can be, with every flag turned, and `OTHERS`."""
    absent = {name: value for name, value in ABSENT.items() if name in op.defaults}
    flags = {n: not on for n, on in op.defaults.items() if isinstance(on, bool) and n not in (*ABSENT, "rate")}
    others = [settings for part, settings in OTHERS if part in op.name]
    return list(dict.fromkeys(tiny(op, **settings) for settings in ({}, absent, flags, *others)))
