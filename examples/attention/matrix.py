"""What is judged: the operation, what its kernels promise, and its cases. Data; nothing runs here."""

import ml_dtypes
import numpy as np
from golden import BLOCK, attention

from parity import Array, Contract, Given, Op


def inputs(case):
    """q, k, v [H, T, D]. `peaky`: a row sees one or two keys; `correlated`: all keys of a head are alike."""
    shape = (case.H, case.T, case.D)
    if case.data not in ("peaky", "correlated"):
        return {name: Array(shape, case.dtype) for name in ("q", "k", "v")}
    q, k, v = np.random.default_rng(case.seed).standard_normal((3, *shape))
    if case.data == "peaky":
        q *= 8
    else:
        k = k / 8 + k[:, :1]
    return {name: Given(x.astype(ml_dtypes.bfloat16)) for name, x in (("q", q), ("k", k), ("v", v))}


def contract(case, backend):
    """P is rounded to bfloat16, all else is computed in float32; products of bfloat16 are exact there."""
    float32 = ("scores", "shifted", "sum", "mass", "Pv", "acc", "quotient")
    exps = dict.fromkeys(("exp", "shrink", "log"), "float32/2")  # off by up to two ulps
    sites = {**dict.fromkeys(float32, "float32"), **exps, "P": "bfloat16"}
    functions = {"exp": ("exp",), "shrink": ("exp",), "log": ("log",), "quotient": ("reciprocal",)}
    return Contract(dot="native", out=case.out, outs={"lse": "float32"}, sites=sites, functions=functions)


def axes(case, inputs):
    """What an error is looked for along: the head, and the block of rows."""
    head, block = np.arange(case.H)[:, None], np.arange(case.T) // BLOCK
    return {
        "out": {"head": head[..., None], "block": block[:, None]},
        "lse": {"head": head, "block": block},
    }


_ATTENTION = Op(
    "attention",
    golden=attention,
    tpu="tpu:attention",
    gpu="gpu:attention",
    inputs=inputs,
    contract=contract,
    route=lambda case: {"out": case.out},
    axes=axes,
)
OUTS = [("bfloat16", "bfloat16"), ("bfloat16", "float32")]
ATTENTION = _ATTENTION.with_cases(
    _ATTENTION.grid([dict(H=2, T=100, D=64)], dtype=OUTS, tier="smoke"),
    _ATTENTION.grid([dict(H=2, T=257, D=64)], dtype=OUTS),
    _ATTENTION.grid([dict(H=2, T=257, D=64)], dtype=OUTS[1:], data=["peaky", "correlated"]),
)
OPS = (ATTENTION,)
