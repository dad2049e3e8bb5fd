"""Files with damage anywhere: read, or refused in one ValueError; nothing else, and nothing is hung on."""

import random
import shutil
from pathlib import Path

import pytest

from parity import matrix
from parity.compilers.plans import LEDGER
from parity.debugging import replay
from parity.debugging.bisect import Bisector
from parity.debugging.capture import MANIFEST, TENSORS
from parity.ledger import shards
from parity.ledger.read import read, read_all
from parity.ledger.write import left_in_parts, merge
from tests.support.records import RECORD, keep, path_of, write

ROOT = Path(__file__).parents[3]
FILES = 100
"""Files of each round; the default tier has one round, the full tier 20."""
ROUNDS = [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 20))]
TOKENS = [
    b"null", b"true", b"-1", b"1e999", b"9" * 30, b"9" * 5000, b"NaN", b'"', b"{}", b"[" * 3000, b"\x00", b"\xff\xfe",
    b"\x1b[2J", b"<<<<<<< HEAD\n", b"\n", b"\\ud800", b'{"schema":1}', "日本".encode(), b"..", b"/", b"#", b"=", b"[[",
]  # fmt: skip


def damaged(content, chance):
    """The content after one to four injuries."""
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(content) + 1), chance.randrange(40)
        kind = chance.randrange(4)
        piece = [chance.choice(TOKENS), b"", chance.randbytes(length), content[at : at + length] * 2][kind]
        content = content[:at] + piece + content[at + (0 if kind == 3 else length) :]
    return content


def ledger(folder):
    keep(folder, RECORD)
    return path_of(folder), lambda: (read(path_of(folder)), read_all(folder, "gpu"), merge(folder))


def part(folder):
    write(folder, RECORD)
    (path,) = (folder / ".parts").glob("*.jsonl")
    return path, lambda: (left_in_parts(folder), merge(folder))


def dealt(folder):
    shards.note(folder, shards.Shards("a" * 12, 2, 8, {"1": 4}))
    return folder / shards.FILE, lambda: shards.together([folder])


def settings(folder):
    (folder / "pyproject.toml").write_text(
        '[tool.parity]\nmatrix = "tests.matrix"\n[tool.parity.runners]\na = "tpu:v6e"\n'
    )
    return folder / "pyproject.toml", lambda: (matrix.module(folder), matrix.runners(folder))


def plans(folder):
    source = next((ROOT / "records" / "plans").glob("*/*.jsonl"))
    path = folder / LEDGER.path / source.parent.name / source.name
    path.parent.mkdir(parents=True)
    path.write_text("".join(source.read_text().splitlines(keepends=True)[:3]))
    return path, lambda: [str(entry) for entry in LEDGER.read(folder).values()]


def state(folder):
    shutil.copy(ROOT / "pyproject.toml", folder)
    bisector = Bisector(ROOT, "gmm", "tpu", 1, folder)
    answer = '{"outcome": "AGREES", "passed": true, "reason": "η = 0", "outputs": [], "narrow": ["out"]}'
    bisector.state.write_text('{"' + "a" * 40 + f'": {answer}' + "}")
    return bisector.state, bisector.known


def manifest(folder):
    call = '{"version": 1, "op": "gmm", "layer": "", "step": 0, "arguments": {"tiling": [8, 8, 8], "name": "x"}, '
    (folder / MANIFEST).write_text(call + '"defaults": {}, "outputs": {"out": "float32"}, "tensors": {}}')
    (folder / TENSORS).write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder / MANIFEST, lambda: replay.read(folder)


@pytest.mark.parametrize("round", ROUNDS)
def test_a_damaged_file_is_read_or_refused_in_one_error(round, tmp_path):
    chance = random.Random(round)
    kinds = [ledger, part, dealt, settings, plans, state, manifest]
    refused = 0
    for n in range(FILES):
        folder = tmp_path / str(n)
        folder.mkdir()
        path, reading = kinds[n % len(kinds)](folder)
        reading()  # as it was it can be read
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # a part that has been folded in
            write(folder, RECORD)
            (path,) = (folder / ".parts").glob("*.jsonl")
        path.write_bytes(damaged(path.read_bytes(), chance))
        try:
            reading()
        except ValueError as error:
            refused += 1
            assert len(str(error)) < 3000
    assert refused > FILES / 3
