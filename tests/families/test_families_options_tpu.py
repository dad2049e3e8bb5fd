"""Each kernel of the TPU at its smallest, with every tensor that it may be given and without, and every flag turned."""

from tests.matrix import OPS
from tests.support.agreement import agree_in_every_way

test_every_option_agrees_with_the_golden = agree_in_every_way(*OPS, backend="tpu")
