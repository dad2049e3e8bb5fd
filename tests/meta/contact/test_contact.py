"""A first contact with a device, played here: kernels that crash, hang, raise, corrupt and differ from run to run."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parity import Array, Contract, Op, matrix
from parity.backends import EMULATED
from parity.contact import assumptions, probes
from parity.contact.assumptions import ASSUMPTIONS, Assumption
from parity.contact.session import Row, Session
from parity.contact.steps import ENDING_SECONDS, Step, of_sizes, one_each, perform, redrawn, steps
from parity.dtypes import round_to
from parity.interop import to_numpy
from parity.judging.judge import gates
from parity.judging.passes import fp8_in_14_digits
from parity.trial import Trial
from tests.matrix import OPS
from tests.matrix.delta_rule import DELTA_RULES
from tests.matrix.gla import GATED_LINEAR_ATTENTION
from tests.matrix.gmm import GMM
from tests.support.waiting import until

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
    limit = 8 if outcome == "HUNG" else 100
    rows = rows_of(session(BODIES[outcome]), [Step("case", F32, limit), Step("case", BF16, 100)], seconds=300)
    bad, good = rows[f"case {F32}"], rows[f"case {BF16}"]
    assert bad.outcome == outcome, bad
    assert good.outcome == "AGREES" and good.by <= 1
    if outcome == "CRASHED":
        assert re.search(r"SIGSEGV, in kernels\.py:\d+ good$", bad.detail) and "Segmentation fault" in bad.log
    elif outcome == "HUNG":
        assert re.search(r"after 8 s, in kernels\.py:\d+ good$", bad.detail), bad
    elif outcome == "OFF CONTRACT":
        assert 100 < bad.by < 1e6
    elif outcome == "RAISED":
        assert "illegal memory access" in bad.detail and "Traceback" in bad.log


@pytest.mark.full
@pytest.mark.gpu
def test_two_runs_with_other_bits_are_seen(session):
    rows = rows_of(
        session("return x + x + 1e-6 * torch.rand(())"), [Step("repeat", F32, 100), Step("repeat", BF16, 100)], 300
    )
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

    with first.file.open("a") as stream:
        stream.write('{"kind": "case", "na')  # it was killed here
    another = Step("case", "double-M3_N5-f32-s0", 60)
    for _ in range(2):
        after = Session(first.root, "gpu", first.file).run([*steps, another], 120, told.append)
        assert [row.id for row in after] == [step.id for step in (*steps, another)]
    assert [row.id for row in told] == [step.id for step in (*steps[1:], another)]

    others = "\n".join([json.dumps(json.loads(head) | {"device": "another"}), *lines, ""])
    for nth, text in enumerate([others, "something else\n"], 1):
        first.file.write_text(text)
        last = Session(first.root, "gpu", first.file)
        assert last.resume() == [] and last.aside.name == f"contact-{nth}.jsonl"
        assert last.aside.read_text() == text


@pytest.mark.full
@pytest.mark.gpu
def test_a_step_ends_with_a_session_that_is_killed(project):
    pytest.importorskip("triton")
    found = project()
    found.write("kernels.py", KERNELS.format(body="open('pid', 'w').write(str(os.getpid())); time.sleep(600)"))
    command = [sys.executable, "-m", "parity", "contact", "--backend", "gpu", "--kind", "case", "--minutes", "5"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(found.folder), *sys.path])}
    pid = found.folder / "pid"
    with subprocess.Popen(command, cwd=found.folder, env=environment, stdout=subprocess.DEVNULL) as session:
        until(lambda: pid.exists() and pid.read_text())
        session.kill()
    until(lambda: not Path("/proc", pid.read_text()).exists())


@pytest.mark.gpu
def test_the_command_prints_a_table_and_says_what_is_left(project):
    pytest.importorskip("triton")
    found = project()
    found.write("kernels.py", KERNELS.format(body=BODIES["OFF CONTRACT"]))
    command = "contact", "--backend", "gpu", "--kind", "case", "--minutes"
    done = found.parity(*command, "2")
    assert done.returncode == 1, done.stdout + done.stderr
    row = rf"^OFF CONTRACT +[\d.e+]+ +[\d.]+  case {F32}  OUT OF BOUND .*$"
    assert len(re.findall(row, done.stdout, re.MULTILINE)) == 2  # when it comes, and below what is right
    assert re.search(r"^ case +1 +1 +\d+ *$", done.stdout, re.MULTILINE)
    assert "2 of 2 steps, 1 wrong, 0 left" in done.stdout and "send home: contact-gpu.jsonl" in done.stdout
    found.write("kernels.py", KERNELS.format(body=BODIES["OFF CONTRACT"].replace("1.001", "1.002")))
    done = found.parity(*command, "1e-9")
    assert "contact-gpu.jsonl was another device's or code's: it is contact-gpu-1.jsonl now" in done.stdout
    assert "0 of 2 steps, 0 wrong, 2 left\nthe same command goes on\n" in done.stdout


def test_what_is_compared_bit_for_bit_and_right_is_off_by_nothing():
    pytest.importorskip("triton")
    (op,) = (op for op in OPS if op.name == "swizzle_scales")
    found = perform(matrix.home(op), "gpu", Step("case", one_each(op)[0].id, 60))
    assert (found.outcome, found.by) == ("AGREES", 0)


@pytest.mark.full
def test_a_smoke_tier_that_takes_too_long_leaves_what_it_recorded(project):
    pytest.importorskip("jax")
    found = project()
    sleep = "@pytest.mark.smoke\n@pytest.mark.tpu\ndef test_later():\n    import time; time.sleep(600)\n"
    found.write("test_double.py", (found.folder / "test_double.py").read_text() + sleep)
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job in the background
    try:
        of_smoke = perform(found.folder, "tpu", Step("tests", "smoke", ENDING_SECONDS + 20))
    finally:
        signal.signal(signal.SIGINT, ours)
    assert of_smoke.outcome == "RAN" and of_smoke.detail.startswith("its time was over: 2 passed"), of_smoke
    (path,) = of_smoke.more["records"]
    assert path.endswith("double.jsonl") and "double-M8_N40-f32-s0" in of_smoke.more["records"][path]


def test_a_project_without_smoke_tests_is_not_off_its_contract(project):
    found = perform(project().folder, "gpu", Step("tests", "smoke", 300))
    assert (found.outcome, found.detail) == ("NOT HERE", "no smoke tests")


def test_steps_come_in_the_order_of_risk_and_cover_every_dtype_path(pytestconfig):
    found = steps(pytestconfig.rootpath, "gpu")
    kinds = list(dict.fromkeys(step.kind for step in found))
    assert kinds == ["probe", "case", "repeat", "graph", "tests", "benchmark"]
    assert len({step.id for step in found}) == len(found)
    cases = [step.name for step in found if step.kind == "case"]
    assert set(cases) == {case.id for op in OPS for case in one_each(op)}
    assert [name.partition("-")[0] for name in cases[: len(OPS)]] == [op.name for op in OPS]
    for op in OPS:
        assert {(case.dtype, case.out) for case in one_each(op)} == {(c.dtype, c.out) for c in op.cases if not c.model}
        assert all(size for case in one_each(op) for _, size in case.dims), op.name


def test_a_captured_graph_finds_sizes_offsets_and_shards_changed():
    names = {"group_sizes", "cu_seqlens", "group_offset"}
    changed = {op.name: set[str]() for op in OPS}
    for op in OPS:
        before, after = redrawn(op, of_sizes(op))
        assert {name: (x.shape, x.dtype) for name, x in before.items()} == {
            name: (x.shape, x.dtype) for name, x in after.items()
        }
        assert any(x.tobytes() != after[name].tobytes() for name, x in before.items())
        changed[op.name] = {name for name in names & {*before} if before[name].tolist() != after[name].tolist()}
    assert all("cu_seqlens" in changed[op.name] for op in (*GATED_LINEAR_ATTENTION, *DELTA_RULES))
    assert changed["gmm"] == changed["grouped_gemm"] == {"group_sizes", "group_offset"}
    assert changed["moe_layer"] == {"group_offset"}


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
        if self.wrong == assumptions.DOT_ROUNDS:
            return np.where(nearest > exact, np.nextafter(nearest, np.float32(0)), nearest) - np.spacing(nearest)
        return fp8_in_14_digits(a, b) if self.wrong == assumptions.FP8_SUMS else nearest


@pytest.mark.parametrize("name", probes.NAMES)
def test_a_probe_finds_what_is_otherwise_than_assumed(name):
    assumed = Assumption(name, "cuda", ulps=4, slope=1.5, holds=name not in probes.TRUTHS or None)
    right, wrong = (probes.measure(Wrong(of), assumed) for of in ("nothing", name))
    assert right.share <= 1, right
    assert wrong.share > 1, wrong


@pytest.mark.parametrize("x", [-126, np.nextafter(np.float32(128), np.float32(0)), -125.5])
def test_what_leaves_the_normal_range_by_what_is_allowed_is_no_error(x, monkeypatch):
    class Leaving(Wrong):
        def unary(self, x, *, function):
            with np.errstate(over="ignore"):
                off = super().unary(x, function=function) * np.float32(1 + np.sign(x) * 2.0**-17)  # up to 128 ulps
            return np.where(np.abs(off) < probes.SMALLEST_NORMAL, np.float32(0), off)

    monkeypatch.setattr(probes, "patterns", lambda seconds: [np.array([x], np.float32)])
    allowed = [probes.measure(Leaving("nothing"), Assumption("exp2", "tpu", ulps=ulps)) for ulps in (128, 1)]
    assert allowed[0].share <= 1
    assert np.isfinite(allowed[1].share) and (allowed[1].share > 1)


def test_every_device_has_an_assumption_of_every_probe_with_its_source(pytestconfig):
    for device in ("cuda", "hopper", "hip", "tpu"):
        assert [*assumptions.of_device(device)] == [*probes.NAMES]
    assert all(assumption.source for assumption in ASSUMPTIONS)
    page = (pytestconfig.rootpath / "docs/assumptions.md").read_text()
    assert [name for name in probes.NAMES if f"`{name}`" not in page] == []


def test_patterns_are_spread_evenly_and_come_once(monkeypatch):
    monkeypatch.setattr(probes, "SAMPLES", 2**10)
    drawn = [x.view(np.uint32) for x in itertools.islice(probes.patterns(600), 8)]
    for count in (1, 2, 4, 8):
        together = np.sort(np.concatenate(drawn[:count])).astype(np.int64)
        assert set(np.diff(together)) == {2**32 // (count * 2**10)}
    assert len(list(probes.patterns(0))) == 1


def test_more_time_is_more_patterns_and_finds_a_rare_error(monkeypatch):
    monkeypatch.setattr(probes, "SAMPLES", 2**10)
    numbers = list(itertools.islice(probes.patterns(600), 4))[3]
    rare = numbers[(np.abs(numbers) < 80) & (np.abs(numbers) > 1e-3)][0]

    class Rare(Wrong):
        def unary(self, x, *, function):
            return super().unary(x, function=function) * np.where(x == rare, np.float32(1.001), np.float32(1))

    assumed = Assumption("exp", "cuda", ulps=4, slope=1.5)
    few, more = (probes.measure(Rare("nothing"), assumed, seconds) for seconds in (0, 1))
    assert few.share <= 1 < more.share
    assert f"{rare:.9g}" in more.detail
    assert few.figures["patterns"] < 2**11 < more.figures["patterns"]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Keeps a pretended table of a device where its contracts look for it."""
    monkeypatch.setattr("parity.matrix.home", lambda op: tmp_path)
    return lambda backend, kind, **figures: assumptions.keep(
        assumptions.measured_path(tmp_path / "records", backend, kind), figures
    )


