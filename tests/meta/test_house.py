"""The rules of the tests' own house: published interfaces alone, and the same files in every family."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KERNEL_PACKAGES = ("op_arguments", "cpu_golden", "tpu_kernels", "gpu_reference")
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
