"""Kernels that misbehave: what they raise or change is their verdict, on both backends, and nobody else's."""

import ctypes
import gc
import os
import re
import signal
import sys
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import pytest

from parity import Array, Contract, Op, abs_of, cli, trial
from parity.backends import runner
from parity.guard import ending
from parity.judging.judge import judge
from parity.judging.verdict import Verdict
from parity.runners import lanes
from parity.trial import Trial
from tests.support.interpreter import DEVICE

ROOT = Path(__file__).parents[3]
FE_UPWARD = 0x800


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(0)


def raise_(error):
    raise error


def set_torch():
    torch = pytest.importorskip("torch")
    torch.set_default_dtype(torch.float64)


def set_x64(in_this_thread):
    jax = pytest.importorskip("jax")
    if in_this_thread:
        jax.enable_x64(True).__enter__()
    else:
        jax.config.update("jax_enable_x64", True)


RAISING = {
    "SystemExit: 0": lambda: sys.exit(0),
    "KeyboardInterrupt": lambda: raise_(KeyboardInterrupt()),
    "Skipped: not here": lambda: pytest.skip("not here"),
    "Unspeakable: its text cannot be had": lambda: raise_(Unspeakable()),
    r"RuntimeError: [/b] \x1b[2Jall \u202eis well": lambda: raise_(RuntimeError("[/b] \x1b[2Jall \u202eis well\nno")),
    "GeneratorExit": lambda: raise_(GeneratorExit()),
}
CHANGING = {
    "torch's default dtype (torch.float32 → torch.float64)": set_torch,
    "JAX's configuration (jax_enable_x64)": lambda: set_x64(False),
    "JAX's configuration (jax_enable_x64) of this thread": lambda: set_x64(True),
    "NumPy's error handling (divide, invalid, over, under)": lambda: np.seterr(all="raise"),
    "NumPy's printing (precision)": lambda: np.set_printoptions(precision=2),
    "the environment (XLA_FLAGS)": lambda: os.environ.update(XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + " "),
    "the working directory": lambda: os.chdir("/"),
    "the warnings' filters": lambda: warnings.simplefilter("error"),
    "what signals do": lambda: signal.signal(signal.SIGINT, lambda *_: None),  # ignored of a job in the background
    "sys.path": lambda: sys.path.insert(0, "/"),
    "the recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "the garbage collector": gc.disable,
    "the floating-point mode": lambda: ctypes.CDLL(None).fesetround(FE_UPWARD),
}


DOUBLE = Op(
    "double", golden=lambda x: 2.0 * x.astype(np.float64), tpu="nowhere:kernel", gpu="nowhere:kernel",
    inputs=lambda c: {"x": Array((c.M,), c.dtype)}, contract=lambda c, backend: Contract(dot="ieee", out=c.out),
    chain=lambda c, inputs: 1, magnitude=abs_of("x"),
)  # fmt: skip
(CASE,) = DOUBLE.grid([dict(M=8)], dtype=["float32"], tier="smoke")


@pytest.fixture(params=["tpu", "gpu"])
def verdict(request):
    """What a kernel comes to that first does something with its input; it returns what comes of that, or 2 x."""
    pytest.importorskip({"tpu": "jax", "gpu": "triton"}[request.param])
    runner(request.param)  # which loads the framework

    def judged(act):
        def kernel(x):
            returned = act(x)
            return x + x if returned is None else returned

        return judge(Trial(DOUBLE, CASE, request.param, kernel)).verdict

    return judged


def settings():
    """Those that a test can read without a framework."""
    python = dict(os.environ), Path.cwd(), [*warnings.filters], [*sys.path], sys.getrecursionlimit(), gc.isenabled()
    return *python, np.geterr(), np.get_printoptions(), ctypes.CDLL(None).fegetround(), signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("reason", RAISING)
def test_whatever_a_kernel_raises_is_a_crash(verdict, reason):
    assert verdict(lambda x: RAISING[reason]()) == Verdict("CRASH", "G1", reason)


@pytest.mark.parametrize("name", CHANGING)
def test_a_kernel_that_changes_what_others_meet_is_dirty_and_nothing_stays_changed(verdict, name):
    before = settings()
    found = verdict(lambda x: [CHANGING[name](), None][1])
    assert found.outcome == "DIRTY"
    assert found.reason.startswith(f"changed {name.removesuffix(' of this thread')}")
    assert settings() == before
    assert verdict(lambda x: None).passed, "the next kernel does not meet it"


