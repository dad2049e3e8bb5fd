"""The scan behind the chunked forms on the TPU: in several blocks, what it fetches, keeps and multiplies, and when."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax.experimental import pallas as pl  # noqa: E402

from cpu_golden._lib.chunks import gate_sums  # noqa: E402
from cpu_golden.stages import Stages  # noqa: E402
from op_arguments.gla import Problem  # noqa: E402
from parity.compilers.kernels import equations  # noqa: E402
from parity.judging.judge import judge  # noqa: E402
from parity.trial import Trial  # noqa: E402
from tests.matrix.gla import BF16, CHUNK_GLA, CHUNK_SIMPLE_GLA, F32  # noqa: E402
from tpu_kernels import chunk_scan, simple_gla  # noqa: E402
from tpu_kernels._lib import chunk_dots, chunk_plan  # noqa: E402
from tpu_kernels._lib.chunk_decays import ChannelDecay  # noqa: E402
from tpu_kernels._lib.decays import finite_exp  # noqa: E402
from tpu_kernels._lib.step_numbers import StepNumbers  # noqa: E402

pytestmark = pytest.mark.tpu

ROWS = dict(B=2, T=70, H=2, K=16, V=24)
PACKED = dict(B=1, T=70, H=2, K=16, V=24, N=5)
# the op, its gates, the shape, and by which route
SMALL = [
    (CHUNK_SIMPLE_GLA[0], dict(gates=["both"]), PACKED, "fused"),
    pytest.param(CHUNK_SIMPLE_GLA[0], dict(gates=["gamma"]), PACKED, "unfused", marks=pytest.mark.full),
    pytest.param(CHUNK_SIMPLE_GLA[1], dict(gates=["both"]), ROWS, "fused", marks=pytest.mark.full),
    pytest.param(CHUNK_SIMPLE_GLA[1], dict(gates=["gamma"]), ROWS, "unfused", marks=pytest.mark.full),
    (CHUNK_GLA[1], {}, ROWS, "fused"),
]


@pytest.mark.parametrize(("op", "gates", "shape", "route"), SMALL)
def test_several_blocks_of_steps_and_heads_agree_with_golden(op, gates, shape, route, monkeypatch):
    """Of 32 steps and one head here: usual ones have 512 and 8, and no case of the default tier has two."""
    monkeypatch.setattr(chunk_plan, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(chunk_plan, "HEADS", 1)
    (case,) = op.grid([shape], dtype=[F32], h0=[True], ht=[True], chunk=[16], route=[route], **gates)
    judged = judge(Trial(op, case, "tpu"))
    assert judged.verdict.passed, judged.verdict


@pytest.mark.parametrize("chunk", [8, 64])
def test_gates_of_channels_are_summed_by_halves_as_the_golden_sums_them(chunk):
    """In float32, bit for bit: until each step, after it, and on both sides of each border of two halves."""
    gk = -np.random.default_rng(0).exponential(size=(2, chunk, 16)).astype(F32)

    def sums(gk, *outs):
        decay, shown = ChannelDecay(gk[...], SimpleNamespace(split=True, precise=False)), []
        decay.probe_sums(lambda site, value, *_, **where: shown.append(value))
        for out, value in zip(outs, (*shown, *(part for (part,) in decay.halves)), strict=True):
            out[...] = value

    in_float32 = Stages(lambda site, x: x.astype(F32).astype(np.float64) if site == "c" else x, sub_block=1)
    golden = gate_sums(gk.astype(np.float64), in_float32)
    wanted = [golden.until, golden.after, *map(finite_exp, map(jax.numpy.float32, golden.by_half.values()))]
    out = [jax.ShapeDtypeStruct(gk.shape, F32)] * len(wanted)
    for found, value in zip(pl.pallas_call(sums, out, interpret=True)(gk), wanted, strict=True):
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(("chunk", "is_spread"), [(16, True), (64, True), (64, False), (256, False)])
def test_numbers_of_steps_are_rows_and_columns_bit_for_bit(chunk, is_spread):
    """Of a chunk, whatever the others have."""
    rng = np.random.default_rng(0)
    numbers = np.exp2(rng.uniform(-40, 0, (2, 2, 3, chunk))).astype(F32)
    numbers[:, :, 2] = np.nan
    problem = Problem(b=1, t=3 * chunk, h=2, k=160, v=16, n=1, scale=1.0, dtype=BF16)
    scan = chunk_plan.plan({"g": 0}, problem, chunk_size=chunk, backward=True, fused=True)
    scan = scan._replace(heads=2, chunks=3, split=True, spread=is_spread)

    def both(first, second, rows, columns, spread, ref):
        StepNumbers.keep(ref, first[...], second[...], scan)
        found = StepNumbers(ref, 1, scan)
        for n in (0, 1):
            rows[n], columns[n] = found.rows[n], found.column(n)
            spread[n] = found.spread(n, 160) if is_spread else jax.numpy.broadcast_to(columns[n], spread[n].shape)

    shapes = [(2, 2, 1, chunk), (2, 2, chunk, 1), (2, 2, chunk, 160)]
    out = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    call = pl.pallas_call(both, out, scratch_shapes=[StepNumbers.scratch(scan)], interpret=True)
    rows, columns, spread = call(*numbers)
    np.testing.assert_array_equal(rows[:, :, 0], numbers[:, :, 1])
    np.testing.assert_array_equal(columns[..., 0], numbers[:, :, 1])
    np.testing.assert_array_equal(spread, np.broadcast_to(columns, spread.shape))


@pytest.mark.parametrize("chunk", [1, 2])
def test_of_two_chunks_at_once_neither_gets_the_others_nan(chunk):
    """The second and the first of a pair, of 16 steps. NaN in v is in dk of its step, in dq and dg from there on."""
    rng = np.random.default_rng(0)
    q, k, v, do = (jax.numpy.asarray(rng.standard_normal((1, 64, 2, 32)), BF16) for _ in range(4))
    g = jax.numpy.asarray(-rng.exponential(0.1, (1, 64, 2)), F32)
    start, end = 16 * chunk, 16 * chunk + 16
    v = v.at[0, start + 7, 0, 3].set(np.nan)
    options = dict(g=g, initial_state=np.zeros((1, 2, 32, 32), F32), chunk_size=16, interpret=True)
    grads = simple_gla.chunk_simple_gla_bwd(q, k, v, do, **options)
    finite = {name: np.isfinite(np.asarray(x, F32)) for name, x in grads._asdict().items() if x is not None}
    assert finite["dv"].all() and finite["dh0"].all()
    assert all(x[0, :, 1].all() for name, x in finite.items() if name != "dh0")
    assert finite["dk"][0, :start].all() and finite["dk"][0, end:].all() and not finite["dk"][0, start + 7, 0].all()
    assert all(finite[name][0, :start].all() and not finite[name][0, end, 0].all() for name in ("dq", "dg"))


B, H, D = 2, 16, 128
GATES: dict[str, dict[str, tuple[int, ...]]] = {
    "constant": {"g_gamma": (H,)},
    "step": {"g": (B, 1, H), "g_gamma": (H,)},
    "channel": {"gk": (B, 1, H, D)},
}
"""Of each kind of gate the shapes, with one step."""


def planned(gate: str, *, backward: bool, fused: bool, t: int) -> Any:
    p = Problem(b=B, t=t, h=H, k=D, v=D, n=B, scale=1.0, dtype=F32)
    gates = dict.fromkeys(("gk",) if gate == "channel" else ("g", "g_gamma")) | GATES[gate]
    return chunk_plan.plan(gates, p, chunk_size=64, backward=backward, fused=fused)


def traced(gate: str, *, backward: bool, fused: bool, t: int, interpret: bool = False) -> list[Any]:
    """The parameters of every kernel of a pass, as a TPU compiles them."""
    rows = dict.fromkeys(("q", "k", "v", "do") if backward else ("q", "k", "v"), (B, t, H, D))
    states = dict.fromkeys(("initial_state", "dht") if backward else ("initial_state",), (B, H, D, D))
    of_steps = {name: (B, t, *shape[2:]) if len(shape) > 1 else shape for name, shape in GATES[gate].items()}
    options: dict[str, Any] = dict(fused=fused, interpret=interpret) | (
        {} if backward else {"output_final_state": True}
    )

    def scan(arguments: Any, gates: Any) -> Any:
        gates = gates if gate == "channel" else {"g": None} | gates
        return (chunk_scan.chunk_bwd if backward else chunk_scan.chunk_fwd)(**arguments, gates=gates, **options)

    arguments, gates = (
        {n: jax.ShapeDtypeStruct(s, F32) for n, s in shapes.items()} for shapes in (rows | states, of_steps)
    )
    return [call.params for call, _ in equations(jax.make_jaxpr(scan)(arguments, gates).jaxpr, "pallas_call")]


def indices(block: Any, grid: tuple[int, ...]) -> Any:
    """The index of an operand's block in each grid step."""
    steps = np.indices(grid).reshape(len(grid), -1)
    index_map = block.index_map_jaxpr
    at = jax.vmap(lambda *step: jax.core.eval_jaxpr(index_map.jaxpr, index_map.consts, *step))(*steps)
    return np.stack(at, axis=1)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_every_block_is_fetched_once_or_again_on_the_way_back(gate, fused, backward):
    """Where its index changes. The one kernel of the backward pass walks there, for the states, and back: what they are
    made of is fetched for both ways, but for the block where it turns, and all else waits at that one."""
    plan = planned(gate, backward=backward, fused=fused, t=2200)
    assert plan.blocks > 2
    once, twice = (B * H // plan.heads * visits for visits in (plan.blocks, 2 * plan.blocks - 1))
    early = {"k", "v"} | (set() if gate == "constant" else set(GATES[gate]))
    for call in traced(gate, backward=backward, fused=fused, t=2200):
        mapping, both_ways = call["grid_mapping"], call["name"] == "chunk_bwd"
        assert mapping.grid == (B, H // plan.heads, 2 * plan.blocks - 1 if both_ways else plan.blocks)
        for block in mapping.block_mappings:
            sizes = [getattr(size, "block_size", 1) for size in block.block_shape]
            counts = [-(-length // size) for length, size in zip(block.array_aval.shape, sizes, strict=True)]
            at = indices(block, mapping.grid)
            assert {tuple(map(int, index)) for index in at} == set(np.ndindex(*counts))
            fetched = 1 + int((np.diff(at, axis=0) != 0).any(axis=1).sum())
            if len(counts) > 1 and fetched > 1:  # states of sequences and gates of heads have no blocks
                name = str(block.origin).split("'")[1]
                assert fetched == (twice if both_ways and name in early else once), name


@pytest.mark.parametrize(("t", "chunks", "blocks", "unroll"), [(1100, 8, 3, 4), (384, 6, 1, 2), (192, 3, 1, 1)])
def test_what_the_backward_pass_keeps_and_unrolls(t, chunks, blocks, unroll):
    """The state at the start of each block but the last, of each chunk of a block, and after it; and the gradient of
    one. As many chunks in a turn of the loop there as divide a block's, up to four, but one where a CPU interprets."""
    (call,) = traced("channel", backward=True, fused=True, t=t)
    plan = planned("channel", backward=True, fused=True, t=t)
    assert (plan.chunks, plan.blocks) == (chunks, blocks)
    state = (plan.heads, D, D)
    checkpoints, dstate, states = (variable.aval.shape for variable in call["jaxpr"].invars[-3:])
    assert (dstate, states, checkpoints) == (state, (chunks + 1, *state), (max(blocks - 1, 1), *state))
    for interpret, turns in ((False, unroll), (True, 1)):
        (call,) = traced("channel", backward=True, fused=True, t=t, interpret=interpret)
        loops = [loop.params for loop, _ in equations(call["jaxpr"], "scan")]
        assert [(loop["length"], loop["unroll"]) for loop in loops] == [(chunks, turns), (chunks, 1)]


def test_a_kernel_may_have_most_of_the_vmem_of_every_chip_and_two_cores():
    """Of 64 MiB at least, an eighth is left; batch rows and heads are any core's, blocks along T follow each other."""
    for backward in (False, True):
        for call in traced("step", backward=backward, fused=False, t=64):
            compiled = call["compiler_params"]
            assert compiled.vmem_limit_bytes == 56 * 2**20
            assert tuple(compiled.dimension_semantics) == ("parallel", "parallel", "arbitrary")


# dtypes of both operands, whether in two pieces, the length of sums; of each dot its dtype and the length of its sums
DOTS = [
    (F32, F32, False, 64, [(BF16, 384)]),
    (F32, F32, False, 24, [(BF16, 24)] * 6),
    (BF16, F32, False, 64, [(BF16, 192)]),
    (BF16, BF16, True, 64, [(BF16, 64)]),
    (F32, BF16, True, 64, [(BF16, 128)]),
    (F32, F32, True, 64, [(BF16, 192)]),
    (F32, F32, True, 16, [(BF16, 48)]),
    (F32, F32, True, 24, [(BF16, 24)] * 3),
    (BF16, F32, True, 100, [(BF16, 100)] * 2),
]


@pytest.mark.parametrize(("a", "b", "split", "depth", "expected"), DOTS)
def test_a_dot_multiplies_pieces_in_one_where_they_fill_registers(a, b, split, depth, expected):
    """Of float32 two or three pieces of bfloat16, but not those below the last one's product: side by side along the
    sums where those are whole registers of 16 rows, else one after the other, the smallest first."""
    scan = planned("step", backward=False, fused=True, t=64)._replace(split=split)
    dot = partial(chunk_dots.dot, contract=(1, 0), scan=scan)
    shapes = jax.ShapeDtypeStruct((2, 8, depth), a), jax.ShapeDtypeStruct((2, depth, 8), b)
    dots = [each for each, _ in equations(jax.make_jaxpr(dot)(*shapes).jaxpr, "dot_general")]
    assert [(each.invars[0].aval.dtype.name, each.invars[0].aval.shape[2]) for each in dots] == expected
    assert all(each.invars[0].aval.dtype == each.invars[1].aval.dtype for each in dots)
    assert all("HIGHEST" not in str(each.params["precision"]) for each in dots)


@pytest.mark.parametrize(("rows", "expected"), [(8, [(16, 256)]), (32, [(32, 384)])])
def test_pieces_of_a_turned_right_operand_are_loaded_once(rows, expected):
    """The rows of both pieces of the left one meet both, where they are no more than those that are loaded."""
    scan = planned("step", backward=False, fused=True, t=64)._replace(split=True)
    dot = partial(chunk_dots.dot, contract=(1, 1), scan=scan)
    shapes = jax.ShapeDtypeStruct((2, rows, 128), F32), jax.ShapeDtypeStruct((2, 16, 128), F32)
    dots = [each for each, _ in equations(jax.make_jaxpr(dot)(*shapes).jaxpr, "dot_general")]
    assert [each.invars[0].aval.shape[1:] for each in dots] == expected
    x, y = (np.random.default_rng(0).standard_normal(shape.shape).astype(F32) for shape in shapes)
    error = np.abs(dot(jax.numpy.asarray(x), jax.numpy.asarray(y)) - x.astype(float) @ y.swapaxes(1, 2))
    # Two pieces leave out 2^-18 of each operand, and the product of both low ones is 2^-18 of the whole at most.
    assert (error <= 2**-16 * (np.abs(x) @ np.abs(y).swapaxes(1, 2))).all()


def test_ones_are_multiplied_as_they_are():
    ones = chunk_dots.ones(np.array([[True, False]]))
    assert ones.dtype == BF16
    assert ones.tolist() == [[1, 0]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pieces_have_eight_bits_each(count):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    pieces = chunk_dots.bf16_split(jax.numpy.asarray(x), count)
    assert [piece.dtype for piece in pieces] == [BF16] * count
    left = np.abs(x - sum(np.asarray(piece, np.float64) for piece in pieces)) / np.abs(x)
    assert left.max() <= (0 if count == 3 else 2.0 ** (-8 * count))


def test_a_group_of_heads_is_finished_after_the_scores_of_the_next(monkeypatch):
    """So that the matrix unit has work while a group waits for its scores."""
    done: list[tuple[str, int]] = []
    heads: dict[int, int] = {}

    def noted(name: str, of: Any, block_at: int) -> Any:
        def run(*arguments: Any) -> Any:
            done.append((name, heads.setdefault(id(arguments[block_at].refs), len(heads))))
            return of(*arguments)

        return run

    for name, block_at in (("_scores", 0), ("_output", 1)):
        monkeypatch.setattr(chunk_scan, name, noted(name, getattr(chunk_scan, name), block_at))
    rows = jax.ShapeDtypeStruct((2, 100, 16, 32), BF16)
    gates = {"g": None, "g_gamma": jax.ShapeDtypeStruct((16,), F32)}
    jax.eval_shape(
        lambda q, gamma: chunk_scan.chunk_fwd(q, q, q, gates={"g": None, "g_gamma": gamma}, chunk_size=64),
        rows,
        gates["g_gamma"],
    )
    assert done == [
        ("_scores", 0),
        ("_scores", 1),
        ("_output", 0),
        ("_scores", 2),
        ("_output", 1),
        ("_scores", 3),
        ("_output", 2),
        ("_output", 3),
    ]


@pytest.mark.parametrize("sequences", [None, 3])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_where_there_is_nothing_to_multiply_states_go_through(given, backward, sequences):
    """Given ones as they are, and else zero ones, of each sequence."""
    n = sequences or 1
    rows = np.zeros((1, 0, 2, 4), np.float32)
    passed = np.random.default_rng(0).standard_normal((n, 2, 4, 4)).astype(np.float32)
    gates = {"g": rows[..., 0], "g_gamma": None}
    packed = {"cu_seqlens": None if sequences is None else np.zeros(n + 1, np.int32)}
    arguments = {name: jax.numpy.asarray(x) if x is not None else None for name, x in (gates | packed).items()}
    gates = {name: arguments[name] for name in gates}
    q = jax.numpy.asarray(rows)
    if backward:
        states = dict(initial_state=passed, dht=passed if given else None)
        grads = chunk_scan.chunk_bwd(q, q, q, q, gates=gates, cu_seqlens=arguments["cu_seqlens"], **states)
        assert grads.dgates["g_gamma"] is None
        assert grads.dgates["g"].shape == (1, 0, 2)
        out, state = grads.dv, grads.dh0
        without = chunk_scan.chunk_bwd(q, q, q, q, gates=gates, cu_seqlens=arguments["cu_seqlens"])
        assert without.dh0 is None
    else:
        states = dict(initial_state=passed if given else None, output_final_state=True)
        out, state = chunk_scan.chunk_fwd(q, q, q, gates=gates, cu_seqlens=arguments["cu_seqlens"], **states)
        assert chunk_scan.chunk_fwd(q, q, q, gates=gates, cu_seqlens=arguments["cu_seqlens"])[1] is None
    assert out.shape == rows.shape
    assert state.dtype == F32
    assert np.array_equal(state, passed if given else np.zeros_like(passed))


@pytest.mark.parametrize("name", ["_fwd", "_bwd", ""])
def test_what_is_said_to_be_one_kernel_is_refused_where_it_cannot_be(name):
    """A state of 256 MiB."""
    rows = jax.ShapeDtypeStruct((1, 64, 1, 8192), F32)
    function = getattr(simple_gla, f"fused_chunk_simple_gla{name}")
    with pytest.raises(ValueError, match=r"^fused must be False or None where the .* MiB of VMEM"):
        jax.eval_shape(function, *[rows] * (4 if name == "_bwd" else 3))
