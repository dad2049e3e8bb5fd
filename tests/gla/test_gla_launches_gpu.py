# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What holds for every launch of the gated linear attentions on a GPU: programs, and the memory between kernels.

One program, state or copy too many does nothing that a result shows, and one too few need not either.
"""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gla, simple_gla
from parity.compilers.launches import PROCESSORS, intercepted
from tests.support import calls
from tests.support.interpreter import interpreted

B, T, H = 2, 4096, 16
SHAPES = [(128, 128), (20, 20), (100, 16), (8192, 16), (128, 2048)]


def flat(arguments):
    """Those of a launch by name, the fields of structs among them."""
    fields = [flat(x._asdict()) if hasattr(x, "_asdict") else {name: x} for name, x in arguments.items()]
    return {name: x for each in fields for name, x in each.items()}


def launched(form, direction, gates, dtype="bfloat16", k=128, v=128, *, batch=B, steps=T, target="sm_90", **options):
    """The launches of a pass, in chunks of 64 where it has chunks."""
    options |= {"chunk": 64} if form == "chunk" else {}
    sizes = dict(B=batch, T=steps, H=H, K=k, V=v)
    return calls.launched(
        *calls.scan(form, direction, gates, dtype, **sizes, h0=True, ht=direction == "bwd", **options), target
    )


def tiles(launch, k, v):
    """Tiles of K and of V of a launch."""
    return -(-k // launch.constants["BK"]), -(-v // launch.constants["BV"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gate", ["g", "gamma", "gk"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_segment_head_and_tile_has_a_program_and_a_state(direction, gate, dtype):
    """A sequence's first state is at its first row // segment + its number: a slot more for each sequence."""
    for k, v in SHAPES[:3]:
        *before, last = launched("chunk", direction, gate, dtype, k, v, route="unfused")
        segment = last.constants["SEGMENT"]
        slots = B * T // segment + B
        axis = tiles(last, k, v)[0 if direction == "bwd" else 1]
        assert last.grid == (slots * H * axis,)
        assert len(before) == (2 if direction == "bwd" else 1)
        for states in before:
            of_keys, of_values = tiles(states, k, v)
            assert states.grid == (B * H * of_keys * of_values,)
            assert flat(states.arguments)["states"].shape == (slots, H, k, v)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "bf16x3")])
@pytest.mark.parametrize("gate", ["g", "gk"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("k", [20, 100, 128, 256])
def test_contracts_have_the_blocks_that_are_launched(direction, gate, dtype, precision, k):
    """What a tile of K sums by itself is rounded by itself: scores that cancel over K leave an error of their parts."""
    for chunk in (16, 64, 128):
        sizes = dict(B=B, T=T, H=H, K=k, V=32)
        op, case = calls.scan("chunk", direction, gate, dtype, **sizes, chunk=chunk, precision=precision)
        tile = calls.launched(op, case, "sm_90")[-1].constants
        promised = op.contract(case, "gpu").schedule
        assert promised["chunk_size"] == tile["ROWS"]
        assert min(promised.get("channels", k), k) == min(tile["BK"], k)


@pytest.mark.parametrize("gate", ["g", "gk"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("form", "k", "v"),
    [*(("chunk", *shape) for shape in SHAPES[:3]), *(("fused_recurrent", *shape) for shape in SHAPES)],
)
def test_every_sequence_head_and_tile_has_a_program_where_a_pass_is_one_kernel(form, direction, gate, k, v):
    options = {"route": "fused"} if form == "chunk" else {}
    last = launched(form, direction, gate, "float32", k, v, **options)[-1]
    of_keys, of_values = tiles(last, k, v)
    assert last.constants["BK"].bit_count() == last.constants["BV"].bit_count() == 1  # of a range in Triton
    assert last.grid == (B * H * (of_keys if direction == "bwd" and form == "chunk" else of_keys * of_values),)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("k", "v"), SHAPES[:3])
def test_what_is_summed_over_tiles_is_float32_until_it_is_summed(form, dtype, k, v):
    last = launched(form, "bwd", "g", dtype, k, v)[-1]
    dv = flat(last.arguments)["dv"]
    parts = tiles(last, k, v)[0]
    assert dv.shape[0] == parts
    assert dv.dtype == (getattr(torch, dtype) if parts == 1 else torch.float32)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_kernels_have_multiply_adds_and_no_stages_that_nothing_fills(form, direction):
    """The arithmetic is that of FMAs; a pipeline would hold the next rows in the registers that are short."""
    for launch in launched(form, direction, "g"):
        assert launch.options["enable_fp_fusion"] is True
        assert launch.options["num_warps"] in ((4, 8) if form == "chunk" else (4,))
        assert launch.options.get("num_stages", 1) == 1


@pytest.mark.parametrize("gate", ["g", "gk"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("target", PROCESSORS)
def test_a_pass_takes_the_route_of_the_gpu_that_it_runs_on(target, direction, gate):
    """One kernel where it has a program for every processor, or no sequence is longer than a chunk; or as asked for."""
    lone = 1 + (direction == "bwd")
    for batch in (1, 2, 4, 16):
        (programs,) = launched("chunk", direction, gate, batch=batch, route="fused")[-1].grid
        found = launched("chunk", direction, gate, batch=batch, target=target)
        assert (len(found) == lone) == (programs >= PROCESSORS[target])
    assert len(launched("chunk", direction, gate, batch=1, steps=64, target=target)) == lone
    assert len(launched("chunk", direction, gate, batch=16, route="unfused", target=target)) == lone + 1


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("empty", ["B", "T", "H", "K", "V"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_nothing_is_launched_where_there_is_nothing(per_channel, empty):
    """States are then as they were, gradients and results zero."""
    b, t, h, k, v = (0 if axis == empty else 2 for axis in "BTHKV")
    q, values, state = torch.ones(b, t, h, k), torch.ones(b, t, h, v), torch.ones(b, h, k, v)
    module, gate = (gla, dict(gk=q)) if per_channel else (simple_gla, dict(g=torch.ones(b, t, h)))
    name = module.__name__.rpartition(".")[2]
    forward, backward = (getattr(module, f"chunk_{name}_{way}") for way in ("fwd", "bwd"))
    arguments = dict(**gate, initial_state=state, scale=1.0, chunk_size=16)
    with intercepted(lambda launch, run: pytest.fail(f"launched {launch.name}")):
        o, ht = forward(q, q, values, output_final_state=True, **arguments)
        alone = forward(q, q, values, **arguments).o
        grads = backward(q, q, values, values, dht=3 * state, **arguments)
    assert torch.equal(ht, state) and torch.equal(o, torch.zeros_like(values)) and torch.equal(alone, o)
    assert torch.equal(grads.dh0, 3 * state)
    of_gate = grads.dgk if per_channel else grads.dg
    for gradient, argument in zip((*grads[:3], of_gate), (q, q, values, *gate.values()), strict=True):
        assert torch.equal(gradient, torch.zeros_like(argument))
