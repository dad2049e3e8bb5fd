"""The chunked forms of the gated delta rules on the GPU, in Triton: blocks of steps at a time, by matrix products.

`chunk_delta_fwd` and `chunk_delta_bwd` are what `chunk_*` of `gpu_reference/gated_delta_rule.py` and
`gpu_reference/kda.py` are made of; the operations are defined in the modules of these names in `cpu_golden`, and the
formulas of a block, from the state S before it, in `cpu_golden/chunk_delta_rule.py`. The kernels:

- `pairs_kernel`, a program for each block of rows: the scores P, and by substitution T = (I + A)^-1;
- `forward_kernel`, a program for each sequence and tile of V, which know nothing of each other: through the blocks with
  S in registers, for v_new = T beta (v - (k exp(c)) S), o and the state after the block;
- backwards these two, which keep S and v_new; `reverse_kernel`, likewise from the last block to the first, for the
  gradient of S, T^T dv_new and dv; then, a program for each block, what is summed over V: `pair_gradients_kernel` those
  of P and A, and `gradients_kernel` all else.

q and k are normalised before, in float32. Each head of values has its own dq and dk, which are added in order.
Nothing is read back from the device. The offsets in a CUDA tensor are not checked; those out of order are clamped.
"""

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from gpu_reference._lib.chunk_plan import Block, backward_block, block_rows
from gpu_reference._lib.delta import Delta, DeltaOptions, dtypes_of_gradients, take
from gpu_reference._lib.delta_backward import Outs, gradients_kernel, pair_gradients_kernel, reverse_kernel
from gpu_reference._lib.delta_forward import NO_MEMORY, Memory, forward_kernel
from gpu_reference._lib.delta_pairs import DIAGONAL, Pairs, pairs_kernel
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.tiles import block_of, cdiv
from op_arguments import dtype_name
from op_arguments.delta_rule import DeltaGrads, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of

SCAN_VALUES, SCAN_WARPS = 16, 8
"""Columns of V and warps of what goes through sequences with all of K: little is spilled on sm_80 to sm_100. What sums
over V has the tiles of `chunk_plan.BACKWARD_TILES`."""
PAIR_KEYS = 64  # columns of K that scores are summed over at a time, at most


