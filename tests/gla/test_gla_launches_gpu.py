# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What the gated linear attentions launch on a GPU: how many programs, of which tiles, and the memory between kernels.

One program, state or copy too many does nothing that a result shows, and one too few need not either.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gla, simple_gla
from gpu_reference._lib.chunk_plan import is_fused
from gpu_reference._lib.launch import Launch
from op_arguments.gla import Problem
from tests.gla.test_gla_compile_gpu import BFLOAT16, FLOAT32, B, Call, H, T
from tests.support.interpreter import interpreted

UNFUSED, FUSED = (("fused", False),), (("fused", True),)
ROWS = B * T
STATE = (H, 128, 128)


def flat(arguments):
    """Those of a launch by name, the fields of structs among them."""
    fields = [flat(x._asdict()) if hasattr(x, "_asdict") else {name: x} for name, x in arguments.items()]
    return {name: x for each in fields for name, x in each.items()}


def segments(size):
    """Slots for segments of so many rows: a sequence's first is at its first row // size + its number."""
    return ROWS // size + B


# Of each kernel: its programs, its tile of K and of V, and what it fills that is not of an argument's shape. bfloat16
# has blocks of 32 rows without and 16 with a gate per channel, and of at most 64 x 64 where there are states alone.
LAUNCHES = [
    (
        Call("chunk", "fwd", "g", BFLOAT16, 64, UNFUSED),
        ("_states_kernel", B * H * 2 * 4, 64, 32, dict(states=(segments(64), *STATE))),
        ("_forward_kernel", segments(64) * H * 4, 128, 32, {}),
    ),
    (Call("chunk", "fwd", "g", BFLOAT16, 64, FUSED), ("_forward_kernel", B * H * 4, 128, 32, {})),
    (
        Call("chunk", "bwd", "g", BFLOAT16, 64, UNFUSED),
        ("_states_kernel", B * H * 2 * 8, 64, 16, dict(states=(segments(32), *STATE))),
        ("_states_kernel", B * H * 2 * 8, 64, 16, dict(states=(segments(32), *STATE))),
        ("_backward_kernel", segments(32) * H * 2, 64, 16, dict(dv=(2, B, T, H, 128), dgate=(2, B, T, H))),
    ),
    (
        Call("chunk", "bwd", "gk", FLOAT32, 64, FUSED),
        ("_states_kernel", B * H * 4 * 8, 32, 16, dict(states=(segments(16), *STATE))),
        ("_backward_kernel", B * H * 4, 32, 16, dict(dv=(4, B, T, H, 128), dgate=(B, T, H, 128), dstates=(B, *STATE))),
    ),
    (
        Call("chunk", "bwd", "gamma", BFLOAT16, 64, FUSED, keys=20, values=20),
        ("_states_kernel", B * H * 2, 32, 16, dict(states=(segments(32), H, 20, 20))),
        ("_backward_kernel", B * H, 32, 16, dict(dv=(1, B, T, H, 20), dgate=(1, B, T, H))),
    ),
    (Call("fused_recurrent", "fwd", "g", FLOAT32), ("_forward_kernel", B * H * 4, 128, 32, {})),
    (
        Call("fused_recurrent", "bwd", "both", BFLOAT16),
        ("_dq_kernel", B * H * 4, 32, 128, dict(states=(segments(64), *STATE))),
        (
            *("_dk_dv_kernel", B * H * 4, 32, 128),
            dict(block=(B * 64, *STATE), dv=(4, B, T, H, 128), dgate=(4, B, T, H)),
        ),
    ),
    (
        Call("fused_recurrent", "bwd", "none", BFLOAT16, keys=100, values=16),
        ("_dq_kernel", B * H, 128, 16, dict(states=None)),
        ("_dk_dv_kernel", B * H, 128, 16, dict(block=None, dv=(1, B, T, H, 16), dgate=None)),
    ),
    # States beyond a program's 4096 elements: a tile has one value, or the four keys that are summed at a time.
    (Call("fused_recurrent", "fwd", "g", FLOAT32, keys=8192), ("_forward_kernel", B * H * 128, 8192, 1, {})),
    (
        Call("fused_recurrent", "bwd", "gk", FLOAT32, values=2048),
        ("_dq_kernel", B * H * 32, 4, 2048, dict(states=(segments(64), H, 128, 2048))),
        ("_dk_dv_kernel", B * H * 32, 4, 2048, dict(dv=(32, B, T, H, 2048), dgate=(B, T, H, 128))),
    ),
]


