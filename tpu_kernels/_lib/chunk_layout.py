"""How the arrays of a scan lie in HBM, and the call of its kernels with their blocks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib.call import Block, bytes_of
from tpu_kernels._lib.call import call as call_with_blocks
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.chunk_decays import decay_scratch
from tpu_kernels._lib.chunk_plan import Scan, vmem_limit


class Operand(NamedTuple):
    """An input or output of a kernel: the array, its block, and where block t of a batch row's head block lies.

    Without a block it is whole, in `space`. early: the states are made of it, and not just what is made of them.
    width: the lanes of a head, where heads lie side by side; a kernel then sees a tuple, each head's rows.
    held: where the blocks are walked twice, they stay in VMEM for the way back.
    """

    array: Any
    block: tuple[int | None, ...] = ()
    at: Callable[[Any, Any, Any], tuple[Any, ...]] | None = None
    early: bool = False
    space: Any = None
    width: int | None = None
    held: bool = False

    def seen(self, ref: Any) -> Any:
        """The block's ref; where heads lie side by side a tuple, each head's rows [rows, width]."""
        if self.width is None:
            return ref
        return tuple(ref.at[:, lane : lane + self.width] for lane in range(0, ref.shape[1], self.width))


class Layout:
    """How arrays lie for the kernels, with T padded to blocks, each packed sequence on chunks of its own.

    If width is a multiple of 128 lanes, rows are [B, T, H · width]: a projection writes and reads these, and XLA
    transposes nothing between it and a kernel. Other rows are [B, H, T, width].

    prefetch, for packed sequences: of each chunk the sequence that it belongs to and how many steps it has, int32. An
    empty sequence has a chunk too, so that its final state is written.
    """

    def __init__(self, scan: Scan, cu_seqlens: jax.Array | None, gates: Mapping[str, jax.Array | None]) -> None:
        self.scan = scan
        self.prefetch: dict[str, jax.Array] = {}
        if cu_seqlens is not None:
            self._lay_out(cu_seqlens)
        self.gates = self._gates(**gates)

    def _lay_out(self, cu_seqlens: jax.Array) -> None:
        length, c, count = self.scan.p.t, self.scan.chunk, self.scan.blocks * self.scan.chunks
        # Bad offsets go unseen under tracing; clipped, they give wrong numbers, but no access beyond the arrays.
        cu_seqlens = lax.cummax(jnp.clip(cu_seqlens, 0, length))
        begins, lengths = cu_seqlens[:-1], jnp.diff(cu_seqlens)
        ends = jnp.cumsum(jnp.maximum(-(-lengths // c), 1))
        chunk = jnp.arange(count, dtype=jnp.int32)
        sequence = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), self.scan.p.n - 1).astype(jnp.int32)
        first_chunk = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1].astype(jnp.int32)])
        done = (chunk - first_chunk[sequence]) * c
        self.prefetch = {"sequence": sequence, "live": jnp.clip(lengths[sequence] - done, 0, c)}
        row = jnp.arange(c, dtype=jnp.int32)
        self._live = (row < self.prefetch["live"][:, None]).reshape(-1)
        self._source = jnp.clip((begins[sequence] + done)[:, None] + row, 0, length - 1).reshape(-1)
        step = jnp.arange(length, dtype=jnp.int32)
        of_step = jnp.minimum(jnp.searchsorted(cu_seqlens[1:], step, side="right"), self.scan.p.n - 1)
        self._is_step = step < cu_seqlens[-1]
        self._target = jnp.where(self._is_step, first_chunk[of_step] * c + step - begins[of_step], 0)

    def _gates(
        self, g: jax.Array | None = None, g_gamma: jax.Array | None = None, gk: jax.Array | None = None
    ) -> dict[str, Operand]:
        if gk is not None:
            return {"gk": self._laid_out(gk, early=True)}
        if g is None:
            gamma = jnp.zeros(self.scan.p.h, jnp.float32) if g_gamma is None else g_gamma
            return {"g_gamma": Operand(gamma, space=pltpu.SMEM)}
        gates = {"g": g}
        if g_gamma is not None:
            gates["g_gamma"] = jnp.broadcast_to(g_gamma, g.shape)
        return self.numbers(**gates)

    def numbers(self, **numbers: jax.Array) -> dict[str, Operand]:
        """Numbers [B, T, H] as operands, in float32 and zero where there is no step."""
        return {name: self.steps(self._laid_out_steps(x.astype(jnp.float32))) for name, x in numbers.items()}

    def rows(self, **tensors: jax.Array) -> dict[str, Operand]:
        """Tensors [B, T, heads, ·] as operands; heads divides those of the scan."""
        # The states are made of k and v.
        return {name: self._laid_out(x, early=name in ("k", "v")) for name, x in tensors.items()}

    def states(self, **states: jax.Array | None) -> dict[str, Operand]:
        """States [N, H, K, V] as operands, those that there are."""
        given = {name: x for name, x in states.items() if x is not None}
        return {name: Operand(self.turned(x), space=pl.ANY) for name, x in given.items()}

    def state_out(self) -> Operand:
        """A state of each sequence."""
        scan = self.scan
        return Operand(jax.ShapeDtypeStruct((scan.p.n, scan.p.h, *scan.state[1:]), jnp.float32), space=pl.ANY)

    def turned(self, states: jax.Array) -> jax.Array:
        """States [N, H, K, V] of the caller as those of the kernels, and back."""
        return states if self.scan.by_key else states.swapaxes(2, 3)

    def rows_out(self, width: int, dtype: Any) -> Operand:
        """An output with a row per step."""
        scan = self.scan
        shape = (scan.t, scan.p.h * width) if _side_by_side(width) else (scan.p.h, scan.t, width)
        return self._rows(jax.ShapeDtypeStruct((scan.p.b, *shape), dtype), scan.p.h, width)

    def chunk_states(self, states: jax.Array | None = None) -> Operand:
        """A state of each chunk."""
        scan = self.scan
        shape = (scan.p.b, scan.blocks * scan.chunks, scan.p.h, *scan.state[1:])
        block = (None, scan.chunks, *scan.state)
        array = jax.ShapeDtypeStruct(shape, jnp.float32) if states is None else states
        return Operand(array, block, lambda b, h, t: (b, t, h, 0, 0))

    def steps(self, gates: jax.Array | None = None) -> Operand:
        """A number per step and head, a chunk in a row of lanes."""
        shape = self.scan.step_shape
        array = jax.ShapeDtypeStruct(shape, jnp.float32) if gates is None else gates
        block = (None, self.scan.heads, None, *shape[3:])
        return Operand(array, block, lambda b, h, t: (b, h, t, 0, 0), early=gates is not None)

    def public(self, rows: jax.Array) -> jax.Array:
        """Rows of the kernels as [B, T, H, ·] of the caller."""
        if rows.ndim == 4:
            return self._picked(rows.swapaxes(1, 2))
        rows = self._picked(rows)
        return rows.reshape(*rows.shape[:2], self.scan.p.h, -1)

    def public_steps(self, steps: jax.Array) -> jax.Array:
        """`steps` of the kernels as [B, T, H] of the caller."""
        scan = self.scan
        return self._picked(steps[..., : scan.chunk].reshape(scan.p.b, scan.p.h, -1).swapaxes(1, 2))

    def _picked(self, x: jax.Array) -> jax.Array:
        if not self.prefetch:
            return x[:, : self.scan.p.t]
        shape = (1, self.scan.p.t) + (1,) * (x.ndim - 2)
        return jnp.where(self._is_step.reshape(shape), x[:, self._target], jnp.zeros((), x.dtype))

    def _laid_out(self, x: jax.Array, early: bool) -> Operand:
        heads, width = x.shape[2:]
        if _side_by_side(width):
            x = x.reshape(*x.shape[:2], -1)
        if self.prefetch:
            x = x[:, self._source]
        x = jnp.pad(x, ((0, 0), (0, self.scan.t - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        x = x if _side_by_side(width) else x.swapaxes(1, 2)
        return self._rows(x, heads, width, early)

    def _laid_out_steps(self, g: jax.Array) -> jax.Array:
        if self.prefetch:
            g = jnp.where(self._live[:, None], g[:, self._source], 0.0)
        *sizes, lanes = self.scan.step_shape
        g = jnp.pad(g, ((0, 0), (0, self.scan.blocks * self.scan.rows - g.shape[1]), (0, 0)))
        g = g.swapaxes(1, 2).reshape(*sizes, self.scan.chunk)
        return jnp.pad(g, ((0, 0),) * 4 + ((0, lanes - self.scan.chunk),))

    def _rows(self, array: Any, heads: int, width: int, early: bool = False) -> Operand:
        """The operand of rows of `heads` heads. If these are fewer than the scan's, neighbours share one."""
        group = self.scan.p.h // heads
        here, share = max(self.scan.heads // group, 1), max(group // self.scan.heads, 1)
        rows = self.scan.rows

        def head(h: Any) -> Any:
            return h if share == 1 else h // share

        if _side_by_side(width):
            return Operand(array, (None, rows, here * width), lambda b, h, t: (b, t, head(h)), early, width=width)
        return Operand(array, (None, here, rows, width), lambda b, h, t: (b, head(h), t, 0), early)


def _side_by_side(width: int) -> bool:
    """Whether the rows of all heads lie side by side: a head's then begin at a register's first lane."""
    return width % LANES == 0


def call(
    scan: Scan,
    kernel: Callable[..., None],
    name: str,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    scratch: Mapping[str, Any],
    *,
    prefetch: Mapping[str, jax.Array],
    interpret: bool | pltpu.InterpretParams,
    work: tuple[int, int],
    walk: str = "once",
) -> dict[str, jax.Array]:
    """The outputs of `kernel(refs by name, scan)` by name.

    It walks the blocks along T "once", "back" from the last, or "twice": there, for what is `early` alone, and back.
    work: how often a step meets the others of its chunk in a dot, and how often the state.
    """
    steps = 2 * scan.blocks - 1 if walk == "twice" else scan.blocks

    def block(operand: Operand) -> Block:
        if operand.at is None:
            return Block(operand.array, space=operand.space)
        at, walked = operand.at, "there" if operand.held else walk
        return Block(
            operand.array,
            operand.block,
            lambda b, h, step, *_: at(b, h, block_of(step, scan.blocks, walked, operand.early)),
        )

    held = {
        name: pltpu.VMEM((scan.blocks, *filter(None, operand.block)), operand.array.dtype)
        for name, operand in inputs.items()
        if operand.held
    }

    def seen(name: str, ref: Any) -> Any:
        operand = inputs.get(name) or outputs.get(name)
        return operand.seen(ref) if operand else ref

    def run(*trees: Mapping[str, Any]) -> None:
        refs = {name: ref for tree in trees for name, ref in tree.items()}
        refs |= {name: _held(refs[name], blocks, scan) for name, blocks in refs.pop("held").items()}
        kernel({name: seen(name, ref) for name, ref in refs.items()}, scan)

    def nbytes(operand: Operand) -> int:
        twice = walk == "twice" and operand.early and not operand.held
        return bytes_of(operand.array) * (steps if twice else scan.blocks) // scan.blocks

    in_chunks, states = work
    all_steps = scan.p.b * scan.p.h * scan.t
    results: dict[str, jax.Array] = call_with_blocks(
        run,
        name=name,
        grid=(scan.p.b, scan.p.h // scan.heads, steps),
        parallel=2,
        scalars=(prefetch,) if prefetch else (),
        operands={name: block(operand) for name, operand in inputs.items()},
        out={name: block(operand) for name, operand in outputs.items()},
        scratch={**scratch, **decay_scratch(scan), "held": held},
        cost=pl.CostEstimate(
            flops=all_steps * (in_chunks * scan.chunk * (scan.p.k + scan.p.v) + 2 * states * scan.p.k * scan.p.v),
            transcendentals=all_steps * (1 if scan.gate == "constant" else scan.chunk),
            bytes_accessed=sum(map(nbytes, [*inputs.values(), *outputs.values()])),
        ),
        interpret=interpret,
        vmem_limit=vmem_limit(),
        sized_by="K, V or chunk_size",
    )
    return results


def _held(block: Any, blocks: Any, scan: Scan) -> Any:
    """The ref of a step's block among those held, stored there on the way there."""
    step = pl.program_id(2)
    held = blocks.at[block_of(step, scan.blocks, "twice", early=True)]

    @pl.when(step < scan.blocks)
    def _() -> None:
        held[...] = block[...]

    return held


def block_of(step: Any, blocks: int, walk: str, early: bool) -> Any:
    """The block that an operand has in a grid step.

    Operands only the backward sweep reads stay at the last block, where it begins, during the forward sweep; those that
    only the forward sweep reads, "there", stay at it after that.
    """
    if walk == "once":
        return step
    if walk == "there":
        return jnp.minimum(step, blocks - 1)
    if walk == "back":
        return blocks - 1 - step
    return jnp.where(step < blocks - 1, step if early else blocks - 1, 2 * (blocks - 1) - step)
