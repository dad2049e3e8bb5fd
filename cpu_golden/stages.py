"""Stages: which intermediate result of a golden is rounded, and to what.

A golden calls `stages(site, value)` wherever a kernel may round. `exact` gives the golden itself; rounding sites to
dtypes emulates a kernel under that contract, and any other function watches the values or changes them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cpu_golden import Array

Passes = Callable[[Array, Array, int | None, int], Iterator[tuple[Array, Array]]]
"""The products that a matrix unit adds up for a @ b, of operands [..., I, J] and [..., J, L]: (a, b, depth, first)."""

Sum = Callable[[Array, Array, Array], Array]
"""(total [..., I, L], a [..., I, J], b [..., J, L]) -> total + a @ b, as a matrix unit adds a step's products."""

Inverse = Callable[[Array, "Stages"], Array]
"""(I + A)⁻¹ of strictly lower triangular A [..., C, C], with the sites of the stages."""


def single_pass(a: Array, b: Array, depth: int | None, first: int) -> Iterator[tuple[Array, Array]]:
    """Both operands cut along J into steps of `depth` (None: one step), the first of which begins at -`first`."""
    size = a.shape[-1]
    step = depth or first + size
    j = 0
    while j < size:
        following = j + step - (first + j) % step
        yield a[..., j:following], b[..., j:following, :]
        j = following


def _as_it_is(site: str, value: Array) -> Array:
    return value


@dataclass(frozen=True)
class Stages:
    """stages(site, value): what goes on from a named site of a golden in place of its float64 value.

    The other fields are a kernel's steps: they decide which partial results there are to round, and without rounding
    only passes change anything: those of a narrow unit leave out the products of the smallest pieces.
    A golden reads those that its docstring names.

    rounding: (site, value) -> value.
    depth: products that are summed before the running sum of a dot is rounded; None: all of them.
    passes: how a matrix unit takes operands that are wider than it is.
    tile: products of a dot that are summed by themselves before they are added to what was summed before; None: all.
    narrow: how a matrix unit that keeps fewer bits than a float32 sums products of fp8, where results need no more and
        the sum runs along memory: (a, b) -> a @ b of operands in their own dtypes; None: as all others.
    router_depth, router_passes: those of a router's matmuls; None: those of all others.
    aligned: the steps of tgmm's sums are counted from the first of all rows, not from the first of each group.
    chunk_size: the chunks of a scan, where a kernel takes other ones than its caller asks for.
    sub_block: rows of a scan's chunk whose pairs are decayed one by one where every channel has its own gate; 1: none,
        and gates are summed by halves.
    kept_whole: what decays a state is rounded as a whole, and not what it is beside 0 or 1.
    values_decayed: a decay per step of what is written into a state multiplies v, and not k; where a scan has no v of
        its own in the gradient of a state, also do, and not q.
    channels: channels of keys that a scan's backward pass has at a time: what is summed over K in dv and the gradient
        of a decay per step is summed for each such tile, then over them; None: all.
    solve_depth, solve_passes: those of the dots that solve a triangular system; None: those of all others.
    whole_passes: those of a delta rule's dots with the solution, and of those that read a state or its gradient; None:
        those of all others.
    inverse: another way than substitution to a delta rule's (I + A)⁻¹: (A, stages) -> T.
    wy: a delta rule's chunk applies the inverse to the values and the keys (u and w) before it meets the state, and not
        to the errors of what the state recalls.
    refined: what a delta rule's inverse gives is corrected once, by what it leaves of the system.
    runs: how many roundings of the same inputs go on side by side, in a leading axis of every value and every result;
        None: there is no such axis. A golden that takes it begins with `each_run` of all its tensors.
    sums: how a matrix unit adds to a running sum, by its site; to one without a name exactly.
    by_halves: vector units add the second half of a register's lanes to the first, and so on; else neighbours in pairs.
    """

    rounding: Callable[[str, Array], Array] = _as_it_is
    depth: int | None = None
    passes: Passes = single_pass
    tile: int | None = None
    narrow: Callable[[Array, Array], Array] | None = None
    router_depth: int | None = None
    router_passes: Passes | None = None
    aligned: bool = False
    chunk_size: int | None = None
    sub_block: int = 16
    kept_whole: bool = False
    values_decayed: bool = False
    channels: int | None = None
    solve_depth: int | None = None
    solve_passes: Passes | None = None
    whole_passes: Passes | None = None
    inverse: "Inverse | None" = None
    wy: bool = False
    refined: bool = False
    runs: int | None = None
    sums: Mapping[str, Sum] = field(default_factory=dict)
    by_halves: bool = False

    def __call__(self, site: str, value: Array) -> Array:
        """What goes on from the site in the value's place."""
        return self.rounding(site, value)

    def each_run(self, x: Array) -> Array:
        """x, to be read only, of every run."""
        return x if self.runs is None else np.broadcast_to(x, (self.runs, *x.shape))

    def renamed(self, **names: str) -> "Stages":
        """These stages for a golden inside another one, some of whose sites have names of their own there."""
        sums = {site: self.sums[name] for site in {*names, *self.sums} if (name := names.get(site, site)) in self.sums}
        return replace(self, rounding=lambda site, value: self(names.get(site, site), value), sums=sums)

    def dot(self, a: Array, b: Array, *, running: str = "acc", first: int = 0) -> Array:
        """a [..., I, J] @ b [..., J, L], summed over J in steps of `depth`, the first of which begins at -`first`.

        Sites: lhs, rhs (the operands), partial (the products of one step, summed), at `running` the running sum (of a
        tile, and the last one), and tiles (that of tiles).
        """
        a, b = self("lhs", a), self("rhs", b)
        acc = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
        for n, (tile_a, tile_b) in enumerate(single_pass(a, b, self.tile, first)):
            total = np.zeros(acc.shape) if n else acc
            offset = 0 if n else first % (self.tile or first + 1)
            for x, y in self.passes(tile_a, tile_b, self.depth, offset):
                add = self.sums.get(running, self._exactly)
                total = self(running, add(total, x, y))
            acc = self("tiles", acc + total) if n else total
        return acc if self.tile is None else self(running, acc)

    def _exactly(self, total: Array, a: Array, b: Array) -> Array:
        return total + self("partial", a @ b)


