"""The recurrent forms of the gated delta rules on the TPU: chunks of few steps, and decoding.

`recurrent_delta_fwd` and `recurrent_delta_bwd` are what `fused_recurrent_*` of `gated_delta_rule.py` and `kda.py` are
made of. A state that takes one step at a time waits in each for a sum over all of it, and leaves the matrix unit idle.
So CHUNK steps are taken at once, by the kernels of `chunk_delta_rule`, and what `chunk_*` gives away is kept: dots take
all bits of what is float32, whatever q and k are, decays come from a series (`decays.decay_parts`) and not from the
processor's exp, the inverse of 16 rows magnifies little of what is lost, and what it gives is corrected once. One step
from a state is `recurrent_decode`'s.
"""

from typing import Any

import jax
import jax.numpy as jnp

from op_arguments.delta_rule import DeltaGrads, DeltaProblem, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of
from tpu_kernels._lib.arguments import Interpreted
from tpu_kernels._lib.call import jit
from tpu_kernels._lib.delta import DeltaArrays, normalised, take
from tpu_kernels._lib.delta_plan import DeltaPlan
from tpu_kernels._lib.delta_plan import make_plan as make_chunk_plan
from tpu_kernels._lib.recurrent_decode import decode, is_decoding
from tpu_kernels.chunk_delta_rule import backward, forward

CHUNK = 16


def make_plan(p: DeltaProblem, per_channel: bool, *, backward: bool) -> DeltaPlan | None:
    """The plan of a checked problem, None where there is nothing to go through."""
    plan = make_chunk_plan(p, per_channel, backward=backward, chunk_size=CHUNK)
    return plan and plan._replace(scan=plan.scan._replace(split=False, precise=True))


@options_of(take, make_plan)
def recurrent_delta_fwd(
    x: DeltaTensors, per_channel: bool, *, output_final_state: bool = False, **options: Any
) -> Output:
    """o [B, T, HV, V] in v's dtype and the states ht [N, HV, K, V] float32 after the last steps, None unless asked for.

    per_channel: whether g is that of `kda`; other arguments as `gated_delta_rule.fused_recurrent_gated_delta_rule_fwd`.
    o is zero beyond the last sequence. Sites shown to a probe: those of `chunk_delta_rule.chunk_delta_fwd`; kept, v_new
    and h where a call decodes.
    Raises ValueError or TypeError as `take`.
    """
    arrays, how = take(make_plan, x, per_channel, **options)
    plan = how["plan"]
    decodes = plan and is_decoding(plan.scan.p, plan.p.k, arrays.initial_state)
    return (_decode if decodes else forward)(arrays, output_final_state=bool(output_final_state), **how)


@options_of(take, make_plan)
def recurrent_delta_bwd(
    x: DeltaTensors, do: jax.Array, per_channel: bool, *, dht: Any = None, **options: Any
) -> DeltaGrads:
    """The gradients of `recurrent_delta_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    Gradients have their arguments' dtypes and are zero beyond the last sequence. Sites shown to a probe: those of
    `chunk_delta_rule.chunk_delta_bwd`.
    Raises as `recurrent_delta_fwd`.
    """
    arrays, how = take(make_plan, x, per_channel, do, dht, **options)
    return backward(arrays, **how)


@jit("plan", "output_final_state", "interpret")
def _decode(x: DeltaArrays, *, plan: DeltaPlan, output_final_state: bool, interpret: Interpreted) -> Output:
    keys = {name: normalised(given)[0] if plan.p.l2norm else given for name, given in (("q", x.q), ("k", x.k))}
    rows = {name: jnp.repeat(given, plan.p.group, axis=2) for name, given in keys.items()}
    gates = {"gk" if plan.scan.gate == "channel" else "g": x.g}
    rows |= {"v": x.v, "beta": x.beta}
    return decode(rows, gates, x.initial_state, plan.scan.p, output_final_state, interpret)
