"""The layer shared out over the devices of a mesh: what the tests of expert parallelism run and compile."""

from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tests.support import parallel
from tpu_kernels.moe import LayerGrads, moe_layer

AXIS = "core"


def sharded_layer(x, w_router, w_gate, w_up, w_down, *, mesh=None, **options):
    """`moe_layer` of all tokens and experts, an equal part of both on each device of the mesh."""
    parts, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(
        partial(moe_layer, axis_name=AXIS, **options),
        mesh=mesh or jax.sharding.get_abstract_mesh(),
        in_specs=(parts, whole, parts, parts, parts),
        out_specs=parts,
        check_vma=False,
    )(x, w_router, w_gate, w_up, w_down)


def sharded_layer_bwd(x, w_router, w_gate, w_up, w_down, dout, **options):
    """The gradients of `sharded_layer`."""
    _, backward = jax.vjp(partial(sharded_layer, **options), x, w_router, w_gate, w_up, w_down)
    return LayerGrads(*backward(dout))


def tensors(sizes, dtype, skew):
    """The inputs of a layer and its dout; the router's weights are float32."""
    x, w_router, *rest = parallel.draw(*sizes, skew)
    x, *rest = (jax.numpy.asarray(tensor, dtype) for tensor in (x, *rest))
    return [x, jax.numpy.asarray(w_router), *rest]


def passes(layer, given, dout):
    """What a layer returns, and its gradients."""

    @jax.jit
    def both(given, dout):
        out, backward = jax.vjp(layer, *given)
        return {"out": out, **LayerGrads(*backward(dout))._asdict()}

    return both(given, dout)


def compare(sizes, dtype, skew, options):
    """`parallel.difference` of each output from one device's."""
    *given, dout = tensors(sizes, dtype, skew)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
    one = passes(partial(moe_layer, **options), given, dout)
    shared = passes(partial(sharded_layer, mesh=mesh, **options), given, dout)
    return {name: parallel.difference(np.asarray(got), np.asarray(one[name])) for name, got in shared.items()}


if __name__ == "__main__":
    parallel.answer(compare)
