"""Our operations with the kernels of jax in the place of ours: golden, bounds, inputs, cases are those of ours."""

from dataclasses import replace

from tests.matrix import gmm, moe

SHAPE = dict(M=256, K=256, N=128, G=4)
GROUPS = ["zipf", "empty_runs", "straddle"]

_GMM = replace(gmm.GMM, tpu="megablox:gmm", cases=(), expected=())
GMM = _GMM.with_cases(
    _GMM.grid([SHAPE], dtype=["float32", "bfloat16"], groups=GROUPS, transpose_rhs=[False, True]),
    _GMM.grid([SHAPE], dtype=["float32"], groups=["short"], existing_out=[False, True]),
    _GMM.grid([SHAPE], dtype=["float32"], groups=["short"], data=["poison"]),
    _GMM.grid([SHAPE], dtype=["float32"], groups=["zipf"], shard=[(3, 8)], existing_out=[False, True]),
    _GMM.grid([dict(M=300, K=256, N=128, G=4)], dtype=["float32"], groups=["zipf"]),
)
_TGMM = replace(gmm.TGMM, tpu="megablox:tgmm", cases=(), expected=())
TGMM = _TGMM.with_cases(
    _TGMM.grid([SHAPE], dtype=["float32", "bfloat16"], groups=GROUPS),
    _TGMM.grid([SHAPE], dtype=["float32"], groups=["short"], data=["normal", "poison"]),
    _TGMM.grid([SHAPE], dtype=["float32"], groups=["zipf"], shard=[(3, 8)]),
)
_BWD = replace(moe.GROUPED_DENSE_BWD, name="gmm_bwd", tpu="megablox:gmm_bwd", cases=())
UNQUANTISED = dict(quantize=[False], bwd_quantize=[False])
GMM_BWD = _BWD.with_cases(
    _BWD.grid([SHAPE], dtype=["bfloat16"], groups=["zipf", "empty_runs", "short"], **UNQUANTISED),
    _BWD.grid([SHAPE], dtype=["bfloat16"], groups=["zipf"], existing_out=[True], **UNQUANTISED),
)
OPS = (GMM, TGMM, GMM_BWD)
