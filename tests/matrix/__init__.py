"""The matrix: one module per op family. Data, not code; both backends run all of it."""

from tests.matrix.delta_rule import CAUSAL_CONV1D, DELTA_RULES, GATES
from tests.matrix.gla import GATED_LINEAR_ATTENTION
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.moe import GROUPED_DENSE, GROUPED_DENSE_BWD, MOE_LAYERS
from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_QUANTIZERS
from tests.matrix.quantize import QUANTIZERS
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED

OPS = (
    *(GMM, TGMM, GMM_QUANTIZED, TGMM_QUANTIZED, GROUPED_GEMM, GROUPED_DENSE, GROUPED_DENSE_BWD),
    *(*QUANTIZERS, *MXFP8_QUANTIZERS),
    *MOE_LAYERS,
    *GATED_LINEAR_ATTENTION,
    *DELTA_RULES,
    *GATES,
    *CAUSAL_CONV1D,
)
