"""What is static about a chunked scan: its blocks, and whether it is one pass over each sequence."""

from typing import Any, NamedTuple

import torch

from gpu_reference._lib.launch import Launch
from gpu_reference._lib.scans import Scan
from gpu_reference._lib.tiles import block_of, cdiv
from op_arguments import dtype_name
from op_arguments.gla import Problem, check_fused

LARGEST_ROWS = {False: 32, True: 16}
"""Rows of a block, at most, without and with a gate for each channel: there pairs within a block are no matrix product,
and few are best. Every row less costs the backward pass memory for states."""

BLOCK_ELEMENTS = 4096  # of q or of the state in a block that has all of K, at most (never fewer than 16 rows of either)

FORWARD_TILES = {
    ("bfloat16", False): (1024, 32, 4),
    ("bfloat16", True): (512, 16, 4),
    ("float32", False): (512, 16, 8),
    ("float32", True): (512, 16, 4),
}
"""(K, columns of V, warps) by dtype and whether each channel has a gate: at most so many columns, that little is
spilled, and so large a K, that 16 rows of q and of k, of float32 but for the first, fit into the 99 KiB of sm_120."""

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


class Plan(NamedTuple):
    """One direction of a chunked scan, as its kernels are launched.

    split: float32 operands of dots are split in two bfloat16. segment: rows between the states that are kept.
    fused: kernels go through whole sequences, not through segments.
    """

    scan: Scan
    block: Block
    split: bool
    segment: int
    fused: bool

    @property
    def slots(self) -> int:
        """States that are kept: a sequence's first is at its first row // segment + its number."""
        return self.scan.p.b * self.scan.p.t // self.segment + self.scan.p.n

    @property
    def parts(self) -> int:
        """Sequences or segments that have programs of their own."""
        return self.scan.p.n if self.fused else self.slots

    def launch(self, kernel: Any, programs: int, **arguments: Any) -> Launch:
        """So many programs of a kernel; arguments: those that are its own, or other than the plan's."""
        tile = {"ROWS": self.block.rows, "BK": self.block.keys, "BV": self.block.values}
        planned = {"SEGMENT": None if self.fused else self.segment, "SPLIT": self.split, **tile}
        # A pipeline would hold the next rows in registers, which are short: one stage.
        options = {"num_warps": self.block.warps, "num_stages": 1, "enable_fp_fusion": True}
        return Launch(
            kernel, (programs,), {**self.scan.arguments, **planned, **arguments}, options, "K, V or chunk_size"
        )


class Route(NamedTuple):
    """How a chunked form is computed, and why."""

    fused: bool
    explain: str


def plan_of(scan: Scan, *, backward: bool = False) -> Plan:
    """The plan of a scan, fused or not as asked for, or where that is None, by `chunk_route` on its device.

    A backward pass keeps states for each block, a forward pass for each chunk. Raises as `check_fused` and, of a
    forward pass, `forward_block`.
    """
    p = scan.p._replace(dtype=dtype_name(scan.inputs.q.dtype))  # interpreted, bfloat16 may have become float32
    split = p.dtype == "bfloat16" or scan.precision != "ieee"  # a dot of bfloat16 operands is no IEEE dot
    per_channel = scan.inputs.gk is not None
    rows = block_rows(p, scan.chunk_size, per_channel=per_channel)
    if backward:
        block = backward_block(p, rows, split=split, per_channel=per_channel)
    else:
        block = forward_block(p, rows, per_channel=per_channel)
    fused = scan.fused
    if fused is None:
        is_cuda = scan.device.type == "cuda"
        processors = torch.cuda.get_device_properties(scan.device).multi_processor_count if is_cuda else 1
        fused = chunk_route(p, block, scan.chunk_size, processors, backward=backward).fused
    return Plan(scan, block, split, rows if backward else scan.chunk_size, check_fused(fused, None))


def chunk_route(p: Problem, block: Block, chunk_size: int, processors: int, *, backward: bool) -> Route:
    """Whether one pass over each sequence (fused) keeps `processors` multiprocessors busy, or chunks must be spread."""
    axis, tiles = ("K", cdiv(p.k, block.keys)) if backward else ("V", cdiv(p.v, block.values))
    programs = p.n * p.h * tiles
    count = f"{p.n} sequences x {p.h} heads x {tiles} tiles of {axis} = {programs} programs"
    if p.t <= chunk_size:
        return Route(True, f"fused: no sequence is longer than a chunk of {chunk_size}")
    if programs >= processors:
        return Route(True, f"fused: {count}, at least one for each of {processors} multiprocessors")
    return Route(False, f"chunks apart: {count} would leave some of {processors} multiprocessors idle")


def block_rows(p: Problem, chunk_size: int, *, per_channel: bool) -> int:
    """The rows of a block. They divide chunk_size, so that calls may be cut at the borders of chunks, and both passes
    have the same, so that a backward pass goes on from a forward pass's final state as from its own."""
    return min(chunk_size & -chunk_size, LARGEST_ROWS[per_channel], max(BLOCK_ELEMENTS // block_of(p.k), 16))


def forward_block(p: Problem, rows: int, *, per_channel: bool) -> Block:
    """The block of `_forward_kernel`, which has all of K and a tile of V. Raises ValueError where K is too large."""
    largest, values, warps = FORWARD_TILES[p.dtype, per_channel]
    if p.k > largest:
        raise ValueError(f"q must have K <= {largest}, got {p.k}")
    keys = block_of(p.k)
    return Block(rows, keys, min(block_of(p.v), values, max(BLOCK_ELEMENTS // keys, 16)), warps)


def backward_block(p: Problem, rows: int, *, split: bool, per_channel: bool) -> Block:
    """The block of `_backward_kernel`, which goes through tiles of V for each tile of K."""
    keys, values, warps = BACKWARD_TILES[split, per_channel]
    return Block(rows, min(block_of(p.k), keys), min(block_of(p.v), values), warps)
