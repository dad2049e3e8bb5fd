"""The import rules of the house: who may know whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL_PACKAGES = ("cpu_golden", "tpu_kernels", "gpu_reference")
MAY_IMPORT = {
    "op_arguments": {"op_arguments"},
    "cpu_golden": {"cpu_golden", "op_arguments", "numpy", "ml_dtypes"},
    "tpu_kernels": {"tpu_kernels", "op_arguments", "jax", "numpy"},
    "gpu_reference": {"gpu_reference", "op_arguments", "torch", "triton"},
}
FRAMEWORKS = {"jax", "jaxlib", "torch", "triton"}
MODULES_OF_A_FRAMEWORK = {
    "parity/backends/tpu.py", "parity/backends/gpu.py",
    "parity/backends/emulation/mxu.py", "parity/backends/emulation/tensor_core.py",
    "parity/debugging/attribution/tpu.py", "parity/debugging/attribution/gpu.py",
}  # fmt: skip


def imported(path: Path, *, at_top: bool = False) -> set[str]:
    """Top-level names of the modules that a file imports; `at_top`: only when it is imported itself."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who is imported"
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} has no modules"
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_it_may(package):
    for path in files(package):
        assert imported(path) <= MAY_IMPORT[package], path.relative_to(ROOT)


def test_parity_knows_no_kernel_package_and_no_op():
    ops = {"gmm", "tgmm"}
    for path in files("parity"):
        assert not imported(path) & {*KERNEL_PACKAGES, "tests"}, path
        names = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not names & ops, path


def test_parity_imports_frameworks_only_where_they_are_needed():
    for path in files("parity"):
        name = path.relative_to(ROOT).as_posix()
        if name not in MODULES_OF_A_FRAMEWORK:
            assert not imported(path, at_top=True) & FRAMEWORKS, name


def test_the_kernel_packages_mirror_each_other():
    """In what they offer; what their kernels share lies in `_lib/`. Of families on their way to files of their own,
    some are there already."""
    on_their_way = {"hardware.py", "grouped_gemm.py"}
    goldens, *others = (
        {p.relative_to(ROOT / package).as_posix() for p in files(package) if p.parent.name != "_lib"}
        for package in KERNEL_PACKAGES
    )
    for package, names in zip(KERNEL_PACKAGES[1:], others, strict=True):
        assert names - goldens <= on_their_way, package
        assert goldens - on_their_way <= names, package


def test_importing_the_plugin_loads_no_framework():
    code = "import sys, parity.runners.plugin, parity.cli; print(sys.modules.keys() & {'jax', 'torch', 'triton'})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "set()"
