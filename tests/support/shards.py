"""The layer shared out over the devices of a mesh: what the tests of expert parallelism run and compile."""

import json
import sys
from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec

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


def draw(tokens, hidden, intermediate, experts, dtype, skew):
    """Inputs of a layer; skew: how much better every token likes the first experts."""
    rng = np.random.default_rng(0)

    def normal(*shape, size=1.0):
        return (rng.standard_normal(shape) * size).astype(np.float32)

    x = np.abs(normal(tokens, hidden)) if skew else normal(tokens, hidden)
    w_router = normal(hidden, experts, size=hidden**-0.5) - skew * np.arange(experts) / experts / hidden
    weights = [normal(experts, *shape, size=shape[0] ** -0.5)
               for shape in ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))]  # fmt: skip
    given = [jax.numpy.asarray(tensor, dtype) for tensor in (x, *weights, normal(tokens, hidden))]
    return given[0], jax.numpy.asarray(w_router), *given[1:]


def passes(layer, given, dout):
    """What a layer returns, and its gradients."""

    @jax.jit
    def both(given, dout):
        out, backward = jax.vjp(layer, *given)
        return {"out": out, **LayerGrads(*backward(dout))._asdict()}

    return both(given, dout)


def compare(sizes, dtype, skew, options):
    """For each output whether it has one device's bits, and the largest difference over the largest element."""
    *given, dout = draw(*sizes, dtype, skew)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
    one = passes(partial(moe_layer, **options), given, dout)
    shared = passes(partial(sharded_layer, mesh=mesh, **options), given, dout)
    found = {}
    for name, got in shared.items():
        a, b = (np.asarray(value, np.float64) for value in (got, one[name]))
        found[name] = (a.tobytes() == b.tobytes(), float(np.abs(a - b).max() / np.abs(b).max()), got.dtype.name)
    return found


def main():
    """Each comparison of sys.argv, as JSON."""
    for line in sys.argv[1:]:
        print(json.dumps(compare(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
