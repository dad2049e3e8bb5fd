# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""gmm, tgmm and their metadata compile for real GPUs, as they would be launched; their default tiles fit the chip."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gmm as gpu
from op_arguments.gmm import Problem
from parity.compilers.ptx import POINTERS, TARGETS, Case, compile_kernels

M, K, N, GROUPS, EXPERTS = 4096, 2048, 1408, 8, 64
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}  # CUDA programming guide, per block
# ptxas trades a register for a word of stack here and there (0 to 56 bytes, another choice in Triton 3.6 than in 3.9);
# a tile that does not fit spills hundreds to thousands of bytes.
SPILL_BYTES = 64


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def gmm_launch(dtype, transpose=False, existing=False, n=N, k=K):
    problem = Problem(M, k, n, GROUPS, EXPERTS, "")
    tile = gpu.gmm_tile(problem, dtype.itemsize)
    rhs = meta(GROUPS, n, k, dtype=dtype).transpose(1, 2) if transpose else meta(GROUPS, k, n, dtype=dtype)
    out = meta(M, n, dtype=dtype)
    visits = -(-M // tile[0]) + GROUPS
    metadata = gpu.GroupMetadata(meta(EXPERTS + 1), meta(visits), meta(visits), meta(1))
    return gpu.gmm_launch(
        problem, tile, meta(M, k, dtype=dtype), rhs, out if existing else None, out, metadata, meta(1)
    )


def tgmm_launch(dtype, existing=False):
    problem = Problem(M, K, N, GROUPS, EXPERTS, "")
    out = meta(GROUPS, K, N, dtype=dtype)
    lhs, rhs = meta(M, K, dtype=dtype), meta(M, N, dtype=dtype)
    tile = gpu.tgmm_tile(problem, dtype.itemsize)
    return gpu.tgmm_launch(problem, tile, lhs, rhs, out if existing else None, out, meta(EXPERTS), meta(1))


def metadata_launch(cover):
    visits = -(-M // 128) + GROUPS
    metadata = gpu.GroupMetadata(meta(EXPERTS + 1), meta(visits), meta(visits), meta(1))
    return gpu.metadata_launch(meta(EXPERTS), meta(1), metadata, M, 128, GROUPS, cover)


def case(launch, target):
    arguments = {
        name: POINTERS[str(value.dtype).removeprefix("torch.")] if isinstance(value, torch.Tensor) else value
        for name, value in launch.arguments.items()
    }
    function = launch.kernel.fn
    return Case(f"{function.__module__}:{function.__name__}", TARGETS[target], arguments, launch.options)


LAUNCHES = {
    **{f"gmm-{name}": gmm_launch(getattr(torch, name)) for name in ("float32", "bfloat16", "float16")},
    "gmm-bfloat16-transposed": gmm_launch(torch.bfloat16, transpose=True),
    "gmm-bfloat16-existing": gmm_launch(torch.bfloat16, existing=True),
    "gmm-bfloat16-ragged": gmm_launch(torch.bfloat16, n=2880 + 16, k=2880 + 16),
    **{f"tgmm-{name}": tgmm_launch(getattr(torch, name)) for name in ("float32", "bfloat16", "float16")},
    "tgmm-bfloat16-existing": tgmm_launch(torch.bfloat16, existing=True),
    "metadata-tiles": metadata_launch("tiles"),
    "metadata-groups": metadata_launch("groups"),
}


# Rows that start at odd addresses need a pointer for each element: slow at best, and the registers may not hold them.
UNALIGNED = gmm_launch(torch.bfloat16, n=2880 + 1, k=2880 + 1)


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_default_tiles_compile_and_fit(target):
    compiled = compile_kernels([case(launch, target) for launch in LAUNCHES.values()])
    for name, result in zip(LAUNCHES, compiled, strict=True):
        assert result.error is None, f"{name}: {result.error}"
        assert result.spill_bytes <= SPILL_BYTES, f"{name}: {result}"
        assert result.shared_bytes <= SHARED_BYTES[target], f"{name}: {result}"


def test_what_does_not_compile_is_an_error_of_that_case_alone():
    good = case(LAUNCHES["metadata-tiles"], "sm_90")
    bad = Case("gpu_reference.gmm:_gmm_kernel", TARGETS["sm_90"], {}, {})
    broken, fine, unaligned = compile_kernels([bad, good, case(UNALIGNED, "sm_90")])
    assert "KeyError" in broken.error
    assert fine.error is None
    assert unaligned.error is None
