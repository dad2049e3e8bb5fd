"""The layer on several processes, each with a part of the tokens and experts, and the layer in one process."""

import pytest

from tests.support import parallel
from tests.support.interpreter import DEVICE

pytest.importorskip("triton")
pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
SIZES = (32, 64, 32, 8)  # T, D, F, E


@parallel.EACH_CASE
def test_processes_give_what_one_does(name):
    processes = 2 if name in ("skewed", "fp8") else 4
    on_the_cpu = dict(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    parallel.check(name, parallel.ask("processes", processes, SIZES, *parallel.CASES[name], **on_the_cpu))


def test_bad_shards_are_refused():
    import torch
    import torch.distributed as dist

    from gpu_reference.moe import moe_layer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, w_router, weights = (torch.zeros(shape, device=DEVICE) for shape in ((8, 16), (16, 4), (4, 16, 16)))
        options = dict(top_k=2, process_group=dist.group.WORLD)
        with pytest.raises(ValueError, match=r"w_gate must have E / devices = 4 / 1 experts on each device, got 2"):
            moe_layer(x, w_router, weights[:2], weights[:2], weights[:2], **options)
    finally:
        dist.destroy_process_group()
