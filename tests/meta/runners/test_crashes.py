"""A test that takes its process along costs that case alone: real signals, real limits."""

import re

import pytest

from parity.runners.crashes import examine
from tests.support import projects

WAYS = {  # what the kernel does for a case of that many rows, and what is to be reported
    11: ("os.kill(os.getpid(), signal.SIGKILL)", "CRASH", "killed by SIGKILL, as the system does when memory runs out"),
    12: ("ctypes.string_at(0)", "CRASH", "killed by SIGSEGV"),
    13: ("os._exit(3)", "CRASH", "ended with status 3"),
    14: ("time.sleep(10_000)", "TIMEOUT", "ran longer than --parity-timeout"),
    15: ("bomb()", "OOM", "MemoryError"),
    16: ("lose_context()", "CRASH", "the accelerator's context is lost"),
}
KERNELS = """
import ctypes, os, resource, signal, time

def good(x):
    {ways}
    return x + x

def bomb():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        kept = [bytearray(1 << 20) for _ in range(10_000)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

def lose_context():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
LOADED = """
from parity.judging.judge import judge
from parity.trial import Trial

for case in DOUBLE.cases[:4]:
    judge(Trial(DOUBLE, case, "{backend}"))

"""
"""What a healthy case needs is loaded and compiled before a test begins: only a kernel that hangs meets the limit."""


@pytest.mark.full
@pytest.mark.parametrize("backend", ["tpu", pytest.param("gpu", marks=[pytest.mark.gpu])])
def test_a_dying_case_costs_that_case_alone(backend, project, tmp_path):
    run = project()
    dims = ", ".join(f"dict(M={rows}, N=4)" for rows in WAYS)
    run.replace("matrix.py", ")\nOPS", f'    _DOUBLE.grid([{dims}], dtype=["float32"]),\n)\nOPS')
    ways = "\n    ".join(f"if x.shape[0] == {rows}: {way}" for rows, (way, _, _) in WAYS.items())
    run.write("kernels.py", KERNELS.format(ways=ways))
    run.write(
        "test_double.py", projects.HEAD + LOADED.format(backend=backend) + projects.test_of(f"test_{backend}", backend)
    )
    done = run("-q", "-n", "1", "--parity-timeout=8", "--parity-record", "--junitxml=junit.xml")
    assert re.search(rf"{len(WAYS)} failed, 4 passed", done.stdout), done.stdout
    for rows, (_, outcome, reason) in WAYS.items():
        case = rf"test_double.py::test_{backend}\[double-M{rows}_N4-f32-s0\]"
        named = case if rows != 15 else rf"{backend}: emulated   double-M15_N4-f32-s0"
        assert re.search(rf"{outcome}  G1: {reason}.*   {named}", done.stdout), (rows, done.stdout)
        assert re.search(rf"rerun: pytest -n0 '{case}'", done.stdout), rows
    summary = rf"double +{backend} emulated +10 .*  4 AGREES  4 CRASH  1 OOM  1 TIMEOUT"
    assert re.search(summary, done.stdout), done.stdout
    assert re.search(r'Timeout .*\n(.*\n)*?.*kernels.py", line \d+ in good', done.stdout), "the stack where it hung"
    records = (tmp_path / "records" / backend / "emulated" / "double.jsonl").read_text()
    assert len(re.findall('"case"', records)) == 4, "what was recorded stays"
    properties = re.findall(r'<property name="verdict" value="(\w+)"', (tmp_path / "junit.xml").read_text())
    assert properties.count("AGREES") == 4


@pytest.mark.parametrize(
    ("log", "status", "outcome", "reason"),
    [
        ("{}\nTimeout (0:00:05)!\nThread 0x1", 1, "TIMEOUT", "ran longer"),
        ("{}\nterminate called after throwing an instance of 'std::bad_alloc'", -6, "OOM", "out of memory"),
        ("{}\nFatal Python error: Aborted", -6, "CRASH", "killed by SIGABRT"),
        ("", None, "CRASH", "ended"),
    ],
)
def test_what_a_log_and_a_status_say(log, status, outcome, reason):
    found = examine(log, status)
    assert (found.outcome, found.entry) == (outcome, {})
    assert found.reason.startswith(reason)
