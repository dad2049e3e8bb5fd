"""Reductions: the verdict stays, what is left is small and the same every time, and the script shows the failure."""

import importlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from cpu_golden.stages import exact
from parity.backends import runner
from parity.debugging.shrink import Shrunk, minimise, script, shrink
from parity.dtypes import round_to
from parity.inputs import draw
from parity.interop import to_numpy
from parity.judging.judge import judge
from parity.judging.reference import reference
from parity.op import Array, Contract, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import ROOT, Fault, places, plant
from tests.meta.faults.test_faults import FAULTS

OP = {op.name: op for op in OPS}
GMM = OP["gmm"]


def smoke(op, **wanted):
    """The first case of the smoke tier with these dtypes and options."""
    return next(c for c in op.cases if c.tier == "smoke" and all(getattr(c, n) == v for n, v in wanted.items()))


def fault(name, backend, op):
    return next(f for f in FAULTS if (f.name, f.backend) == (name, backend) and op in f.ops)


def importable(planted, op_name, folder):
    """The name of a module in `folder` that has an op's kernel with a fault that was planted there."""
    target = getattr(OP[op_name], planted.backend)
    (place,) = places(target, planted.old, planted.within)
    path = folder / f"planted_{planted.backend}.py"
    (folder / "planted.py").write_text(
        f"import sys\nfrom importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location({place.module!r}, {str(path)!r})\n"
        f"sys.modules[spec.name] = module_from_spec(spec)\nspec.loader.exec_module(sys.modules[spec.name])\n"
        f"from {target.partition(':')[0]} import {op_name}\n"
    )
    return "planted"


def run_alone(text, folder):
    """Run a script where kernels can be imported, from `folder` first, and parity only where the script emulates."""
    if "from parity.backends.emulation" not in text:
        (folder / "sitecustomize.py").write_text("import sys\nsys.modules['parity'] = None\n")
    path = folder / "repro.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, cwd=folder, env=environment
    )


# fault, backend, op, the case to start from, what is left of its sizes
PLANTED = [
    ("the accumulator is bfloat16", "tpu", "tgmm", dict(dtype="float32"), (1, 1, 1, 1)),
    ("two groups are swapped", "gpu", "tgmm", dict(dtype="bfloat16"), (1, 1, 1, 2)),
    ("a partial K tile is dropped", "tpu", "gmm", dict(dtype="float32", transpose_rhs=False), (1, 129, 1, 1)),
    # Of one column and of two, drawn anew, no sum of 128 products is rounded to another one.
    ("the accumulator is bfloat16", "gpu", "gmm", dict(dtype="bfloat16", transpose_rhs=False), (1, 129, 3, 1)),
]


@pytest.mark.parametrize(
    ("name", "backend", "op_name", "wanted", "left"),
    [
        pytest.param(*planted, id="-".join(planted[1:3]), marks=[getattr(pytest.mark, planted[1]), pytest.mark.full])
        for planted in PLANTED
    ],
)
def test_a_planted_fault_is_reduced_and_its_script_shows_it(
    name, backend, op_name, wanted, left, tmp_path, monkeypatch
):
    op, case = OP[op_name], smoke(OP[op_name], groups="zipf", **wanted)
    planted = fault(name, backend, op_name)
    trial = Trial(op, case, backend, getattr(plant(planted, tmp_path), op_name))
    found = shrink(trial)
    before = judge(trial).verdict
    assert found.failure == (before.outcome, before.gate)
    assert found.judged.verdict.outcome == before.outcome
    assert found.is_minimal
    assert tuple(size for _, size in found.case.dims) == left
    assert sum(int((x != 0).sum()) for x in found.inputs.values() if x is not None) <= 5

    monkeypatch.syspath_prepend(tmp_path)
    module = importable(planted, op_name, tmp_path)
    text = script(trial, found, target=f"{module}:{op_name}")
    assert len(text.splitlines()) <= 31
    broken = run_alone(text, tmp_path)
    assert broken.returncode == 1, broken.stderr
    assert broken.stdout.startswith("got ")
    package = getattr(op, backend).partition(":")[0]
    healthy = run_alone(text.replace(f"from {module} import", f"from {package} import"), tmp_path)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr


