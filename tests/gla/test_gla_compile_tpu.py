"""The gated linear attentions through the real TPU compiler, for every chip they are for: they compile, with the dot
passes of their contract."""

import pytest

from tests.matrix.programs import LINEAR_ATTENTION_CHIPS, linear_attention
from tests.support import tpu_code

pytestmark = tpu_code.needs_compiler

BF16, F32 = "bfloat16", "float32"
CHUNKED = ("chunk_simple_gla", "fused_chunk_simple_gla", "chunk_gla")
RECURRENT = ("fused_recurrent_simple_gla", "fused_recurrent_gla")
DIRECTIONS = ("fwd", "bwd")
DEFAULT_TIER = ("v5e",)  # a chip takes half a minute
SMALL = {"batch": 1, "steps": 130, "heads": 2}
UNALIGNED = {"batch": 3, "steps": 77, "heads": 3, "key_size": 100, "value_size": 40}
LONG = {"batch": 1, "steps": 65_536}
PACKED = {"batch": 1, "steps": 300, "heads": 2, "sequences": 5, "states": True}


def gates_of(op):
    return ("none", "gamma", "g", "both") if "simple" in op else ("gk",)


def representative():
    """Of each kernel both directions, and every kind of argument somewhere. (What float32 dots become: test_mosaic.)"""
    for direction in DIRECTIONS:
        yield linear_attention(f"chunk_simple_gla_{direction}", "both", BF16, **PACKED, chunk_size=64)
        yield linear_attention(f"fused_recurrent_gla_{direction}", "gk", F32, **SMALL, reverse=True)
    yield linear_attention("chunk_gla_bwd", "gk", BF16, **LONG, chunk_size=64)
    yield linear_attention("fused_recurrent_simple_gla_fwd", "both", BF16, **PACKED)
    yield linear_attention("fused_recurrent_gla_fwd", "gk", BF16, **SMALL, key_size=256, value_size=256)


def everything(op):
    """Of an op each gate, dtype, chunk size, route and precision, at the longest and at odd shapes."""
    sizes = [{}] if op in RECURRENT else [{"chunk_size": size} for size in (16, 32, 64, 128, 256)]
    default = sizes[len(sizes) // 2]
    for direction in DIRECTIONS:
        name = f"{op}_{direction}"
        for dtype in (BF16, F32):
            for size in sizes:
                yield linear_attention(name, gates_of(op)[-1], dtype, **LONG, **size)
            for gates in gates_of(op)[:-1]:
                yield linear_attention(name, gates, dtype, **SMALL, **default)
            yield linear_attention(name, gates_of(op)[-1], dtype, **UNALIGNED, states=True, **default)
            yield linear_attention(name, gates_of(op)[-1], dtype, **PACKED, **default)
            yield linear_attention(name, gates_of(op)[-1], dtype, **SMALL, key_size=256, value_size=256, **default)
            yield linear_attention(name, gates_of(op)[-1], dtype, **SMALL, key_size=16, value_size=32, **default)
            if op in RECURRENT:
                yield linear_attention(name, gates_of(op)[-1], dtype, **PACKED, reverse=True)
            if op in ("chunk_simple_gla", "chunk_gla"):
                yield linear_attention(name, gates_of(op)[-1], dtype, **PACKED, fused=False, **default)
                yield linear_attention(name, gates_of(op)[-1], dtype, **LONG, fused=False, **default)
        if op in CHUNKED:
            yield linear_attention(name, gates_of(op)[-1], F32, **SMALL, precision="bf16x3", **default)


def check(programs, chip):
    for program, dots in tpu_code.dots(programs, chip):
        assert dots == promised(program), program.id


def promised(program):
    """The operands of its dots and the passes of each, where it compiles."""
    if program.op.startswith("fused_recurrent") and "f32" in program.id:
        return set()
    return {("bf16", 1)}  # what is float32 is in pieces


@pytest.mark.parametrize(
    "chip", [pytest.param(c, marks=[] if c in DEFAULT_TIER else [pytest.mark.full]) for c in LINEAR_ATTENTION_CHIPS]
)
def test_compiles(chip):
    check(list(representative()), chip)


@pytest.mark.full
@pytest.mark.parametrize("chip", LINEAR_ATTENTION_CHIPS)
@pytest.mark.parametrize("op", CHUNKED + RECURRENT)
def test_all_of_it_compiles(op, chip):
    check(list(everything(op)), chip)
