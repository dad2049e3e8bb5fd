"""Bad input to the delta rules, their gates and their convolution: the same exception with the same words."""

import numpy as np
import pytest

from op_arguments.delta_rule import DeltaTensors, check_delta_forward
from tests.support.bad_input import OF_SCANS, OFFSETS, PACKAGES, bf16, call, check_refused, f16, f32, i32
from tests.support.functions import public

RULES = [f"{form}_{rule}" for rule in ("gated_delta_rule", "kda") for form in ("chunk", "fused_recurrent")]

# Two rows of 8 steps, 1 head of keys and 2 of values, K = 4, V = 5.
TENSORS = dict(
    q=f32(2, 8, 1, 4), k=f32(2, 8, 1, 4), v=f32(2, 8, 2, 5), beta=f32(2, 8, 2), initial_state=f32(2, 2, 4, 5)
)
GRADS = dict(do=f32(2, 8, 2, 5), dht=f32(2, 2, 4, 5))
NARROW = {name: bf16(*x.shape) for name, x in {**TENSORS, **GRADS}.items() if name in ("q", "k", "v", "do")}
# The same in one row of 8 steps that holds three sequences.
PACKED_TENSORS = {name: x[:1] for name, x in TENSORS.items()} | dict(initial_state=f32(3, 2, 4, 5))
PACKED_GRADS = dict(do=f32(1, 8, 2, 5), dht=f32(3, 2, 4, 5))


def gate(function, rows=2):
    return f32(rows, 8, 2, 4) if "kda" in function else f32(rows, 8, 2)


def good(function):
    backward = GRADS if function.endswith("_bwd") else {}
    return TENSORS | {"g": gate(function)} | backward


GOOD = {f"{rule}_{way}": good(f"{rule}_{way}") for rule in RULES for way in ("fwd", "bwd")} | {
    "softplus_gate": dict(a=f32(2, 8, 3), A_log=f32(3), dt_bias=f32(3)),
    "softplus_gate_bwd": dict(a=f32(2, 8, 3), dg=f32(2, 8, 3), A_log=f32(3), dt_bias=f32(3)),
    "bounded_gate": dict(a=f32(2, 8, 3, 4), A_log=f32(3), dt_bias=f32(3, 4)),
    "bounded_gate_bwd": dict(a=f32(2, 8, 3, 4), dg=f32(2, 8, 3, 4), A_log=f32(3), dt_bias=f32(3, 4)),
    "causal_conv1d": dict(x=f32(2, 8, 3), weight=f32(3, 4), bias=f32(3), initial_state=f32(2, 3, 3)),
    "causal_conv1d_bwd": dict(x=f32(2, 8, 3), weight=f32(3, 4), dy=f32(2, 8, 3), bias=f32(3),
                              initial_state=f32(2, 3, 3), dht=f32(2, 3, 3)),
}  # fmt: skip
"""Good arguments of every function."""
FED = {name: given for name, given in GOOD.items() if not name.startswith(tuple(RULES))}
"""Those of gates and the convolution, which delta rules are fed with."""
EVERY = [(package, name) for package in PACKAGES for name in GOOD]
"""Every function, in each package."""

