"""A first contact with a device, played here: kernels that crash, hang, raise, corrupt and differ from run to run."""

import json
import time

import numpy as np
import pytest

from parity.contact import assumptions, probes
from parity.contact.assumptions import ASSUMPTIONS, Assumption
from parity.contact.session import Row, Session
from parity.contact.steps import Step, one_each, steps
from tests.matrix import OPS
from tests.matrix.gmm import GMM

F32, BF16 = "double-M8_N40-f32-s0", "double-M8_N40-bf16-s0"
KERNELS = """
import os, signal, time
import torch

def good(x):
    if x.dtype == torch.float32:
        {body}
    return x + x
"""
BODIES = {
    "CRASHED": "os.kill(os.getpid(), signal.SIGSEGV)",
    "HUNG": "time.sleep(600)",
    "RAISED": "raise RuntimeError('an illegal memory access was encountered')",
    "OFF CONTRACT": "return x + x * 1.001",
}


@pytest.fixture
def session(project):
    pytest.importorskip("triton")

    def of(body: str = "pass") -> Session:
        found = project()
        found.write("kernels.py", KERNELS.format(body=body))
        return Session(found.folder, "gpu", found.folder / "contact.jsonl")

    return of


def rows_of(session: Session, found: list[Step], seconds: float = 120) -> dict[str, Row]:
    return {row.id: row for row in session.run(found, seconds, lambda row: None)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "outcome", [pytest.param(name, marks=[pytest.mark.full] * (name in ("RAISED", "OFF CONTRACT"))) for name in BODIES]
)
def test_a_kernel_that_takes_its_process_along_costs_its_row_alone(session, outcome):
    rows = rows_of(session(BODIES[outcome]), [Step("case", F32, 8), Step("case", BF16, 60)])
    bad, good = rows[f"case {F32}"], rows[f"case {BF16}"]
    assert bad.outcome == outcome, bad
    assert good.outcome == "AGREES" and good.by <= 1
    if outcome == "CRASHED":
        assert "SIGSEGV" in bad.detail
    elif outcome == "OFF CONTRACT":
        assert 100 < bad.by < 1e6
    elif outcome == "RAISED":
        assert "illegal memory access" in bad.detail and "Traceback" in bad.log


@pytest.mark.full
@pytest.mark.gpu
def test_two_runs_with_other_bits_are_seen(session):
    rows = rows_of(session("return x + x + 1e-6 * torch.rand(())"), [Step("repeat", F32, 60), Step("repeat", BF16, 60)])
    assert rows[f"repeat {F32}"].outcome == "OFF CONTRACT" and "differ in" in rows[f"repeat {F32}"].detail
    assert rows[f"repeat {BF16}"].outcome == "AGREES"


@pytest.mark.gpu
def test_a_session_ends_in_its_time_and_goes_on_where_it_ended(session):
    first = session()
    steps = [Step("case", F32, 60), Step("case", BF16, 60), Step("graph", BF16, 60)]
    assert list(rows_of(first, steps[:1])) == [f"case {F32}"]
    began = time.monotonic()
    assert list(rows_of(first, steps, 0.05)) == [f"case {F32}"] and time.monotonic() - began < 20
    told = []
    again = Session(first.root, "gpu", first.file).run(steps, 120, told.append)
    assert [row.id for row in again] == [step.id for step in steps]
    assert [row.id for row in told] == [step.id for step in steps[1:]]
    head, *lines = first.file.read_text().splitlines()
    assert json.loads(head)["device"] and [Row(**json.loads(line)) for line in lines] == again

    first.file.write_text("\n".join([json.dumps(json.loads(head) | {"device": "another"}), *lines, ""]))
    assert Session(first.root, "gpu", first.file).resume() == []


@pytest.mark.gpu
def test_the_command_prints_a_table_and_says_what_is_left(project):
    pytest.importorskip("triton")
    found = project()
    found.write("kernels.py", KERNELS.format(body=BODIES["OFF CONTRACT"]))
    done = found.parity("contact", "--backend", "gpu", "--kind", "case", "--minutes", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"OFF CONTRACT case {F32}" in done.stdout
    assert "2 of 2 steps, 1 wrong, 0 left" in done.stdout and "contact-gpu.jsonl" in done.stdout
    assert (found.folder / "contact-gpu.jsonl").exists()


def test_steps_come_in_the_order_of_risk_and_cover_every_dtype_path(pytestconfig):
    found = steps(pytestconfig.rootpath, "gpu")
    kinds = list(dict.fromkeys(step.kind for step in found))
    assert kinds == ["probe", "case", "repeat", "graph", "tests", "benchmark"]
    assert len({step.id for step in found}) == len(found)
    cases = [step.name for step in found if step.kind == "case"]
    assert set(cases) == {case.id for op in OPS for case in one_each(op)}
    assert [name.partition("-")[0] for name in cases[: len(OPS)]] == [op.name for op in OPS]
    assert {(case.dtype, case.out) for case in one_each(GMM)} == {(case.dtype, case.out) for case in GMM.cases}


class Wrong:
    """A device whose functions are NumPy's, but for one."""

    def __init__(self, wrong):
        self.wrong = wrong

    def unary(self, x, *, function):
        with np.errstate(all="ignore"):
            right = probes.TRUTHS.get(function, lambda x: x)(x.astype(np.float64)).astype(np.float32)
            if function == "minimum":
                right = np.fmin(x, 1) if self.wrong == "minimum keeps NaN" else np.minimum(x, 1)
            if function == "kept" and self.wrong == "subnormals are kept":
                right = np.zeros_like(x)
            return right * np.float32(1 + 2.0**-20) if self.wrong == function else right

    def convert(self, x, *, dtype):
        narrow = x.astype(np.float32).astype(probes.numpy_dtype(dtype))
        if self.wrong == f"to_{dtype} rounds to nearest even":  # truncates
            wide = np.abs(narrow.astype(np.float32)) > np.abs(x)
            code = narrow.view(f"u{narrow.itemsize}")
            return (code - wide).astype(code.dtype).view(narrow.dtype)
        return narrow

    def dot(self, a, b):
        exact = a.astype(np.float64) @ b.astype(np.float64)
        nearest = exact.astype(np.float32)
        if self.wrong == "dot of one sign is rounded to nearest":
            return np.where(nearest > exact, np.nextafter(nearest, np.float32(0)), nearest) - np.spacing(nearest)
        return nearest


@pytest.mark.parametrize("name", probes.NAMES)
def test_a_probe_finds_what_is_otherwise_than_assumed(name):
    assumed = Assumption(name, "cuda", ulps=4, slope=1.5, holds=name not in probes.TRUTHS or None)
    right, wrong = (probes.measure(Wrong(of), assumed) for of in ("nothing", name))
    assert right.share <= 1, right
    assert wrong.share > 1, wrong


def test_every_device_has_an_assumption_of_every_probe_with_its_source(pytestconfig):
    for device in ("cuda", "hip", "tpu"):
        assert [*assumptions.of_device(device)] == [*probes.NAMES]
    assert all(assumption.source for assumption in ASSUMPTIONS)
    page = (pytestconfig.rootpath / "docs/assumptions.md").read_text()
    assert [name for name in probes.NAMES if f"`{name}`" not in page] == []


def test_what_was_measured_takes_the_place_of_the_assumption(tmp_path):
    path = assumptions.measured_path(tmp_path, "gpu", "NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"exp": {"ulps": 2.5}, "minimum keeps NaN": {"holds": True}}))
    found = assumptions.of_device("cuda", path)
    assert found["exp"].ulps == 2.5 and found["minimum keeps NaN"].holds and found["log"].ulps == 4
