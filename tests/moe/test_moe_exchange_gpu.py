# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""How rows travel between processes, which are threads here, and each expert one factor: the same bits as one process
has, in buffers for the worst case and no larger."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import moe
from gpu_reference._lib import exchange
from tests.support.interpreter import interpreted

pytestmark = [pytest.mark.gpu, interpreted]
HIDDEN = 3


class Processes:
    """What `torch.distributed` does, for threads."""

    def __init__(self, count):
        self._count, self._given, self._barrier = count, [None] * count, threading.Barrier(count, timeout=30)
        self.buffers, self.rows = set(), []  # their sizes, and of each that is sent the rows that are not zero

    def all_gather(self, gathered, tensor, group):
        for out, given in zip(gathered, self._all(group.rank(), tensor), strict=True):
            out.copy_(given)

    def all_to_all_single(self, received, sent, group):
        if sent.is_floating_point():
            self.buffers.add(len(sent))
            self.rows.append(int(sent.any(1).sum()))
        for out, given in zip(received.chunk(self._count), self._all(group.rank(), sent), strict=True):
            out.copy_(given.chunk(self._count)[group.rank()])

    def _all(self, rank, tensor):
        self._given[rank] = tensor
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def run(self, function):
        """Of each process what `function` returns for its rank and group."""
        results = [None] * self._count

        def one(rank):
            results[rank] = function(rank, SimpleNamespace(size=lambda: self._count, rank=lambda: rank))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def experts(seen):
    """In place of the matmuls of each expert a product with the first of its weights."""

    def multiplied(o, rows, weights, w_gate, w_up, w_down, group_sizes, group_offset):
        seen.append((len(rows), group_sizes.tolist()))
        active = int(group_sizes.sum())
        factors = w_gate[:, 0, 0].repeat_interleave(group_sizes.long())[:, None]
        return torch.cat([rows[:active] * weights[:active] * factors, 0 * rows[active:]])

    return multiplied


def route(indices):
    """In place of the router what each token's number, the first of its elements, says."""

    def chosen(o, x, w_router):
        taken = indices[x[:, 0].long()]
        return (x @ w_router).gather(1, taken.long()), taken

    return chosen


def choices(tokens, num_experts, top_k, skewed):
    keys = np.random.default_rng(0).random((tokens, num_experts))
    if skewed:
        keys = keys * 0.5 + np.arange(num_experts)  # everyone likes the first best
    return torch.from_numpy(keys.argsort(1)[:, :top_k].astype(np.int32))


def both_passes(given, dout, **options):
    primals = [tensor.detach().requires_grad_() for tensor in given]
    out = moe.moe_layer(*primals, **options)
    return [out.detach(), *torch.autograd.grad(out, primals[:3], dout)]


@pytest.mark.parametrize(
    ("processes", "tokens", "num_experts", "top_k", "capacity", "skewed"),
    [
        (1, 5, 4, 2, None, False),
        (2, 5, 4, 1, None, False),
        (3, 4, 6, 2, None, True),  # all rows go to the first process
        (2, 6, 4, 3, None, True),  # more choices than a process has experts
        (3, 4, 6, 2, 5, True),  # the second process takes what the first leaves of the capacity, the third nothing
        (2, 6, 4, 2, 4, False),
        (4, 3, 4, 4, 100, False),  # everyone takes every expert, of which a process has one
    ],
)
def test_rows_come_to_their_experts_and_back(monkeypatch, processes, tokens, num_experts, top_k, capacity, skewed):
    total, held, rng = processes * tokens, num_experts // processes, np.random.default_rng(1)

    def integers(*shape):
        return torch.from_numpy(rng.integers(1, 8, shape).astype(np.float32))

    x, w_router, w_gate, dout = (integers(*shape) for shape in
        ((total, HIDDEN), (HIDDEN, num_experts), (num_experts, HIDDEN, HIDDEN), (total, HIDDEN)))  # fmt: skip
    x[:, 0] = torch.arange(total)
    seen, together = [], Processes(processes)
    monkeypatch.setattr(exchange, "dist", together)
    monkeypatch.setattr(moe, "_experts", experts(seen))
    monkeypatch.setattr(moe, "_route", route(choices(total, num_experts, top_k, skewed)))
    options = dict(top_k=top_k, capacity=capacity)
    expected = both_passes((x, w_router, *[w_gate] * 3), dout, **options)
    _, whole_sizes = seen.pop()

    def part(rank, group):
        rows, weights = (tensor.chunk(processes)[rank] for tensor in (x, w_gate))
        return both_passes(
            (rows, w_router, *[weights] * 3), dout.chunk(processes)[rank], **options, process_group=group
        )

    out, dx, drouter, dgate = zip(*together.run(part), strict=True)
    for got, whole in zip((torch.cat(out), torch.cat(dx), sum(drouter), torch.cat(dgate)), expected, strict=True):
        assert torch.equal(got, whole)
    # What of T tokens can go to a process: all their choices, of its experts alone, each in its capacity.
    width = tokens * min(top_k, held) if capacity is None else min(tokens * min(top_k, held), held * capacity)
    assert together.buffers == {processes * width}
    most = processes * width if capacity is None else min(processes * width, held * capacity)
    assert [rows for rows, _ in seen] == [most] * processes
    # Rows, weights and results; there and, as gradients, back. What fills a buffer is nobody's row.
    assert sum(together.rows) == 6 * sum(whole_sizes)
    assert sorted(sizes for _, sizes in seen) == sorted(np.reshape(whole_sizes, (processes, held)).tolist())