@pytest.mark.parametrize(("call", "expected"), [pytest.param(c, e, id=c.name) for c, *e in LAUNCHES])
def test_there_is_a_program_for_every_tile_and_memory_for_what_it_leaves(call, expected):
    for launch, (name, programs, keys, values, filled) in zip(call.launches(), expected, strict=True):
        assert launch.kernel.fn.__name__ == name
        assert launch.grid == (programs,)
        assert (launch.arguments["BK"], launch.arguments["BV"]) == (keys, values)
        given = flat(launch.arguments)
        shapes = {x: getattr(given[x], "shape", None) for x in filled}
        assert shapes == filled


def test_what_is_summed_over_tiles_of_keys_is_float32_until_it_is_summed():
    for call, *_ in LAUNCHES:
        if call.direction == "bwd":
            *_, last = call.launches()
            dv = flat(last.arguments)["dv"]
            tiles = dv.shape[0]
            assert dv.dtype == (call.dtype if tiles == 1 else FLOAT32)


def test_kernels_are_launched_with_multiply_adds_and_without_stages_that_nothing_fills():
    """The arithmetic is that of FMAs; a pipeline would hold the next rows in the registers that are short."""
    for call, *_ in LAUNCHES:
        for launch in call.launches():
            assert launch.options["enable_fp_fusion"] is True
            assert launch.options["num_warps"] in ((4,) if call.chunk is None else (4, 8))
            assert launch.options.get("num_stages", 1) == 1


@pytest.mark.parametrize(("backward", "programs"), [(False, 128), (True, 64)])
def test_a_pass_takes_the_route_of_the_gpu_that_it_runs_on(backward, programs, monkeypatch):
    """2 sequences of 16 heads, with 4 tiles of V forward and 2 of K backward; and no route but the one asked for."""
    p = Problem(b=2, t=4096, h=16, k=128, v=128, n=2, scale=1.0, dtype="bfloat16")
    direction = dict(backward=True) if backward else {}
    for processors, fused in ((programs, True), (programs + 1, False)):
        properties = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        for asked in (None, True, False):
            found = is_fused(p, 64, asked, torch.device("cuda"), per_channel=False, **direction)
            assert found is (fused if asked is None else asked)


def test_the_interpreter_has_one_processor_which_a_program_keeps_busy():
    p = Problem(b=1, t=100, h=1, k=16, v=16, n=1, scale=1.0, dtype="float32")
    assert is_fused(p, 64, None, torch.device("cpu"), per_channel=False)


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("empty", ["B", "T", "H", "K", "V"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_nothing_is_launched_where_there_is_nothing(per_channel, empty, monkeypatch):
    """States are then as they were, gradients and results zero."""
    monkeypatch.setattr(Launch, "run", None)
    b, t, h, k, v = (0 if axis == empty else 2 for axis in "BTHKV")
    q, values, state = torch.ones(b, t, h, k), torch.ones(b, t, h, v), torch.ones(b, h, k, v)
    module, gate = (gla, dict(gk=q)) if per_channel else (simple_gla, dict(g=torch.ones(b, t, h)))
    name = module.__name__.rpartition(".")[2]
    arguments = dict(**gate, initial_state=state, scale=1.0, chunk_size=16)
    o, ht = getattr(module, f"chunk_{name}_fwd")(q, q, values, output_final_state=True, **arguments)
    assert torch.equal(ht, state) and torch.equal(o, torch.zeros_like(values))
    assert torch.equal(getattr(module, f"chunk_{name}_fwd")(q, q, values, **arguments).o, o)
    grads = getattr(module, f"chunk_{name}_bwd")(q, q, values, values, dht=3 * state, **arguments)
    assert torch.equal(grads.dh0, 3 * state)
    of_gate = grads.dgk if per_channel else grads.dg
    for gradient, argument in zip((*grads[:3], of_gate), (q, q, values, *gate.values()), strict=True):
        assert torch.equal(gradient, torch.zeros_like(argument))
