"""Our operations with the kernels of flash-linear-attention in the place of ours: golden and inputs are ours.

So is the contract of float32. That of bfloat16 is what they are written to do: operands of dots that were computed in
float32, as states and scores, are rounded to one bfloat16 (ours are split in two).
"""

from dataclasses import replace

from tests.matrix import gla
from tests.matrix.gla import DECAYS, DISTRIBUTIONS, EDGES, EMPTY, PACKED, PACKINGS, SMALL, SMALL_CHANNELS, WIDE

BOTH = ["float32", "bfloat16"]
STATES = gla.STATES
ALIBI = dict(B=1, T=129, H=16, K=16, V=16)  # its last chunk is one step
SHORT_AND_LONG = dict(B=1, T=130, H=1, K=32, V=32)


def contract(case, backend):
    ours = gla.contract(case, backend)
    if case.dtype != "bfloat16":
        return ours
    return replace(ours, dot="bf16x1", sites={**ours.sites, "lhs": "bfloat16", "rhs": "bfloat16"})


def theirs(op):
    own = dict(gpu=f"kernels:{op.name}", contract=contract, route=lambda case: {})
    return replace(op, **own, cases=(), expected=())  # what is expected of the TPU's kernels beside ours


_SIMPLE_FWD, _SIMPLE_BWD = map(theirs, gla.CHUNK_SIMPLE_GLA)
SIMPLE_FWD = _SIMPLE_FWD.with_cases(
    _SIMPLE_FWD.grid([SMALL], dtype=BOTH, chunk=[16], **STATES),
    _SIMPLE_FWD.grid([SMALL], dtype=["float32"], gates=["none", "gamma", "both"], chunk=[32], **STATES),
    _SIMPLE_FWD.grid([SMALL], dtype=["float32"], decay=["steep", "resets"], **STATES),
    _SIMPLE_FWD.grid([ALIBI], dtype=["float32"], gates=["gamma"], chunk=[64, 128], ht=[True]),
    _SIMPLE_FWD.grid([ALIBI], dtype=["bfloat16"], gates=["gamma"], chunk=[128], ht=[True]),
    _SIMPLE_FWD.grid(EDGES[3:4], dtype=["float32"]),
    _SIMPLE_FWD.grid([PACKED], dtype=["float32"], chunk=[16], lengths=["zeros_and_ones"], **STATES),
)
_GAMMA_BWD = replace(
    _SIMPLE_BWD,
    name="gamma_simple_gla_bwd",  # what is left without the gradient of g_gamma, which they do not have
    golden=lambda **arguments: _SIMPLE_BWD.golden(**arguments)._replace(dg_gamma=None),
)
SIMPLE_BWD = _SIMPLE_BWD.with_cases(
    _SIMPLE_BWD.grid([SMALL], dtype=BOTH, chunk=[16], **STATES),
    _SIMPLE_BWD.grid([SMALL], dtype=["float32"], gates=["none", "gamma"], chunk=[32], **STATES),
    _SIMPLE_BWD.grid([SMALL], dtype=["float32"], decay=["steep"], **STATES),
    _SIMPLE_BWD.grid([PACKED], dtype=["float32"], chunk=[16], lengths=["zeros_and_ones"], **STATES),
)
GAMMA_BWD = _GAMMA_BWD.with_cases(
    _GAMMA_BWD.grid([SMALL], dtype=["float32"], gates=["gamma"], chunk=[32], **STATES),
    _GAMMA_BWD.grid([ALIBI], dtype=BOTH, gates=["gamma"], chunk=[64, 128], **STATES, tier="full"),
    _GAMMA_BWD.grid([PACKED], dtype=BOTH, gates=["gamma"], chunk=[16], lengths=PACKINGS, **STATES, tier="full"),
)
_GLA_FWD, _GLA_BWD = map(theirs, gla.CHUNK_GLA)
GLA_FWD = _GLA_FWD.with_cases(
    _GLA_FWD.grid([SMALL_CHANNELS], dtype=BOTH, **STATES),
    _GLA_FWD.grid([SMALL_CHANNELS], dtype=["float32"], decay=["steep", "resets"], **STATES),
    _GLA_FWD.grid([PACKED], dtype=["float32"], lengths=["zeros_and_ones"], **STATES),
    _GLA_FWD.grid(EDGES[4:5], dtype=["bfloat16"], narrow_gates=[True]),
)
GLA_BWD = _GLA_BWD.with_cases(
    _GLA_BWD.grid([SMALL_CHANNELS], dtype=BOTH, **STATES),
    _GLA_BWD.grid([SMALL_CHANNELS], dtype=["float32"], decay=["steep"], **STATES),
)


def everything_else(op):
    """Every decay, distribution, size and packing, and arguments left out: `pytest --parity-tier=full`."""
    is_simple = "gates" in op.defaults
    small = SMALL if is_simple else SMALL_CHANNELS
    gates = dict(gates=["g", "gamma"]) if is_simple and op.name.endswith("fwd") else {}
    return op.with_cases(
        op.cases,
        op.grid([small, SHORT_AND_LONG], dtype=["float32"], decay=DECAYS, **STATES, tier="full"),
        op.grid([small], dtype=["float32"], data=DISTRIBUTIONS, **STATES, tier="full"),
        op.grid([small], dtype=["float32"], h0=[False, True], ht=[False, True], tier="full"),
        op.grid([small], dtype=["bfloat16"], narrow_gates=[True], **STATES, tier="full"),
        op.grid([gla.ONE_STEP, *EDGES, *WIDE], dtype=BOTH, **STATES, tier="full"),
        op.grid([PACKED], dtype=BOTH, lengths=PACKINGS, **gates, **STATES, tier="full"),
        op.grid(EMPTY, dtype=["float32"], **STATES, tier="full"),
    )


OPS = (*map(everything_else, (SIMPLE_FWD, SIMPLE_BWD, GLA_FWD, GLA_BWD)), GAMMA_BWD)
