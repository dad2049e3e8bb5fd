"""What is judged: the operation, what its kernels promise, and its cases. Data; nothing runs here."""

import ml_dtypes  # noqa: F401  (makes NumPy know bfloat16)
import numpy as np
from golden import softmax

from parity import Array, Contract, Given, Op


def inputs(case):
    """Random logits; for the integer twin such that every sum is exact: exp(0) = 1 and exp(-inf) = 0."""
    if case.data != "integers":
        return {"x": Array((case.M, case.N), case.dtype)}
    ones = 2 ** (np.arange(case.M) % 4)  # as many ones in a row, so that the quotient is exact too
    place = (np.arange(case.N) * 7 + np.arange(case.M)[:, None]) % case.N
    return {"x": Given(np.where(place < ones[:, None], 0.0, -np.inf).astype(case.dtype))}


def contract(case, backend):
    """Both kernels compute in float32, and round once more to what they return."""
    sites = dict.fromkeys(("shifted", "sum", "quotient"), "float32") | {"exp": "float32/2"}
    return Contract(out=case.out, sites=sites, functions={"exp": ("exp",), "quotient": ("reciprocal",)})


_SOFTMAX = Op(
    "softmax",
    golden=softmax,
    tpu="tpu:softmax",
    gpu="gpu:softmax",
    inputs=inputs,
    contract=contract,
    # Without the hardware exp is that of the CPU: NumPy's in Triton's interpreter, within half a unit in the last
    # place and a bit, and XLA's in Pallas', within one. ε 1.07× was seen. On a TPU and a GPU: measure, and lower it.
    tau=0.15,
)
SOFTMAX = _SOFTMAX.with_cases(
    _SOFTMAX.grid([dict(M=20, N=100)], dtype=["float32", "bfloat16"], tier="smoke"),
    _SOFTMAX.grid([dict(M=64, N=1000), dict(M=7, N=8)], dtype=["float32"], data=["normal", "wide", "one_signed"]),
)
OPS = (SOFTMAX,)
