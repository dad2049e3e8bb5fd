"""What is static about a chunked scan: its sizes, its blocks, and whether it is one pass over each sequence."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gpu_reference._lib.decays import Gates, gates_of
from gpu_reference._lib.layout import Sequences, Sizes
from gpu_reference._lib.rows import contiguous
from gpu_reference._lib.tiles import block_of
from op_arguments.gla import Problem, check_fused

LARGEST_ROWS = {False: 32, True: 16}
"""Rows of a block, at most, without and with a gate for each channel: there pairs within a block are no matrix product,
and few are best. Every row less costs the backward pass memory for states."""

BLOCK_ELEMENTS = 4096  # of q or of the state in a block that has all of K, at most (never fewer than 16 rows of either)

FORWARD_TILES = {
    ("bfloat16", False): (32, 4),
    ("bfloat16", True): (16, 4),
    ("float32", False): (16, 8),
    ("float32", True): (16, 4),
}
"""(columns of V, warps) by dtype and whether each channel has a gate: at most so many, that little is spilled."""

BACKWARD_TILES = {
    (True, False): (64, 16, 8),
    (True, True): (32, 32, 4),
    (False, False): (32, 16, 8),
    (False, True): (32, 16, 4),
}
"""(columns of K, columns of V, warps) likewise, by whether dots are of bfloat16 and whether each channel has a gate.
Every tile of K more costs memory for a copy of dv. Chosen on sm_80 to sm_100; AMD takes the same, and spills."""


class Block(NamedTuple):
    """What a program works on at a time: rows, and columns of K and V; and its warps."""

    rows: int
    keys: int
    values: int
    warps: int

    @property
    def options(self) -> dict[str, Any]:
        """Of the launch. A pipeline would hold the next rows in registers, which are short: one stage."""
        return {"num_warps": self.warps, "num_stages": 1, "enable_fp_fusion": True}


class Scan(NamedTuple):
    """One direction of a chunked scan, as its kernels are launched.

    split: float32 operands of dots are split in two bfloat16. segment: rows between the states that are kept.
    fused: kernels go through whole sequences, not through segments.
    """

    p: Problem
    gates: Gates
    sequences: Sequences
    sizes: Sizes
    block: Block
    split: bool
    segment: int
    fused: bool

    @property
    def slots(self) -> int:
        """States that are kept: a sequence's first is at its first row // segment + its number."""
        return self.p.b * self.p.t // self.segment + self.p.n

    @property
    def parts(self) -> int:
        """Sequences or segments that have programs of their own."""
        return self.p.n if self.fused else self.slots


class Route(NamedTuple):
    """How a chunked form is computed, and why."""

    fused: bool
    explain: str


def plan(
    p: Problem,
    gates: Mapping[str, Tensor | None],
    cu_seqlens: Tensor | None,
    chunk_size: int,
    precision: str,
    *,
    fused: bool,
    backward: bool = False,
) -> Scan:
    """The scan of a checked problem. A backward pass keeps states for each block, a forward pass for each chunk."""
    per_channel = "gk" in gates
    if backward:
        block = backward_block(p, chunk_size, precision, per_channel=per_channel)
    else:
        block = forward_block(p, chunk_size, per_channel=per_channel)
    return Scan(
        p,
        gates_of(gates),
        Sequences(contiguous(cu_seqlens), p.n, p.t, p.b * p.t),
        Sizes(p.h, p.k, p.v),
        block,
        is_split(p, precision),
        block.rows if backward else chunk_size,
        fused,
    )


def chunk_route(
    p: Problem,
    chunk_size: int,
    processors: int,
    *,
    per_channel: bool,
    backward: bool = False,
    precision: str = "ieee",
) -> Route:
    """Whether one pass over each sequence (fused) keeps `processors` multiprocessors busy, or chunks must be spread.

    per_channel: whether the gate is gk; precision: as in `chunk_fwd`.
    """
    if backward:
        block = backward_block(p, chunk_size, precision, per_channel=per_channel)
        axis, tiles = "K", triton.cdiv(p.k, block.keys)
    else:
        axis, tiles = "V", triton.cdiv(p.v, forward_block(p, chunk_size, per_channel=per_channel).values)
    programs = p.n * p.h * tiles
    count = f"{p.n} sequences x {p.h} heads x {tiles} tiles of {axis} = {programs} programs"
    if p.t <= chunk_size:
        return Route(True, f"fused: no sequence is longer than a chunk of {chunk_size}")
    if programs >= processors:
        return Route(True, f"fused: {count}, at least one for each of {processors} multiprocessors")
    return Route(False, f"chunks apart: {count} would leave some of {processors} multiprocessors idle")


def is_fused(
    p: Problem,
    chunk_size: int,
    fused: bool | None,
    device: torch.device,
    *,
    per_channel: bool,
    backward: bool = False,
    precision: str = "ieee",
) -> bool:
    """What was asked for, or where that is None, the route of `chunk_route` on this device."""
    if fused is not None:
        return check_fused(fused, None)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return chunk_route(p, chunk_size, processors, per_channel=per_channel, backward=backward, precision=precision).fused


def block_rows(p: Problem, chunk_size: int, *, per_channel: bool) -> int:
    """The rows of a block. They divide chunk_size, so that calls may be cut at the borders of chunks, and both passes
    have the same, so that a backward pass goes on from a forward pass's final state as from its own."""
    return min(chunk_size & -chunk_size, LARGEST_ROWS[per_channel], max(BLOCK_ELEMENTS // block_of(p.k), 16))


def forward_block(p: Problem, chunk_size: int, *, per_channel: bool) -> Block:
    """The block of `_forward_kernel`, which has all of K and a tile of V."""
    values, warps = FORWARD_TILES[p.dtype, per_channel]
    rows = block_rows(p, chunk_size, per_channel=per_channel)
    keys = block_of(p.k)
    return Block(rows, keys, min(block_of(p.v), values, max(BLOCK_ELEMENTS // keys, 16)), warps)


def backward_block(p: Problem, chunk_size: int, precision: str, *, per_channel: bool) -> Block:
    """The block of `_backward_kernel`, which goes through tiles of V for each tile of K."""
    keys, values, warps = BACKWARD_TILES[is_split(p, precision), per_channel]
    rows = block_rows(p, chunk_size, per_channel=per_channel)
    return Block(rows, min(block_of(p.k), keys), min(block_of(p.v), values), warps)


def is_split(p: Problem, precision: str) -> bool:
    """Whether float32 operands of dots are split in two: all but those of IEEE dots, which bfloat16's are not."""
    return p.dtype == "bfloat16" or precision != "ieee"