H200, TPU = "NVIDIA H200", "TPU v6 lite"


def exp(x, stages=lambda site, value: value):
    return stages("exp", np.exp(x.astype(np.float64)))


EXP = Op(
    "exp",
    exp,
    "nowhere:exp",
    "nowhere:exp",
    inputs=lambda case: {"x": Array((case.M, case.N), "float32")},
    contract=lambda case, backend: Contract(sites={"exp": "float32/2"}, functions={"exp": ("exp",)}),
)
(CASE,) = EXP.grid([dict(M=64, N=64)], dtype=["float32"])


def off_by(ulps):
    """exp, off by up to so many ulps."""

    def kernel(x):
        exact = np.exp(to_numpy(x).astype(np.float64))
        unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
        errors = np.random.default_rng(0).uniform(-ulps, ulps, exact.shape)
        return (exact + errors * unit).astype(np.float32)

    return kernel


@pytest.mark.gpu
def test_contracts_on_a_device_use_what_was_measured_there(tables):
    pytest.importorskip("triton")
    trial = Trial(EXP, CASE, "gpu", other=off_by(4))
    tables("gpu", "AMD Instinct MI300X", exp=dict(ulps=7.5, patterns=2**32))
    tables("gpu", H200, exp=dict(ulps=0.8))
    sites = {EMULATED: "float32/2", "NVIDIA B200": "float32/4", "AMD Instinct MI300X": "float32/8", H200: "float32"}
    verdicts = {device: gates(replace(trial, device=device)).verdict.outcome for device in sites}
    of_device = {device: replace(trial, device=device).contract.sites["exp"] for device in sites}
    assert of_device == {device: site + " of a power" * (device != EMULATED) for device, site in sites.items()}
    assert verdicts.pop("AMD Instinct MI300X") == "AGREES"
    assert set(verdicts.values()) <= {"OFF CONTRACT", "OUT OF BOUND"}
    assert gates(replace(trial, other=off_by(0.5), device=H200)).verdict.outcome == "AGREES"


