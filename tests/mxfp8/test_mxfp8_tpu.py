"""The MXFP8 quantisers and grouped_gemm on the TPU, or its emulation, against the golden."""

from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_QUANTIZERS
from tests.support.agreement import agree, are_exact, are_no_worse

test_has_the_goldens_bits = agree(*MXFP8_QUANTIZERS, backend="tpu")
test_agrees_with_golden = agree(GROUPED_GEMM, backend="tpu")
test_is_exact_on_integers = are_exact(GROUPED_GEMM, backend="tpu")
test_is_no_worse_than_the_gpu = are_no_worse(GROUPED_GEMM)
