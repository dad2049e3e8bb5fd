"""gmm and tgmm through the real TPU compiler, for every chip: they compile, with the dot passes of their contract."""

import pytest

from tests.matrix.gmm import GMM, TGMM
from tests.matrix.models import DEEPSEEK_V3, GPT_OSS_120B
from tests.matrix.ops import BF16, F16, F32
from tests.support import tpu_code
from tests.support.calls import point

pytestmark = tpu_code.needs_compiler

PROGRAM_LIMIT = 300  # KB on tpu7x for bfloat16, group metadata included; public kernels need about 950
SMALL = dict(M=300, K=200, N=256)
UNALIGNED = dict(M=257, K=600, N=300, G=3, shard=(0, 5))


def call(op, dtype, **settings):
    return op, point(op, dtype, **dict(M=8192, K=2048, N=512, G=8) | settings)


def model(op, experts, groups, **settings):
    shard = (0, experts.experts)
    return call(op, BF16, K=experts.hidden, N=experts.intermediate, G=groups, shard=shard, **settings)


# On part of a tile the compiler may do without the matrix unit, or let two passes share one.
ONE_COLUMN = call(GMM, BF16, M=5, K=300, N=1, transpose_rhs=True)
PARTIAL = [ONE_COLUMN, *(call(op, F32, **UNALIGNED) for op in (GMM, TGMM))]
# KB of programs with tiles that HBM is read less for
TRANSPOSED, WEIGHTS = model(GMM, DEEPSEEK_V3, 32, transpose_rhs=True), model(TGMM, GPT_OSS_120B, 16)
LARGER = {TRANSPOSED[1].id: 450, WEIGHTS[1].id: 460}

REPRESENTATIVE = [
    call(GMM, BF16),
    call(GMM, F32, transpose_rhs=True, existing_out=True),
    call(GMM, F32, **UNALIGNED),
    call(TGMM, BF16),
    call(TGMM, F16, **SMALL),
]
EVERYTHING = [
    *REPRESENTATIVE,
    *PARTIAL,
    TRANSPOSED,
    WEIGHTS,
    call(GMM, F16, **SMALL),
    model(GMM, GPT_OSS_120B, 16, existing_out=True),
    call(TGMM, F32, existing_out=True),
    model(TGMM, DEEPSEEK_V3, 32, existing_out=True),
    call(TGMM, BF16, M=1, K=1, N=1),
]


@tpu_code.some_then_all("tpu7x", REPRESENTATIVE, EVERYTHING)
def test_compiles(chip, calls):
    kilobytes = {}
    for op, case, result in tpu_code.compiled(calls, chip):
        if (op, case) not in PARTIAL:
            (emitted,) = [passes.emitted for kernel in result.kernels for passes in kernel.passes]
            assert emitted == pytest.approx(1 if case.dtype == BF16 else 6), case.id
        if case.dtype == BF16:
            kilobytes[case.id] = result.code_bytes / 1024
    if chip == "tpu7x":
        assert {name: size for name, size in kilobytes.items() if size > LARGER.get(name, PROGRAM_LIMIT)} == {}
        assert {name for name in LARGER if kilobytes.get(name, LARGER[name]) <= PROGRAM_LIMIT} == set()