def test_a_sum_that_is_cut_off_is_a_site_toward_zero(tables):
    case = next(case for case in GMM.cases if case.dtype == "bfloat16")
    of = {backend: Trial(GMM, case, backend, device=EMULATED) for backend in ("tpu", "gpu")}
    assert of["gpu"].contract.sites == {"acc": "float32"}
    assert replace(of["gpu"], device=H200).contract.sites == {"acc": "float32 toward zero"}  # as is assumed
    tables("gpu", H200, **{assumptions.DOT_ROUNDS: dict(holds=True)})
    tables("tpu", TPU, **{assumptions.DOT_ROUNDS: dict(holds=False)})
    assert replace(of["gpu"], device=H200).contract.sites == {"acc": "float32"}
    assert replace(of["tpu"], device=TPU).contract.sites == of["tpu"].contract.sites | {
        "partial": "float32 toward zero"
    }


def test_a_conversion_that_is_cut_off_is_a_site_toward_zero(tables):
    def narrow(x):
        exact = np.exp(to_numpy(x).astype(np.float64))
        return round_to(exact, "bfloat16 toward zero").astype(np.float32)

    op = replace(EXP, contract=lambda case, backend: Contract(sites={"exp": "bfloat16"}))
    trial = Trial(op, CASE, "gpu", other=narrow, device=H200)
    assert trial.contract.sites == {"exp": "bfloat16"}
    assert gates(trial).verdict.outcome in ("OFF CONTRACT", "OUT OF BOUND")
    tables("gpu", H200, **{"to_bfloat16 rounds to nearest even": dict(holds=False)})
    measured = Trial(op, CASE, "gpu", other=narrow, device=H200)
    assert measured.contract.sites == {"exp": "bfloat16 toward zero"}
    assert gates(measured).verdict.outcome == "AGREES"


