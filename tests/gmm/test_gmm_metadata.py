"""The visits of a kernel are the golden's, one by one: no result shows one that does nothing."""

import importlib
from functools import partial

import numpy as np
import pytest

from cpu_golden._lib.visits import make_group_metadata
from parity.interop import to_jax, to_numpy, to_torch
from tests.support.interpreter import DEVICE

SIZES = [(9, 0, 20, 3, 0), (0, 8, 0, 16, 16), (40, 0, 0, 0, 0), (0, 0, 0, 0, 0), (3, 3, 3, 3, 3), (1, 0, 0, 38, 1)]

EDGES = [
    (0, 8, (0, 0, 0), 2),  # no rows: no tiles
    (0, 8, (0, 0), 0),
    (40, 8, (), 0),  # no experts
    (40, 8, (9, 30), 0),  # a shard of no groups
    (8, 8, (8, 0), 1),  # one visit
    (40, 8, (9, 0, 20, 3, 8), 1),
    (700, 4, (1, 0, 300, 0, 99, 288), 4),  # more visits than one program of the GPU's kernel has
]
"""(m, tm, sizes, num_groups)"""


@pytest.mark.parametrize("cover", ["tiles", "groups"])
@pytest.mark.parametrize(
    ("package", "module", "convert"),
    [
        pytest.param("tpu_kernels", "_lib.visits", to_jax, marks=pytest.mark.tpu),
        pytest.param("gpu_reference", "_lib.visits", partial(to_torch, device=DEVICE), marks=pytest.mark.gpu),
    ],
)
def test_visits_are_those_of_the_golden(package, module, convert, cover):
    pytest.importorskip("jax" if package == "tpu_kernels" else "triton")
    kernel = importlib.import_module(f"{package}.{module}").make_group_metadata
    for m, tm, sizes, groups in [(40, 8, sizes, 3) for sizes in SIZES] + EDGES:
        for offset in (0, 1, 2) if groups == 3 else (0, len(sizes) - groups):
            given = dict(m=m, tm=tm, num_groups=groups, cover=cover)
            expected = make_group_metadata(np.array(sizes, np.int32), group_offset=offset, **given)
            got = kernel(convert(np.array(sizes, np.int32)), group_offset=convert(np.int32([offset])), **given)
            for name, ours, theirs in zip(expected._fields, got, expected, strict=True):
                assert to_numpy(ours).tolist() == theirs.tolist(), (m, tm, sizes, groups, offset, name)


@pytest.mark.tpu
def test_traced_sizes_and_offsets_that_could_not_be_checked_are_clipped():
    """No write is beyond the lists: sizes end where the rows do, and a shard where the experts do."""
    jax = pytest.importorskip("jax")
    from tpu_kernels._lib.visits import make_group_metadata as kernel

    given = dict(m=40, tm=8, num_groups=2, cover="tiles")
    traced = jax.jit(lambda sizes, offset: kernel(sizes, group_offset=offset, **given))
    for sizes, clipped in [((-3, 50, 4), (0, 40, 0)), ((9, -1, 20), (9, 0, 20)), ((30, 30, 30), (30, 10, 0))]:
        for offset, nearest in [(-1, 0), (0, 0), (1, 1), (2, 1), (9, 1)]:
            expected = make_group_metadata(np.array(clipped, np.int32), group_offset=nearest, **given)
            got = traced(to_jax(np.array(sizes, np.int32)), to_jax(np.array(offset, np.int32)))
            for name, ours, theirs in zip(expected._fields, got, expected, strict=True):
                assert to_numpy(ours).tolist() == theirs.tolist(), (sizes, offset, name)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (255, 257), (256, 512), (300, 1023), (767, 1024), (0, 1024), (512, 512)]
)
def test_blocks_of_a_tile_are_those_that_have_rows_of_the_group(start, end):
    """In order, each once, and none beyond the tile: there a kernel would write what is not its own."""
    jax = pytest.importorskip("jax")
    from tpu_kernels._lib.visits import OwnRows, row_block

    tm, visited = 1024, []
    with jax.disable_jit():
        OwnRows(start, end, tm).for_blocks(lambda rows: visited.append((int(rows.start), rows.size)))
    height = row_block(tm)
    assert height < tm
    assert visited == [(row, height) for row in range(0, tm, height) if start < min(row + height, end) and row < end]
