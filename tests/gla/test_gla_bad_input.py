"""Bad input to gated linear attention: the same exception with the same words in all three packages."""

import numpy as np
import pytest

from op_arguments.gla import check_chunk_size, check_forward, check_fused, check_gradients, check_precision
from parity.interop import to_jax
from tests.support.bad_input import OF_SCANS, OFFSETS, PACKAGES, bf16, call, check_refused, f32, i32

FORMS = {"simple_gla": ("chunk", "fused_chunk", "fused_recurrent"), "gla": ("chunk", "fused_recurrent")}
PASSES = ("_fwd", "_bwd", "")  # the last one is differentiable, which goldens are not
FUNCTIONS = [
    (package, module, form, passes)
    for package in PACKAGES
    for module, forms in FORMS.items()
    for form in forms
    for passes in PASSES
    if passes or package != "cpu_golden"
]

# Two rows of 8 steps, 1 head, K = 4, V = 5.
TENSORS = dict(q=f32(2, 8, 1, 4), k=f32(2, 8, 1, 4), v=f32(2, 8, 1, 5), initial_state=f32(2, 1, 4, 5))
GATES = {"simple_gla": dict(g=f32(2, 8, 1), g_gamma=f32(1)), "gla": dict(gk=f32(2, 8, 1, 4))}
GRADS = dict(do=f32(2, 8, 1, 5), dht=f32(2, 1, 4, 5))
# The same in one row of 8 steps that holds three sequences.
PACKED_TENSORS = dict(q=f32(1, 8, 1, 4), k=f32(1, 8, 1, 4), v=f32(1, 8, 1, 5), initial_state=f32(3, 1, 4, 5))
PACKED_GATES = {"simple_gla": dict(g=f32(1, 8, 1), g_gamma=f32(1)), "gla": dict(gk=f32(1, 8, 1, 4))}
PACKED_GRADS = dict(do=f32(1, 8, 1, 5), dht=f32(3, 1, 4, 5))
NARROW = {name: bf16(*x.shape) for name, x in {**TENSORS, **GRADS}.items() if name in ("q", "k", "v", "do")}

ANY = [
    *OF_SCANS,
    (dict(v=f32(2, 8, 5)), ValueError, "v must have rank 4 [B, T, H, V], got shape [2, 8, 5]"),
    (dict(v=bf16(2, 8, 1, 5)), TypeError, "v must have q's dtype float32, got bfloat16"),
    (dict(v=f32(2, 8, 2, 5)), ValueError, "v must have shape [B, T, H, V] = [2, 8, 1, 5], got [2, 8, 2, 5]"),
    (dict(initial_state=bf16(2, 1, 4, 5)), TypeError, "initial_state must be float32, got bfloat16"),
    (dict(initial_state=f32(2, 1, 5, 4)), ValueError,
     "initial_state must have shape [N, H, K, V] = [2, 1, 4, 5], got [2, 1, 5, 4]"),
    (dict(initial_state=f32(2, 4, 5)), ValueError,
     "initial_state must have rank 4 [N, H, K, V], got shape [2, 4, 5]"),
]  # fmt: skip

PACKED = [
    *OFFSETS,
    (dict(cu_seqlens=i32(0, 3, 8)), ValueError,
     "initial_state must have shape [N, H, K, V] = [2, 1, 4, 5], got [3, 1, 4, 5]"),
]  # fmt: skip

OF_GATES = {
    "simple_gla": [
        (dict(g=0.5), TypeError, "g must be an array [B, T, H], got float"),
        (dict(g=f32(2, 8, 1, 4)), ValueError, "g must have rank 3 [B, T, H], got shape [2, 8, 1, 4]"),
        (dict(g=f32(2, 7, 1)), ValueError, "g must have shape [B, T, H] = [2, 8, 1], got [2, 7, 1]"),
        (dict(g=bf16(2, 8, 1)), TypeError, "g must be float32, got bfloat16"),
        (dict(g=np.ones((2, 8, 1), np.int8), **NARROW), TypeError, "g must be float32 or bfloat16, got int8"),
        (dict(g_gamma=f32(1, 1)), ValueError, "g_gamma must have rank 1 [H], got shape [1, 1]"),
        (dict(g_gamma=f32(3)), ValueError, "g_gamma must have shape [H] = [1], got [3]"),
        (dict(g_gamma=bf16(1)), TypeError, "g_gamma must be float32, got bfloat16"),
    ],
    "gla": [
        (dict(gk=None), TypeError, "gk must be an array [B, T, H, K], got NoneType"),
        (dict(gk=f32(2, 8, 1)), ValueError, "gk must have rank 4 [B, T, H, K], got shape [2, 8, 1]"),
        (dict(gk=f32(2, 8, 1, 5)), ValueError, "gk must have shape [B, T, H, K] = [2, 8, 1, 4], got [2, 8, 1, 5]"),
        (dict(gk=bf16(2, 8, 1, 4)), TypeError, "gk must be float32, got bfloat16"),
    ],
}

