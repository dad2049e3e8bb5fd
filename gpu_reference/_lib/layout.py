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
    """The tensors of a scan: q, k [B, T, H, K], v and in the backward pass do [B, T, H, V], its `decays.Gates`, and
    of a delta rule beta [B, T, H]; there all but q and k have the heads of values."""

    q: Any
    k: Any
    v: Any
    do: Any = None
    g: Any = None
    g_gamma: Any = None
    gk: Any = None
    beta: Any = None

    @property
    def gate(self) -> Any:
        """That of a delta rule, which has one."""
        return self.g if self.gk is None else self.gk


class Outs(NamedTuple):
    """What a backward pass fills: dq, dk [B, T, H, K], dv [tiles of K, B, T, H, V], and dgate, gk's in its shape, else
    [tiles of K, B, T, H]."""

    dq: Any
    dk: Any
    dv: Any
    dgate: Any


class Layout(NamedTuple):
    """Which rows are a sequence's, and H, K and V. (A field `values` would be Triton's own, of every tuple.)

    `count` sequences of `steps` rows each, or cut from `steps` rows by cu_seqlens; rows: of all of them. group: of a
    delta rule, how many heads of values share a head of keys.
    """

    cu_seqlens: Any
    count: Any
    steps: Any
    rows: Any
    h: Any
    k: Any
    v: Any
    group: Any = 1


class Rows(NamedTuple):
    """The rows of a head from `first` (int64) on, and before `end`."""

    first: Any
    end: Any
    head: Any
    heads: Any


class Steps(NamedTuple):
    """The steps of a head in a sequence, in the order of time: `length` of them.

    start: the sequence's first row. first, stride: the first step's row of a [B T H, ...] tensor, and how far it is to
    the next one's; int64.
    """

    sequence: Any
    head: Any
    start: Any
    length: Any
    first: Any
    stride: Any


@triton.jit
def of_program(size, TILE: tl.constexpr, heads):
    """This program's tile of an axis of `size` elements, its head, and its sequence or segment (int64)."""
    tiles = tl.maximum(tl.cdiv(size, TILE), 1)
    program = tl.program_id(0)
    return program % tiles, program // tiles % heads, (program // tiles // heads).to(tl.int64)


@triton.jit
def rows_of_sequence(sequence, layout):
    """A sequence's first row (int64), and the first after it."""
    if layout.cu_seqlens is None:
        start = sequence * layout.steps
        end = start + layout.steps
    else:
        steps = layout.steps
        start = tl.minimum(tl.maximum(tl.load(layout.cu_seqlens + sequence), 0), steps).to(tl.int64)
        end = tl.minimum(tl.maximum(tl.load(layout.cu_seqlens + sequence + 1), start), steps).to(tl.int64)
    return start, end


@triton.jit
def steps_of_program(size, TILE: tl.constexpr, layout, REVERSE: tl.constexpr):
    """This program's tile of an axis of `size` elements, and its Steps."""
    tile, head, sequence = of_program(size, TILE, layout.h)
    start, end = rows_of_sequence(sequence, layout)
    length = (end - start).to(tl.int32)
    stride = tl.full((), layout.h, tl.int64)
    first = start
    if REVERSE:
        stride = -stride
        first += tl.maximum(length - 1, 0)
    return tile, Steps(sequence, head, start, length, first * layout.h + head, stride)


@triton.jit
def first_slot(sequence, start, SEGMENT: tl.constexpr):
    """The slot of a sequence's first segment: no other sequence has it, whatever the lengths are."""
    return start // SEGMENT + sequence


@triton.jit
def rows_of_segment(segment, layout, SEGMENT: tl.constexpr):
    """The sequence of a segment, its first row and the first after it: a whole sequence without SEGMENT, else at most
    SEGMENT rows of one, and none where this is no sequence's segment."""
    if SEGMENT is None:
        sequence = segment
        start, end = rows_of_sequence(sequence, layout)
    else:
        sequence = tl.full((), 0, tl.int64)
        beyond = tl.full((), 0, tl.int64) + layout.count
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            middle_start, _ = rows_of_sequence(middle, layout)
            is_before = first_slot(middle, middle_start, SEGMENT) <= segment
            sequence = tl.where(is_before, middle, sequence)
            beyond = tl.where(is_before, beyond, middle)
        first, end = rows_of_sequence(sequence, layout)
        start = first + (segment - first_slot(sequence, first, SEGMENT)) * SEGMENT
        end = tl.minimum(end, start + SEGMENT)
    return sequence, start, end


@triton.jit
def rows_of_block(layout, ROWS: tl.constexpr):
    """The slot of this program's block of rows, and the `Rows`; one program per (block of rows, head)."""
    _, head, slot = of_program(1, 1, layout.h)
    _, start, end = rows_of_segment(slot, layout, ROWS)
    return slot, Rows(start, end, head, layout.h)


@triton.jit
def state_offset(index, head, key, value, layout):
    """Where the elements (key, value) of a head's state are in [..., H, K, V]; index is int64. A state has fewer than
    2^31 elements."""
    return (index * layout.h + head) * layout.k * layout.v + (key * layout.v + value)


@triton.jit
def state_of_program(steps, key, value, layout, NEW_AXIS: tl.constexpr):
    """Keys and values in the shape of this program's tile of the state, [V, K], where keys get their new axis in front,
    or [K, V]; which of its elements there are; and where they are in [N, H, K, V]."""
    state_key = tl.expand_dims(key, NEW_AXIS)
    state_value = tl.expand_dims(value, 1 - NEW_AXIS)
    in_state = (state_key < layout.k) & (state_value < layout.v)
    return state_key, state_value, in_state, state_offset(steps.sequence, steps.head, state_key, state_value, layout)


@triton.jit
def load_state(states, at_state, in_state):
    """Elements of a state, zero where they are not `in_state`; all of them if there are no states."""
    state = tl.full(in_state.shape, 0.0, tl.float32)
    if states is not None:
        state += tl.load(states + at_state, mask=in_state, other=0)
    return state


@triton.jit
def store_state(states, at_state, state, in_state):
    """Store the elements of a state that are `in_state`, if there are states."""
    if states is not None:
        tl.store(states + at_state, state, mask=in_state)


@triton.jit
def load_row(x, row, column, columns):
    """Row `row` of x [rows, columns] as float32, zero beyond its last column."""
    return tl.load(x + row * columns + column, mask=column < columns, other=0).to(tl.float32)


@triton.jit
def store_row(x, values, row, column, columns):
    """Store row `row` of x [rows, columns], up to its last column."""
    tl.store(x + row * columns + column, values.to(x.dtype.element_ty), mask=column < columns)


@triton.jit
def load_tile(x, row, column, rows, columns):
    """The rows before `rows.end`, and zero for others, of a head in x [rows, H, columns], in the shape of `row` (int64)
    and `column` broadcast: [R, 1] and [1, C], or [1, R] and [C, 1] for columns, or [R] and 0 of 1 column."""
    at_tile = (row * rows.heads + rows.head) * columns + column
    return tl.load(x + at_tile, mask=(row < rows.end) & (column < columns), other=0)


@triton.jit
def store_tile(x, tile, row, column, rows, columns):
    """Store what `load_tile` loads."""
    at_tile = (row * rows.heads + rows.head) * columns + column
    tl.store(x + at_tile, tile.to(x.dtype.element_ty), mask=(row < rows.end) & (column < columns))
