"""Laws that every kernel keeps: bit for bit, what a step's result may depend on; memory that it must not read; and
constant decays that must stay finite."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from parity.backends import load_kernel, runner
from parity.inputs import draw
from parity.judging.judge import judge
from parity.judging.reference import reference
from parity.op import Case, Gates, Inputs, Op, outputs
from parity.trial import Trial
from tests.matrix.gla import (
    BF16,
    CHUNK_GLA,
    CHUNK_SIMPLE_GLA,
    F32,
    FUSED_CHUNK_SIMPLE_GLA,
    FUSED_RECURRENT_GLA,
    FUSED_RECURRENT_SIMPLE_GLA,
    GATED_LINEAR_ATTENTION,
    is_backward,
    is_recurrent,
    make_alibi_g_gamma,
)

FRAMEWORK = {"tpu": "jax", "gpu": "triton"}
ROWS = ("q", "k", "v", "do", "g", "gk")
STATES = ("initial_state", "dht")
# K and V are no multiples of anything, and every packed case has the same shapes, so that it compiles once.
SIZES = dict(H=2, K=20, V=24)
WHOLE = 40  # steps: in chunks of 16 or 32 the last one is short
PACKED = (0, WHOLE, 1, 17, 0)
BORDER = 32
TOTAL = sum(PACKED)


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """The TPU's recurrences take so few rows at a time that a sequence is in several tiles, beside others."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("jax"):
            patch.setattr("tpu_kernels._lib.recurrent_layout.TILE", BORDER)
        yield


@dataclass(frozen=True)
class Kernel:
    """A kernel on a backend, in one of its ways, and inputs for it that pack `PACKED`."""

    op: Op
    backend: str
    case: Case
    inputs: Inputs = field(repr=False)

    def __call__(self, inputs: Inputs) -> dict[str, np.ndarray]:
        arguments = {**self.op.arguments(self.case), **self.op.route(self.case)}
        return outputs(runner(self.backend).run(load_kernel(getattr(self.op, self.backend)), inputs, arguments))

    def packed(self, lengths: tuple[int, ...] = PACKED) -> dict[str, Any]:
        """A copy of the inputs, cut into sequences of these lengths."""
        copy = {name: None if x is None else x.copy() for name, x in self.inputs.items()}
        return copy | {"cu_seqlens": offsets(lengths)}


def offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def params() -> list[Any]:
    """In the default tier both passes of each kind of kernel once, in float32, on one backend; the rest in full.

    Of the recurrent ones forward with a gate per channel and backward with one per step, which share their kernels.
    """
    both, gamma, plain = dict(gates=["both"]), dict(gates=["gamma"]), {}
    fused, unfused = dict(route=["fused"]), dict(route=["unfused"])
    table = [
        ("tpu", CHUNK_SIMPLE_GLA, dict(chunk=[16]), both | fused, [both | unfused, gamma | fused, gamma | unfused]),
        ("", FUSED_CHUNK_SIMPLE_GLA, dict(chunk=[16]), both, []),
        ("tpu", FUSED_RECURRENT_SIMPLE_GLA[1:], {}, both, [gamma, both | dict(reverse=[True])]),
        ("", FUSED_RECURRENT_SIMPLE_GLA[:1], {}, both, [gamma, both | dict(reverse=[True])]),
        ("gpu", CHUNK_GLA, dict(chunk=[32]), unfused, [fused]),
        ("gpu", FUSED_RECURRENT_GLA[:1], {}, plain, [dict(reverse=[True])]),
        ("", FUSED_RECURRENT_GLA[1:], {}, plain, [dict(reverse=[True])]),
    ]
    found = []
    for where, passes, common, usual, more in table:
        for options in [usual, *more]:
            for dtype in (F32, BF16):
                for op in passes:
                    shape = dict(B=1, T=TOTAL, **SIZES, N=len(PACKED)) | (dict(H=1) if op in CHUNK_GLA else {})
                    (case,) = op.grid([shape], dtype=[dtype], h0=[True], ht=[True], **common, **options)
                    for backend in FRAMEWORK:
                        is_default = (backend, dtype, options) == (where, F32, usual)
                        marks = [getattr(pytest.mark, backend)] + [pytest.mark.full] * (not is_default)
                        found.append(pytest.param((op, backend, case), id=f"{backend}-{case.id}", marks=marks))
    return found


