"""The kernel that goes through the sequences of a gated delta rule, by blocks of rows; see `chunk_delta_rule`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_reference._lib.chunk_decays import block_decays
from gpu_reference._lib.chunk_dots import dot, next_state
from gpu_reference._lib.chunk_dots import read_state as read_by_one_dot
from gpu_reference._lib.delta_pairs import Pairs, rows_of_keys
from gpu_reference._lib.layout import (
    Rows,
    first_slot,
    load_state,
    load_tile,
    of_program,
    rows_of_sequence,
    state_offset,
    store_state,
    store_tile,
)
from gpu_reference._lib.probe import INTERPRETED, probe


class Memory(NamedTuple):
    """What the kernels of a backward pass leave for each other, float32: states before each block [slots, HV, K, V] and
    their gradients after it, and [B, T, HV, V] error (v less what the state recalls), v_new (what is written), and
    dupdate, T^T times the gradient of that. dpairs: the gradients of p and raw of `Pairs`."""

    states: Any
    error: Any
    v_new: Any
    dstates: Any
    dupdate: Any
    dpairs: Any = Pairs(None)


NO_MEMORY = Memory(None, None, None, None, None)
"""That of a forward pass."""


@triton.jit
def columns_of_program(layout, BK: tl.constexpr, BV: tl.constexpr):
    """The sequence and head of one program per (sequence, head of values, tile of V); its columns of V [1, V], the
    channels [K, 1] and [1, K]; which elements [K, V] of a state these are, and where that of the sequence has them."""
    tile, head, sequence = of_program(layout.v, BV, layout.h)
    value = tile * BV + tl.arange(0, BV)[None, :]
    key_row = tl.arange(0, BK)[None, :]
    key = tl.arange(0, BK)[:, None]
    in_state = (key < layout.k) & (value < layout.v)
    at_sequence = state_offset(sequence, head, key, value, layout)
    return sequence, head, value, key, key_row, in_state, at_sequence


INSTRUCTION = tl.constexpr(16)
"""Products of one instruction of the matrix units for bfloat16."""


@triton.jit
def read_state(k_rows, state, weight, SPLIT: tl.constexpr):
    """(weight k) state [R, V], float32, as `chunk_dots.read_state`.

    Of more than 128 channels with a gate each it is the sum of a batch of dots, one instruction deep: R and V are 16
    there, and in one dot each of the eight warps holds both operands whole and spills. In a batch it holds a part.
    """
    if SPLIT and len(weight.shape) == 2 and state.shape[0] > 128:
        COUNT: tl.constexpr = state.shape[0] // INSTRUCTION
        rows = tl.reshape(weight * k_rows.to(tl.float32), (k_rows.shape[0], COUNT, INSTRUCTION))
        parts = dot(tl.permute(rows, (1, 0, 2)), tl.reshape(state, (COUNT, INSTRUCTION, state.shape[1])), SPLIT)
        result = tl.sum(parts, axis=0)
    else:
        result = read_by_one_dot(k_rows, state, weight, SPLIT)
    return result


@triton.jit
def forward_kernel(
    inputs,
    layout,
    scale,
    pairs,
    initial_state,
    o,
    memory,
    ht,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (sequence, head of values, tile of V). What is None of o, memory and ht is not stored."""
    sequence, head, value, key, key_row, in_state, at_sequence = columns_of_program(layout, BK, BV)
    start, end = rows_of_sequence(sequence, layout)
    at = tl.arange(0, ROWS)

    state = load_state(initial_state, at_sequence, in_state)
    for block in range(tl.cdiv(end - start, ROWS)):
        rows = Rows(start + block * ROWS, end, head, layout.h)
        key_rows = rows_of_keys(rows, layout)
        row = rows.first + at
        k_rows = load_tile(inputs.k, row[:, None], key_row, key_rows, layout.k)
        from_start = block_decays(inputs, rows, key_row, layout.k, 0, SPLIT, ROWS).from_start
        recalled = read_state(k_rows, state, from_start, SPLIT)
        error = load_tile(inputs.v, row[:, None], value, rows, layout.v).to(tl.float32) - recalled
        beta = load_tile(inputs.beta, row, 0, rows, 1).to(tl.float32)
        t_rows = load_tile(pairs.t, row[:, None], at[None, :], rows, ROWS)
        v_new = dot(t_rows, beta[:, None] * error, SPLIT)
        if INTERPRETED:
            v_new = probe("v_new", v_new, (row[:, None] < end) & (value < layout.v), chunk_size=ROWS)
        if memory.states is not None:
            slot = first_slot(sequence, start, ROWS) + block
            tl.store(memory.states + state_offset(slot, head, key, value, layout), state, mask=in_state)
            store_tile(memory.error, error, row[:, None], value, rows, layout.v)
            store_tile(memory.v_new, v_new, row[:, None], value, rows, layout.v)
        if o is not None:
            q_rows = load_tile(inputs.q, row[:, None], key_row, key_rows, layout.k)
            p_rows = load_tile(pairs.p, row[:, None], at[None, :], rows, ROWS)
            out = read_state(q_rows, state, from_start, SPLIT) + dot(p_rows, v_new, SPLIT)
            store_tile(o, scale * out, row[:, None], value, rows, layout.v)
        decays = block_decays(inputs, rows, key, layout.k, 1, SPLIT, ROWS)
        k_columns = load_tile(inputs.k, row[None, :], key, key_rows, layout.k)
        state = next_state(state, k_columns, v_new, decays.to_end, decays, SPLIT)
        if INTERPRETED:
            state = probe("h", state, in_state, chunk_size=ROWS)
    store_state(ht, at_sequence, state, in_state)