exact = Stages()
"""The stages that round nothing."""


ROWS = 8  # of a TPU's register


def folded_sum(terms: Array, stages: Callable[[str, Array], Array] = exact) -> Array:
    """Σ over the last axis of terms [..., N], as [..., 1]: in halves until `ROWS` are left, as registers are added, and
    these as neighbours in pairs.

    Site: sum (the sums of each level).
    """
    size = terms.shape[-1]
    whole = max(ROWS, 1 << (size - 1).bit_length())
    terms = np.concatenate([terms, np.zeros((*terms.shape[:-1], whole - size))], axis=-1)
    while (half := terms.shape[-1] // 2) >= ROWS:
        terms = stages("sum", terms[..., :half] + terms[..., half:])
    return tree_sum(terms, stages)


def tree_sum(terms: Array, stages: Callable[[str, Array], Array] = exact) -> Array:
    """Σ over the last axis of terms [..., N], as [..., 1]: neighbours in pairs, or as `Stages.by_halves` says.

    Site: sum (the sums of each level).
    """
    size, by_halves = terms.shape[-1], isinstance(stages, Stages) and stages.by_halves
    if by_halves and size:
        whole = 1 << (size - 1).bit_length()
        terms = np.concatenate([terms, np.zeros((*terms.shape[:-1], whole - size))], axis=-1)
    while (size := terms.shape[-1]) > 1:
        if size % 2:
            terms = np.concatenate([terms, np.zeros((*terms.shape[:-1], 1))], axis=-1)
        first, second = np.split(terms, 2, -1) if by_halves else (terms[..., ::2], terms[..., 1::2])
        terms = stages("sum", first + second)
    return terms if size else np.zeros((*terms.shape[:-1], 1))
