"""The gated delta rules through the real TPU compiler, for every chip they are for: they compile, with the dot passes
of their contract."""

import pytest

from tests.matrix.programs import LINEAR_ATTENTION_CHIPS, delta_rule
from tests.support import tpu_code

pytestmark = tpu_code.needs_compiler

BF16, F32 = "bfloat16", "float32"
OPS = ("chunk_gated_delta_rule", "chunk_kda")
PASSES = ("fwd", "bwd")
SMALL = {"batch": 1, "steps": 130, "key_heads": 1, "heads": 2}
UNALIGNED = {"batch": 3, "steps": 77, "key_heads": 3, "heads": 3, "key_size": 100, "value_size": 48}
GROUPED = {"batch": 1, "steps": 300, "key_heads": 2, "heads": 8, "sequences": 5, "states": True}
LONG = {"batch": 1, "steps": 65_536}


def everything(op):
    """Each dtype, chunk size and kind of argument, at the longest and at odd shapes."""
    for passes in PASSES:
        name = f"{op}_{passes}"
        for dtype in (BF16, F32):
            for chunk_size in (16, 32, 48, 64, 128):
                yield delta_rule(name, dtype, **SMALL, chunk_size=chunk_size)
            yield delta_rule(name, dtype, **UNALIGNED, states=True, chunk_size=64)
            yield delta_rule(name, dtype, **GROUPED, chunk_size=64, use_qk_l2norm_in_kernel=True)
            yield delta_rule(name, dtype, **SMALL, key_size=256, value_size=256, chunk_size=64)
            yield delta_rule(name, dtype, **LONG, chunk_size=64)


def check(programs, chip):
    for program, dots in tpu_code.dots(programs, chip):
        assert dots == {("bf16", 1)}, program.id  # what is float32 is in pieces


def test_forward_compiles():
    check([delta_rule("chunk_gated_delta_rule_fwd", BF16, **GROUPED, chunk_size=64)], "v6e")


@pytest.mark.full
@pytest.mark.parametrize("chip", LINEAR_ATTENTION_CHIPS)
@pytest.mark.parametrize("op", OPS)
def test_all_of_it_compiles(op, chip):
    check(list(everything(op)), chip)
