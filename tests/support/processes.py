"""The layer shared out over processes, which talk over gloo: what the test of expert parallelism in torch runs."""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gpu_reference.moe import LayerGrads, moe_layer, moe_layer_bwd
from parity.backends.emulation import tensor_core


def draw(tokens, hidden, intermediate, experts, dtype, skew):
    """Inputs of a layer; skew: how much better every token likes the first experts."""
    rng = np.random.default_rng(0)

    def normal(*shape, size=1.0):
        return torch.from_numpy((rng.standard_normal(shape) * size).astype(np.float32))

    x = normal(tokens, hidden).abs() if skew else normal(tokens, hidden)
    w_router = normal(hidden, experts, size=hidden**-0.5) - skew * torch.arange(experts) / experts / hidden
    shapes = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
    weights = [normal(experts, *shape, size=shape[0] ** -0.5) for shape in shapes]
    x, *rest = (tensor.to(getattr(torch, dtype)) for tensor in (x, *weights, normal(tokens, hidden)))
    return [x, w_router, *rest]


def run(rank, processes, store, results, sizes, dtype, skew, options):
    """One process's part of the layer and its gradients, each with an equal part of the tokens and of the experts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    x, w_router, *weights, dout = draw(*sizes, dtype, skew)
    part = [tensor.chunk(processes)[rank] for tensor in (x, *weights, dout)]
    given = (part[0], w_router, *part[1:4])
    with tensor_core.emulated():
        out = moe_layer(*given, **options, process_group=dist.group.WORLD)
        grads = moe_layer_bwd(*given, part[4], **options, process_group=dist.group.WORLD)
    torch.save([out, *grads], Path(results, str(rank)))
    dist.barrier()
    dist.destroy_process_group()


def compare(processes, *comparison):
    """For each output whether it has one process's bits, and the largest difference over the largest element."""
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
    *given, dout = draw(*sizes, dtype, skew)
    with tensor_core.emulated():
        one = [moe_layer(*given, **options), *moe_layer_bwd(*given, dout, **options)]
    found = {}
    for name, got, expected in zip(("out", *LayerGrads._fields), parts, one, strict=True):
        whole = sum(got) if name == "w_router" else torch.cat(got)
        difference = (whole.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert whole.dtype == expected.dtype
        found[name] = (torch.equal(whole, expected), float(difference))
    return found


def main():
    """Each comparison of sys.argv, as JSON."""
    for line in sys.argv[1:]:
        print(json.dumps(compare(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