ANY = [
    *OF_SCANS,
    (dict(v=f32(2, 8, 5)), ValueError, "v must have rank 4 [B, T, HV, V], got shape [2, 8, 5]"),
    (dict(v=bf16(2, 8, 2, 5)), TypeError, "v must have q's dtype float32, got bfloat16"),
    (dict(v=f32(2, 7, 2, 5)), ValueError, "v must have shape [B, T, HV, V] = [2, 8, 2, 5], got [2, 7, 2, 5]"),
    (dict(q=f32(2, 8, 2, 4), k=f32(2, 8, 2, 4), v=f32(2, 8, 3, 5)), ValueError,
     "v must have a multiple of q's H = 2 heads, got 3"),
    (dict(q=f32(2, 8, 1, 257), k=f32(2, 8, 1, 257)), ValueError, "q must have K <= 256, got 257"),
    (dict(v=f32(2, 8, 2, 257)), ValueError, "v must have V <= 256, got 257"),
    (dict(g=None), TypeError, {"kda": "g must be an array [B, T, HV, K], got NoneType",
                               "gated_delta_rule": "g must be an array [B, T, HV], got NoneType"}),
    (dict(g=f32(2, 8, 2, 5)), ValueError,
     {"kda": "g must have shape [B, T, HV, K] = [2, 8, 2, 4], got [2, 8, 2, 5]",
      "gated_delta_rule": "g must have rank 3 [B, T, HV], got shape [2, 8, 2, 5]"}),
    (dict(beta=f32(2, 8, 1)), ValueError, "beta must have shape [B, T, HV] = [2, 8, 2], got [2, 8, 1]"),
    (dict(beta=bf16(2, 8, 2)), TypeError, "beta must be float32, got bfloat16"),
    (dict(beta=f16(2, 8, 2), **NARROW), TypeError, "beta must be float32 or bfloat16, got float16"),
    (dict(initial_state=bf16(2, 2, 4, 5)), TypeError, "initial_state must be float32, got bfloat16"),
    (dict(initial_state=f32(2, 1, 4, 5)), ValueError,
     "initial_state must have shape [N, HV, K, V] = [2, 2, 4, 5], got [2, 1, 4, 5]"),
    (dict(use_qk_l2norm_in_kernel=1), TypeError, "use_qk_l2norm_in_kernel must be a bool, got int"),
]  # fmt: skip
PACKED = [
    *OFFSETS,
    (dict(cu_seqlens=i32(0, 3, 8)), ValueError,
     "initial_state must have shape [N, HV, K, V] = [2, 2, 4, 5], got [3, 2, 4, 5]"),
]  # fmt: skip
BACKWARD = [
    (dict(do=None), TypeError, "do must be an array [B, T, HV, V], got NoneType"),
    (dict(do=bf16(2, 8, 2, 5)), TypeError, "do must have q's dtype float32, got bfloat16"),
    (dict(do=f32(2, 8, 1, 5)), ValueError, "do must have shape [B, T, HV, V] = [2, 8, 2, 5], got [2, 8, 1, 5]"),
    (dict(dht=bf16(2, 2, 4, 5)), TypeError, "dht must be float32, got bfloat16"),
    (dict(dht=f32(3, 2, 4, 5)), ValueError,
     "dht must have shape [N, HV, K, V] = [2, 2, 4, 5], got [3, 2, 4, 5]"),
]  # fmt: skip
CHUNKED = [
    (dict(chunk_size=64.0), TypeError, "chunk_size must be an int, got float"),
    (dict(chunk_size=0), ValueError, "chunk_size must be a positive multiple of 16, at most 128, got 0"),
    (dict(chunk_size=24), ValueError, "chunk_size must be a positive multiple of 16, at most 128, got 24"),
    (dict(chunk_size=144), ValueError, "chunk_size must be a positive multiple of 16, at most 128, got 144"),
]
GATE = [
    (dict(a=f32(8, 3)), ValueError, "a must have rank 4 [B, T, HV, K], got shape [8, 3]"),
    (dict(a=f16(2, 8, 3)), TypeError, "a must be float32 or bfloat16, got float16"),
    (dict(A_log=f32(2)), ValueError, "A_log must have shape [HV] = [3], got [2]"),
    (dict(A_log=bf16(3)), TypeError, "A_log must be float32, got bfloat16"),
]
FUNCTIONS = [
    ("softplus_gate", dict(A_log=None), TypeError, "A_log must be an array [HV], got NoneType"),
    ("softplus_gate", dict(dt_bias=f32(2)), ValueError, "dt_bias must have shape [HV] = [3], got [2]"),
    ("bounded_gate", dict(dt_bias=f32(3)), ValueError, "dt_bias must have rank 2 [HV, K], got shape [3]"),
    ("bounded_gate", dict(lower_bound="-5"), TypeError, "lower_bound must be a float, got str"),
    ("bounded_gate", dict(lower_bound=0.0), ValueError, "lower_bound must be finite and below 0, got 0.0"),
    ("softplus_gate_bwd", dict(dg=f32(2, 8, 1)), ValueError,
     "dg must have shape [B, T, HV] = [2, 8, 3], got [2, 8, 1]"),
    ("bounded_gate_bwd", dict(dg=bf16(2, 8, 3, 4)), TypeError, "dg must be float32, got bfloat16"),
    ("causal_conv1d", dict(x=f32(8, 3)), ValueError, "x must have rank 3 [B, T, D], got shape [8, 3]"),
    ("causal_conv1d", dict(weight=f32(4, 4)), ValueError, "weight must have shape [D, W] = [3, 4], got [4, 4]"),
    ("causal_conv1d", dict(weight=f32(3, 0), initial_state=None), ValueError, "weight must have W >= 1, got 0"),
    ("causal_conv1d", dict(weight=bf16(3, 4)), TypeError, "weight must be float32, got bfloat16"),
    ("causal_conv1d", dict(bias=f32(4)), ValueError, "bias must have shape [D] = [3], got [4]"),
    ("causal_conv1d", dict(initial_state=f32(2, 3, 4)), ValueError,
     "initial_state must have shape [N, D, W - 1] = [2, 3, 3], got [2, 3, 4]"),
    ("causal_conv1d", dict(activation="relu"), ValueError, "activation must be None or 'silu', got 'relu'"),
    ("causal_conv1d", dict(cu_seqlens=i32(0, 8)), ValueError,
     "x must have B = 1 with cu_seqlens, got 2 (shape [2, 8, 3])"),
    ("causal_conv1d_bwd", dict(dy=bf16(2, 8, 3)), TypeError, "dy must be float32, got bfloat16"),
    ("causal_conv1d_bwd", dict(dht=f32(2, 3, 4)), ValueError,
     "dht must have shape [N, D, W - 1] = [2, 3, 3], got [2, 3, 4]"),
]  # fmt: skip


