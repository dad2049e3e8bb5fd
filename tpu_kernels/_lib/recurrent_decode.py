"""One step of a recurrence for each of many sequences, from their states to their states: decoding.

A step reads and writes a state once and does little else, so HBM bounds it. States stay [K, V], as the caller has them,
and GROUP of them at a time stream through VMEM, of whatever sequences and heads. v is a row then, and what is
summed over K is added register by register; k, q and gates by key are columns. Of gated linear attention in
float32 the bits are those of `fused_recurrent` for sequences of one step: each element in the same operations, each sum
over K in the same order.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Output, Problem
from op_arguments.probe import active, probe
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import Block, bytes_of, call, is_interpreted, rarely
from tpu_kernels._lib.chip import LANES, generation
from tpu_kernels._lib.decays import decay_parts, next_state, times
from tpu_kernels._lib.recurrent_layout import GROUP, LEAST_VMEM, SPARE_VMEM, SUBLANES, gate_of, step_decays, vmem_bytes
from tpu_kernels._lib.recurrent_sums import (
    bit_of,
    column_of,
    columns_by_products,
    fold_registers,
    multiplies_exactly,
    spread_bits,
    sum_folded,
)

Column = Callable[[Any], jax.Array]
MOST_VMEM = 32 * 2**20  # bytes, for the states of a group, in and out and twice buffered


class Call(NamedTuple):
    """What is static about a call: its problem, the gate as `recurrent_layout.Plan` has it, how many states."""

    p: Problem
    gate: str | None
    states: int


def is_decoding(p: Problem, keys: int, initial_state: jax.Array | None) -> bool:
    """Whether `decode` takes the call: one step of each sequence, from a state that needs no padding for it.

    keys: what other calls would pad K to. A sum over K begins with halves of K: where these are whole registers, zeros
    in its place add nothing.
    """
    whole = p.k % SUBLANES == 0 and keys % p.k == 0
    fits = 4 * vmem_bytes((GROUP, p.k, p.v)) <= MOST_VMEM
    return p.t == 1 and not p.packed and initial_state is not None and whole and fits


def decode(
    x: Mapping[str, jax.Array],
    gates: Mapping[str, Any],
    initial_state: Any,
    p: Problem,
    output_final_state: bool,
    interpret: Interpreted,
) -> Output:
    """o [B, 1, H, V] and, if asked for, the states after the step [B, H, K, V] float32.

    x: q, k and v [B, 1, H, ·], of a delta rule beta [B, 1, H] besides. gates: as `scans.take`'s, by name.
    The states after the step are written in place of the initial ones, where the caller donates these.
    """
    count, gate = p.b * p.h, gate_of(gates)
    rows = {name: array.reshape(count, -1) for name, array in x.items()}
    if gate == "key":
        rows["gk"] = gates["gk"].reshape(count, -1)
    elif gate == "step":
        rows["decays"] = jnp.stack([part[..., 0].T.ravel() for part in step_decays(gates, p)], axis=1)
    operands = {name: _blocks(array) for name, array in rows.items()}
    states = initial_state.reshape(count, p.k, p.v)
    operands["h0"] = _blocks(states)
    out = {"o": _blocks(jax.ShapeDtypeStruct((count, p.v), x["v"].dtype))}
    if output_final_state:
        out["ht"] = _blocks(jax.ShapeDtypeStruct(states.shape, jnp.float32))
    found = call(
        partial(_kernel, of=Call(p, gate, count)),
        name="recurrent_decode",
        grid=(pl.cdiv(count, GROUP),),
        parallel=1,
        operands=operands,
        out=out,
        scratch={
            "parts": pltpu.VMEM((GROUP, SUBLANES, p.v), jnp.float32),
            "written": pltpu.VMEM((GROUP, p.v), jnp.float32),
        },
        cost=pl.CostEstimate(
            flops=15 * count * p.k * p.v,
            transcendentals=0,
            bytes_accessed=bytes_of(operands, out),
        ),
        in_place={"h0": "ht"} if output_final_state else None,
        interpret=interpret,
        vmem_limit=max(4 * vmem_bytes((GROUP, p.k, p.v)) + SPARE_VMEM, LEAST_VMEM),
        sized_by="K and V",
    )
    ht = found["ht"].reshape(initial_state.shape) if "ht" in found else None
    return Output(found["o"].reshape(x["v"].shape), ht)


def _blocks(array: Any) -> Block:
    """An array of one entry per state, GROUP of them at a time."""
    rest = array.shape[1:]
    return Block(array, (GROUP, *rest), lambda i: (i, *[0] * len(rest)))


def _kernel(operands: dict[str, Any], out: dict[str, Any], scratch: dict[str, Any], *, of: Call) -> None:
    names = operands.keys() & {"q", "k", "gk"}
    x = {name: operands[name][...].astype(jnp.float32) for name in sorted(names)}
    if of.states % GROUP:  # rows beyond the last state may be NaN, which products spread
        x = {name: jnp.where(_is_state(of.states, (GROUP, 1)), rows, 0.0) for name, rows in x.items()}
    if "gk" in x:
        x["kept"], x["rest"] = decay_parts(x.pop("gk"))
    multiplied = _multiplied(of.p, "beta" in operands)
    narrow = {"kept", *(name for name in "qk" if operands[name].dtype == jnp.bfloat16)}

    def columns(by_product: set[str]) -> dict[str, Column]:
        found: dict[str, Column] = {}
        for name, rows in x.items():
            if name in by_product:
                rows = rows.astype(jnp.bfloat16) if name in narrow else rows
                found[name] = columns_by_products(rows, of.p.v)
            elif name == "kept":
                found[name] = partial(bit_of, spread_bits(rows, of.p.v))
            else:
                found[name] = partial(column_of, rows.T)
        return found

    steps, unroll = partial(_steps, operands, out, scratch, of=of), not is_interpreted()
    if not multiplied:
        steps(columns(multiplied), turn=1 if unroll else GROUP, unroll=unroll)
        return
    are_exact = jnp.all(reduce(jnp.logical_and, [multiplies_exactly(x[name], name in narrow) for name in "qk"]))
    steps(columns(multiplied), turn=GROUP, unroll=unroll, shown=are_exact)
    # Only now: as the other branch of a condition, steps would wait for it (1,481 cycles in place of 1,423).
    rarely(jnp.logical_not(are_exact))(lambda: steps(columns(multiplied - {"q", "k"}), turn=GROUP, unroll=False))


def _multiplied(p: Problem, is_delta: bool) -> set[str]:
    """Names of the columns that are products of the matrix unit: those that make a group's steps shorter.

    None for other states than of 128 by 128: smaller ones wait for a product longer than it saves, and of larger ones
    a group's steps spill more than fits VMEM.
    """
    if vmem_bytes((p.k, p.v)) != vmem_bytes((LANES, LANES)) or (generation() == 5 and not is_delta):
        return set()
    return {"q", "k", "kept"} if is_delta else {"q", "k"}


def _is_state(count: int, shape: tuple[int, ...]) -> jax.Array:
    """Where rows of a group are those of one of `count` states."""
    return pl.program_id(0) * GROUP + lax.broadcasted_iota(jnp.int32, shape, 0) < count


def _steps(
    operands: dict[str, Any],
    out: dict[str, Any],
    scratch: dict[str, Any],
    columns: dict[str, Column],
    *,
    of: Call,
    turn: int,
    unroll: bool,
    shown: Any = True,
) -> None:
    """Take a group's states through their steps.

    columns: by name, n -> that of the n-th state, [K, 1] or [K, V] of equal lanes. turn: states that recall before one
    is written, so that none waits for its own sum over K. shown: whether a probe sees them.
    """
    parts, written = scratch["parts"], scratch["written"]

    def decay_of(n: Any) -> list[jax.Array]:
        if of.gate == "key":
            return [columns[name](n) for name in ("kept", "rest")]
        if of.gate == "step":
            return [operands["decays"][pl.ds(n, 1), pl.ds(part, 1)] for part in range(2)]
        return []

    def recall(n: Any) -> None:
        before = operands["h0"][n]
        parts[n] = fold_registers(columns["k"](n) * (times(decay_of(n), before) if of.gate == "key" else before))

    def step(n: Any) -> None:
        before, decay, term = operands["h0"][n], decay_of(n), columns["k"](n) * written[pl.ds(n, 1), :]
        state = next_state(before, decay, term) if decay else before + term
        if active():
            there = jnp.full(state.shape, shown & (pl.program_id(0) * GROUP + n < of.states))
            probe("h" if "beta" in operands else "state", state, there)
            if decay:
                probe("kept", decay[1], there[: decay[1].shape[0], : decay[1].shape[1]])
            if "beta" in operands:
                probe("v_new", written[pl.ds(n, 1), :], there[:1])
        if "ht" in out:
            out["ht"][n] = state
        parts[n] = fold_registers(columns["q"](n) * state)

    written[...] = operands["v"][...].astype(jnp.float32)
    for first in range(0, GROUP, turn):
        states = pl.ds(first, turn)
        if "beta" in operands:
            _for_states(recall, states, unroll)
            recalled = sum_folded(parts.at[states])
            if of.gate == "step":
                recalled = times([operands["decays"][states, pl.ds(part, 1)] for part in range(2)], recalled)
            written[states] = operands["beta"][states].astype(jnp.float32) * (written[states] - recalled)
        _for_states(step, states, unroll)
    out["o"][...] = (of.p.scale * sum_folded(parts)).astype(out["o"].dtype)


def _for_states(body: Any, states: Any, unroll: bool) -> None:
    """body(n) for some states of a group."""
    if unroll:
        for n in range(states.start, states.start + states.size):
            body(n)
    else:
        lax.fori_loop(states.start, states.start + states.size, lambda n, _: body(n), None)
