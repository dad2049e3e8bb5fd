"""Explanations: losses of precision planted in the real kernels are named, faults of logic are not taken for one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from parity import matrix
from parity.cli import main
from parity.explain import contrast, explain, rounded
from parity.judge import judge
from parity.op import Case
from tests.matrix import OPS
from tests.meta.test_faults import FAULTS, PACKAGES, ROOT, load
from tests.meta.test_faults import plant as plant_fault

OP = {op.name: op for op in OPS}


@dataclass(frozen=True)
class Loss:
    """The nth `old` becomes `new` in a module: these roundings are then its error, and no others.

    `sites` as "dtype at site", the output's own dtype left out.
    """

    backend: str
    op: str
    old: str
    new: str
    sites: set[str]
    where: Callable[[Case], bool]
    module: str = "gmm"
    nth: int = 0


def f32(c):
    return c.tier == "smoke" and c.dtype == c.out == "float32"


def bf16(c):
    return c.tier == "smoke" and c.dtype == c.out == "bfloat16"


def plant(loss: Loss, folder):
    file = f"{PACKAGES[loss.backend]}/{loss.module}.py"
    parts = (ROOT / file).read_text().split(loss.old)
    assert len(parts) > loss.nth + 1, f"{loss.old!r} must occur in {file}"
    source = loss.old.join(parts[: loss.nth + 1]) + loss.new + loss.old.join(parts[loss.nth + 1 :])
    path = folder / f"planted_{loss.backend}.py"
    path.write_text(source)
    return getattr(load(path, path.stem), loss.op)


HIGHEST = "precision = lax.Precision.HIGHEST if"
TPU_DOT = "    return lax.dot_general(a, b, axes, precision"
IEEE = 'tl.dot(a, b, sums, input_precision="ieee")'


def of_tpu(name, old, new, sites, where=f32):
    return Loss("tpu", name, old, new, sites, where)


def of_gpu(name, old, new, sites, where=f32):
    return Loss("gpu", name, old, new, sites, where, nth=("gmm", "tgmm").index(name) if old == IEEE else 0)


LOSSES = [
    loss
    for name in ("gmm", "tgmm")
    for loss in (
        of_tpu(name, HIGHEST, "precision = lax.Precision.DEFAULT if", {"bfloat16 at lhs", "bfloat16 at rhs"}),
        of_tpu(name, HIGHEST, "precision = lax.Precision.HIGH if", {"bf16x3 at dot"}),
        of_tpu(name, TPU_DOT, f"    a = a.astype(jnp.bfloat16).astype(a.dtype)\n{TPU_DOT}", {"bfloat16 at lhs"}),
        of_tpu(name, TPU_DOT, f"    b = lax.reduce_precision(b, 8, 10)\n{TPU_DOT}", {"tf32 at rhs"}),
        of_gpu(name, IEEE, IEEE.replace("ieee", "tf32"), {"tf32 cut at lhs", "tf32 cut at rhs"}),
        of_gpu(name, IEEE, IEEE.replace("(a, b,", "(a.to(tl.bfloat16).to(a.dtype), b,"), {"bfloat16 at lhs"}),
        of_gpu(name, IEEE, f"{IEEE}.to(tl.bfloat16).to(tl.float32)", {"bfloat16 at acc"}),
    )
] + [
    of_tpu("gmm", "result = sums.astype(out.dtype)",
           "result = lax.reduce_precision(sums, 8, 10).astype(out.dtype)", {"tf32 at out"}, bf16),
    of_tpu("tgmm", "out[...] = total.astype(out.dtype)",
           "out[...] = lax.reduce_precision(total, 8, 10).astype(out.dtype)", {"tf32 at out"}, bf16),
]  # fmt: skip


def name_of(loss):
    return f"{loss.backend}-{loss.op}-{' and '.join(sorted(loss.sites))}"


@pytest.mark.parametrize(
    "loss", [pytest.param(loss, id=name_of(loss), marks=getattr(pytest.mark, loss.backend)) for loss in LOSSES]
)
def test_a_loss_of_precision_is_named(loss, tmp_path):
    pytest.importorskip("jax" if loss.backend == "tpu" else "triton")
    op = OP[loss.op]
    case = next(case for case in op.cases if loss.where(case))
    found = explain(op, case, loss.backend, plant(loss, tmp_path))
    named = {f"{r.dtype} at {r.site}" for r in found.attribution.roundings}
    assert (found.kind, named - {f"{case.out} at out"}) == ("rounding", loss.sites), found.conclusion
    assert found.attribution.explained > 0.9


LOGIC = [
    pytest.param(
        fault, name, id=f"{fault.backend}-{name}-{fault.name}", marks=[getattr(pytest.mark, fault.backend), *tier]
    )
    for fault in FAULTS
    for name in fault.ops
    if not any(word in fault.name for word in ("bfloat16", "rounded", "not masked"))  # precision; and reads beyond
    for tier in ([] if fault.name == "two groups are swapped" else [pytest.mark.full],)
]


@pytest.mark.parametrize(("fault", "name"), LOGIC)
def test_a_fault_of_logic_is_not_taken_for_a_rounding(fault, name, tmp_path):
    pytest.importorskip("jax" if fault.backend == "tpu" else "triton")
    op, kernel = OP[name], getattr(plant_fault(fault, tmp_path), name)
    cases = (case for case in op.cases if case.tier != "full" and fault.where(case))
    case = next(case for case in cases if not judge(op, case, fault.backend, kernel).verdict.passed)
    found = explain(op, case, fault.backend, kernel)
    assert found.kind == "logic", found.conclusion
    assert found.conclusion.startswith("not explained by rounding: a logic fault in axis")


def test_the_worst_bin_of_each_axis_is_named():
    errors = np.ones((4, 6))
    errors[2] = 3.0
    rows = {str(n): np.arange(4)[:, None] == n for n in range(4)}
    columns = {"left": np.arange(6) < 3, "right": np.arange(6) >= 3}
    by_row, by_column = contrast(errors, {"columns": columns, "rows": rows, "all": {"one": np.ones((1, 1), bool)}})
    assert (by_row.axis, by_row.bin, by_row.contrast) == ("rows", "2", 3.0)
    assert by_row.share == 9 / 12
    assert (by_column.axis, by_column.contrast) == ("columns", 1.0)
    assert contrast(np.zeros((4, 6)), {"rows": rows}) == ()


def test_roundings():
    third = np.array([1 / 3, -1 / 3])
    assert rounded(third, "bfloat16 cut").tolist() == [85 / 256, -85 / 256]
    assert rounded(third, "bfloat16").tolist() == [171 / 512, -171 / 512]
    assert np.abs(rounded(third, "bf16x2") - third).max() < 2**-18 / 3
    rest = rounded(third - rounded(third, "bfloat16 cut"), "bfloat16")
    np.testing.assert_array_equal(rounded(third, "rest of bf16"), rest)
    assert np.abs(rounded(third, "pieces of bf16") - third).max() < 2**-16 / 3


@pytest.mark.gpu
def test_the_command(capsys, pytestconfig):
    pytest.importorskip("triton")
    case = next(case.id for case in OP["gmm"].cases if bf16(case))
    assert main(["--root", str(pytestconfig.rootpath), "explain", case, "--backend", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "AGREES" in out and "error = bfloat16 at out, 100% explained" in out and "integer twin: EXACT" in out


def test_a_case_is_found_by_its_id():
    case = next(case for case in OP["tgmm"].cases if case.tier == "smoke")
    assert matrix.find(OPS, case.id) == (OP["tgmm"], case)
    assert matrix.find(OPS, case.with_seed(7).id)[1] == case.with_seed(7)
    assert matrix.find(OPS, case.with_data("integers").id)[1] == case.with_data("integers")
    assert matrix.find(OPS, case.id.removesuffix("-s0"))[1] == case
    with pytest.raises(ValueError, match="case must be the id of a case of the matrix"):
        matrix.find(OPS, "tgmm-M1")
    with pytest.raises(ValueError, match="bit-exact"):
        op = OP["fp8_quantize"]
        explain(op, op.cases[0], "gpu")


@pytest.mark.tpu
def test_what_no_site_has_is_no_loss_where_the_case_passes():
    """Six passes are six roundings of which the golden has none."""
    pytest.importorskip("jax")
    op = OP["tgmm"]
    found = explain(op, next(case for case in op.cases if f32(case)), "tpu")
    assert (found.kind, found.judged.verdict.outcome) == ("noise", "AGREES")
    assert found.conclusion.startswith("error within its bound")
