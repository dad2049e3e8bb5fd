"""The rules of the tests' own house: published interfaces alone, and the same files in every family."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.commands import run_pytest

TESTS = Path(__file__).parents[1]
PACKAGES = ("op_arguments", "cpu_golden", "tpu_kernels", "gpu_reference", "parity", "mutation")
SETTERS = ("getattr", "setattr", "delattr")
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
OF_OTHERS = {"_exit", "_cache_size", "_interpreter"}
"""What Python, JAX and Triton call so, and have under no other name."""
LEFT = {
    "meta/judging/test_golden_cache.py": {
        "cache._store", "cache._root", "goldens._sources", "parity.judging.reference._truth",
    },
}  # fmt: skip
"""Private names that tests still use: what they list, forbid, or put something simpler in the place of."""


def private_names(path: Path) -> set[str]:
    """The private names that a file imports from our packages, reads or sets on anything but `self`, or spells out.

    A fault planted in a kernel is source text of it, and may hold any name.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in PACKAGES:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if PRIVATE.fullmatch(alias.name)}
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in OF_OTHERS:
            found |= {ast.unparse(node)} if ast.unparse(node.value) != "self" else set()
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SETTERS:
            named = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            named = {str(name) for name in named} - OF_OTHERS
            found |= {f"{ast.unparse(node.args[0])}.{name}" for name in named if PRIVATE.fullmatch(name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = re.fullmatch(r"(\w+)[.:][\w.:]+", node.value)
            if name and name[1] in PACKAGES and any(map(PRIVATE.fullmatch, re.split("[.:]", node.value))):
                found.add(node.value)
    return found


@pytest.mark.parametrize(
    "path", sorted({*TESTS.rglob("*.py")} - {Path(__file__)}), ids=lambda path: path.relative_to(TESTS).as_posix()
)
def test_no_test_names_what_is_private(path):
    assert private_names(path) == LEFT.get(path.relative_to(TESTS).as_posix(), set())


def test_no_option_of_this_pytest_reaches_one_that_a_test_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    (tmp_path / "test_environment.py").write_text("import os\ndef test(): assert 'PYTEST_ADDOPTS' not in os.environ\n")
    assert run_pytest(tmp_path, "-q").returncode == 0


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