@pytest.mark.full
@pytest.mark.tpu
def test_a_script_emulates_where_the_matrix_unit_loses(tmp_path, monkeypatch):
    if runner("tpu").real:
        pytest.skip("a TPU's matrix unit needs no emulation")
    one_pass = Fault("", "tpu", ("tgmm",), "lax.Precision.HIGHEST if", "lax.Precision.DEFAULT if")
    kernel = plant(one_pass, tmp_path).tgmm
    found = shrink(Trial(OP["tgmm"], smoke(OP["tgmm"], groups="zipf", dtype="float32"), "tpu", kernel))
    assert found.failure == ("OUT OF BOUND", "G3")
    monkeypatch.syspath_prepend(tmp_path)
    module = importable(one_pass, "tgmm", tmp_path)
    text = script(Trial(OP["tgmm"], found.case, "tpu", kernel), found, target=f"{module}:tgmm")
    assert "from parity.backends.emulation.mxu import emulated" in text


SPOILT = """
import inspect
import {module} as module
import jax.numpy as jnp
import ml_dtypes
import numpy as np
runs = 0

def kernel(**arguments):
    global runs
    runs += 1
    golden, dtypes = module.{name}, {dtypes}
    known = inspect.signature(golden).parameters
    result = golden(**{{n: np.asarray(x) if hasattr(x, "shape") else x for n, x in arguments.items() if n in known}})
    fields = result._asdict() if hasattr(result, "_asdict") else dict(out=result)
    outputs = {{n: np.array(fields[n]).astype(getattr(ml_dtypes, dtypes[n], dtypes[n])) for n in dtypes}}
    last = outputs[list(dtypes)[-1]].reshape(-1)
    {spoil}
    arrays = {{n: jnp.asarray(x) for n, x in outputs.items()}}
    return type(result)(**{{**fields, **arrays}}) if hasattr(result, "_asdict") else arrays["out"]
"""
"""A golden as a kernel of JAX arrays that spoils the last of its outputs: what a script says of it is in no time."""

WRONG_ELEMENT = "last[-1] = 2 if last[-1] != 2 else 1"
SPOILING = [
    *(
        pytest.param(op, WRONG_ELEMENT, outcome, id=op, marks=marks)
        for op, outcome, *marks in [
            ("fp8_dual_quantize", "OTHER BITS"),
            ("mxfp8_quantize", "OTHER BITS", pytest.mark.full),
            ("swizzle_scales", "OTHER BITS", pytest.mark.full),
            ("permute", "OTHER BITS", pytest.mark.full),
            ("tgmm_quantized", "LOGIC FAULT", pytest.mark.full),
            ("grouped_gemm", "LOGIC FAULT", pytest.mark.full),
            ("grouped_dense_bwd", "LOGIC FAULT", pytest.mark.full),
            ("moe_layer_bwd", "LOGIC FAULT", pytest.mark.full),
            ("chunk_simple_gla_bwd", "LOGIC FAULT", pytest.mark.full),
            ("fused_recurrent_gla_bwd", "LOGIC FAULT", pytest.mark.full),
        ]
    ),
    pytest.param("fp8_dequantize", "last[last == 0] = -0.0", "OTHER BITS", id="zero", marks=pytest.mark.full),
    pytest.param("fp8_quantize", "last[-1] = runs % 2", "NOT REPEATABLE", id="repetition", marks=pytest.mark.full),
    pytest.param(
        "fp8_quantize", "del outputs[list(dtypes)[-1]]; fields['scale'] = None", "WRONG OUTPUTS", id="outputs",
        marks=pytest.mark.full,
    ),
    pytest.param("moe_layer_bwd", "outputs['x'] = outputs['x'][:, :-1]", "WRONG SHAPE", id="shape",
                 marks=pytest.mark.full),
]  # fmt: skip


