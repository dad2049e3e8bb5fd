"""A GPU's memory, simulated: no program touches what is not of a tensor, reads what nothing has written, or touches
what another program of its launch writes; and between a load and a store of one element it has a barrier, since other
threads may make them. The interpreter's programs come one after the other, each in one thread, and what lies beside a
tensor is there to be read: results show none of this.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from parity.backends import load_kernel, runner
from parity.compilers.launches import intercepted
from parity.inputs import draw
from parity.op import outputs
from tests.matrix.delta_rule import DELTA_RULES
from tests.matrix.gla import F32, GATED_LINEAR_ATTENTION, is_backward
from tests.support.interpreter import interpreted

UNWRITTEN = 0x7FC0DEAD  # a NaN that no arithmetic makes
NOBODY, SEVERAL = -1, -2


def tensors_of(arguments):
    """Those of a launch, those in structs among them, each with its name."""
    for name, x in arguments.items():
        if hasattr(x, "_asdict"):
            yield from ((f"{name}.{field}", tensor) for field, tensor in tensors_of(x._asdict()))
        elif hasattr(x, "data_ptr"):
            yield name, x


class StrictMemory:
    """The interpreter's loads and stores, each of them checked before it is done."""

    def __init__(self, interpreter, builder):
        self._interpreter, self._builder = interpreter, builder
        self._tensors = ()
        self._calls = self._barriers = 0
        self.missing = 0  # of the calls of a barrier the one that does nothing, from 1 on

    def __getattr__(self, name):
        return getattr(self._interpreter, name)

    def launch(self, arguments):
        """These are a launch's tensors, of which no program has touched anything yet."""
        self._tensors = [
            SimpleNamespace(
                name=name,
                start=x.data_ptr(),
                size=x.element_size(),
                count=x.numel(),
                writer=np.full(x.numel(), NOBODY),
                reader=np.full(x.numel(), NOBODY),
                loaded=np.full((x.numel(), 2), NOBODY),
                stored=np.full((x.numel(), 2), NOBODY),
            )
            for name, x in tensors_of(arguments)
        ]

    def barrier(self):
        """All threads of a program wait for each other."""
        self._calls += 1
        self._barriers += self._calls != self.missing

    def load(self, pointers, mask, other, dtype):
        value = self._interpreter.load(pointers, mask, other, dtype)
        for tensor, at in self._touched(pointers[mask]):
            is_unwritten = dtype == np.float32 and (value[mask].view(np.uint32) == UNWRITTEN).any()
            assert not is_unwritten, f"{tensor.name} is read where nothing has been written"
            program = self._builder.grid_idx[0]
            assert np.isin(tensor.writer[at], (NOBODY, program)).all(), f"{tensor.name}: what others write is read"
            assert not self._is_now(tensor.stored[at]), f"{tensor.name} is read without a barrier after it is written"
            tensor.loaded[at] = program, self._barriers
            is_first = np.isin(tensor.reader[at], (NOBODY, program))
            tensor.reader[at] = np.where(is_first, program, SEVERAL)
        return value

    def store(self, pointers, value, mask):
        for tensor, at in self._touched(pointers[mask]):
            program = self._builder.grid_idx[0]
            for others in (tensor.writer[at], tensor.reader[at]):
                assert np.isin(others, (NOBODY, program)).all(), f"{tensor.name}: two programs have one element"
            assert not self._is_now(tensor.loaded[at]), f"{tensor.name} is written without a barrier after it is read"
            assert not self._is_now(tensor.stored[at]), f"{tensor.name} is written twice without a barrier"
            tensor.stored[at] = program, self._barriers
            tensor.writer[at] = program
        return self._interpreter.store(pointers, value, mask)

    def _is_now(self, accesses):
        """Whether one is of this program since its last barrier."""
        return (accesses == (self._builder.grid_idx[0], self._barriers)).all(axis=1).any()

    def _touched(self, pointers):
        """The tensor that these are of, and where in it."""
        if pointers.size:
            first, last = int(pointers.min()), int(pointers.max())
            inside = [x for x in self._tensors if x.start <= first and last < x.start + x.count * x.size]
            assert inside, "what is touched lies in no tensor, or in two"
            yield inside[0], (pointers.astype(np.int64) - inside[0].start) // inside[0].size