def test_a_conversion_is_known_by_the_dtype_of_its_site(tmp_path):
    sites = {"h": "bfloat16", "lhs": "bf16x2", "code": "float8_e4m3fn", "acc": "float32", "P": "float16"}
    cut_off = {f"to_{dtype} rounds to nearest even": dict(holds=False) for dtype in ("bfloat16", "float8_e4m3fn")}
    assumptions.keep(assumptions.measured_path(tmp_path, "gpu", H200), cut_off)
    found = assumptions.on_device(Contract(sites=sites), "gpu", H200, tmp_path)
    assert found.sites == sites | {name: f"{sites[name]} toward zero" for name in ("h", "lhs", "code")}


def test_functions_are_added_and_a_narrower_site_stays():
    contract = Contract(
        sites={"silu": "float32/2", "P": "bfloat16", "x": "float32"},
        functions={"silu": ("exp", "reciprocal"), "P": ("exp",)},
    )
    found = assumptions.on_device(contract, "gpu", H200, Path("nowhere"))
    assert found.sites == {"silu": "float32/8 of a power", "P": "bfloat16", "x": "float32"}
    with pytest.raises(ValueError, match="functions' sites must be one of silu, P, x, got 'y'"):
        replace(contract, functions={"y": ("exp",)})


@pytest.mark.parametrize("ulps", [1025, float("inf")])
def test_a_function_that_is_far_off_leaves_no_contract(tables, ulps):
    tables("gpu", H200, exp=dict(ulps=ulps))
    with pytest.raises(ValueError, match=f"exp must be off by at most 1024 ulps .* got {ulps:g}"):
        _ = Trial(EXP, CASE, "gpu", device=H200).contract


