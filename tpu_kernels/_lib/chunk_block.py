"""A grid step's block of chunks of a scan: its rows, its decays, and the states at the ends of its sequences."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.probe import active, probe
from tpu_kernels._lib.chunk_decays import (
    ChannelDecay,
    ConstantDecay,
    Decay,
    Refs,
    StepDecay,
    gammas_of,
    prepare_decays,
)
from tpu_kernels._lib.chunk_dots import iota
from tpu_kernels._lib.chunk_plan import Scan

OF_HEADS = {"gk", "q", "k", "v", "o", "state", "decay_from_start", "decay_to_end", "between"}
"""The refs of the forward pass in which each head has a part, along the first axis."""


class ChunkBlock:
    """A grid step's block of chunks: what its refs hold of one of them, for all heads of the step at once."""

    def __init__(self, refs: Refs, scan: Scan, index: Any) -> None:
        self.refs, self.scan, self.index = refs, scan, index
        self.batch, self.first_head = pl.program_id(0), pl.program_id(1) * scan.heads
        prepare_decays(refs, scan, self.first_head)

    def groups(self) -> "Iterator[ChunkBlock]":
        """The block of each group of heads."""
        if self.scan.group == self.scan.heads:
            yield self
            return
        for head in range(0, self.scan.heads, self.scan.group):
            group = copy(self)
            heads = slice(head, head + self.scan.group)
            group.refs = {name: _of_heads(ref, heads) if name in OF_HEADS else ref for name, ref in self.refs.items()}
            group.scan = self.scan._replace(heads=self.scan.group)
            group.first_head = self.first_head + head
            yield group

    def rows(self, i: Any, chunks: int = 1) -> Any:
        """The rows in the block of so many chunks from chunk i on."""
        return pl.ds(pl.multiple_of(i * self.scan.chunk, self.scan.chunk), chunks * self.scan.chunk)

    def live(self, i: Any) -> Any:
        """How many rows of chunk i are steps; they are its first."""
        chunk = self._chunk(i)
        if self.scan.p.packed:
            return self.refs["live"][chunk]
        return jnp.clip(self.scan.p.t - chunk * self.scan.chunk, 0, self.scan.chunk)

    def load(self, i: Any, name: str, chunks: int = 1) -> jax.Array:
        """The rows [heads, chunks · C, ·] of so many chunks from chunk i on, zero where they are no steps: there may be
        NaN, and 0 * NaN is NaN."""
        if chunks > 1 and self.scan.masked:
            return jnp.concatenate([self.load(i + n, name) for n in range(chunks)], 1)
        ref, rows = self.refs[name], self.rows(i, chunks)
        x = jnp.stack([of_head[rows] for of_head in ref]) if isinstance(ref, tuple) else ref[:, rows, :]
        return jnp.where(iota(x.shape, 1) < self.live(i), x, jnp.zeros_like(x)) if self.scan.masked else x

    def store(self, i: Any, name: str, x: jax.Array) -> None:
        """Store the rows [heads, C, ·] of chunk i, or a number per step as [heads, 1, C], if asked for."""
        if name not in self.refs:
            return
        ref = self.refs[name]
        if isinstance(ref, tuple):
            for of_head, row in zip(ref, x, strict=True):
                of_head[self.rows(i)] = row.astype(of_head.dtype)
        elif x.shape[1] == self.scan.chunk:
            ref[:, self.rows(i), :] = x.astype(ref.dtype)
        else:
            ref[:, pl.ds(i, 1), : self.scan.chunk] = x

    def decay(self, i: Any) -> Decay:
        """The decays of chunk i."""
        scan, refs = self.scan, self.refs
        if scan.gate == "channel":
            return ChannelDecay(self.load(i, "gk"), scan)
        if scan.gate == "constant":
            live = self.live(i) if scan.masked else scan.chunk
            return ConstantDecay(refs, gammas_of(refs, scan, self.first_head), live, scan)
        return StepDecay(refs, i, scan)

    def probe(self, i: Any, site: str, x: Any, *axes: int, where: Any = True) -> Any:
        """In place of x, a value (or a pair that sums to it) of chunk i at a site of the golden.

        It is one `where` that says so, at the steps of the chunk along `axes`.
        """
        if not active():
            return x
        live, shape = self.live(i), jnp.shape(x[0] if isinstance(x, tuple) else x)
        where = jnp.broadcast_to(where, shape) & (live > 0)
        for axis in axes:
            where &= iota(shape, axis) < live
        return probe(site, x, where, chunk_size=self.scan.chunk)

    def for_chunks(
        self,
        body: Callable[..., None],
        enter: Callable[[Any], None] | None = None,
        leave: Callable[[Any], None] | None = None,
        *,
        before: Callable[[Any], Sequence[tuple[Any, ...]]] = lambda i: [()],
        at_once: int = 1,
        reverse: bool = False,
        unroll: int = 1,
    ) -> None:
        """body(i) for each chunk i; enter(i) before that of the first of a sequence and leave(i) after its last.

        before(i): of each of `at_once` chunks from chunk i on, what else body takes. unroll: chunks in a turn of the
        loop. In reverse the other way round, and one by one.
        """
        last = self.scan.chunks - 1
        enters, leaves = (self._is_last, self._is_first) if reverse else (self._is_first, self._is_last)

        def at(i: Any, is_there: Callable[[Any], Any], action: Callable[[Any], None] | None) -> None:
            if action:
                pl.when(is_there(i))(lambda: action(i))

        def step(n: Any, _: None) -> None:
            first = last - n if reverse else n * at_once
            for i, given in enumerate(before(first)):
                visit(first + i, *given)

        def visit(i: Any, *given: Any) -> None:
            if self.scan.p.packed:
                at(i, enters, enter)
            body(i, *given)
            if self.scan.p.packed:
                at(i, leaves, leave)

        begin, end = (last, 0) if reverse else (0, last)
        if not self.scan.p.packed:
            at(begin, enters, enter)
        lax.fori_loop(0, self.scan.chunks // at_once, step, None, unroll=max(unroll // at_once, 1))
        if not self.scan.p.packed:
            at(end, leaves, leave)

    def load_state(self, name: str, i: Any, state: Any) -> None:
        """Copy the states `name` of the sequence of chunk i, zero where there are none, to the ref `state`."""
        if name in self.refs:
            pltpu.sync_copy(self._states(name, i), state)
        else:
            state[...] = jnp.zeros(self.scan.state, jnp.float32)

    def store_state(self, name: str, i: Any, state: Any) -> None:
        """The reverse of `load_state`."""
        if name in self.refs:
            pltpu.sync_copy(state, self._states(name, i))

    def _states(self, name: str, i: Any) -> Any:
        sequence = self.refs["sequence"][self._chunk(i)] if self.scan.p.packed else self.batch
        return self.refs[name].at[sequence, pl.ds(self.first_head, self.scan.heads)]

    def _chunk(self, i: Any) -> Any:
        return self.index * self.scan.chunks + i

    def _is_first(self, i: Any) -> Any:
        chunk = self._chunk(i)
        if not self.scan.p.packed:
            return chunk == 0
        sequence = self.refs["sequence"]
        return (chunk == 0) | (sequence[jnp.maximum(chunk - 1, 0)] != sequence[chunk])

    def _is_last(self, i: Any) -> Any:
        chunk, last = self._chunk(i), self.scan.blocks * self.scan.chunks - 1
        if not self.scan.p.packed:
            return chunk == last
        sequence = self.refs["sequence"]
        return (chunk == last) | (sequence[jnp.minimum(chunk + 1, last)] != sequence[chunk])


def _of_heads(ref: Any, heads: slice) -> Any:
    return ref[heads] if isinstance(ref, tuple) else ref.at[heads]
