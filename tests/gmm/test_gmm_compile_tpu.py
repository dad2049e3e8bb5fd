"""gmm and tgmm through the real TPU compiler, for every chip: they compile, with the dot passes of their contract."""

from importlib.util import find_spec

import pytest

from parity.compilers.mosaic import Abstract, Compilation, compile_for_tpu

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install libtpu"
)

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
PROGRAM_LIMIT = 300  # KB on tpu7x for bfloat16, group metadata included; public kernels need about 950
LARGER = {"gmm-bf16-DeepSeek_V3-transposed": 450, "tgmm-bf16-gpt_oss_120b": 460}  # tiles that HBM is read less for


def gmm(chip, dtype, m=8192, k=2048, n=512, groups=8, experts=8, transpose_rhs=False, existing_out=False):
    weights = (groups, n, k) if transpose_rhs else (groups, k, n)
    arguments = (Abstract((m, k), dtype), Abstract(weights, dtype), Abstract((experts,), "int32"))
    keywords = {"transpose_rhs": transpose_rhs, "group_offset": Abstract((), "int32"), "interpret": False}
    if existing_out:
        keywords["existing_out"] = Abstract((m, n), dtype)
    return Compilation("tpu_kernels.gmm:gmm", chip, arguments, keywords)


def tgmm(chip, dtype, m=8192, k=2048, n=512, groups=8, experts=8, existing_out=False):
    arguments = (Abstract((m, k), dtype), Abstract((m, n), dtype), Abstract((experts,), "int32"))
    keywords = {"num_actual_groups": groups, "group_offset": Abstract((), "int32"), "interpret": False}
    if existing_out:
        keywords["existing_out"] = Abstract((groups, k, n), dtype)
    return Compilation("tpu_kernels.gmm:tgmm", chip, arguments, keywords)


DEEPSEEK_V3 = {"k": 7168, "n": 2048, "groups": 32, "experts": 256}
GPT_OSS_120B = {"k": 2880, "n": 2880, "groups": 16, "experts": 128}
SMALL = {"m": 300, "k": 200, "n": 256}
UNALIGNED = {"m": 257, "k": 600, "n": 300, "groups": 3, "experts": 5}

REPRESENTATIVE = ("gmm-bf16", "gmm-f32-transposed-existing_out", "gmm-f32-unaligned", "tgmm-bf16", "tgmm-f16")
# On part of a tile the compiler may do without the matrix unit, or let two passes share one.
PARTIAL = ("gmm-bf16-one_column-transposed", "gmm-f32-unaligned", "tgmm-f32-unaligned")


def cases(chip):
    return {
        "gmm-bf16": gmm(chip, "bfloat16"),
        "gmm-f32-transposed-existing_out": gmm(chip, "float32", transpose_rhs=True, existing_out=True),
        "gmm-f16": gmm(chip, "float16", **SMALL),
        "gmm-bf16-DeepSeek_V3-transposed": gmm(chip, "bfloat16", transpose_rhs=True, **DEEPSEEK_V3),
        "gmm-bf16-gpt_oss_120b-existing_out": gmm(chip, "bfloat16", existing_out=True, **GPT_OSS_120B),
        "gmm-bf16-one_column-transposed": gmm(chip, "bfloat16", m=5, k=300, n=1, transpose_rhs=True),
        "gmm-f32-unaligned": gmm(chip, "float32", **UNALIGNED),
        "tgmm-bf16": tgmm(chip, "bfloat16"),
        "tgmm-f32-existing_out": tgmm(chip, "float32", existing_out=True),
        "tgmm-f16": tgmm(chip, "float16", **SMALL),
        "tgmm-bf16-DeepSeek_V3-existing_out": tgmm(chip, "bfloat16", existing_out=True, **DEEPSEEK_V3),
        "tgmm-bf16-gpt_oss_120b": tgmm(chip, "bfloat16", **GPT_OSS_120B),
        "tgmm-bf16-one_row": tgmm(chip, "bfloat16", m=1, k=1, n=1),
        "tgmm-f32-unaligned": tgmm(chip, "float32", **UNALIGNED),
    }


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip):
    named = cases(chip)
    check({name: named[name] for name in REPRESENTATIVE}, chip)


@pytest.mark.full
@pytest.mark.parametrize("chip", CHIPS)
def test_all_of_it_compiles(chip):
    check(cases(chip), chip)


def check(named, chip):
    compiled = dict(zip(named, compile_for_tpu(list(named.values()), schedule=True), strict=True))
    assert {name: result.error for name, result in compiled.items() if not result.ok} == {}
    for name, result in compiled.items():
        if name not in PARTIAL:
            (emitted,) = [passes.emitted for kernel in result.kernels for passes in kernel.passes]
            assert emitted == pytest.approx(1 if "bf16" in name else 6), name
    if chip == "tpu7x":
        sizes = {name: result.code_bytes / 1024 for name, result in compiled.items() if "bf16" in name}
        assert {name: size for name, size in sizes.items() if size > LARGER.get(name, PROGRAM_LIMIT)} == {}
        assert {name for name in LARGER if sizes.get(name, LARGER[name]) <= PROGRAM_LIMIT} == set()