@pytest.fixture(scope="module", params=params())
def kernel(request: pytest.FixtureRequest) -> Kernel:
    op, backend, case = request.param
    pytest.importorskip(FRAMEWORK[backend])
    return Kernel(op, backend, case, draw(op, case))


@pytest.fixture(scope="module")
def base(kernel: Kernel) -> dict[str, np.ndarray]:
    """The results for `PACKED`."""
    return kernel(kernel.packed())


@pytest.fixture(scope="module")
def alone(kernel: Kernel) -> dict[str, np.ndarray]:
    """The results for the sequence of `WHOLE` steps without the others."""
    return kernel(sequence(kernel, 1))


def sequence(kernel: Kernel, n: int) -> dict[str, Any]:
    """The inputs of the n-th sequence alone."""
    start, end = offsets(PACKED)[n : n + 2]
    cut = {name: slice_of(name, x, slice(start, end), n) for name, x in kernel.inputs.items()}
    return cut | {"cu_seqlens": None}


def slice_of(name: str, x: Any, rows: slice, n: int) -> Any:
    return x if x is None else x[:, rows] if name in ROWS else x[n : n + 1] if name in STATES else x


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], rows: Any, states: Any) -> None:
    """Bit for bit: `rows` (of got, of expected) of what has steps, `states` of what has sequences.

    The gradient of g_gamma sums over all of them.
    """
    assert got.keys() == expected.keys()
    for name in got.keys() - {"dg_gamma"}:
        here, there = states if name in ("ht", "dh0") else rows
        a, b = (np.ascontiguousarray(x) for x in (got[name][here], expected[name][there]))
        assert a.shape == b.shape
        assert a.size, name
        differ = a.view(np.uint8) != b.view(np.uint8)
        assert not differ.any(), f"{name}: {np.abs(a.astype(float) - b.astype(float)).max()}"


def steps(start: int, end: int) -> Any:
    return np.s_[:, start:end]


# Within the first chunk of 16; within a chunk of 16 and one of 32; at the second step of a chunk of either size.
@pytest.mark.parametrize("at", [pytest.param(5, marks=pytest.mark.full), 21, pytest.param(33, marks=pytest.mark.full)])
def test_a_step_does_not_see_later_ones(kernel, base, at):
    """Every token and gate from some step on is another (reversed: up to some step): o, and dq, stay before it."""
    reverse = is_recurrent(kernel.case) and kernel.case.reverse
    causal = "dq" if is_backward(kernel.case) else "o"
    later, kept = (steps(0, at), steps(at, WHOLE)) if reverse else (steps(at, WHOLE), steps(0, at))
    changed = kernel.packed()
    for name in ROWS:
        if changed.get(name) is not None:
            changed[name][later] = np.flip(changed[name][later], 1) * 3
    got = kernel(changed)[causal]
    assert np.array_equal(got[kept], base[causal][kept])
    assert not np.array_equal(got[later], base[causal][later])


def test_packed_is_as_alone(kernel, base, alone):
    assert_same(base, alone, (steps(0, WHOLE), steps(0, WHOLE)), (np.s_[1:2], np.s_[0:1]))


def test_place_and_neighbours_do_not_matter(kernel, base):
    """The same sequences in another order: one of 17 steps first."""
    order = (3, 1, 2, 0, 4)
    start = offsets(PACKED)
    rows = np.concatenate([np.arange(start[n], start[n + 1]) for n in order])
    moved = kernel.packed(tuple(PACKED[n] for n in order))
    for name in (*ROWS, *STATES):
        if moved.get(name) is not None:
            moved[name] = np.ascontiguousarray(moved[name][:, rows] if name in ROWS else moved[name][list(order)])
    assert_same(kernel(moved), base, (slice(None), np.s_[:, rows]), (slice(None), list(order)))


@pytest.mark.full  # the matrix has batches as well, and a program for one takes seconds to compile
def test_batch_rows_are_as_alone(kernel, alone):
    one = sequence(kernel, 1)
    other = {name: np.flip(x, 1) if name in ROWS and x is not None else x for name, x in one.items()}
    batch = {
        name: np.concatenate([other[name], x]) if name in (*ROWS, *STATES) and x is not None else x
        for name, x in one.items()
    }
    assert_same(kernel(batch), alone, (np.s_[1:2], np.s_[0:1]), (np.s_[1:2], np.s_[0:1]))


