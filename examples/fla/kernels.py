"""flash-linear-attention's own functions under the argument names of our operations; nothing of theirs is mended."""

import torch
from fla.ops.gla import chunk_gla
from fla.ops.simple_gla import chunk_simple_gla

from gpu_reference import gla, simple_gla


def chunk_simple_gla_fwd(q, k, v, *, cu_seqlens=None, **options):
    return simple_gla.Output(*chunk_simple_gla(q, k, v, cu_seqlens=as_int64(cu_seqlens), **options))


def chunk_simple_gla_bwd(q, k, v, do, *, g=None, g_gamma=None, initial_state=None, **options):
    inputs = dict(q=q, k=k, v=v, g=g, g_gamma=g_gamma, initial_state=initial_state)
    return simple_gla.SimpleGrads(*gradients(chunk_simple_gla_fwd, inputs, do, **options))


def chunk_gla_fwd(q, k, v, *, gk, chunk_size, cu_seqlens=None, **options):
    """chunk_size is theirs to choose: the power of two that holds T, but at least 16 and at most 64."""
    return gla.Output(*chunk_gla(q, k, v, gk, cu_seqlens=as_int64(cu_seqlens), **options))


def chunk_gla_bwd(q, k, v, do, *, gk, initial_state=None, **options):
    inputs = dict(q=q, k=k, v=v, gk=gk, initial_state=initial_state)
    return gla.Grads(*gradients(chunk_gla_fwd, inputs, do, **options))


def gradients(forward, inputs, do, dht=None, **options):
    """What autograd has of each input: None for one that was not given, or that they return no gradient of."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if x is not None}
    out = forward(**leaves, output_final_state=dht is not None, **options)
    ends = (out[:1], (do,)) if dht is None else (out, (do, dht))
    found = torch.autograd.grad(ends[0], tuple(leaves.values()), ends[1], allow_unused=True)
    return map(dict(zip(leaves, found, strict=True)).get, inputs)


def as_int64(offsets):
    """The offsets of sequences as they ask for them."""
    return None if offsets is None else offsets.long()