def is_rule(function):
    return function.startswith(tuple(RULES))


@pytest.mark.parametrize(
    ("package", "function"),
    [pytest.param(*names, marks=[pytest.mark.full] * (names[0] != "cpu_golden" and is_rule(names[1])))
     for names in EVERY],
)  # fmt: skip
def test_the_good_arguments_are_good(package, function):
    assert call(package, function, GOOD[function]) is not None


@pytest.mark.parametrize(("package", "function"), [names for names in EVERY if is_rule(names[1])])
def test_bad_arguments_of_a_rule_are_refused_in_the_same_words(package, function):
    backward, rule = function.endswith("_bwd"), "kda" if "kda" in function else "gated_delta_rule"
    packed = PACKED_TENSORS | {"g": gate(function, 1)} | (PACKED_GRADS if backward else {})
    lists = [(GOOD[function], ANY), (packed, PACKED)]
    lists += [(GOOD[function], BACKWARD)] * backward + [(GOOD[function], CHUNKED)] * function.startswith("chunk")
    for arguments, bad in lists:
        for change, error, message in bad:
            given = {name: x for name, x in change.items() if backward or name not in GRADS}
            check_refused(package, function, arguments | given, error,
                          message if isinstance(message, str) else message[rule])  # fmt: skip


@pytest.mark.parametrize(
    ("package", "function", "change", "error", "message"),
    [(package, *bad) for bad in [(f"softplus_gate{way}", *bad) for way in ("", "_bwd") for bad in GATE] + FUNCTIONS
     for package in PACKAGES],
)  # fmt: skip
def test_bad_arguments_are_refused_in_the_same_words(package, function, change, error, message):
    check_refused(package, function, GOOD[function] | change, error, message)


@pytest.mark.parametrize(("package", "function"), EVERY)
def test_a_misspelt_option_is_refused_by_its_name(package, function):
    with pytest.raises(TypeError, match=r"^\w+\(\) got an unexpected keyword argument 'initial_sate'"):
        call(package, function, GOOD[function] | {"initial_sate": None})


@pytest.mark.parametrize("function", [*filter(is_rule, GOOD)])
def test_float64_is_let_through_by_goldens_alone(function):
    wide = {name: x.astype(np.float64) for name, x in GOOD[function].items()}
    assert call("cpu_golden", function, wide) is not None
    x = DeltaTensors(*(GOOD[function][name] for name in DeltaTensors._fields))
    for name in DeltaTensors._fields:
        changed = x._replace(**{name: getattr(x, name).astype(np.float64)})
        with pytest.raises(TypeError, match=rf"^{name} must .*got float64$"):
            check_delta_forward(changed, "kda" in function, None, None, None, None, False)


def test_every_public_function_is_tested():
    homes = {public("cpu_golden")[name].__module__ for name in GOOD}
    functions = {name for name, found in public("cpu_golden").items() if found.__module__ in homes}
    assert {name for name in functions if not name.endswith("_definition")} == GOOD.keys()