@pytest.fixture
def spoilt(tmp_path, monkeypatch):
    """An op's golden as a kernel, spoilt; importable as `spoilt`, and as `right` without that."""

    def kernel(op, case, spoil):
        golden, contract = reference(op, case).golden, None if op.bit_exact else op.contract(case, "tpu")
        dtypes = {n: contract.dtype(n) if contract else str(x.dtype) for n, x in golden.items()}
        module = {"module": op.golden.__module__, "name": op.golden.__name__, "dtypes": dtypes}
        (tmp_path / "spoilt.py").write_text(SPOILT.format(**module, spoil=spoil))
        (tmp_path / "right.py").write_text(SPOILT.format(**module, spoil=""))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "spoilt", raising=False)
        return importlib.import_module("spoilt").kernel

    return kernel


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "spoil", "outcome"), SPOILING)
def test_a_script_shows_what_is_wrong_with_any_op(name, spoil, outcome, tmp_path, spoilt):
    """Several outputs, numbers of every format, results that are exactly defined, and what is wrong with no element."""
    op = OP[name]
    case = next((c for c in op.cases if c.tier == "smoke"), op.cases[0])
    found = shrink(Trial(op, case, "tpu", spoilt(op, case, spoil)))
    assert found.failure.outcome == outcome
    text = script(Trial(op, found.case, "tpu"), found, target="spoilt:kernel")
    assert len(text.splitlines()) <= 30
    broken = run_alone(text, tmp_path)
    assert (broken.returncode, broken.stdout[:4]) == (1, "got "), broken.stderr
    healthy = run_alone(text.replace("from spoilt import", "from right import"), tmp_path)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr


def keyed(x, stages=exact):
    x = x.astype(np.float64)
    return {"half": stages("half", x / 2), "result": stages("result", x + 1)}


KEYED = Op(
    "keyed",
    golden=keyed,
    tpu="keyed:kernel",
    gpu="",
    inputs=lambda case: {"x": Array((case.M,), "float32")},
    contract=lambda case, backend: Contract(sites={"half": "float32", "result": "float32"}),
    twin=False,
)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("returned", "outcome"),
    [('"half": x / 2, "result": x + 2', "OUT OF BOUND"), ('"half": x / 2, "result": None', "WRONG OUTPUTS")],
    ids=["wrong", "missing"],
)
def test_a_script_shows_an_output_of_a_dict(returned, outcome, tmp_path, monkeypatch):
    (tmp_path / "keyed.py").write_text(f"def kernel(x):\n    return {{{returned}}}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keyed", raising=False)
    op = KEYED.with_cases(KEYED.grid([dict(M=8)], dtype=["float32"]))
    found = shrink(Trial(op, op.cases[0], "tpu"))
    assert found.failure.outcome == outcome
    text = script(Trial(op, found.case, "tpu"), found)
    broken = run_alone(text, tmp_path)
    assert (broken.returncode, broken.stdout[:4]) == (1, "got "), broken.stderr
    (tmp_path / "keyed.py").write_text('def kernel(x):\n    return {"half": x / 2, "result": x + 1}\n')
    healthy = run_alone(text, tmp_path)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr


@pytest.mark.tpu
def test_of_nans_that_differ_a_script_shows_the_bits(spoilt):
    op = OP["fp8_quantize"]
    case = next(c for c in op.cases if c.tier == "smoke")
    x = np.zeros_like(draw(op, case)["x"])
    x[3, 5] = np.nan
    trial = Trial(op, case, "tpu", spoilt(op, case, "outputs['qvalue'].view(np.uint8)[3, 5] ^= 0x80"), {"x": x})
    judged = judge(trial)
    text = script(trial, Shrunk(case, {"x": x}, ("OTHER BITS", "G2"), judged, 1), target="spoilt:kernel")
    assert "np.asarray(result.qvalue[3, 5]).tobytes().hex()" in text and "got == '7f'" in text


def test_a_mistrusted_case_has_no_script():
    judged = SimpleNamespace(verdict=SimpleNamespace(outcome="MISTRUSTED"))
    with pytest.raises(ValueError, match="MISTRUSTED is said of a case whose contract allows too much for its data"):
        script(Trial(GMM, EXISTING, "tpu", GMM.golden), Shrunk(EXISTING, {}, ("MISTRUSTED", "G3"), judged, 1))


def golden_but(spoil):
    """gmm's golden in the dtype of the contract, with something done to the arrays or the result."""

    def kernel(preferred_element_type, tiling, **arguments):
        tensors = {name: to_numpy(x) for name, x in arguments.items() if hasattr(x, "shape")}
        out = round_to(GMM.golden(**arguments | tensors), preferred_element_type)
        return spoil(out, tensors, arguments)

    return kernel


def zero_a_corner(out, tensors, arguments):
    """What lies beyond row 20 and column 33 of tall enough lhs is lost, unless rhs is transposed."""
    if not arguments["transpose_rhs"]:
        out[20:, 33:] = 0
    return out


def raise_for_three_groups(out, tensors, arguments):
    if len(tensors["group_sizes"]) >= 3:
        raise RuntimeError(f"no memory for {out.nbytes} bytes")
    return out


