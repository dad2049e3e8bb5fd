"""The layer shared out over processes, which talk over gloo: what the test of expert parallelism in torch runs."""

import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from gpu_reference.moe import moe_layer, moe_layer_bwd
from parity.backends.emulation import tensor_core
from parity.interop import to_numpy
from tests.support import parallel


def tensors(sizes, dtype, skew):
    """The inputs of a layer and its dout; the router's weights are float32."""
    x, w_router, *rest = map(torch.from_numpy, parallel.draw(*sizes, skew))
    x, *rest = (tensor.to(getattr(torch, dtype)) for tensor in (x, *rest))
    return [x, w_router, *rest]


def run(rank, processes, store, results, sizes, dtype, skew, options):
    """One process's part of the layer and its gradients, each with an equal part of the tokens and of the experts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    x, w_router, *weights, dout = tensors(sizes, dtype, skew)
    part = [tensor.chunk(processes)[rank] for tensor in (x, *weights, dout)]
    given = (part[0], w_router, *part[1:4])
    with tensor_core.emulated():
        out = moe_layer(*given, **options, process_group=dist.group.WORLD)
        grads = moe_layer_bwd(*given, part[4], **options, process_group=dist.group.WORLD)
    torch.save([out, *grads], Path(results, str(rank)))
    dist.barrier()
    dist.destroy_process_group()


def compare(processes, *comparison):
    """`parallel.difference` of each output from one process's."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        context = multiprocessing.get_context("fork")
        started = [
            context.Process(target=run, args=(rank, processes, store, folder, *comparison)) for rank in range(processes)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        assert all(process.exitcode == 0 for process in started), [process.exitcode for process in started]
        parts = zip(*(torch.load(Path(folder, str(rank))) for rank in range(processes)), strict=True)
    sizes, dtype, skew, options = comparison
    torch.set_num_threads(1)
    *given, dout = tensors(sizes, dtype, skew)
    with tensor_core.emulated():
        one = [moe_layer(*given, **options), *moe_layer_bwd(*given, dout, **options)]
    found = {}
    for name, got, expected in zip(parallel.OUTPUTS, parts, one, strict=True):
        whole = sum(got) if name == "w_router" else torch.cat(got)
        found[name] = parallel.difference(to_numpy(whole), to_numpy(expected))
    return found


if __name__ == "__main__":
    parallel.answer(compare)
