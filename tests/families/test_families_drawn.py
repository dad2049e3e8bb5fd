"""Cases of sizes that nobody chose, drawn at random from the matrix's: both backends agree with the golden, and every
TPU's compiler takes them.

Such cases showed that no chip took `gmm_quantized` of 200 rows, and that right kernels failed where K^-0.5 is no
float32.
"""

import random
from collections.abc import Iterator
from itertools import islice
from math import prod

import pytest

from parity.compilers.chips import CHIPS
from parity.judging.judge import judge
from parity.op import BACKENDS, Case, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.support import tpu_code
from tests.support.functions import FRAMEWORKS

pytestmark = pytest.mark.full
CASES = 4  # of each op, the same ones every time
CHANGED = 0.6  # the chance of a size to be another one
LARGEST = 2**22  # the product of all sizes
SIZES = {
    "B": (1, 2, 3),
    "T": (1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 100, 129, 200),
    "H": (1, 2, 3),
    "K": (1, 8, 16, 24, 32, 64, 96, 100, 128, 130, 160, 192, 256),
    "V": (8, 16, 32, 40, 64, 100, 128, 130, 192, 256),
    "M": (0, 1, 2, 7, 8, 17, 31, 64, 100, 129, 200, 257, 300, 520),
    "N": (1, 8, 16, 32, 64, 96, 128, 136, 192, 256, 300, 520),
    "G": (1, 2, 3, 5, 8, 16),
    "E": (2, 5, 8, 16),
    "D": (8, 16, 64, 100, 128, 130, 256),
    "F": (16, 40, 64, 128),
    "W": (1, 2, 3, 4, 5),
}
WITHOUT_KERNELS = ("permute", "unpermute", "swizzle_scales")  # they are XLA's


def drawn(op: Op) -> Iterator[Case]:
    """Cases with other sizes and seeds, of which the golden takes the inputs."""
    chance = random.Random(op.name)
    while True:
        base = chance.choice(op.cases)
        sizes = dict(base.dims)
        for name in [name for name in SIZES if name in sizes]:
            if chance.random() < CHANGED:
                sizes[name] = chance.choice(SIZES[name])
        if {"H", "HV"} <= sizes.keys():
            sizes["HV"] = sizes["H"] * chance.choice((1, 2, 3))
        options = {name: [value] for name, value in base.options}
        (case,) = op.grid([sizes], dtype=[(base.dtype, base.out)], data=[base.data], **options)
        case = case.with_seed(chance.randrange(1000))
        if prod(max(size, 1) for size in sizes.values()) <= LARGEST and is_call(op, case):
            yield case


def is_call(op: Op, case: Case) -> bool:
    """Whether the sizes fit each other: blocks divide an axis, packed sequences are of one row."""
    try:
        return bool(Trial(op, case, "tpu").reference.golden)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "backend", [pytest.param(backend, marks=getattr(pytest.mark, backend)) for backend in BACKENDS]
)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_agrees(op, backend):
    pytest.importorskip(FRAMEWORKS[backend])
    judged = {case.id: judge(Trial(op, case, backend)).verdict for case in islice(drawn(op), CASES)}
    # Of a few steps with steep decays the last tile may be next to nothing.
    assert {name: of for name, of in judged.items() if not (of.passed or of.outcome == "MISTRUSTED")} == {}


@tpu_code.needs_compiler
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", [op for op in OPS if op.name not in WITHOUT_KERNELS], ids=lambda op: op.name)
def test_compiles(op, chip):
    tpu_code.compiled([(op, case) for case in islice(drawn(op), CASES)], chip)
