"""A kernel is its code: what changes neither that nor what it reaches changes no hash, and no fault planted in it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mutation.tokens import normal, occurrences
from parity.ledger import sources
from tests.matrix import OPS

ROOT = Path(__file__).parents[3]

KERNEL = '''"""A kernel."""

from some_kernels._lib import shapes
from some_kernels._lib.tiles import BLOCK, blocks


def kernel(x, *, scale=1.0):
    """Its docstring."""
    total = scale * x.sum()  # a comment
    if x.size > BLOCK:
        total += blocks(x, shapes.padded(x.size))
    return f"{total:.3f}" "," if total else None


def unreached(x):
    return x
'''
TILES = "BLOCK = 128\n\n\ndef blocks(x, size):\n    return sum(x[i : i + BLOCK] for i in range(0, size, BLOCK))\n"
SHAPES = "from some_arguments import LANES\n\n\ndef padded(size):\n    return -(-size // LANES) * LANES\n"
FILES = {
    "some_kernels/__init__.py": "",
    "some_kernels/op.py": KERNEL,
    "some_kernels/_lib/__init__.py": "",
    "some_kernels/_lib/tiles.py": TILES,
    "some_kernels/_lib/shapes.py": SHAPES,
    "some_arguments/__init__.py": "LANES = 128\n",
}
REFORMATTED = """
from some_kernels._lib.tiles import (
  blocks,
  BLOCK,
)
import some_kernels._lib.shapes as shapes


def kernel(
  x,
  *,
  scale=1.0,
):
  # another comment
  total = (
    scale
    * x.sum()
  )
  if x.size > BLOCK: total += blocks(x, shapes.padded(x.size),)

  return f'{total:.3f}' ',' if total else None