@pytest.fixture
def strict(monkeypatch):
    """Runs every launch of a test in `StrictMemory`, in which empty tensors hold UNWRITTEN."""
    torch, interpreter = pytest.importorskip("torch"), pytest.importorskip("triton.runtime.interpreter")
    memory = StrictMemory(interpreter._interpreter, interpreter.interpreter_builder)
    monkeypatch.setattr(interpreter, "_interpreter", memory)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_barrier", lambda builder: memory.barrier())
    empty, empty_like = torch.empty, torch.empty_like

    def unwritten(x):
        if x.dtype == torch.float32:
            x.view(torch.int32).fill_(UNWRITTEN)
        return x

    def checked(launch, run):
        memory.launch(launch.arguments)
        run()

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: unwritten(empty(*shape, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: unwritten(empty_like(x, **options)))
    with intercepted(checked):
        yield memory


# Tiles of K and V of which the last is a part, more blocks than one, and sequences of no, one and several of them.
CHUNKED, PACKED = dict(B=2, T=20, H=2, K=40, V=20), dict(B=1, T=38, H=2, K=20, V=20, N=3)
STEPS, STEPS_PACKED = dict(B=2, T=3, H=2, K=80, V=72), dict(B=1, T=70, H=2, K=20, V=20, N=3)


USUAL = "fused_recurrent_kda_bwd"


def of_values(op, shape):
    """A shape for an op, of delta rules with two heads of values for one of keys."""
    return shape | dict(HV=2 * shape["H"]) if op in DELTA_RULES else shape


def params():
    """In the default tier backward of batches, by the fused route, and forward of packed sequences, by the other."""
    for op in (*GATED_LINEAR_ATTENTION, *DELTA_RULES):
        recurrent = "recurrent" in op.name
        ways = dict(chunk=[16]) if "chunk" in op.defaults else {}
        ways |= dict(route=["fused", "unfused"]) if "route" in op.defaults else {}
        ways |= dict(gates=["both"]) if "gates" in op.defaults else {}
        ways |= dict(l2norm=[True]) if "l2norm" in op.defaults else {}
        shapes = (STEPS, STEPS_PACKED) if recurrent else (CHUNKED, PACKED)
        for shape in shapes if not op.name.startswith("fused_chunk") else ():
            for case in op.grid([of_values(op, shape)], dtype=[F32], h0=[True], ht=[True], **ways):
                is_packed = "N" in dict(case.dims)
                other = dict(case.options).get("route") == ("fused" if is_packed else "unfused")
                full = other or is_packed == is_backward(case) or (op in DELTA_RULES and case.op != USUAL)
                yield pytest.param(op, case, id=case.id, marks=[pytest.mark.full] * full)


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize(("op", "case"), list(params()))
def test_programs_touch_what_is_theirs(op, case, strict, monkeypatch):
    """The recurrences go back through several blocks, of two steps each."""
    for module in ("fused_recurrent", "recurrent_delta_rule"):
        monkeypatch.setattr(f"gpu_reference.{module}.BLOCK", 2)
    arguments = {**op.arguments(case), **op.route(case)}
    for name, y in outputs(runner("gpu").run(load_kernel(op.gpu), draw(op, case), arguments)).items():
        assert np.isfinite(y).all(), name


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "chunk_simple_gla_bwd",
        *(pytest.param(f"fused_recurrent_{rule}_bwd", marks=pytest.mark.full) for rule in ("gla", "kda")),
    ],
)
def test_a_barrier_that_is_missing_is_found(name, missing, strict):
    """Each of the first two that there are, where there is one tile of V."""
    op = next(op for op in (*GATED_LINEAR_ATTENTION, *DELTA_RULES) if op.name == name)
    ways = dict(chunk=[16], route=["fused"]) if "route" in op.defaults else {}
    (case,) = op.grid([of_values(op, dict(B=1, T=70, H=1, K=16, V=16))], dtype=[F32], h0=[True], ht=[True], **ways)
    strict.missing = missing
    with pytest.raises(Exception, match="without a barrier"):
        runner("gpu").run(load_kernel(op.gpu), draw(op, case), {**op.arguments(case), **op.route(case)})
