"""The rules of the tests' own house: published interfaces alone, and the same files in every family."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KERNEL_PACKAGES = ("op_arguments", "cpu_golden", "tpu_kernels", "gpu_reference")
KINDS = {"cpu", "tpu", "gpu", "bad_input", "compile_tpu", "compile_gpu", "laws"}
MISSING = {
    ("moe", "compile_tpu"): "matmuls of other families, and XLA; test_moe_expert_parallel_tpu compiles all of it",
    ("moe", "compile_gpu"): "matmuls of other families, and torch",
    ("mxfp8", "cpu"): "test_mxfp8_laws and test_mxfp8_grouped_gemm ask goldens beside both backends",
    ("quantize", "compile_tpu"): "compiled beside the matmuls in test_quantized_gmm_compile_tpu",
    ("quantize", "compile_gpu"): "compiled beside the matmuls in test_quantized_gmm_compile_gpu",
}
"""Files that a family does without, and why."""
PRIVATE = re.compile(r"_(?!_|lib$|asdict$|fields$|make$|replace$)\w+")


def private_names(path: Path) -> set[str]:
    """The private names of kernel packages that a file imports, reads from one of their modules, or names in a string.

    A fault planted in a kernel is source text of it, and may hold any name.
    """
    tree, modules, found = ast.parse(path.read_text()), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in KERNEL_PACKAGES:
            modules |= {alias.asname or alias.name for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names if PRIVATE.fullmatch(alias.name)}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name.split(".")[0] for alias in node.names
                        if alias.name.split(".")[0] in KERNEL_PACKAGES}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and ast.unparse(node.value) in modules:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = re.fullmatch(r"(\w+)[.:][\w.:]+", node.value)
            if name and name[1] in KERNEL_PACKAGES and any(map(PRIVATE.fullmatch, re.split("[.:]", node.value))):
                found.add(node.value)
    return found


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_names_what_is_private_to_a_kernel(path):
    assert private_names(path) == set()


def test_every_family_has_the_same_files():
    """One folder for each module of the matrix, and in it one file for each question; `families` asks all at once."""
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"__pycache__"}
    families = folders - {"families", "matrix", "meta", "support"}
    assert families <= {path.stem for path in (TESTS / "matrix").glob("*.py")}
    lacking = {
        (family, kind)
        for family in families
        for kind in KINDS
        if not (TESTS / family / f"test_{family}_{kind}.py").exists()
    }
    assert lacking == MISSING.keys()
    for family in families | {"families"}:
        strange = [path.name for path in (TESTS / family).iterdir() if path.is_file()
                   and not path.name.startswith(f"test_{family}_")]  # fmt: skip
        assert not strange, f"tests/{family} holds {strange}"