def test_split_at_a_border_is_as_in_one(kernel, alone):
    """A sequence in two parts: the state goes on from the first to the second, its gradient comes back.

    Both begin at a border of chunks, and where a recurrence rounds its state, every 16 steps.
    """
    reverse = is_recurrent(kernel.case) and kernel.case.reverse
    first, second = (1, 0) if reverse else (0, 1)  # in time
    lengths = (BORDER, WHOLE - BORDER)
    parts = kernel.packed((lengths[first], lengths[second], *PACKED[2:]))
    parts["initial_state"][first] = kernel.inputs["initial_state"][1]
    if is_backward(kernel.case):
        forward = next(op for op in GATED_LINEAR_ATTENTION if op.name == kernel.op.name.replace("_bwd", "_fwd"))
        given = {name: x for name, x in parts.items() if name not in ("do", "dht")}
        before = Kernel(forward, kernel.backend, replace(kernel.case, op=forward.name), given)(given)
        parts["dht"][second] = kernel.inputs["dht"][1]
        parts["initial_state"][second] = before["ht"][first]
        parts["dht"][first] = kernel(parts)["dh0"][second]
        got, state = kernel(parts), np.s_[first : first + 1]
    else:
        parts["initial_state"][second] = kernel(parts)["ht"][first]
        got, state = kernel(parts), np.s_[second : second + 1]
    assert_same(got, alone, (steps(0, WHOLE), steps(0, WHOLE)), (state, np.s_[0:1]))


def test_nothing_leaks_from_another_sequence(kernel, base):
    poisoned = kernel.packed()
    start, end = offsets(PACKED)[3:5]
    poison(poisoned, steps(start, end), np.s_[3:4])
    got = kernel(poisoned)
    assert_same(got, base, (steps(0, start), steps(0, start)), ([0, 1, 2, 4], [0, 1, 2, 4]))
    assert not np.isfinite(next(iter(got.values()))[:, start:end]).any()


def poison(inputs: dict[str, Any], rows: Any, states: Any) -> None:
    for name in (*ROWS, *STATES):
        if inputs.get(name) is not None:
            inputs[name][rows if name in ROWS else states] = np.nan


def test_nothing_leaks_from_rows_beyond_the_last_sequence(kernel, base, monkeypatch):
    """Where the values of cu_seqlens are not known, as under jit or on a CUDA device, such rows cannot be refused."""
    # the function that reads cu_seqlens where it is known
    values = {"tpu": "tpu_kernels._lib.scans.concrete_values", "gpu": "gpu_reference._lib.scans.values"}
    monkeypatch.setattr(values[kernel.backend], lambda cu_seqlens: None)
    slack = kernel.packed((*PACKED[:3], PACKED[3] - 6, PACKED[4]))
    poison(slack, steps(TOTAL - 6, TOTAL), np.s_[:0])
    got, start = kernel(slack), offsets(PACKED)[3]
    assert_same(got, base, (steps(0, start), steps(0, start)), ([0, 1, 2, 4], [0, 1, 2, 4]))
    for name, x in got.items():
        assert np.isfinite(x.astype(np.float32)).all(), name
        if name not in ("ht", "dh0", "dg_gamma"):
            assert not x[:, TOTAL - 6 :].astype(np.float32).any(), name


def test_empty_sequences_keep_their_states(kernel, base):
    """An empty sequence's final state is the one it starts from, and so are their gradients."""
    kept, given = ("dh0", "dht") if is_backward(kernel.case) else ("ht", "initial_state")
    for n in (0, 4):
        assert np.array_equal(base[kept][n], kernel.inputs[given][n])