"""


@pytest.fixture
def hash_with(tmp_path, monkeypatch):
    """The hash of the kernel where these files are otherwise, or (None) gone."""
    monkeypatch.syspath_prepend(tmp_path)

    def identity(**changed):
        for path, text in (FILES | changed).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).unlink(missing_ok=True)
            if text is not None:
                (tmp_path / path).write_text(text)
        sources.forget()
        return sources.identity("some_kernels.op:kernel")

    yield lambda changed: identity(**changed)
    sources.forget()


IN_ONE_FILE = KERNEL.replace("from some_kernels._lib.tiles import BLOCK, blocks\n", "") + "\n\n" + TILES
SAME = {
    "a comment": {"some_kernels/_lib/tiles.py": TILES.replace("128", "128  # lanes")},
    "a docstring": {"some_kernels/_lib/tiles.py": TILES.replace("size):\n", 'size):\n    """Sums."""\n')},
    "reformatted": {"some_kernels/op.py": REFORMATTED},
    "a file is renamed": {
        "some_kernels/_lib/tiles.py": None,
        "some_kernels/_lib/blocks.py": TILES,
        "some_kernels/op.py": KERNEL.replace("_lib.tiles", "_lib.blocks"),
    },
    "a helper is moved": {
        "some_kernels/_lib/shapes.py": "",
        "some_kernels/_lib/tiles.py": f"{TILES}\n\n{SHAPES}",
        "some_kernels/op.py": KERNEL.replace("import shapes", "import tiles").replace("shapes.padded", "tiles.padded"),
    },
    "all in one file": {"some_kernels/_lib/tiles.py": None, "some_kernels/op.py": IN_ONE_FILE},
    "imported under another name": {
        "some_kernels/op.py": KERNEL.replace("BLOCK, blocks", "BLOCK as B, blocks as sums")
        .replace("> BLOCK", "> B").replace("blocks(x", "sums(x"),
    },
    "what is not reached": {"some_kernels/op.py": KERNEL.replace("    return x\n", "    return 2 * x\n")},
}  # fmt: skip
OTHER = {
    "an operator": {"some_kernels/op.py": KERNEL.replace("scale * x", "scale + x")},
    "a helper's operator": {"some_kernels/_lib/tiles.py": TILES.replace("i + BLOCK", "i - BLOCK")},
    "a helper's constant": {"some_kernels/_lib/tiles.py": TILES.replace("128", "256")},
    "another package's constant": {"some_arguments/__init__.py": "LANES = 8\n"},
    "a default": {"some_kernels/op.py": KERNEL.replace("scale=1.0", "scale=2.0")},
    "another import": {"some_kernels/_lib/shapes.py": SHAPES.replace("some_arguments", "math").replace("LANES", "tau")},
    "the text of an f-string": {"some_kernels/op.py": KERNEL.replace(":.3f", ":.4f")},
    "indentation": {"some_kernels/op.py": KERNEL.replace("        total += ", "    total += ").replace(
        "        total", "        pass\n    total").replace("BLOCK:\n", "BLOCK:\n        pass\n")},
    "a registration": {"some_kernels/_lib/tiles.py": f"{TILES}\n\nregister(blocks)\n"},
}  # fmt: skip


@pytest.mark.parametrize("changed", SAME.values(), ids=SAME)
def test_what_does_not_change_the_code_does_not_change_its_hash(hash_with, changed):
    assert hash_with({}) == hash_with(changed)


@pytest.mark.parametrize("changed", OTHER.values(), ids=OTHER)
def test_what_changes_the_code_changes_its_hash(hash_with, changed):
    assert hash_with({}) != hash_with(changed)


def test_of_a_module_that_is_handed_around_everything_counts(hash_with):
    handed = {"some_kernels/op.py": KERNEL.replace("shapes.padded(x.size)", "getattr(shapes, 'padded')(x.size)")}
    before = hash_with(handed)
    more = {"some_kernels/_lib/shapes.py": f"{SHAPES}\n\ndef other():\n    pass\n"}
    assert hash_with(handed | more) != before


def test_modules_that_import_a_name_of_each_other_are_read(hash_with):
    lines = {
        "tiles": "from some_kernels._lib.shapes import padded\n",
        "shapes": "from some_kernels._lib.tiles import padded\n",
    }
    circle = {f"some_kernels/_lib/{name}.py": f"{line}{TILES}" for name, line in lines.items()}
    more = {path: f"{text}\n\ndef other():\n    pass\n" for path, text in circle.items()}
    assert hash_with(circle) != hash_with(more)


def test_names_of_a_function_are_not_its_modules(hash_with):
    local = {"some_kernels/op.py": KERNEL.replace("total", "unreached")}
    changed = {"some_kernels/op.py": local["some_kernels/op.py"].replace("    return x\n", "    return 2 * x\n")}
    assert hash_with(local) == hash_with(changed)


def test_a_missing_module_or_function_is_said(hash_with):
    hash_with({})
    with pytest.raises(ModuleNotFoundError, match=r"some_kernels\.none"):
        sources.identity("some_kernels.none:kernel")
    with pytest.raises(AttributeError, match="must define 'none'"):
        sources.identity("some_kernels.op:none")
    assert "some_kernels.op" not in sys.modules


def test_all_kernels_of_the_matrix_are_read_within_a_second():
    sources.forget()
    began = time.process_time()
    found = {getattr(op, backend): sources.identity(getattr(op, backend)) for op in OPS for backend in ("tpu", "gpu")}
    assert len({*found.values()}) == len(found)
    assert time.process_time() - began < 3, "a second is usual"


OTHERS = [path for path in (Path.home() / ".pyenv/versions").glob("3.1[123]*/bin/python") if path.exists()]
HASH = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("sources", sys.argv[1])
sources = importlib.util.module_from_spec(spec)
sys.modules["sources"] = sources
spec.loader.exec_module(sources)
sources.version_of = lambda package: "" if package in json.loads(sys.argv[3]) else None
print(json.dumps([sources.identity(target) for target in json.loads(sys.argv[2])]))
"""


@pytest.mark.full
@pytest.mark.skipif(not OTHERS, reason="needs another Python")
def test_every_python_says_the_same():
    targets = sorted(getattr(op, backend) for op in OPS for backend in ("tpu", "gpu"))
    foreign = [*sys.stdlib_module_names, "jax", "numpy", "torch", "triton", "ml_dtypes"]
    command = ["-c", HASH, sources.__file__, json.dumps(targets), json.dumps(foreign)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = {
        subprocess.run([python, *command], env=environment, capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, *OTHERS)
    }
    assert len(said) == 1


def test_tokens_are_the_same_whatever_the_layout():
    code = "total = scale * f(x,\n    [1, 2,],  # a comment\n)\n"
    assert normal(code) == normal("total = scale*f(x, [1,2])") == "total = scale * f(x, [1, 2])"
    assert normal('x = """a # b"""  # c') == 'x = """a # b"""'
    assert [tokens[0].start for tokens in occurrences("f ( x", code)] == [code.index("f(x")]
    assert not [*occurrences("f(y", code)] and not [*occurrences("total = scale\n", code)]