BACKWARD = [
    (dict(do=None), TypeError, "do must be an array [B, T, H, V], got NoneType"),
    (dict(do=bf16(2, 8, 1, 5)), TypeError, "do must have q's dtype float32, got bfloat16"),
    (dict(do=f32(2, 8, 1, 4)), ValueError, "do must have shape [B, T, H, V] = [2, 8, 1, 5], got [2, 8, 1, 4]"),
    (dict(dht=bf16(2, 1, 4, 5)), TypeError, "dht must be float32, got bfloat16"),
    (dict(dht=f32(3, 1, 4, 5)), ValueError, "dht must have shape [N, H, K, V] = [2, 1, 4, 5], got [3, 1, 4, 5]"),
]  # fmt: skip

CHUNKED = [
    (dict(chunk_size=64.0), TypeError, "chunk_size must be an int, got float"),
    (dict(chunk_size=None), TypeError, "chunk_size must be an int, got NoneType"),
    (dict(chunk_size=0), ValueError, "chunk_size must be a positive multiple of 16, at most 256, got 0"),
    (dict(chunk_size=-16), ValueError, "chunk_size must be a positive multiple of 16, at most 256, got -16"),
    (dict(chunk_size=24), ValueError, "chunk_size must be a positive multiple of 16, at most 256, got 24"),
    (dict(chunk_size=512), ValueError, "chunk_size must be a positive multiple of 16, at most 256, got 512"),
]

DOTS = [
    (dict(precision="tf32"), ValueError, "precision must be 'ieee' or 'bf16x3', got 'tf32'"),
    (dict(precision="bf16x3", **NARROW), ValueError,
     "precision must be 'ieee' for bfloat16 operands, got 'bf16x3'"),
]  # fmt: skip

ROUTED = [(dict(fused="yes"), TypeError, "fused must be True, False or None, got str")]


def refusals(package, module, form, passes):
    """What a function refuses: the arguments that are good, the one that is not, and the exception."""
    backward, chunked = passes == "_bwd", "chunk" in form
    good = TENSORS | GATES[module] | (GRADS if backward else {})
    packed = PACKED_TENSORS | PACKED_GATES[module] | (PACKED_GRADS if backward else {})
    kernel = package != "cpu_golden"
    lists = [(good, ANY + OF_GATES[module]), (packed, PACKED), (good, BACKWARD * backward), (good, CHUNKED * chunked)]
    lists += [(good, DOTS * (kernel and chunked)), (good, ROUTED * (kernel and form == "chunk"))]
    for arguments, bad in lists:
        for change, error, message in bad:
            yield {**arguments, **{x: y for x, y in change.items() if backward or x not in GRADS}}, error, message


FUNCTION = pytest.mark.parametrize(
    ("package", "module", "form", "passes"), FUNCTIONS, ids=[f"{p}-{f}_{m}{s}" for p, m, f, s in FUNCTIONS]
)


@pytest.mark.parametrize(
    ("package", "module", "form", "passes"),
    [
        pytest.param(*names, id=f"{names[0]}-{names[2]}_{names[1]}{names[3]}", marks=[pytest.mark.full] * compiled)
        for names in FUNCTIONS
        for compiled in [names[0] == "tpu_kernels" and names[1:] != ("simple_gla", "chunk", "_fwd")]
    ],
)
def test_the_good_arguments_are_good(package, module, form, passes):
    arguments = PACKED_TENSORS | PACKED_GATES[module] | (PACKED_GRADS if passes == "_bwd" else {})
    result = call(package, f"{form}_{module}{passes}", arguments | dict(cu_seqlens=i32(0, 3, 3, 8)))
    assert result[0].shape == (1, 8, 1, 4 if passes == "_bwd" else 5)


