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
FAMILIES = {
    f"{name}.py"
    for name in (
        "gmm", "quantize", "mxfp8", "swizzle", "quantized_gmm", "grouped_gemm", "chunk_scan", "fused_recurrent",
        "simple_gla", "gla", "grouped_dense", "permute", "moe", "chunk_delta_rule", "recurrent_delta_rule",
        "gated_delta_rule", "kda", "gates", "causal_conv1d",
    )
}  # fmt: skip
CONCEPTS = {"cpu_golden.stages"}
"""What parity hands to goldens, whatever they compute."""
FRAMEWORKS = {"jax", "jaxlib", "torch", "triton"}
MODULES_OF_A_FRAMEWORK = {
    "parity/backends/tpu.py", "parity/backends/gpu.py",
    "parity/backends/emulation/mxu.py", "parity/backends/emulation/tensor_core.py",
    "parity/backends/emulation/foreign.py", "parity/backends/emulation/vector_sums.py",
    "parity/backends/emulation/pallas.py",
    "parity/debugging/attribution/tpu.py", "parity/debugging/attribution/tpu_primitives.py",
    "parity/debugging/attribution/gpu.py", "parity/debugging/attribution/gpu_builders.py",
    "parity/debugging/attribution/gpu_frames.py", "parity/debugging/attribution/gpu_lines.py",
    "parity/debugging/attribution/gpu_memory.py", "parity/debugging/attribution/gpu_tensors.py",
    "parity/debugging/attribution/tape.py",
    "parity/contact/tpu.py", "parity/contact/gpu.py",
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


def imported_modules(path: Path) -> set[str]:
    """What a file imports, with its package: `a.b` of `from a.b import c` and of `from a import b`."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = set()
    for node in nodes:
        of = [alias.name for alias in node.names]
        names |= set(of if isinstance(node, ast.Import) else [node.module] if "." in node.module else
                     [f"{node.module}.{name}" for name in of])  # fmt: skip
    return names


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} has no modules"
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_it_may(package):
    for path in files(package):
        assert imported(path) <= MAY_IMPORT[package], path.relative_to(ROOT)


def test_parity_knows_no_op_and_imports_concepts_alone():
    ops = {"gmm", "tgmm"}
    for path in files("parity"):
        assert not imported(path) & {"tests"}, path
        assert {name for name in imported_modules(path) if name.split(".")[0] in KERNEL_PACKAGES} <= CONCEPTS, path
        assert not imported_modules(path) & {f"op_arguments.{Path(name).stem}" for name in FAMILIES}, path
        names = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not names & ops, path


def test_parity_imports_frameworks_only_where_they_are_needed():
    for path in files("parity"):
        name = path.relative_to(ROOT).as_posix()
        if name not in MODULES_OF_A_FRAMEWORK:
            assert not imported(path, at_top=True) & FRAMEWORKS, name


def test_the_kernel_packages_mirror_each_other():
    """One module per family, of the same name in all three; what a package's families share lies in its `_lib/`."""
    own = {"cpu_golden": {"stages.py"}}
    for package in KERNEL_PACKAGES:
        names = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"} - own.get(package, set())
        assert names == FAMILIES, package
        assert {path.name for path in (ROOT / package).iterdir() if path.is_dir()} <= {"_lib", "__pycache__"}, package


def test_an_operation_is_of_one_family_in_all_three_packages():
    from tests.matrix import OPS

    for op in OPS:
        homes = {op.golden.__module__, op.tpu.partition(":")[0], op.gpu.partition(":")[0]}
        assert {home.partition(".")[0] for home in homes} == set(KERNEL_PACKAGES), op.name
        assert len({home.partition(".")[2] for home in homes}) == 1, (op.name, homes)


def test_importing_the_plugin_loads_no_framework():
    code = "import sys, parity.runners.plugin, parity.cli; print(sys.modules.keys() & {'jax', 'torch', 'triton'})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "set()"
