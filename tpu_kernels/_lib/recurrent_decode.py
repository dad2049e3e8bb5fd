"""One step of a recurrence for each of many sequences, from their states to their states: decoding.

A step reads and writes a state once and does little else, so HBM bounds it. States stay [K, V], as the caller has them,
and GROUP of them at a time stream through VMEM, of whatever sequences and heads. v is a row then, and what is
summed over K is added register by register; k, q and gates by key are columns. The bits are those of `fused_recurrent`
and `recurrent_delta_rule` for sequences of one step: each element in the same operations, each sum over K in the same
order.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gla import Output
from op_arguments.probe import active, probe
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import Block, bytes_of, call
from tpu_kernels._lib.decays import decay_parts, next_state
from tpu_kernels._lib.recurrent_layout import GROUP, LEAST_VMEM, SPARE_VMEM, SUBLANES, Plan, step_decays, vmem_bytes
from tpu_kernels._lib.recurrent_sums import (
    bit_of,
    column_of,
    fold_registers,
    recalled,
    spread_bits,
    sum_folded,
)

MOST_VMEM = 32 * 2**20  # bytes, for the states of a group, in and out and twice buffered


def is_decoding(plan: Plan, initial_state: jax.Array | None) -> bool:
    """Whether `decode` takes the call: one step of each sequence, from a state that needs no padding for it.

    A sum over K begins with halves of K: where these are whole registers, zeros in its place add nothing.
    """
    p = plan.p
    whole = p.k % SUBLANES == 0 and plan.keys % p.k == 0
    fits = 4 * vmem_bytes((GROUP, p.k, p.v)) <= MOST_VMEM
    return p.t == 1 and not p.packed and initial_state is not None and whole and fits


def decode(
    x: Mapping[str, jax.Array],
    gates: Mapping[str, Any],
    initial_state: Any,
    plan: Plan,
    output_final_state: bool,
    interpret: Interpreted,
) -> Output:
    """o [B, 1, H, V] and, if asked for, the states after the step [B, H, K, V] float32.

    x: q, k and v [B, 1, H, ·], of a delta rule beta [B, 1, H] besides. gates: as `scans.take`'s, by name.
    The states after the step are written in place of the initial ones, where the caller donates these.
    """
    p, count = plan.p, plan.p.b * plan.p.h
    rows = {name: array.reshape(count, -1) for name, array in x.items()}
    if plan.gate == "key":
        rows["gk"] = gates["gk"].reshape(count, -1)
    elif plan.gate == "step":
        rows["decays"] = jnp.stack([part[..., 0].T.ravel() for part in step_decays(gates, p)], axis=1)
    operands = {name: _blocks(array) for name, array in rows.items()}
    states = initial_state.reshape(count, p.k, p.v)
    operands["h0"] = _blocks(states)
    out = {"o": _blocks(jax.ShapeDtypeStruct((count, p.v), x["v"].dtype))}
    if output_final_state:
        out["ht"] = _blocks(jax.ShapeDtypeStruct(states.shape, jnp.float32))
    found = call(
        partial(_kernel, plan=plan, count=count, unroll=not interpret),
        name="recurrent_decode",
        grid=(pl.cdiv(count, GROUP),),
        parallel=1,
        operands=operands,
        out=out,
        scratch=pltpu.VMEM((GROUP, SUBLANES, p.v), jnp.float32),
        cost=pl.CostEstimate(
            flops=15 * count * p.k * p.v,
            transcendentals=0,
            bytes_accessed=sum(bytes_of(block.array) for block in (operands | out).values()),
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


def _kernel(operands: dict[str, Any], out: dict[str, Any], parts: Any, *, plan: Plan, count: int, unroll: bool) -> None:
    q, k, v = (operands[name][...].astype(jnp.float32) for name in "qkv")
    q, k = q.T, k.T
    decay_of = _decays(operands)
    first = pl.program_id(0) * GROUP

    def step(n: Any, _: Any = None) -> None:
        key, written, before, decay = column_of(k, n), _row_of(v, n), operands["h0"][n], decay_of(n)
        if "beta" in operands:
            written = operands["beta"][pl.ds(n, 1), :].astype(jnp.float32) * (written - recalled(before, key, decay))
        state = next_state(before, decay, key * written) if decay else before + key * written
        if active():
            there = jnp.full(state.shape, first + n < count)
            probe("h" if "beta" in operands else "state", state, there)
            if decay:
                probe("kept", decay[1], there[: decay[1].shape[0], : decay[1].shape[1]])
            if "beta" in operands:
                probe("v_new", written, there[:1])
        if "ht" in out:
            out["ht"][n] = state
        parts[n] = fold_registers(column_of(q, n) * state)

    if unroll:
        for n in range(GROUP):
            step(n)
    else:
        lax.fori_loop(0, GROUP, step, None)
    out["o"][...] = (plan.p.scale * sum_folded(parts)).astype(out["o"].dtype)


def _decays(operands: dict[str, Any]) -> Any:
    """n -> both parts of the n-th state's decay, of each key [K, 1] or of all [1, 1]; none."""
    if "gk" in operands:
        kept, rest = decay_parts(operands["gk"][...].astype(jnp.float32))
        kept_bits, rest = spread_bits(kept, operands["v"].shape[1]), rest.T
        return lambda n: [bit_of(kept_bits, n), column_of(rest, n)]
    if "decays" in operands:
        return lambda n: [operands["decays"][pl.ds(n, 1), pl.ds(part, 1)] for part in range(2)]
    return lambda n: []


def _row_of(x: jax.Array, n: Any) -> jax.Array:
    """Row n of x [GROUP, V]."""
    return x[n : n + 1] if isinstance(n, int) else lax.dynamic_slice_in_dim(x, n, 1)