@pytest.mark.parametrize("text", ["[]", "{", '{"exp": {"ulp": 1}}', '{"cosine": {}}', '{"exp": 1}'])
def test_a_table_that_is_none_is_refused_by_name(tmp_path, text):
    path = tmp_path / "assumptions.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"assumptions\.json must be a table that parity contact --record wrote"):
        assumptions.of_device("cuda", path)


def test_every_function_of_a_contract_has_an_assumption():
    devices = {"tpu": ["TPU v5p"], "gpu": [H200, "AMD Instinct MI300X"]}
    for op in OPS:
        for case in {(case.dtype, case.out, case.options): case for case in op.cases}.values():
            for backend, kinds in devices.items():
                for kind in kinds:
                    assumptions.on_device(op.contract(case, backend), backend, kind, Path("nowhere"))


def test_the_table_of_a_device_lies_in_the_records_of_its_project(pytestconfig):
    assert matrix.home(GMM) == pytestconfig.rootpath
    assert matrix.home(GMM.with_inputs({})) == pytestconfig.rootpath


def test_what_was_measured_takes_the_place_of_the_assumption(tmp_path):
    path = assumptions.measured_path(tmp_path, "gpu", H200)
    assumptions.keep(path, {"exp": {"ulps": 2.5, "patterns": 2**20}, "log": {"ulps": 9}})
    assumptions.keep(path, {"log": {"ulps": 1}, "minimum keeps NaN": {"holds": True}})
    found = assumptions.of_device("cuda", path)
    assert (found["exp"].ulps, found["exp"].patterns, found["exp"].slope) == (2.5, 2**20, 1.5)
    assert found["minimum keeps NaN"].holds and found["log"].ulps == 1 and found["rsqrt"].ulps == 2


@pytest.mark.full
@pytest.mark.gpu
def test_nothing_is_recorded_of_an_emulated_device(project):
    pytest.importorskip("triton")
    found = project()
    done = found.parity("contact", "--backend", "gpu", "--kind", "probe", "--record")
    assert done.returncode and "--record must be used on a device, got an emulated one" in done.stderr
    assert not (found.folder / "records").exists()
