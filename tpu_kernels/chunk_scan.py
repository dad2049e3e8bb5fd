"""Gated linear attention a chunk at a time: the scan behind `simple_gla` and `gla`, both directions, every gate.

With S the state at a chunk's start and decays counted inside the chunk, the recurrence S_t = a_t S_{t-1} + k_t v_tᵀ,
o_t = scale · q_tᵀ S_t becomes a few matrix products per chunk (Yang et al. 2024, arXiv:2312.06635; Dao & Gu 2024,
arXiv:2405.21060):

    o = scale · [from_start · (q S) + A v]        A_ij = Σ_K q_i k_j · decay from step j to step i, for i >= j
    S' = whole · S + (k · to_end)ᵀ v

What differs between gates is how many decays a step has, one or one per channel of k, and so how A is formed:
`_StepDecay` and `_ChannelDecay`. Kernels see q, k, v as [B, H, T, ·] and states as [V, K], so that what decays channels
is a row of lanes; a grid step takes a block of chunks of a few heads, and the state stays in VMEM along T.

**Fused**: the forward pass is one kernel, and so is the backward pass. That walks the blocks twice: forward, over k and
v alone, to keep the state at the start of each block in VMEM; then in reverse, where the states of a block's chunks are
made again and the gradient of the state is carried. **Unfused**: the states (and their gradients) of all chunks go to
HBM, and another kernel makes the outputs (or gradients) of each block on its own.

Packed sequences are laid out anew so that each begins with a chunk; rows without a step are masked as they are loaded.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments import gla
from op_arguments.debug import Debug
from op_arguments.gla import Gates, Precision, Problem, check_backward, check_forward, check_fused, check_precision
from tpu_kernels._lib.arguments import Interpret, concrete_values, resolve_interpret
from tpu_kernels.fused_recurrent import Pair, decay_parts, two_sum

Refs = Mapping[str, Any]
Load = Callable[[str], jax.Array]
"""The rows [heads, C, ·] of a chunk, of the tensor of that name."""
Store = Callable[[str, jax.Array], None]
OF_HEADS = {"q", "k", "v", "o", "state", "from_start", "to_end", "between"}
"""The refs of the forward pass with a decay per head of which each head has a part, along the first axis."""

LARGEST_EXPONENT = 88.0  # exp of it is finite in float32
# A step that decays by more leaves nothing of any float32 state, and sums of such steps stay small enough to add.
STRONGEST_GATE = -256.0
LANES = 128
SUBLANES = 16  # of a packed 16-bit register
MIB = 2**20
VMEM_LIMIT = 56 * MIB  # of the 64 that the smallest of v5e, v5p, v6e and tpu7x has
VMEM_BUDGET = 40 * MIB  # of that for blocks, states and what else is planned here
BLOCK_TOKENS = 512  # of a grid step, where chunks are shorter
HEADS = 8  # of a grid step at most: independent work for the scheduler
# Rows of all heads of a step's chunks at most, by gate: with more a program is longer, and no faster.
ROWS_AT_ONCE = {"constant": 1024, "step": 1024, "channel": 128}
UNROLL = (4, 2, 1)  # chunks in a turn of the loop that makes just states
# Rows of the heads at work at once where heads come in groups: what they need stays in registers.
ROWS_OF_GROUP = 128


class Route(NamedTuple):
    """Whether a chunked form runs as one kernel, and why."""

    fused: bool
    explain: str


class Scan(NamedTuple):
    """The static side of a scan.

    gate: "constant" (a decay per head), "step" (and step) or "channel" (and channel of k). split: dots are of bfloat16
    pieces, else of float32 at HIGHEST. n sequences in b rows of `length` steps, packed where n is not b, or laid out in
    t rows for the kernels: `blocks` of `chunks` of `chunk` rows. heads: of a grid step; group: of them, at work at
    once.
    """

    gate: str
    backward: bool
    split: bool
    scale: float
    b: int
    length: int
    h: int
    k: int
    v: int
    n: int
    packed: bool
    t: int
    chunk: int
    chunks: int
    blocks: int
    heads: int
    group: int

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.chunk * self.chunks

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of the states of a grid step's heads."""
        return self.heads, self.v, self.k

    @property
    def masked(self) -> bool:
        """Whether some rows are no steps."""
        return self.packed or self.length != self.blocks * self.rows

    @property
    def gate_pieces(self) -> int:
        """Into how many bfloat16 the gates of steps go for the matrix unit to sum them, or 0: it would take longer.

        dg keeps more bits than o, or than what split dots leave of it.
        """
        sums = self.gate == "step" and self.split and 2 * self.chunk <= LANES
        return 0 if not sums else 3 if self.backward else 2

    @property
    def step_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of a number per step and head, a chunk in whole registers of lanes."""
        return self.b, self.h, self.blocks, self.chunks, max(self.chunk, LANES)


class ChunkOptions(gla.ChunkOptions, total=False):
    """The options of `chunk_fwd` and `chunk_bwd` on the TPU.

    precision, of dots of float32 operands: "ieee", six bfloat16 passes, or "bf16x3", three. Of bfloat16 operands only
    results are rounded so far. interpret: as `tpu_kernels.gmm.gmm`.
    """

    interpret: Interpret
    debug: Debug


class Gradients(NamedTuple):
    """The gradients of the arguments of `chunk_fwd`; None for those that are None. dgates by the gates' names."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dgates: dict[str, jax.Array | None]
    dh0: jax.Array | None