EXISTING = next(c for c in GMM.cases if c.existing_out and c.dtype == "float32" and c.M == 300)


def reduced(backend):
    """The steps of a reduction, and what it found."""
    steps = []
    return steps, shrink(Trial(GMM, EXISTING, backend, golden_but(zero_a_corner)), steps.append)


reduced_once = cache(reduced)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("tpu", marks=pytest.mark.tpu), pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.full])],
)
def test_sizes_options_and_data_are_reduced_under_one_verdict(backend):
    steps, found = reduced_once(backend)
    assert found.case.id == "gmm-M21_K1_N34_G1-f32-zipf-s0"
    assert "existing_out True → False" in steps
    assert {name: int((x != 0).sum()) for name, x in found.inputs.items() if x is not None} == {
        "lhs": 1, "rhs": 1, "group_sizes": 1,
    }  # fmt: skip
    assert found.inputs["lhs"][20, 0] != 0
    assert found.inputs["rhs"][0, 0, 33] != 0
    assert found.judged.worst.index == (20, 33)


@pytest.mark.gpu
def test_an_interpreted_kernel_that_dies_takes_nothing_with_it():
    if runner("gpu").real:
        pytest.skip("a GPU's kernel does not run in this process")

    def die(out, tensors, arguments):
        if len(tensors["group_sizes"]) >= 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        return out

    found = shrink(Trial(GMM, EXISTING, "gpu", golden_but(die)))
    assert found.failure == ("CRASH", "signal 11")
    assert found.case.dims == (("M", 1), ("K", 1), ("N", 1), ("G", 3))


@pytest.mark.full
def test_a_reduction_is_the_same_every_time():
    pytest.importorskip("jax")
    (first, one), (second, other) = reduced_once("tpu"), reduced("tpu")
    assert (first, one.case, one.runs) == (second, other.case, other.runs)
    assert all(x is None or x.tobytes() == other.inputs[name].tobytes() for name, x in one.inputs.items())


def test_a_fault_of_integer_data_stays_one():
    pytest.importorskip("jax")
    found = shrink(Trial(GMM, EXISTING.with_data("integers"), "tpu", golden_but(zero_a_corner)))
    assert found.failure == ("LOGIC FAULT", "G2")
    assert "integers" in found.case.id


def test_an_exception_is_a_failure_whatever_numbers_it_names():
    pytest.importorskip("jax")
    found = shrink(Trial(GMM, EXISTING, "tpu", golden_but(raise_for_three_groups)))
    assert found.failure == ("CRASH", "RuntimeError: no memory for # bytes")
    assert found.case.dims == (("M", 1), ("K", 1), ("N", 1), ("G", 3))
    assert found.judged is None


@pytest.mark.full
def test_what_the_operation_refuses_is_no_step():
    pytest.importorskip("jax")

    def golden(**arguments):
        if arguments["lhs"].shape[1] % 8:
            raise ValueError("K must be a multiple of 8")
        return GMM.golden(**arguments)

    picky = replace(GMM, golden=golden)
    found = shrink(Trial(picky, EXISTING, "tpu", golden_but(zero_a_corner)))
    assert found.case.K == 8


def test_a_case_that_passes_is_refused():
    pytest.importorskip("jax")
    with pytest.raises(ValueError, match=r"case must fail on tpu to be reduced, got gmm-.*, which passes"):
        shrink(Trial(GMM, EXISTING, "tpu", golden_but(lambda out, tensors, arguments: out)))


@pytest.mark.parametrize("needed", [set(), {3}, {0, 17, 18}, {5, 40, 99}])
def test_minimise_finds_what_is_needed(needed):
    assert set(minimise(range(100), lambda some: needed <= set(some))) == needed


@pytest.mark.tpu
def test_the_command_prints_steps_smallest_case_and_script(project, tmp_path):
    run, out = project("bad"), tmp_path / "repro.py"
    done = run.parity("shrink", "double-M8_N40-f32-s0", "--out", str(out))
    assert done.returncode == 1, done.stderr
    assert "smallest case: double-M6_N8-f32-s0" in done.stdout
    # Elsewhere, and where another kernel of that name would be imported first.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kernels.py").write_text("def bad(x):\n    return x + x\n")
    broken = run_alone(out.read_text(), tmp_path / "elsewhere")
    assert (broken.returncode, broken.stdout[:8]) == (1, "got 0.0 "), broken.stderr
