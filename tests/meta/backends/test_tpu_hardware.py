# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What the Pallas kernels know of the TPUs: generations, and what the matrix unit of each multiplies."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

from tpu_kernels._lib import chip
from tpu_kernels._lib.arguments import resolve_interpret

KINDS = {
    "TPU v4": 4, "TPU v5 lite": 5, "TPU v5e": 5, "TPU v5": 5, "TPU v5p": 5, "TPU v6 lite": 6, "TPU v6e": 6, "TPU7x": 7,
}  # fmt: skip
FP8, E5M2, INT8, BF16, F16, F32 = (
    jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float16", "float32")
)


def test_every_kind_has_its_generation():
    assert {kind: chip.tpu_generation(kind) for kind in KINDS} == KINDS
    with pytest.raises(ValueError, match=r"kind must be one of TPU v4, .*, TPU7x, got 'TPU v3'"):
        chip.tpu_generation("TPU v3")


def test_without_a_tpu_there_is_no_generation():
    if jax.default_backend() == "tpu":
        pytest.skip("needs a host without a TPU")
    assert (chip.tpu_kind(), chip.is_tpu(), chip.tpu_generation()) == (None, False, None)
    assert not chip.supports_matmul(BF16)
    assert chip.select_input_dtype(FP8, FP8) == FP8  # as on the newest


def test_the_target_of_an_ahead_of_time_compilation_counts():
    for kind, platform in (("TPU v5e", "tpu"), ("NVIDIA H100", "gpu")):
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            assert chip.tpu_kind() == (kind if kind.startswith("TPU") else None)


def test_on_a_host_with_a_tpu_it_counts_where_an_array_is(monkeypatch):
    """Traced ones are nowhere yet: for those the host's TPU counts."""
    monkeypatch.setattr(chip, "tpu_kind", lambda: "TPU7x")
    array = jax.device_put(jnp.zeros(8), jax.devices("cpu")[0])
    assert chip.is_tpu() and not chip.is_tpu(array)
    assert resolve_interpret(None, array) and not resolve_interpret(False, array)
    seen = []
    jax.make_jaxpr(lambda x: seen.append(chip.is_tpu(x)) or x)(array)
    assert seen == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_dots_of_8_bits_came_with_v5_and_float16_never(kind):
    assert all(chip.supports_matmul(dtype, kind) for dtype in (F32, BF16))
    assert not chip.supports_matmul(F16, kind)
    assert {chip.supports_matmul(dtype, kind) for dtype in (FP8, E5M2, INT8)} == {KINDS[kind] >= 5}


def test_a_dot_is_fed_the_narrowest_supported_dtype_of_both():
    fed = {
        ("TPU v4", FP8, FP8): BF16, ("TPU v5e", FP8, FP8): FP8, ("TPU7x", INT8, INT8): INT8,
        ("TPU7x", FP8, E5M2): BF16, ("TPU7x", BF16, INT8): BF16, ("TPU7x", BF16, BF16): BF16,
        ("TPU7x", BF16, F32): F32, ("TPU7x", F16, F16): F32, ("TPU7x", F16, FP8): F32,
    }  # fmt: skip
    assert {key: chip.select_input_dtype(key[1], key[2], key[0]) for key in fed} == fed
    assert chip.select_input_dtype(jnp.zeros(1, BF16), jnp.zeros(1, FP8), "TPU7x") == BF16  # arrays as well


def test_the_path_of_a_quantised_matmul_by_generation():
    paths = {dtype: [chip.matmul_path(dtype, dtype, g)[0] for g in (4, 5, 6, 7)] for dtype in (FP8, INT8)}
    assert paths == {FP8: ["bfloat16"] * 3 + ["fp8"], INT8: ["bfloat16", "int8", "int8", "bfloat16"]}
    assert chip.matmul_path(BF16, INT8, 6)[0] == "bfloat16"
    assert chip.matmul_path(F16, FP8, 7)[0] == chip.matmul_path(F32, FP8, 7)[0] == "float32"


def test_a_register_has_eight_rows_of_32_bits():
    assert [chip.sublanes(dtype) for dtype in (F32, BF16, F16, INT8, FP8)] == [8, 16, 16, 32, 32]