class Plan(NamedTuple):
    """One direction of a chunked gated delta rule, as its kernels are launched.

    split: operands of dots are split in two bfloat16 where they are float32.
    """

    delta: Delta
    block: Block
    split: bool

    @property
    def slots(self) -> int:
        """Blocks of rows, and states before them: a sequence's first is at its first row // rows + its number."""
        return self.delta.p.b * self.delta.p.t // self.block.rows + self.delta.p.n

    def empty_pairs(self) -> Tensor:
        """[B, T, HV, ROWS] float32."""
        return self.delta.scan.empty_rows(self.block.rows, dtype=torch.float32)

    def pairs(self, *, with_raw: bool) -> Pairs:
        """Those of every row."""
        pairs = Pairs(self.empty_pairs(), self.empty_pairs(), self.empty_pairs() if with_raw else None)
        levels = (self.block.rows // DIAGONAL.value).bit_length() - 1
        own = {"pairs": pairs, "LEVELS": levels, "BK": min(self.block.keys, PAIR_KEYS)}
        self._launch(pairs_kernel, self.slots, **own)
        return pairs

    def through_sequences(self, kernel: Any, **own: Any) -> None:
        """Run a kernel that has a program for each tile of V, and all of K."""
        programs = self.delta.p.n * cdiv(self.delta.p.v, self.block.values)
        tile = {"BK": self.block.keys, "BV": self.block.values}
        self._launch(kernel, programs, **own, **tile)

    def through_blocks(self, kernel: Any, **own: Any) -> None:
        """Run a kernel that has a program for each block of rows, and goes through the tiles of K and V."""
        self._launch(kernel, self.slots, **own, BV=self.block.values)

    def _launch(self, kernel: Any, programs: int, **own: Any) -> None:
        arguments = {**self.delta.scan.arguments, **own, "SPLIT": self.split, "ROWS": self.block.rows}
        options = {"num_warps": self.block.warps, "num_stages": 1, "enable_fp_fusion": True}
        launch = Launch(kernel, (programs * self.delta.p.hv,), arguments, options, "K, V or chunk_size")
        launch.run(self.delta.scan.device)


@options_of(take)
def chunk_delta_fwd(
    x: DeltaTensors,
    per_channel: bool,
    *,
    output_final_state: bool = False,
    chunk_size: int = 64,
    **options: Unpack[DeltaOptions],
) -> Output:
    """(o, ht) of a gated delta rule, as `cpu_golden.gated_delta_rule` and `cpu_golden.kda` define it; ht None unless
    output_final_state.

    x: tensors of any strides. per_channel: whether g has an axis of channels. chunk_size: blocks have a power of two of
    rows that divides it, at most 32, or 16 with a gate for each channel; no result depends on more of it. options:
    those of `op_arguments.delta_rule.DeltaFwd`. Sites shown to a probe: c, decay, kept, T, P, v_new, h, rstd.
    o has v's shape and dtype and is zero beyond the last sequence; ht [N, HV, K, V] is float32.
    Raises ValueError or TypeError as `op_arguments.delta_rule.check_delta_forward`, ValueError for tensors on several
    devices, and RuntimeError for CPU tensors where Triton's interpreter is off.
    """
    return _forward(take(x, per_channel, chunk_size=chunk_size, **options), output_final_state)


@options_of(take)
def chunk_delta_bwd(
    x: DeltaTensors,
    do: Tensor,
    per_channel: bool,
    *,
    dht: Tensor | None = None,
    chunk_size: int = 64,
    **options: Unpack[DeltaOptions],
) -> DeltaGrads:
    """The gradients of `chunk_delta_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype. Gradients have their arguments' dtypes and are zero beyond the last sequence. Held
    meanwhile, in float32: two states for each block of rows, four copies of v, and dq and dk of each head of values.
    Sites: those of `chunk_delta_fwd`, dv_new and dh. Raises as `chunk_delta_fwd`.
    """
    return _backward(take(x, per_channel, do, dht, chunk_size=chunk_size, **options))


@bfloat16_as_float32_where_interpreted(lambda delta, *_: Output(delta.scan.inputs.v.dtype, None))
def _forward(delta: Delta, output_final_state: bool) -> Output:
    scan = delta.scan
    if scan.is_empty:
        return scan.forward_of_nothing(output_final_state)
    plan = plan_of(delta.normalised())
    o, ht = scan.empty_output(output_final_state)
    own = {"pairs": plan.pairs(with_raw=False), "initial_state": scan.initial_state, "memory": NO_MEMORY}
    plan.through_sequences(forward_kernel, **own, o=o, ht=ht)
    return Output(o, ht)


@bfloat16_as_float32_where_interpreted(dtypes_of_gradients)
def _backward(delta: Delta) -> DeltaGrads:
    if delta.scan.is_empty:
        return delta.empty_gradients()
    delta = delta.normalised()
    p, scan = delta.p, delta.scan
    scans, sums = plan_of(delta), plan_of(delta, sums=True)
    pairs = scans.pairs(with_raw=True)
    states, dstates = (scan.empty_states(scans.slots) for _ in range(2))
    error, v_new, dupdate = (scan.empty_rows(p.v, dtype=torch.float32) for _ in range(3))
    memory = Memory(states, error, v_new, dstates, dupdate)
    initial = {"initial_state": scan.initial_state, "o": None, "memory": memory, "ht": None}
    scans.through_sequences(forward_kernel, pairs=pairs, **initial)
    dv = scan.empty_rows(p.v)
    dh0 = None if scan.initial_state is None else scan.empty_states(p.n)
    scans.through_sequences(reverse_kernel, pairs=pairs, dht=scan.dht, memory=memory, dv=dv, dh0=dh0)
    x = scan.inputs
    of_heads = x.q.dtype if p.group == 1 and not p.l2norm else torch.float32
    dq, dk = (scan.empty_rows(p.k, parts=(1,), dtype=of_heads) for _ in range(2))
    dgate = scan.empty_rows(*x.gate.shape[3:], dtype=x.gate.dtype)
    dbeta = scan.empty_rows(dtype=x.beta.dtype)
    memory = memory._replace(dpairs=Pairs(scans.empty_pairs(), raw=scans.empty_pairs()))
    left = {"pairs": pairs, "memory": memory}
    sums.through_blocks(pair_gradients_kernel, **left, dbeta=dbeta)
    sums.through_blocks(gradients_kernel, **left, outs=Outs(dq, dk, dgate), BK=sums.block.keys)
    return DeltaGrads(*delta.of_keys((dq, dk)), dv, dgate, dbeta, dh0)


def plan_of(delta: Delta, *, sums: bool = False) -> Plan:
    """The plan of a pass; sums: of what is summed over V, for tiles of K."""
    scan, per_channel = delta.scan, delta.scan.inputs.gk is not None
    p = scan.p._replace(dtype=dtype_name(scan.inputs.v.dtype))  # interpreted, bfloat16 may have become float32
    split = p.dtype == "bfloat16"
    rows = block_rows(p, scan.chunk_size, per_channel=per_channel)
    if sums:
        return Plan(delta, backward_block(p, rows, split=split, per_channel=per_channel), split)
    return Plan(delta, Block(rows, block_of(p.k), SCAN_VALUES, SCAN_WARPS), split)