def chunk_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    gates: Gates,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: Precision = "ieee",
    fused: bool | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> tuple[jax.Array, jax.Array | None]:
    """(o, ht): `o_t = scale q_t^T S_t`, and the state after the last step where output_final_state, else None.

    q, k [B, T, H, K], v [B, T, H, V]: all float32 or all bfloat16. gates: natural logs of the decays, `g` [B, T, H]
    and `g_gamma` [H], which add (None: no decay), or `gk` [B, T, H, K]; float32, `g` and `gk` also of q's dtype.
    initial_state [N, H, K, V] float32. cu_seqlens [N + 1] int32 packs N sequences into B = 1 (N = B without).
    scale: default K ** -0.5. precision, of dots of float32 operands: "ieee" or "bf16x3". fused: whether one kernel does
    all (None: where it can, see `chunk_route`). interpret and debug: as `tpu_kernels.gmm.gmm`; sites are c (of `g`),
    exponent (of `gk`), decay, A and state.
    o has v's shape and dtype and is zero beyond the last sequence; ht [N, H, K, V] is float32.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`, `check_precision` and `check_fused`; values are
    checked outside tracing only.
    """
    p = check_forward(
        q,
        k,
        v,
        gates=gates,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        offsets=None if cu_seqlens is None else concrete_values(cu_seqlens),
        chunk_size=chunk_size,
    )
    scan, fused = _planned(p, gates, cu_seqlens, chunk_size, precision, fused, backward=False)
    return _forward(
        q,
        k,
        v,
        dict(gates),
        initial_state,
        cu_seqlens,
        scan=scan,
        fused=fused,
        output_final_state=bool(output_final_state),
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


def chunk_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    gates: Gates,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    dht: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: Precision = "ieee",
    fused: bool | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Gradients:
    """The gradients of `chunk_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype; dht [N, H, K, V] is float32. Gradients have their arguments' dtypes and are zero beyond
    the last sequence. Sites of debug: those of `chunk_fwd`, dA, dgate and dstate.
    Raises as `chunk_fwd`, with `op_arguments.gla.check_backward`.
    """
    p = check_backward(
        q,
        k,
        v,
        do,
        gates=gates,
        scale=scale,
        initial_state=initial_state,
        dht=dht,
        cu_seqlens=cu_seqlens,
        offsets=None if cu_seqlens is None else concrete_values(cu_seqlens),
        chunk_size=chunk_size,
    )
    scan, fused = _planned(p, gates, cu_seqlens, chunk_size, precision, fused, backward=True)
    return _backward(
        q,
        k,
        v,
        do,
        dict(gates),
        initial_state,
        dht,
        cu_seqlens,
        scan=scan,
        fused=fused,
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


# -------------------------------------------------------------------------------------------------------- route


def chunk_route(
    gates: Gates, p: Problem, *, packed: bool = False, chunk_size: int = 64, backward: bool = False
) -> Route:
    """Whether the blocks and states of the fused kernel fit VMEM.

    gates: as in `chunk_fwd`, of which only those that are None matter; packed: whether there are cu_seqlens.
    """
    scan = plan(gates, p, packed=packed, chunk_size=chunk_size, backward=backward, fused=True)
    need = _vmem_bytes(scan, p, backward, fused=True)
    blocks = f"{scan.blocks} blocks of {scan.rows} steps and {scan.heads} heads"
    what = f"the {'backward' if backward else 'forward'} pass in {blocks} needs {need / MIB:.1f} MiB of VMEM"
    return Route(need <= VMEM_BUDGET, f"{what}, and may have {VMEM_BUDGET // MIB}")


def plan(gates: Gates, p: Problem, *, packed: bool, chunk_size: int, backward: bool, fused: bool) -> Scan:
    """The blocks of a scan: those of the most heads and of about BLOCK_TOKENS that fit VMEM, or else the least.

    A chunk is as long as the largest power of two in chunk_size.
    """
    gate = "channel" if "gk" in gates else "constant" if gates["g"] is None else "step"
    chunk = chunk_size & -chunk_size
    count = p.t // chunk + p.n if packed else pl.cdiv(p.t, chunk)
    most_rows = ROWS_AT_ONCE[gate] // (1 if p.dtype == "bfloat16" else 2)
    # The more heads in a step, the less is waited for at a chunk's end. Each of two cores has a part of b or the heads.
    wide = fused and not backward and gate != "channel" and p.dtype == "bfloat16" and 2 * chunk <= ROWS_OF_GROUP
    wide &= p.h % (2 * HEADS) == 0 and p.b * p.h > 2 * HEADS
    most_heads = 2 * HEADS if wide else min(HEADS, p.h, max(most_rows // chunk, 1))
    # Decays that are there already leave registers to spare, if few heads work at once.
    at_once = ROWS_OF_GROUP // chunk if wide and gate == "constant" else most_heads
    heads = [n for n in range(most_heads, 0, -1) if p.h % n == 0]
    # Longer blocks have fewer states at their starts, shorter ones fewer in them. A loop of one chunk is none to XLA's
    # CPU compiler: without the loop it fuses, and so rounds, an interpreted kernel in another way.
    wanted = BLOCK_TOKENS // chunk // (2 if wide else 1)
    chunks = sorted({max(min(wanted * 2**n // 8, count), 2) for n in range(8)}, key=lambda size: abs(size - wanted))

    def scan_of(heads: int, chunks: int) -> Scan:
        blocks = pl.cdiv(count, chunks)
        rows = blocks * chunks * chunk if packed or blocks == 1 else p.t
        group = next(n for n in range(min(at_once, heads), 0, -1) if heads % n == 0)
        sizes = p.b, p.t, p.h, p.k, p.v, p.n, packed, rows, chunk, chunks, blocks, heads, group
        return Scan(gate, backward, False, p.scale, *sizes)

    scans = [scan_of(*choice) for choice in itertools.product(heads, chunks)]
    need = partial(_vmem_bytes, p=p, backward=backward, fused=fused)
    return next((scan for scan in scans if need(scan) <= VMEM_BUDGET), min(scans, key=need))


def _planned(
    p: Problem,
    gates: Gates,
    cu_seqlens: jax.Array | None,
    chunk_size: int,
    precision: Precision,
    fused: bool | None,
    *,
    backward: bool,
) -> tuple[Scan | None, bool]:
    """The scan, None where there is nothing to multiply, and whether it is fused."""
    check_precision(precision, p.dtype)
    packed = cu_seqlens is not None
    if 0 in (p.b, p.t, p.h, p.k, p.v, p.n):
        return None, check_fused(fused, None)
    route = chunk_route(gates, p, packed=packed, chunk_size=chunk_size, backward=backward)
    fused = check_fused(fused, None if route.fused else route.explain)
    scan = plan(gates, p, packed=packed, chunk_size=chunk_size, backward=backward, fused=fused)
    return scan._replace(split=p.dtype != "float32" or precision != "ieee"), fused


def _vmem_bytes(scan: Scan, p: Problem, backward: bool, fused: bool) -> int:
    """What the blocks, twice buffered, and the scratch of the largest kernel of a scan take of VMEM."""
    size = jnp.dtype(p.dtype).itemsize
    k, v, c = (pl.cdiv(n, LANES) * LANES for n in (scan.k, scan.v, scan.chunk))
    state = scan.v * k * 4
    channels = k * 4 * (2 if backward else 1) if scan.gate == "channel" else 0
    row = (2 * k + 2 * v + (2 * k + v if backward else 0)) * size + channels
    kept = 0 if fused else 2 * scan.chunks * state * (2 if backward else 1)
    if fused and backward:
        kept = (scan.chunks + scan.blocks + 1) * state
    values = 8 * (scan.chunk * (2 * c + k + v)) * 4  # of the chunk that is in registers, which spill to VMEM
    return scan.heads * (2 * scan.rows * row + kept + state + scan.chunk * c * 4) + values


# ------------------------------------------------------------------------------------------------------- passes


@partial(jax.jit, static_argnames=("scan", "fused", "output_final_state", "interpret", "debug"))
def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: dict[str, jax.Array | None],
    initial_state: jax.Array | None,
    cu_seqlens: jax.Array | None,
    *,
    scan: Scan | None,
    fused: bool,
    output_final_state: bool,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> tuple[jax.Array, jax.Array | None]:
    if scan is None:
        h0 = _states(q, v, cu_seqlens) if initial_state is None else initial_state
        return jnp.zeros(v.shape, v.dtype), h0 if output_final_state else None
    layout = _Layout(scan, cu_seqlens, gates)
    call = partial(_call, scan, prefetch=layout.prefetch, interpret=interpret)
    before = {**layout.rows(k=k, v=v), **layout.gates, **layout.states(h0=initial_state)}
    ends = {"ht": layout.state_out()} if output_final_state else {}
    state = {"state": pltpu.VMEM(scan.state, jnp.float32)}
    outputs = {"o": layout.rows_out(scan.v, q.dtype)}
    forward = partial(_forward_kernel, debug=debug)
    if fused:
        results = call(forward, "chunk_fwd", {**before, **layout.rows(q=q)}, {**outputs, **ends}, state, work=(2, 2))
    else:
        kept = {"states": layout.chunk_states()}
        results = call(forward, "chunk_states", before, {**kept, **ends}, state, work=(0, 1))
        operands = {**layout.rows(q=q, k=k, v=v), **layout.gates, "states": layout.chunk_states(results["states"])}
        results |= call(partial(_outputs_kernel, debug=debug), "chunk_outputs", operands, outputs, {}, work=(2, 1))
    return layout.public(results["o"]), results["ht"].swapaxes(2, 3) if output_final_state else None


@partial(jax.jit, static_argnames=("scan", "fused", "interpret", "debug"))
def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    gates: dict[str, jax.Array | None],
    initial_state: jax.Array | None,
    dht: jax.Array | None,
    cu_seqlens: jax.Array | None,
    *,
    scan: Scan | None,
    fused: bool,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> Gradients:
    if scan is None:
        dq, dk, dv = (jnp.zeros(x.shape, x.dtype) for x in (q, k, v))
        dgates = {name: None if x is None else jnp.zeros(x.shape, x.dtype) for name, x in gates.items()}
        passed = _states(q, v, cu_seqlens) if dht is None else dht
        return Gradients(dq, dk, dv, dgates, None if initial_state is None else passed)
    layout = _Layout(scan, cu_seqlens, gates)
    call = partial(_call, scan, prefetch=layout.prefetch, interpret=interpret)
    before = {**layout.rows(k=k, v=v), **layout.gates, **layout.states(h0=initial_state)}
    after = {**layout.rows(q=q, do=do), **layout.states(dht=dht)}
    starts = {} if initial_state is None else {"dh0": layout.state_out()}
    grads = {name: layout.rows_out(x.shape[3], x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if any(gate is not None for gate in gates.values()):
        grads["dgate"] = layout.rows_out(scan.k, jnp.float32) if scan.gate == "channel" else layout.steps()
    dstate = {"dstate": pltpu.VMEM(scan.state, jnp.float32)}
    if fused:
        scratch = dstate | {
            "states": pltpu.VMEM((scan.chunks + 1, *scan.state), jnp.float32),
            "checkpoints": pltpu.VMEM((max(scan.blocks - 1, 1), *scan.state), jnp.float32),
        }
        # The next chunk's product does not wait for the state. XLA's CPU compiler would round each in its own way.
        unroll = 1 if interpret else next(n for n in UNROLL if scan.chunks % n == 0)
        backward = partial(_backward_kernel, debug=debug, unroll=unroll)
        results = call(
            backward, "chunk_bwd", {**before, **after}, {**grads, **starts}, scratch, work=(5, 6), walk="twice"
        )
    else:
        kept = {"states": layout.chunk_states()}
        forward, back = partial(_forward_kernel, debug=debug), partial(_dstates_kernel, debug=debug)
        states = call(forward, "chunk_states", before, kept, {"state": dstate["dstate"]}, work=(0, 1))["states"]
        outputs = {"dstates": layout.chunk_states(), **starts}
        results = call(back, "chunk_dstates", {**after, **layout.gates}, outputs, dstate, work=(0, 1), walk="back")
        operands = {**layout.rows(q=q, k=k, v=v, do=do), **layout.gates, "states": layout.chunk_states(states)}
        operands["dstates"] = layout.chunk_states(results["dstates"])
        gradients = partial(_gradients_kernel, debug=debug)
        results |= call(gradients, "chunk_grads", operands, grads, {}, work=(5, 3))
    dq, dk, dv = (layout.public(results[name]) for name in ("dq", "dk", "dv"))
    dh0 = results["dh0"].swapaxes(2, 3) if starts else None
    return Gradients(dq, dk, dv, _gate_gradients(layout, gates, results.get("dgate")), dh0)


def _gate_gradients(
    layout: "_Layout", gates: dict[str, jax.Array | None], dgate: jax.Array | None
) -> dict[str, jax.Array | None]:
    """The gradient of each gate, from that of the log decay of each step."""
    if dgate is None:
        return dict.fromkeys(gates)
    steps = layout.public(dgate) if layout.scan.gate == "channel" else layout.public_steps(dgate)

    def of(name: str, gate: jax.Array | None) -> jax.Array | None:
        if gate is None:
            return None
        return steps.sum((0, 1)) if name == "g_gamma" else steps.astype(gate.dtype)

    return {name: of(name, gate) for name, gate in gates.items()}


def _states(q: jax.Array, v: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """Zero states [N, H, K, V]."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return jnp.zeros((sequences, *q.shape[2:], v.shape[3]), jnp.float32)


class _Operand(NamedTuple):
    """An input or output of a kernel: the array, its block, and where block t of a batch row's head block lies.

    Without a block it is whole, in `space`. early: the states are made of it, and not just what is made of them.
    """

    array: Any
    block: tuple[int | None, ...] | None = None
    at: Callable[[Any, Any, Any], tuple[Any, ...]] | None = None
    early: bool = False
    space: Any = None


class _Layout:
    """How arrays lie for the kernels: [B, H, T, ·] with T padded to blocks, each packed sequence on chunks of its own.

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
        length, c, count = self.scan.length, self.scan.chunk, self.scan.blocks * self.scan.chunks
        # Bad offsets go unseen under tracing; clipped, they give wrong numbers, but no access beyond the arrays.
        cu_seqlens = lax.cummax(jnp.clip(cu_seqlens, 0, length))
        begins, lengths = cu_seqlens[:-1], jnp.diff(cu_seqlens)
        ends = jnp.cumsum(jnp.maximum(-(-lengths // c), 1))
        chunk = jnp.arange(count, dtype=jnp.int32)
        sequence = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), self.scan.n - 1).astype(jnp.int32)
        first_chunk = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1].astype(jnp.int32)])
        done = (chunk - first_chunk[sequence]) * c
        self.prefetch = {"sequence": sequence, "live": jnp.clip(lengths[sequence] - done, 0, c)}
        row = jnp.arange(c, dtype=jnp.int32)
        self._live = (row < self.prefetch["live"][:, None]).reshape(-1)
        self._source = jnp.clip((begins[sequence] + done)[:, None] + row, 0, length - 1).reshape(-1)
        step = jnp.arange(length, dtype=jnp.int32)
        of_step = jnp.minimum(jnp.searchsorted(cu_seqlens[1:], step, side="right"), self.scan.n - 1)
        self._is_step = step < cu_seqlens[-1]
        self._target = jnp.where(self._is_step, first_chunk[of_step] * c + step - begins[of_step], 0)

    def _gates(
        self, g: jax.Array | None = None, g_gamma: jax.Array | None = None, gk: jax.Array | None = None
    ) -> dict[str, _Operand]:
        if gk is not None:
            return {"gk": self._rows(self._laid_out(gk), early=True)}
        if g is None:
            gamma = jnp.zeros(self.scan.h, jnp.float32) if g_gamma is None else g_gamma
            return {"g_gamma": _Operand(gamma, space=pltpu.SMEM)}
        gates = {"g": g.astype(jnp.float32)}
        if g_gamma is not None:
            gates["g_gamma"] = jnp.broadcast_to(g_gamma, g.shape)
        return {name: self.steps(self._laid_out_steps(x)) for name, x in gates.items()}

    def rows(self, **tensors: jax.Array) -> dict[str, _Operand]:
        """Tensors [B, T, H, ·] as operands."""
        # The states are made of k and v.
        return {name: self._rows(self._laid_out(x), early=name in ("k", "v")) for name, x in tensors.items()}

    def states(self, **states: jax.Array | None) -> dict[str, _Operand]:
        """States [N, H, K, V] as operands, those that there are."""
        given = {name: x for name, x in states.items() if x is not None}
        return {name: _Operand(x.swapaxes(2, 3), space=pl.ANY) for name, x in given.items()}

    def state_out(self) -> _Operand:
        """A state of each sequence."""
        scan = self.scan
        return _Operand(jax.ShapeDtypeStruct((scan.n, scan.h, scan.v, scan.k), jnp.float32), space=pl.ANY)

    def rows_out(self, width: int, dtype: Any) -> _Operand:
        """An output with a row per step."""
        scan = self.scan
        return self._rows(jax.ShapeDtypeStruct((scan.b, scan.h, scan.t, width), dtype))

    def chunk_states(self, states: jax.Array | None = None) -> _Operand:
        """A state of each chunk."""
        scan = self.scan
        shape = (scan.b, scan.blocks * scan.chunks, scan.h, scan.v, scan.k)
        block = (None, scan.chunks, scan.heads, scan.v, scan.k)
        array = jax.ShapeDtypeStruct(shape, jnp.float32) if states is None else states
        return _Operand(array, block, lambda b, h, t: (b, t, h, 0, 0))

    def steps(self, gates: jax.Array | None = None) -> _Operand:
        """A number per step and head, a chunk in a row of lanes."""
        shape = self.scan.step_shape
        array = jax.ShapeDtypeStruct(shape, jnp.float32) if gates is None else gates
        block = (None, self.scan.heads, None, *shape[3:])
        return _Operand(array, block, lambda b, h, t: (b, h, t, 0, 0), early=gates is not None)

    def public(self, rows: jax.Array) -> jax.Array:
        """[B, H, T, ·] of the kernels as [B, T, H, ·] of the caller."""
        return self._picked(rows.swapaxes(1, 2))

    def public_steps(self, steps: jax.Array) -> jax.Array:
        """`steps` of the kernels as [B, T, H] of the caller."""
        scan = self.scan
        return self._picked(steps[..., : scan.chunk].reshape(scan.b, scan.h, -1).swapaxes(1, 2))

    def _picked(self, x: jax.Array) -> jax.Array:
        if not self.prefetch:
            return x[:, : self.scan.length]
        shape = (1, self.scan.length) + (1,) * (x.ndim - 2)
        return jnp.where(self._is_step.reshape(shape), x[:, self._target], jnp.zeros((), x.dtype))

    def _laid_out(self, x: jax.Array) -> jax.Array:
        x = (x[:, self._source] if self.prefetch else x).swapaxes(1, 2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.scan.t - x.shape[2]), (0, 0)))

    def _laid_out_steps(self, g: jax.Array) -> jax.Array:
        if self.prefetch:
            g = jnp.where(self._live[:, None], g[:, self._source], 0.0)
        *sizes, lanes = self.scan.step_shape
        g = jnp.pad(g, ((0, 0), (0, self.scan.blocks * self.scan.rows - g.shape[1]), (0, 0)))
        g = g.swapaxes(1, 2).reshape(*sizes, self.scan.chunk)
        return jnp.pad(g, ((0, 0),) * 4 + ((0, lanes - self.scan.chunk),))

    def _rows(self, array: Any, early: bool = False) -> _Operand:
        block = (None, self.scan.heads, self.scan.rows, array.shape[3])
        return _Operand(array, block, lambda b, h, t: (b, h, t, 0), early)


def _call(
    scan: Scan,
    kernel: Callable[..., None],
    name: str,
    inputs: Mapping[str, _Operand],
    outputs: Mapping[str, _Operand],
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
    scratch = dict(scratch) | _decay_scratch(scan)
    names = [*prefetch, *inputs, *outputs, *scratch]

    def spec(operand: _Operand) -> Any:
        if operand.at is None:
            return pl.BlockSpec(memory_space=operand.space)
        at = operand.at
        return pl.BlockSpec(
            operand.block, lambda b, h, step, *_: at(b, h, _block_of(step, scan.blocks, walk, operand.early))
        )

    steps = 2 * scan.blocks - 1 if walk == "twice" else scan.blocks

    def nbytes(operand: _Operand) -> int:
        twice = walk == "twice" and operand.early
        return operand.array.size * operand.array.dtype.itemsize * (steps if twice else scan.blocks) // scan.blocks

    in_chunks, states = work
    all_steps = scan.b * scan.h * scan.t
    cost = pl.CostEstimate(
        flops=all_steps * (in_chunks * scan.chunk * (scan.k + scan.v) + 2 * states * scan.k * scan.v),
        transcendentals=all_steps * (1 if scan.gate == "constant" else scan.chunk),
        bytes_accessed=sum(map(nbytes, [*inputs.values(), *outputs.values()])),
    )
    results = pl.pallas_call(
        lambda *refs: kernel(dict(zip(names, refs, strict=True)), scan),
        out_shape=[x.array for x in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(scan.b, scan.h // scan.heads, steps),
            in_specs=[spec(x) for x in inputs.values()],
            out_specs=[spec(x) for x in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(*prefetch.values(), *(x.array for x in inputs.values()))
    return dict(zip(outputs, results, strict=True))


def _block_of(step: Any, blocks: int, walk: str, early: bool) -> Any:
    """The block that an operand has in a grid step. What is needed on the way back only waits at its first block."""
    if walk == "once":
        return step
    if walk == "back":
        return blocks - 1 - step
    return jnp.where(step < blocks - 1, step if early else blocks - 1, 2 * (blocks - 1) - step)


# ------------------------------------------------------------------------------------------------------ kernels


class _Block:
    """A grid step's block of chunks: what its refs hold of one of them, for all heads of the step at once."""

    def __init__(self, refs: Refs, scan: Scan, index: Any) -> None:
        self.refs, self.scan, self.index = refs, scan, index
        self.batch, self.first_head = pl.program_id(0), pl.program_id(1) * scan.heads
        _prepare_decays(refs, scan, self.first_head)

    def groups(self) -> "Iterator[_Block]":
        """The block of each group of heads."""
        if self.scan.group == self.scan.heads:
            yield self
            return
        for head in range(0, self.scan.heads, self.scan.group):
            group = copy(self)
            heads = pl.ds(head, self.scan.group)
            group.refs = {name: ref.at[heads] if name in OF_HEADS else ref for name, ref in self.refs.items()}
            group.scan = self.scan._replace(heads=self.scan.group)
            group.first_head = self.first_head + head
            yield group

    def rows(self, i: Any) -> Any:
        """The rows of chunk i in the block."""
        return pl.ds(pl.multiple_of(i * self.scan.chunk, self.scan.chunk), self.scan.chunk)

    def live(self, i: Any) -> Any:
        """How many rows of chunk i are steps; they are its first."""
        chunk = self._chunk(i)
        if self.scan.packed:
            return self.refs["live"][chunk]
        return jnp.clip(self.scan.length - chunk * self.scan.chunk, 0, self.scan.chunk)

    def load(self, i: Any, name: str) -> jax.Array:
        """The rows [heads, C, ·] of chunk i, zero where they are no steps: there may be NaN, and 0 * NaN is NaN."""
        x = self.refs[name][:, self.rows(i), :]
        return jnp.where(_iota(x.shape, 1) < self.live(i), x, jnp.zeros_like(x)) if self.scan.masked else x

    def store(self, i: Any, name: str, x: jax.Array) -> None:
        """Store the rows [heads, C, ·] of chunk i, or a number per step as [heads, 1, C], if asked for."""
        if name not in self.refs:
            return
        ref = self.refs[name]
        if x.shape[1] == self.scan.chunk:
            ref[:, self.rows(i), :] = x.astype(ref.dtype)
        else:
            ref[:, pl.ds(i, 1), : self.scan.chunk] = x

    def decay(self, i: Any) -> "_Decay":
        """The decays of chunk i."""
        scan, refs = self.scan, self.refs
        if scan.gate == "channel":
            return _ChannelDecay(self.load(i, "gk"), scan)
        if scan.gate == "constant":
            live = self.live(i) if scan.masked else scan.chunk
            return _ConstantDecay(refs, _gammas(refs, scan, self.first_head), live, scan)
        return _StepDecay(refs, i, scan)

    def for_chunks(
        self,
        body: Callable[[Any], None],
        enter: Callable[[Any], None] | None = None,
        leave: Callable[[Any], None] | None = None,
        *,
        reverse: bool = False,
        unroll: int = 1,
    ) -> None:
        """body(i) for each chunk i; enter(i) before that of the first of a sequence and leave(i) after its last.

        In reverse the other way round. unroll: chunks in a turn of the loop.
        """
        last = self.scan.chunks - 1
        enters, leaves = (self._is_last, self._is_first) if reverse else (self._is_first, self._is_last)

        def at(i: Any, is_there: Callable[[Any], Any], action: Callable[[Any], None] | None) -> None:
            if action:
                pl.when(is_there(i))(lambda: action(i))

        def step(n: Any, _: None) -> None:
            i = last - n if reverse else n
            if self.scan.packed:
                at(i, enters, enter)
            body(i)
            if self.scan.packed:
                at(i, leaves, leave)

        begin, end = (last, 0) if reverse else (0, last)
        if not self.scan.packed:
            at(begin, enters, enter)
        lax.fori_loop(0, last + 1, step, None, unroll=unroll)
        if not self.scan.packed:
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
        sequence = self.refs["sequence"][self._chunk(i)] if self.scan.packed else self.batch
        return self.refs[name].at[sequence, pl.ds(self.first_head, self.scan.heads)]

    def _chunk(self, i: Any) -> Any:
        return self.index * self.scan.chunks + i

    def _is_first(self, i: Any) -> Any:
        chunk = self._chunk(i)
        if not self.scan.packed:
            return chunk == 0
        sequence = self.refs["sequence"]
        return (chunk == 0) | (sequence[jnp.maximum(chunk - 1, 0)] != sequence[chunk])

    def _is_last(self, i: Any) -> Any:
        chunk, last = self._chunk(i), self.scan.blocks * self.scan.chunks - 1
        if not self.scan.packed:
            return chunk == last
        sequence = self.refs["sequence"]
        return (chunk == last) | (sequence[jnp.minimum(chunk + 1, last)] != sequence[chunk])


class _Watch(NamedTuple):
    """What is watched of chunk i of a block: nothing without `debug`, and then it is false."""

    debug: Debug
    block: _Block
    i: Any

    def __bool__(self) -> bool:
        return self.debug is not None

    def __call__(self, site: str, x: Any, *axes: int, where: Any = True) -> Any:
        """In place of x, a value (or a pair that sums to it) at a site of the golden, `axes` of which are steps; where
        it is one."""
        if self.debug is None:
            return x
        live, shape = self.block.live(self.i), jnp.shape(x[0] if isinstance(x, tuple) else x)
        where = jnp.broadcast_to(where, shape) & (live > 0)
        for axis in axes:
            where &= _iota(shape, axis) < live
        return self.debug(site, x, where, chunk_size=self.block.scan.chunk)


def _forward_kernel(refs: Refs, scan: Scan, debug: Debug = None) -> None:
    """o, or the states at the start of each chunk, and ht."""
    block, state = _Block(refs, scan, pl.program_id(2)), refs["state"]

    def body(i: Any) -> None:
        if "o" not in refs:
            refs["states"][i] = state[...]
            advance(block, i, block.decay(i))
            return
        # The matrix unit makes the scores of a group of heads while the group before waits for its own.
        waiting: list[Callable[[], None]] = []
        for group in block.groups():
            decay = group.decay(i)
            waiting.append(partial(finish, group, i, decay, _scores(group, i, decay, debug)))
            if len(waiting) > 1:
                waiting.pop(0)()
        waiting.pop()()

    def finish(group: _Block, i: Any, decay: _Decay, scores: jax.Array) -> None:
        meanwhile = partial(advance, group, i, decay)
        group.store(i, "o", _output(scores, group, i, decay, group.refs["state"], meanwhile))

    def advance(group: _Block, i: Any, decay: _Decay) -> None:
        load, scan, state, watch = partial(group.load, i), group.scan, group.refs["state"], _Watch(debug, group, i)
        state[...] = watch("state", _next_state(load, state[...], decay, scan))

    block.for_chunks(body, lambda i: block.load_state("h0", i, state), lambda i: block.store_state("ht", i, state))


def _outputs_kernel(refs: Refs, scan: Scan, debug: Debug = None) -> None:
    """o from the states at the start of each chunk."""
    block = _Block(refs, scan, pl.program_id(2))

    def body(i: Any) -> None:
        decay = block.decay(i)
        block.store(i, "o", _output(_scores(block, i, decay, debug), block, i, decay, refs["states"].at[i]))

    block.for_chunks(body)


def _backward_kernel(refs: Refs, scan: Scan, debug: Debug = None, unroll: int = 1) -> None:
    """All gradients: there, `unroll` chunks at a time, to keep the state at the start of each block, and back."""
    step, last = pl.program_id(2), scan.blocks - 1
    index = _block_of(step, scan.blocks, "twice", early=True)
    block, states, checkpoints, dstate = _Block(refs, scan, index), refs["states"], refs["checkpoints"], refs["dstate"]

    @pl.when(index > 0)
    def _() -> None:
        states[0] = checkpoints[jnp.maximum(index - 1, 0)]

    def forward(i: Any) -> None:
        watch = _Watch(debug, block, i)
        states[i + 1] = watch("state", _next_state(partial(block.load, i), states[i], block.decay(i), scan))

    block.for_chunks(forward, lambda i: block.load_state("h0", i, states.at[i]), unroll=unroll)

    @pl.when(step < last)
    def _() -> None:
        checkpoints[jnp.minimum(index, max(last - 1, 0))] = states[scan.chunks]

    @pl.when(step >= last)
    def _() -> None:
        def back(i: Any) -> None:
            load, decay, watch = partial(block.load, i), block.decay(i), _Watch(debug, block, i)
            _watch_decays(decay, watch)
            decay.store_gradients(load, partial(block.store, i), states.at[i], dstate, scan, watch)
            dstate[...] = watch("dstate", _previous_dstate(load, dstate[...], decay, scan))

        _for_chunks_back(block, back)


def _dstates_kernel(refs: Refs, scan: Scan, debug: Debug = None) -> None:
    """The gradients of the states at the end of each chunk, and dh0."""
    block, dstate = _Block(refs, scan, _block_of(pl.program_id(2), scan.blocks, "back", early=False)), refs["dstate"]

    def body(i: Any) -> None:
        refs["dstates"][i] = dstate[...]
        watch = _Watch(debug, block, i)
        dstate[...] = watch("dstate", _previous_dstate(partial(block.load, i), dstate[...], block.decay(i), scan))

    _for_chunks_back(block, body)


def _gradients_kernel(refs: Refs, scan: Scan, debug: Debug = None) -> None:
    """The other gradients from the states at the start of each chunk and their gradients at its end."""
    block = _Block(refs, scan, pl.program_id(2))

    def body(i: Any) -> None:
        states = refs["states"].at[i], refs["dstates"].at[i]
        decay, watch = block.decay(i), _Watch(debug, block, i)
        _watch_decays(decay, watch)
        decay.store_gradients(partial(block.load, i), partial(block.store, i), *states, scan, watch)

    block.for_chunks(body)


def _for_chunks_back(block: _Block, body: Callable[[Any], None]) -> None:
    dstate = block.refs["dstate"]
    block.for_chunks(
        body,
        lambda i: block.load_state("dht", i, dstate),
        lambda i: block.store_state("dh0", i, dstate),
        reverse=True,
    )


# ------------------------------------------------------------------------------------------- one chunk, all heads
# What is needed twice is loaded twice: of all heads it would not fit the registers in between.


def _scores(block: _Block, i: Any, decay: "_Decay", debug: Debug) -> jax.Array:
    """A [heads, C, C] of chunk i."""
    load, scan, watch = partial(block.load, i), block.scan, _Watch(debug, block, i)
    _watch_decays(decay, watch)
    return watch("A", decay.scores(load, scan), 1, 2)


def _output(
    scores: jax.Array,
    block: _Block,
    i: Any,
    decay: "_Decay",
    state: Any,
    meanwhile: Callable[[], None] = lambda: None,
) -> jax.Array:
    """o [heads, C, V] float32 of chunk i, from its scores and the ref of the state at its start.

    meanwhile() comes before the last product, which has to wait for the scores; it may change the state.
    """
    read = _read(block.load(i, "q"), state[...], decay, decay.from_start, block.scan)
    meanwhile()
    return block.scan.scale * (read + _dot(scores, block.load(i, "v"), (1, 0), block.scan))


def _next_state(load: Load, state: jax.Array, decay: "_Decay", scan: Scan) -> jax.Array:
    """The state [heads, V, K] at the end of a chunk."""
    return _decayed(state, decay, _dot(load("v"), _f32(load("k")) * decay.to_end(scan.k), (0, 0), scan))


def _previous_dstate(load: Load, dstate: jax.Array, decay: "_Decay", scan: Scan) -> jax.Array:
    """The gradient [heads, V, K] of the state at the start of a chunk, from that at its end."""
    weighted = _f32(load("q")) * (scan.scale * decay.from_start(scan.k))
    return _decayed(dstate, decay, _dot(load("do"), weighted, (0, 0), scan))


def _decayed(state: jax.Array, decay: "_Decay", term: jax.Array) -> jax.Array:
    """The state, or its gradient, decayed by a whole chunk, and term."""
    return reduce(lambda rest, part: part * state + rest, reversed(decay.whole), term)


def _read(x: jax.Array, state: jax.Array, decay: "_Decay", way: Callable[[int], jax.Array], scan: Scan) -> jax.Array:
    """(x · way) @ stateᵀ. A decay per row is applied to the sums, which leaves x as exact as it is."""
    if decay.per_channel:
        return _dot(_f32(x) * way(scan.k), state, (1, 1), scan)
    return way(scan.v) * _dot(x, state, (1, 1), scan)


class _StepDecay:
    """Decays of heads that have one per step; of `_ChannelDecay` the counterpart.

    from_start(width) [heads, C, 1 or width]: from the start of the chunk to each step; to_end(width): from after each
    step to the chunk's end; whole [heads, 1, 1]: both, in the parts of `_whole`. between() [heads, C, C]: from after
    step j to step i, zero for i < j, at [i, j] in the forward pass and at [j, i] in the backward one.
    """

    per_channel = False

    def __init__(self, refs: Refs, i: Any, scan: Scan) -> None:
        """Of chunk i, from what `_prepare_decays` left: rows of a number per step."""
        self._refs, self._chunk, self._scan = refs, i, scan
        self.whole = _whole(scan, *(self._row(name)[:, :, scan.chunk - 1 :] for name in ("sum_hi", "sum_lo")))

    def watch_sums(self, watch: _Watch) -> None:
        """Let the sums of gates be watched, but those in which one may have been clamped."""
        hi, lo = self._row("sum_hi"), self._row("sum_lo")
        watch("c", (hi, lo), 2, where=hi > STRONGEST_GATE)

    def from_start(self, width: int) -> jax.Array:
        """See the class."""
        return self._from_start

    def to_end(self, width: int) -> jax.Array:
        """See the class."""
        return self._to_end

    @cached_property
    def _from_start(self) -> jax.Array:
        return self._column(self._row("from_start"))

    @cached_property
    def _to_end(self) -> jax.Array:
        return self._column(self._row("to_end"))

    def between(self) -> jax.Array:
        """See the class."""
        i, j = _steps(self._scan)
        sums = self._products() if self._scan.gate_pieces else self._differences()
        return _exp(jnp.where(i >= j, sums, -jnp.inf))

    def _differences(self) -> jax.Array:
        """The sums of the gates after step j up to step i, for i >= j: those up to i less those up to j."""
        rows = self._row("sum_hi"), self._row("sum_lo")
        columns = self._column(rows[0]), self._column(rows[1])
        return _difference(*((rows, columns) if self._scan.backward else (columns, rows)))

    def _products(self) -> jax.Array:
        """The same by the matrix unit, of just these gates. It makes no columns, which take the longest."""
        scan, c = self._scan, self._scan.chunk
        lanes = scan.gate_pieces * c
        place, step = _iota((1, c, lanes), 1), _iota((1, c, lanes), 2) % c
        gates = self._row("gate", scan.gate_pieces)
        gates = jnp.where(step > place if scan.backward else step <= place, gates, 0.0)
        step, place = _iota((lanes, c), 0) % c, _iota((lanes, c), 1)
        others = _ones(step <= place if scan.backward else step > place, scan)
        return _dot_with_all(gates.astype(jnp.bfloat16), others, scan)

    def _row(self, name: str, pieces: int = 1) -> jax.Array:
        return self._refs[name][:, pl.ds(self._chunk, 1), : pieces * self._scan.chunk]

    def _column(self, row: jax.Array) -> jax.Array:
        i, j = _steps(self._scan)
        return jnp.sum(jnp.where(i == j, row, 0.0), axis=2, keepdims=True)

    def scores(self, load: Load, scan: Scan) -> jax.Array:
        """A [heads, C, C]."""
        return _dot(load("q"), load("k"), (1, 1), scan) * self.between()

    def store_gradients(self, load: Load, store: Store, state: Any, dstate: Any, scan: Scan, watch: _Watch) -> None:
        """Store dq, dk, dv and dg of a chunk, from the refs of the state at its start and the gradient at its end."""
        # Pairs of steps are at [j, i], so that just one of the dots below transposes.
        products = _dot(load("k"), load("q"), (1, 1), scan)
        dproducts = _dot(load("v"), load("do"), (1, 1), scan)
        dscores = dproducts * (scan.scale * self.between())
        dv = _read(load("k"), dstate[...], self, self.to_end, scan)
        scores = watch("A", products * self.between(), 1, 2)
        store("dv", dv + scan.scale * _dot(scores, load("do"), (1, 0), scan))
        # The gate of step t decays what goes from before t to t or later. Sums of just these pairs lose nothing to
        # cancellation, as running sums of q·dq - k·dk do.
        row, column = _iota(products.shape, 1), _iota(products.shape, 2)
        if watch:
            watch("dA", scan.scale * dproducts, 1, 2, where=row <= column)
        sums = _dot_with_all(products * dscores, _ones((row >= column)[0], scan), scan)
        dq = scan.scale * self.from_start(scan.k) * _dot(load("do"), state[...], (1, 0), scan)
        from_state = jnp.sum(_f32(load("q")) * dq, axis=2, keepdims=True)
        store("dq", dq + _dot(dscores, load("k"), (0, 0), scan))
        dk = self.to_end(scan.k) * _dot(load("v"), dstate[...], (1, 0), scan)
        to_state = jnp.sum(_f32(load("k")) * dk, axis=2, keepdims=True)
        store("dk", dk + _dot(dscores, load("q"), (1, 0), scan))
        whole = reduce(jnp.add, self.whole)
        through = jnp.sum(whole * jnp.sum(state[...] * dstate[...], axis=1, keepdims=True), axis=2, keepdims=True)
        through = watch("dgate", through)
        store("dgate", through + jnp.sum(jnp.where(row < column, sums + to_state, from_state), axis=1, keepdims=True))


class _ConstantDecay(_StepDecay):
    """Decays of heads whose steps have all the same: what `_prepare_decays` left of them."""

    def __init__(self, refs: Refs, gammas: jax.Array, live: Any, scan: Scan) -> None:
        self._refs, self._gammas, self._live, self._scan = refs, gammas, live, scan
        self.whole = _whole(scan, gammas * _f32(jnp.full(gammas.shape, live, jnp.int32)))

    def watch_sums(self, watch: _Watch) -> None:
        """There are none, but products."""

    def from_start(self, width: int) -> jax.Array:
        """See `_StepDecay`."""
        return self._refs["from_start"][:, :, :width]

    def to_end(self, width: int) -> jax.Array:
        """See `_StepDecay`."""
        if not self._scan.masked:
            return self._refs["to_end"][:, :, :width]
        step = _iota((self._scan.heads, self._scan.chunk, 1), 1)
        return _power(self._gammas, jnp.maximum(self._live - 1 - step, 0))

    def between(self) -> jax.Array:
        """See `_StepDecay`."""
        return self._refs["between"][...]


class _ChannelDecay:
    """Decays of heads that have one per step and channel of k.

    from_start(width), to_end(width) [heads, C, K] and whole [heads, 1, K] as in `_StepDecay`. The decay between two
    steps is the product of two that meet between them: at the border of the halves, one step in each, of the smallest
    part of the chunk that holds both (parts have 2, 4, 8, … steps). halves: for each size of parts, [heads, C, K]: from
    that border to the steps of the second half, and to it from those of the first. So no exponent is of a longer way
    than from j to i.
    """

    per_channel = True

    def __init__(self, gk: jax.Array, scan: Scan) -> None:
        """From the log decays [heads, C, K]. Sums of halves are added to sums of wholes: no difference is taken."""
        # Of the part of a step, the sum up to it and the sum over the rest.
        until, after = jnp.maximum(_f32(gk), STRONGEST_GATE), jnp.zeros(gk.shape, jnp.float32)
        self.halves, c = [], gk.shape[1]
        for level in range(c.bit_length() - 1):
            half = 2**level
            second = _in_second(gk.shape, half)
            self.halves.append(_exp(jnp.where(second, until, after)))
            total = until + after
            until += jnp.where(second, pltpu.roll(total, half, 1), 0.0)
            after += jnp.where(second, 0.0, pltpu.roll(total, c - half, 1))
        self._until, self._after = until, after
        self.whole = _whole(scan, until[:, c - 1 :])

    def watch_sums(self, watch: _Watch) -> None:
        """See `_StepDecay`."""
        for sums in (self._until, self._after):
            watch("exponent", sums, 1, where=sums > STRONGEST_GATE)

    def from_start(self, width: int) -> jax.Array:
        """See the class."""
        return _exp(self._until)

    def to_end(self, width: int) -> jax.Array:
        """See the class."""
        return _exp(self._after)

    def scores(self, load: Load, scan: Scan) -> jax.Array:
        """A [heads, C, C]."""
        q, k = _f32(load("q")), _f32(load("k"))
        i, j = _steps(scan)
        scores = jnp.where(i == j, jnp.sum(q * k, axis=2, keepdims=True), 0.0)
        for half, _, decayed in self._levels(q, k):
            products = _dot(decayed, decayed, (1, 1), scan)
            scores = jnp.where((i > j) & _meet(i, j, half), products, scores)
        return scores

    def store_gradients(self, load: Load, store: Store, state: Any, dstate: Any, scan: Scan, watch: _Watch) -> None:
        """Store dq, dk, dv and dgk of a chunk, from the refs of the state at its start and the gradient at its end."""
        q, k, v, do = (_f32(load(name)) for name in ("q", "k", "v", "do"))
        i, j = _steps(scan)
        dq = scan.scale * self.from_start(scan.k) * _dot(load("do"), state[...], (1, 0), scan)
        dk = self.to_end(scan.k) * _dot(load("v"), dstate[...], (1, 0), scan)
        # As in `_StepDecay.store_gradients`: of the gate of step t, only pairs with t between them, and what passes it.
        dgk = watch("dgate", reduce(jnp.add, self.whole) * jnp.sum(state[...] * dstate[...], axis=1, keepdims=True))
        read = watch("dgate", _dot(_ones(i >= j, scan), q * dq, (1, 0), scan), 1)
        dgk += read + watch("dgate", _dot(_ones(i < j, scan), k * dk, (1, 0), scan), 1)
        dscore = scan.scale * jnp.sum(do * v, axis=2, keepdims=True)
        dq, dk = dq + dscore * k, dk + dscore * q
        # Of a pair, at [i, j] as at [j, i].
        dscores = _dot(load("do"), load("v"), (1, 1), scan), _dot(load("v"), load("do"), (1, 1), scan)
        dpairs = watch("dA", scan.scale * jnp.where(i < j, *dscores), 1, 2)
        scores = jnp.where(i == j, jnp.sum(q * k, axis=2, keepdims=True), 0.0)
        for half, decay, decayed in self._levels(q, k):
            meet, second = _meet(i, j, half), _in_second(q.shape, half)
            scores = jnp.where((i > j) & meet, _dot(decayed, decayed, (1, 1), scan), scores)
            ddecayed = _dot(jnp.where(meet, dpairs, 0.0), decayed, (1, 0), scan)
            dq += jnp.where(second, decay * ddecayed, 0.0)
            dk += jnp.where(second, 0.0, decay * ddecayed)
            # Of the same half: from t on in a second one, before t in a first one.
            after = (i ^ j < half) & ((i >= j) ^ (j & half == 0))
            dgk += _dot(_ones(after, scan), decayed * ddecayed, (1, 0), scan)
        dv = _read(load("k"), dstate[...], self, self.to_end, scan)
        scores = watch("A", scores, 1, 2)
        store("dv", dv + scan.scale * _dot(scores, load("do"), (1, 0), scan))
        store("dq", dq)
        store("dk", dk)
        store("dgate", dgk)

    def _levels(self, q: jax.Array, k: jax.Array) -> Iterator[tuple[int, jax.Array, jax.Array]]:
        """For each size of halves: it, the decays, and what they decay: q in second halves, k in first ones."""
        for level, decay in enumerate(self.halves):
            half = 2**level
            yield half, decay, decay * jnp.where(_in_second(q.shape, half), q, k)


_Decay = _StepDecay | _ChannelDecay


def _watch_decays(decay: _Decay, watch: _Watch) -> None:
    if watch:
        decay.watch_sums(watch)
        watch("decay", decay.from_start(1), 1)
        watch("decay", decay.to_end(1), 1)


def _in_second(shape: tuple[int, ...], half: int) -> jax.Array:
    """Which rows are in second halves, of halves of so many."""
    return _iota(shape, 1) & half != 0


def _meet(i: jax.Array, j: jax.Array, half: int) -> jax.Array:
    """Whether i and j are in different halves of a part."""
    between = i ^ j
    return (between >= half) & (between < 2 * half)


# ------------------------------------------------------------------------------------------------------- decays


def _decay_scratch(scan: Scan) -> dict[str, Any]:
    """What `_prepare_decays` fills."""
    if scan.gate == "constant":
        rows = pltpu.VMEM((scan.heads, scan.chunk, max(scan.k, scan.v)), jnp.float32)
        between = pltpu.VMEM((scan.heads, scan.chunk, scan.chunk), jnp.float32)
        return {"from_start": rows, "to_end": rows, "between": between}
    if scan.gate == "step":
        steps = pltpu.VMEM((scan.heads, *scan.step_shape[3:]), jnp.float32)
        rows = dict.fromkeys(("sum_hi", "sum_lo", "from_start", "to_end"), steps)
        if scan.gate_pieces:
            lanes = pl.cdiv(scan.gate_pieces * scan.chunk, LANES) * LANES
            rows["gate"] = pltpu.VMEM((scan.heads, scan.chunks, lanes), jnp.float32)
        return rows
    return {}


def _prepare_decays(refs: Refs, scan: Scan, first_head: Any) -> None:
    """What the decays of all chunks of a block, or of some heads, have in common."""
    if scan.gate == "constant":

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            gammas = _gammas(refs, scan, first_head)
            i, j = _steps(scan)
            refs["between"][...] = jnp.where(i >= j, _power(gammas, jnp.maximum(i - j, 0)), 0.0)
            step = _iota(refs["to_end"].shape, 1)
            refs["from_start"][...] = _power(gammas, step + 1)
            refs["to_end"][...] = _power(gammas, scan.chunk - 1 - step)

    if scan.gate == "step":
        g = jnp.maximum(refs["g"][...], STRONGEST_GATE)
        gamma = jnp.maximum(refs["g_gamma"][...], STRONGEST_GATE) if "g_gamma" in refs else jnp.zeros_like(g)
        gate = two_sum(g, gamma)
        if scan.gate_pieces:
            pieces = [_f32(piece)[:, :, : scan.chunk] for piece in _pieces(gate[0], scan.gate_pieces)]
            refs["gate"][:, :, : scan.gate_pieces * scan.chunk] = jnp.concatenate(pieces, 2)
        hi, lo = _running_sums(*gate, scan.chunk)
        last = hi[:, :, scan.chunk - 1 : scan.chunk], lo[:, :, scan.chunk - 1 : scan.chunk]
        refs["sum_hi"][...], refs["sum_lo"][...] = hi, lo
        refs["from_start"][...] = _exp(hi + lo)
        refs["to_end"][...] = _exp(_difference(last, (hi, lo)))


def _gammas(refs: Refs, scan: Scan, first_head: Any) -> jax.Array:
    """[heads, 1, 1]."""
    return jnp.stack([jnp.full((1, 1), refs["g_gamma"][first_head + h]) for h in range(scan.heads)])


def _steps(scan: Scan) -> tuple[jax.Array, jax.Array]:
    """The steps i and j at each place of `_StepDecay.between`: at [i, j] forward, at [j, i] backward."""
    shape = (scan.heads, scan.chunk, scan.chunk)
    i, j = _iota(shape, 1), _iota(shape, 2)
    return (j, i) if scan.backward else (i, j)


def _power(gammas: jax.Array, steps: jax.Array) -> jax.Array:
    """The decay over so many steps. The product is rounded once, where a running sum is at each step."""
    return _exp(gammas * _f32(steps))


def _whole(scan: Scan, total: jax.Array, low: jax.Array | float = 0.0) -> tuple[jax.Array, ...]:
    """The decay of a whole chunk, exp(total + low), as a sum: what is near 1 and the rest, so that a product with it
    loses little of what a slow head keeps for many chunks. Split dots lose more than that."""
    return (_exp(total + low),) if scan.split else decay_parts(total, low)


def _difference(a: Pair, b: Pair) -> jax.Array:
    """a - b, both in two pieces."""
    return (a[0] - b[0]) + (a[1] - b[1])


def _running_sums(hi: jax.Array, lo: jax.Array, chunk: int) -> Pair:
    """The sums of hi + lo over the lanes up to each.

    Of sums in one piece, differences are as wrong as the sums are large.
    """
    lane = _iota(hi.shape, 2)
    for level in range(chunk.bit_length() - 1):
        before = 2**level
        earlier_hi, earlier_lo = (jnp.where(lane >= before, pltpu.roll(x, before, 2), 0.0) for x in (hi, lo))
        hi, error = two_sum(hi, earlier_hi)
        lo += earlier_lo + error
    return two_sum(hi, lo)


def _exp(x: jax.Array) -> jax.Array:
    """exp, finite everywhere."""
    return jnp.exp(jnp.minimum(x, LARGEST_EXPONENT))


# ----------------------------------------------------------------------------------------------------- products


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], scan: Scan) -> jax.Array:
    """For each head, float32 sums over axis `contract[0]` of its matrix in a and `contract[1]` of that in b.

    A bfloat16 operand enters as it is. One in float32 goes in six passes or, where dots are split, as the sum of two
    bfloat16: 16 bits, and all products but that of the two lower pieces.
    """
    x, y = contract[0] + 1, contract[1] + 1
    dot = partial(lax.dot_general, dimension_numbers=(((x,), (y,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    if not scan.split:
        return dot(a, b, precision=lax.Precision.HIGHEST)
    lhs, rhs = _pieces(a), _pieces(b)
    pairs = [(m, n) for m in range(len(lhs)) for n in range(len(rhs)) if m + n < 2][::-1]
    if a.shape[x] % SUBLANES:
        return reduce(jnp.add, [dot(lhs[m], rhs[n]) for m, n in pairs])
    # One dot of a longer contraction: of the 256 rows of the matrix unit, 128 or 64 would leave most without work.
    return dot(jnp.concatenate([lhs[m] for m, _ in pairs], x), jnp.concatenate([rhs[n] for _, n in pairs], y))


def _dot_with_all(a: jax.Array, b: jax.Array, scan: Scan) -> jax.Array:
    """For each head, the product of its matrix in a and the matrix b, which the matrix unit loads once."""
    return _dot(a.reshape(1, -1, a.shape[2]), b[None], (1, 0), scan).reshape(*a.shape[:2], b.shape[1])


def _pieces(x: jax.Array, count: int = 2) -> list[jax.Array]:
    """x as a sum of bfloat16, the largest first: of so many, where it is none itself."""
    piece = x.astype(jnp.bfloat16)
    if x.dtype == jnp.bfloat16 or count == 1:
        return [piece]
    return [piece, *_pieces(x - piece.astype(jnp.float32), count - 1)]


def _ones(where: jax.Array, scan: Scan) -> jax.Array:
    """1 where it is, else 0, which a dot takes as it is."""
    ones = jnp.where(where, 1.0, 0.0)
    return ones.astype(jnp.bfloat16) if scan.split else ones


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