def test_what_a_library_sets_when_it_is_imported_is_not_the_kernels(tmp_path, monkeypatch):
    pytest.importorskip("jax")
    (tmp_path / "sets_on_import.py").write_text("import warnings\nwarnings.simplefilter('ignore')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def kernel(x):
        import sets_on_import  # noqa: F401

        return x + x

    assert judge(Trial(DOUBLE, CASE, "tpu", kernel)).verdict.passed


@pytest.mark.gpu
def test_a_kernel_that_writes_into_its_input_fails_by_name():
    found = judge(Trial(DOUBLE, CASE, "gpu", lambda x: x.add_(x)))
    assert found.verdict == Verdict("DIRTY", "G1", "wrote into its input x")


def test_a_static_buffer_does_not_hide_that_results_vary():
    torch = pytest.importorskip("torch")
    buffer = torch.zeros(8, device=DEVICE)
    found = judge(Trial(DOUBLE, CASE, "gpu", lambda x: buffer.add_(x + x)))
    assert found.verdict.outcome == "NOT REPEATABLE"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_users_interrupt_is_no_crash(number):
    """SIGTERM as a supervised child has it; of a job in the background, where Ctrl-C is ignored, it is all there is."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ending(lambda: signal.raise_signal(number))
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("command", "code"), [("explain", 3), ("stages", 3), pytest.param("shrink", 1, marks=pytest.mark.full)]
)
def test_every_command_names_a_kernel_that_exits(command, code, monkeypatch, capsys):
    pytest.importorskip("jax")
    monkeypatch.setattr(trial, "load_kernel", lambda target: lambda **arguments: sys.exit(0))
    assert cli.main(["--root", str(ROOT), command, "gmm-M9_K5_N7_G3-f32-tiling16x128x128-zipf-s0"]) == code
    assert "CRASH" in (printed := capsys.readouterr().out) and "SystemExit" in printed


def work(n):
    """What a lane of the next test does: it may die, or hang, of its job."""
    if n == 1:
        os._exit(0)
    if n == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if n == 3:
        signal.pause()
    return n * n


def test_a_dying_job_costs_that_job_alone():
    found = dict(lanes.each(work, range(6), 2, seconds=5))
    assert found == {
        0: 0, 1: lanes.Death(0), 2: lanes.Death(-signal.SIGSEGV), 3: lanes.Death(None), 4: 16, 5: 25
    }  # fmt: skip


def test_a_message_that_comes_after_one_looked_is_no_death(monkeypatch):
    poll = Connection.poll
    monkeypatch.setattr(Connection, "poll", lambda self: poll(self) or (wait([self], 10) and False))
    assert dict(lanes.each(work, [4, 5], 2)) == {0: 16, 1: 25}


@pytest.mark.parametrize("status", [0, 5])
def test_a_run_that_a_kernel_ends_is_not_green(status, project):
    """Nor is it one without tests, which is what pytest's 5 says."""
    run = project()
    ends = f"x.shape[0] == 3 and __import__('os')._exit({status})"
    run.replace("kernels.py", "def good(x):\n", f"def good(x):\n    {ends}\n")
    done = run("-q", "-k", "test_agrees")
    assert done.returncode == 1
    case = r"'?test_double.py::test_agrees\[double-M3_N5-f32-s0\]'?"
    assert re.search(f"CRASH  G1: ended with status {status}   {case}\nrerun: pytest -n0 {case}", done.stdout), (
        done.stdout
    )


def test_a_limit_is_kept_without_workers(project):
    run = project()
    run.write("kernels.py", "import time\n\ndef good(x):\n    time.sleep(999)\n")
    done = run("-q", "-k", "test_agrees", "--parity-timeout=5")
    assert done.returncode == 1
    assert "TIMEOUT  G1: ran longer than --parity-timeout   test_double.py::test_agrees[double-M8" in done.stdout
    assert 'kernels.py", line 4 in good' in done.stdout, done.stdout


def test_a_limit_that_nobody_keeps_is_refused(project):
    done = project()("-q", "--pdb", "--parity-timeout=5")
    assert done.returncode == 4
    assert "--parity-timeout ends the process of a test: it needs -n, or a run without a debugger" in done.stderr