@FUNCTION
def test_bad_arguments_are_refused_in_the_same_words(package, module, form, passes):
    for arguments, error, message in refusals(package, module, form, passes):
        check_refused(package, f"{form}_{module}{passes}", arguments, error, message)


@FUNCTION
def test_a_misspelt_option_is_refused_by_its_name(package, module, form, passes):
    arguments = TENSORS | GATES[module] | (GRADS if passes == "_bwd" else {})
    with pytest.raises(TypeError, match=r"^\w+\(\) got an unexpected keyword argument 'initial_sate'"):
        call(package, f"{form}_{module}{passes}", arguments | {"initial_sate": None})


def test_a_route_that_cannot_be_taken_is_refused_with_the_reason():
    assert check_fused(None, None)
    assert check_fused(True, None)
    assert not check_fused(False, None)
    assert not check_fused(None, "the state does not fit")
    with pytest.raises(ValueError, match=r"^fused must be False or None where the state does not fit, got True$"):
        check_fused(True, "the state does not fit")


def checked(change, exact, backward=False):
    arguments = TENSORS | (GRADS if backward else {}) | change
    gradients = {name: arguments.pop(name) for name in GRADS if name in arguments}
    scale = arguments.pop("scale", None)
    gates = {name: arguments.pop(name) for name in ("g", "g_gamma", "gk") if name in arguments}
    p = check_forward(**arguments, gates=gates, scale=scale, cu_seqlens=None, offsets=None, **exact)
    if backward:
        check_gradients(p, **gradients, **exact)
    return p


@pytest.mark.parametrize("backward", [False, True])
def test_float64_is_let_through_only_where_the_goldens_ask_for_it(backward):
    given = TENSORS | (GRADS if backward else {})
    together = {name: x.astype(np.float64) for name, x in given.items() if name in NARROW}
    alone = dict(g=f32(2, 8, 1), g_gamma=f32(1), gk=f32(2, 8, 1, 4), initial_state=given["initial_state"])
    alone |= {name: x for name, x in given.items() if name == "dht"}
    for change in (together, *({name: x.astype(np.float64)} for name, x in alone.items())):
        checked(change, dict(exact=True), backward)
        for kernels in ({}, dict(exact=False)):
            with pytest.raises(TypeError, match=r"must be float32( or bfloat16)?, got float64"):
                checked(change, kernels, backward)


def test_a_scale_is_a_float_and_by_default_one_over_the_root_of_the_keys():
    for size, scale in ((1, 1.0), (4, 0.5), (16, 0.25), (0, 1.0)):
        change = dict(q=f32(2, 8, 1, size), k=f32(2, 8, 1, size), initial_state=None)
        assert checked(change, {}).scale == scale
    for scale in (2, 0.125, -1.0):
        found = checked(dict(scale=scale), {}).scale
        assert found == scale and type(found) is float


def test_what_is_just_good_enough_is_good():
    for chunk_size in range(16, 257, 16):
        check_chunk_size(chunk_size)
    for precision, dtype in (("ieee", "float32"), ("ieee", "bfloat16"), ("bf16x3", "float32")):
        check_precision(precision, dtype)


@pytest.mark.parametrize("module", FORMS)
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_values_are_not_checked_under_tracing_and_slack_is_not_read(module, form):
    jax = pytest.importorskip("jax")
    arguments = {name: x.copy() for name, x in (PACKED_TENSORS | PACKED_GATES[module]).items()}
    for name in set(arguments) - {"initial_state", "g_gamma"}:
        arguments[name][:, 7:] = np.nan
    traced = jax.jit(lambda sizes: call("tpu_kernels", f"{form}_{module}_fwd", arguments | dict(cu_seqlens=sizes)).o)
    o = np.asarray(traced(to_jax(i32(0, 3, 3, 7))))
    assert np.isfinite(o).all()
    assert not o[:, 7:].any()
    assert o[:, :7].all()
