"""Rows to experts and back, and the layers, on the GPU or its emulation, against the golden."""

from tests.matrix.moe import GROUPED_DENSE, GROUPED_DENSE_BWD, MOE_LAYER, MOE_LAYER_BWD, PERMUTE, UNPERMUTE
from tests.support.agreement import agree, are_exact

INEXACT = (UNPERMUTE, GROUPED_DENSE, GROUPED_DENSE_BWD, MOE_LAYER, MOE_LAYER_BWD)


test_has_the_goldens_bits = agree(PERMUTE, backend="gpu")
test_agrees_with_golden = agree(*INEXACT, backend="gpu")
test_is_exact_on_integers = are_exact(*INEXACT, backend="gpu")
