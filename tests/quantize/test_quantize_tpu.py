"""The quantisers on the TPU, or its emulation: the golden's bits."""

from tests.matrix.quantize import QUANTIZERS
from tests.support.agreement import agree

test_has_the_goldens_bits = agree(*QUANTIZERS, backend="tpu")
