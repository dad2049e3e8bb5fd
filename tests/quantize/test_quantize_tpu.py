"""The quantisers on the TPU, or its emulation: the golden's bits."""

import parity
from tests.matrix.quantize import QUANTIZERS


@parity.cases(*QUANTIZERS, backend="tpu")
def test_has_the_goldens_bits(run):
    run.agrees()
