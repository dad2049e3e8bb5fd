"""Where the rows and states of scans lie in memory, and which of them a program has.

A tensor of rows is [B, T, H, columns]: row r of head h begins at (r H + h) columns. Its B T rows are cut into sequences
of T rows each, or by cu_seqlens. A sequence is cut into *segments*, each of which has a slot for a state:
[slots, H, K, V].
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Inputs(NamedTuple):
    """The tensors of a scan: q, k [B, T, H, K], v and in the backward pass do [B, T, H, V]."""

    q: Any
    k: Any
    v: Any
    do: Any = None


class Sequences(NamedTuple):
    """Which rows are a sequence's: `count` sequences of `steps` rows each, or cut from `steps` rows by cu_seqlens.

    rows: of all of them.
    """

    cu_seqlens: Any
    count: Any
    steps: Any
    rows: Any


class Sizes(NamedTuple):
    """H, K and V. (A field `values` would be Triton's own, of every tuple.)"""

    h: Any
    k: Any
    v: Any


class Rows(NamedTuple):
    """The rows of a head from `first` (int64) on, and before `end`."""

    first: Any
    end: Any
    head: Any
    heads: Any


@triton.jit
def of_program(size, TILE: tl.constexpr, heads):
    """This program's tile of an axis of `size` elements, its head, and its sequence or segment (int64)."""
    tiles = tl.maximum(tl.cdiv(size, TILE), 1)
    program = tl.program_id(0)
    return program % tiles, program // tiles % heads, (program // tiles // heads).to(tl.int64)


@triton.jit
def rows_of_sequence(sequence, sequences):
    """A sequence's first row (int64), and the first after it."""
    if sequences.cu_seqlens is None:
        start = sequence * sequences.steps
        end = start + sequences.steps
    else:
        steps = sequences.steps
        start = tl.minimum(tl.maximum(tl.load(sequences.cu_seqlens + sequence), 0), steps).to(tl.int64)
        end = tl.minimum(tl.maximum(tl.load(sequences.cu_seqlens + sequence + 1), start), steps).to(tl.int64)
    return start, end


@triton.jit
def first_slot(sequence, start, SEGMENT: tl.constexpr):
    """The slot of a sequence's first segment: no other sequence has it, whatever the lengths are."""
    return start // SEGMENT + sequence


@triton.jit
def rows_of_segment(segment, sequences, SEGMENT: tl.constexpr):
    """The sequence of a segment, its first row and the first after it: a whole sequence without SEGMENT, else at most
    SEGMENT rows of one, and none where this is no sequence's segment."""
    if SEGMENT is None:
        sequence = segment
        start, end = rows_of_sequence(sequence, sequences)
    else:
        sequence = tl.full((), 0, tl.int64)
        beyond = tl.full((), 0, tl.int64) + sequences.count
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            middle_start, _ = rows_of_sequence(middle, sequences)
            is_before = first_slot(middle, middle_start, SEGMENT) <= segment
            sequence = tl.where(is_before, middle, sequence)
            beyond = tl.where(is_before, beyond, middle)
        first, end = rows_of_sequence(sequence, sequences)
        start = first + (segment - first_slot(sequence, first, SEGMENT)) * SEGMENT
        end = tl.minimum(end, start + SEGMENT)
    return sequence, start, end


@triton.jit
def state_offset(index, head, key, value, sizes):
    """Where the elements (key, value) of a head's state are in [..., H, K, V]; index is int64."""
    return ((index * sizes.h + head) * sizes.k + key) * sizes.v + value


@triton.jit
def load_tile(x, row, column, rows, columns):
    """The rows before `rows.end`, and zero for others, of a head in x [rows, H, columns], in the shape of `row` (int64)
    and `column` broadcast: [R, 1] and [1, C], or [1, R] and [C, 1] for columns."""
    at_tile = (row * rows.heads + rows.head) * columns + column
    return tl.load(x + at_tile, mask=(row < rows.end) & (column < columns), other=0)


@triton.jit
def store_columns(x, tile, row, column, rows, columns):
    """Store tile [C, R] as rows of a head in x [rows, H, columns]; `column` is [C, 1]."""
    at_tile = (row[None, :] * rows.heads + rows.head) * columns + column
    tl.store(x + at_tile, tile.to(x.dtype.element_ty), mask=(row[None, :] < rows.end) & (column < columns))
