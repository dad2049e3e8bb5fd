# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""How rows travel between processes, which are threads here, and matmuls add row by row: the same bits as one process
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
HIDDEN = 32  # so that every row is whole vectors of torch's elementwise functions: the same bits at every place


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


def row_by_row(seen):
    """In place of the matmuls of a layer those that add in the same order wherever a row stands. Seen are how many rows
    each product with experts has, and their group sizes."""

    def gmm(lhs, rhs, group_sizes, transpose_rhs=False):
        active = int(group_sizes.sum())
        groups = torch.arange(len(rhs)).repeat_interleave(group_sizes.long())
        matrices = rhs.mT if transpose_rhs else rhs
        out = [(row[:, None] * matrices[group]).sum(0) for row, group in zip(lhs[:active], groups, strict=True)]
        return torch.stack([*out, *lhs.new_zeros(len(lhs) - active, matrices.shape[2])])

    def tgmm(lhs, rhs, group_sizes):
        out, first = [], 0
        for size in group_sizes.tolist():
            rows = zip(lhs[first : first + size], rhs[first : first + size], strict=True)
            out.append(sum((row[:, None] * other for row, other in rows), lhs.new_zeros(lhs.shape[1], rhs.shape[1])))
            first += size
        return torch.stack(out)

    def product(lhs, rhs, group_sizes, transpose_rhs=False, **_):
        seen.append((len(lhs.qvalue), tuple(group_sizes.tolist())))
        return gmm(lhs.qvalue, rhs.qvalue, group_sizes, transpose_rhs)

    def weight_product(lhs, rhs, group_sizes, **_):
        return tgmm(lhs.qvalue, rhs.qvalue, group_sizes)

    return {"gmm": gmm, "tgmm": tgmm, "product": product, "weight_product": weight_product}


def routed(tokens, num_experts, skewed):
    """Tokens that are rows of an identity, and the weights of a router which choose their experts."""
    rng = np.random.default_rng(0)
    w_router = torch.zeros(HIDDEN, num_experts)
    w_router[:tokens] = torch.from_numpy(rng.random((tokens, num_experts)))
    if skewed:
        w_router = w_router * 0.5 - torch.arange(num_experts)  # everyone likes the first best
    return torch.eye(tokens, HIDDEN), w_router


def both_passes(given, dout, **options):
    primals = [tensor.detach().requires_grad_() for tensor in given]
    out = moe.moe_layer(*primals, **options)
    return [out.detach(), *torch.autograd.grad(out, primals, dout)]


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
    x, w_router = routed(total, num_experts, skewed)
    w_gate, w_up, w_down = torch.from_numpy(rng.standard_normal((3, num_experts, HIDDEN, HIDDEN), np.float32))
    dout = torch.from_numpy(rng.standard_normal((total, HIDDEN), np.float32))
    seen, together = [], Processes(processes)
    monkeypatch.setattr(exchange, "dist", together)
    for name, function in row_by_row(seen).items():
        monkeypatch.setattr(moe, name, function)
    options = dict(top_k=top_k, capacity=capacity)
    expected = both_passes((x, w_router, w_gate, w_up, w_down), dout, **options)
    ((_, whole_sizes),) = {*seen}
    seen.clear()

    def part(rank, group):
        rows, gradient, *experts = (tensor.chunk(processes)[rank] for tensor in (x, dout, w_gate, w_up, w_down))
        return both_passes((rows, w_router, *experts), gradient, **options, process_group=group)

    out, dx, drouter, *dexperts = zip(*together.run(part), strict=True)
    together_again = torch.cat(out), torch.cat(dx), sum(drouter), *map(torch.cat, dexperts)
    for got, whole in zip(together_again, expected, strict=True):
        assert torch.equal(got, whole)
    # What of T tokens can go to a process: all their choices, of its experts alone, each in its capacity.
    width = tokens * min(top_k, held) if capacity is None else min(tokens * min(top_k, held), held * capacity)
    assert together.buffers == {processes * width}
    most = processes * width if capacity is None else min(processes * width, held * capacity)
    # Rows, weights and results; there and, as gradients, back. What fills a buffer is nobody's row.
    assert sum(together.rows) == 6 * sum(whole_sizes)
    # Three products with experts in a pass.
    sizes = map(tuple, np.reshape(whole_sizes, (processes, held)).tolist())
    assert sorted(seen) == sorted(6 * [(most, of_one) for of_one in sizes])