@pytest.mark.tpu
@pytest.mark.parametrize(
    "shape", [pytest.param(dict(B=2, T=WHOLE, H=16), marks=pytest.mark.full), dict(B=1, T=TOTAL, H=32, N=len(PACKED))]
)
def test_heads_in_groups_are_as_heads_at_once(shape):
    """With a decay per head 16 heads of a grid step go forward in groups, 8 at once."""
    pytest.importorskip("jax")
    op = CHUNK_SIMPLE_GLA[0]
    (case,) = op.grid([shape | dict(K=20, V=24)], dtype=[BF16], gates=["gamma"], h0=[True], ht=[True], chunk=[32])
    kernel = Kernel(op, "tpu", case, draw(op, case))
    whole = kernel(kernel.inputs)
    for first in range(0, shape["H"], 8):
        heads = slice(first, first + 8)
        at = dict.fromkeys(("q", "k", "v"), np.s_[:, :, heads]) | {"g_gamma": heads, "initial_state": np.s_[:, heads]}
        got = kernel({name: x if x is None or name not in at else x[at[name]] for name, x in kernel.inputs.items()})
        assert_same(got, whole, (slice(None), np.s_[:, :, heads]), (slice(None), np.s_[:, heads]))


def surrounded(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel on copies of its tensors that lie in the middle of NaN."""
    import torch

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        buffer = torch.full((x.numel() + 2 * MARGIN,), float("nan"), dtype=x.dtype, device=x.device)
        middle = buffer[MARGIN : MARGIN + x.numel()].view(x.shape)
        return middle.copy_(x)

    return lambda **arguments: kernel(**{name: moved(x) for name, x in arguments.items()})


MARGIN = 4096  # elements: beyond any tile of these small tensors


def on_one(backend: str, usual: tuple[Op, ...]) -> list[Any]:
    """Every op on a backend; in the default tier those that are usual."""
    marks = [getattr(pytest.mark, backend)], [getattr(pytest.mark, backend), pytest.mark.full]
    return [pytest.param(op, id=op.name, marks=marks[op not in usual]) for op in GATED_LINEAR_ATTENTION]


def packed_case(op: Op) -> Case:
    shape = dict(B=1, T=TOTAL, **SIZES, N=len(PACKED))
    chunk = dict(chunk=[32]) if "chunk" in op.defaults else {}
    return op.grid([shape], dtype=[F32], h0=[True], ht=[True], **chunk)[0]


@pytest.mark.parametrize("op", on_one("gpu", (*CHUNK_SIMPLE_GLA, FUSED_RECURRENT_SIMPLE_GLA[0])))
def test_nothing_beyond_a_tensor_is_read(op):
    """A GPU's pointers: tensors in the middle of NaN."""
    pytest.importorskip("triton")
    case = packed_case(op)
    arguments, inputs = {**op.arguments(case), **op.route(case)}, draw(op, case)
    plain, between = (
        outputs(runner("gpu").run(kernel, inputs, arguments))
        for kernel in (load_kernel(op.gpu), surrounded(load_kernel(op.gpu)))
    )
    for name in plain:
        assert np.array_equal(plain[name], between[name]), name


@pytest.mark.parametrize("op", on_one("tpu", CHUNK_SIMPLE_GLA[:1]))
def test_strict_memory_is_never_read_before_it_is_written(op):
    """The TPU's memories simulated: what was not written is NaN, reads out of bounds are errors, races are found."""
    pytest.importorskip("jax")
    from jax.experimental.pallas import tpu as pltpu

    case = packed_case(op)
    strict = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    expected = reference(op, case)
    arguments = {**op.arguments(case), **op.route(case), "interpret": strict}
    for name, y in outputs(runner("tpu").run(load_kernel(op.tpu), expected.inputs, arguments)).items():
        error = np.abs(y - expected.golden[name])
        assert np.all(error <= 1e-5 * expected.magnitude[name]), name


ARGUMENT_OF = {"dh0": "initial_state"} | {f"d{name}": name for name in ("q", "k", "v", "g", "g_gamma", "gk")}


def differentiated(target: str) -> Callable[..., dict[str, Any]]:
    """The gradients by name, of the differentiable function of that name, as its own framework has them."""
    differentiable = load_kernel(target)

    def by_jax(do: Any, dht: Any, **arguments: Any) -> dict[str, Any]:
        import jax

        inner = {name: arguments.pop(name) for name in ARGUMENT_OF.values() if name in arguments}
        out, pull = jax.vjp(lambda x: tuple(differentiable(**x, **arguments, output_final_state=True)), inner)
        (grads,) = pull((do, dht))
        assert out[0].dtype == do.dtype
        return {d: grads[name] for d, name in ARGUMENT_OF.items() if name in grads}

    def by_torch(do: Any, dht: Any, **arguments: Any) -> dict[str, Any]:
        import torch

        inner = {name: arguments.pop(name).requires_grad_() for name in ARGUMENT_OF.values() if name in arguments}
        out = differentiable(**inner, **arguments, output_final_state=True)
        torch.autograd.backward([out.o, out.ht], [do, dht])
        return {d: inner[name].grad for d, name in ARGUMENT_OF.items() if name in inner}

    return by_jax if target.startswith("tpu") else by_torch


def backward_params() -> list[Any]:
    """On a TPU all share what makes them differentiable."""
    usual = {
        "tpu": (CHUNK_SIMPLE_GLA[1],),
        "gpu": (CHUNK_GLA[1], FUSED_RECURRENT_SIMPLE_GLA[1]),
    }
    return [
        pytest.param(op, backend, id=f"{backend}-{op.name}", marks=[getattr(pytest.mark, mark) for mark in marks])
        for op in GATED_LINEAR_ATTENTION
        if op.name.endswith("_bwd")
        for backend in FRAMEWORK
        for marks in [(backend,) if op in usual[backend] else (backend, "full")]
    ]


@pytest.mark.parametrize(("op", "backend"), backward_params())
def test_the_differentiable_function_has_the_gradients_of_the_backward_pass(op, backend):
    pytest.importorskip(FRAMEWORK[backend])
    gates = dict(gates=["both"]) if "gates" in op.defaults else {}
    (case,) = op.grid([dict(B=2, T=20, H=1, K=16, V=16)], dtype=[F32], h0=[True], ht=[True], scale=[0.5], **gates)
    inputs, arguments = draw(op, case), {**op.arguments(case), **op.route(case)}
    target = getattr(op, backend)
    expected = outputs(runner(backend).run(load_kernel(target), inputs, arguments))
    got = outputs(runner(backend).run(differentiated(target.removesuffix("_bwd")), inputs, arguments))
    assert got.keys() == expected.keys()
    for name in got:
        assert np.array_equal(got[name], expected[name]), name


def schedules() -> list[Any]:
    """ALiBi's decays around a chunk's border: some heads of some of 20 layers of 16 heads; in the full tier every head
    of every layer, and 64 heads and 70 layers as well."""
    found = []
    for op in CHUNK_SIMPLE_GLA:
        for layers, heads in ((20, 16), (20, 64), (70, 16), (70, 64)):
            for chunk in (64, 128, 256):
                for dtype in (F32, BF16):
                    for backend in FRAMEWORK:
                        some = (layers, heads, dtype, chunk) == (20, 16, F32, 128)
                        name = f"{backend}-{op.name}-{layers}_layers-H{heads}-chunk{chunk}-{dtype}"
                        usual = some and (backend == "gpu") == is_backward(op.cases[0])
                        for full in (False, True) if usual else (True,):
                            marks = [getattr(pytest.mark, backend)] + [pytest.mark.full] * full
                            values = (op, backend, layers, heads, chunk, dtype, full)
                            found.append(pytest.param(*values, id=name + "-all" * full, marks=marks))
    return found


@pytest.mark.parametrize(("op", "backend", "layers", "heads", "chunk", "dtype", "full"), schedules())
def test_alibi_schedules_stay_finite_and_right(op, backend, layers, heads, chunk, dtype, full):
    """One step more than a chunk; at chunk 128 the steepest head of the first layer decays by exp(-95) within it."""
    pytest.importorskip(FRAMEWORK[backend])
    chosen = range(1, layers + 1) if full else (1, layers // 2, layers)
    gammas = [make_alibi_g_gamma(heads, layers, layer) for layer in chosen]
    flat = tuple(gamma for of_layer in gammas for gamma in (of_layer if full else of_layer[:: heads // 2 - 1]))
    at_once = 2**24 // chunk**2  # heads: the golden has all pairs of a chunk's steps, in float64
    for first in range(0, len(flat), at_once):
        part = flat[first : first + at_once]
        given = replace(op, inputs=lambda c, part=part: {**op.inputs(c), "g_gamma": Gates((c.H,), part)})
        shape = dict(B=1, T=chunk + 1, H=len(part), K=16, V=16)
        (case,) = op.grid([shape], dtype=[dtype], gates=["gamma"], h0=[True], ht=[True], chunk=[chunk])
        judged = judge(Trial(given, case, backend))
        assert judged.verdict.passed, judged.verdict
