"""What is judged: the operations, what their kernels promise, and their cases. Data; nothing runs here."""

from golden import rmsnorm, rmsnorm_bwd

from parity import Array, Contract, Op


def inputs(case):
    return {"x": Array((case.M, case.N), case.dtype), "weight": Array((case.N,), case.dtype)}


def inputs_bwd(case):
    return {**inputs(case), "dy": Array((case.M, case.N), case.dtype)}


ROOT = {"rstd": "float32/2"}  # a sum, a root and a quotient: off by up to two ulps


def contract(case, backend):
    """All is computed in float32, and rounded once more to what is returned."""
    return Contract(out=case.out, sites=dict.fromkeys(("product", "sum", "mean", "normed", "y"), "float32") | ROOT)


def contract_bwd(case, backend):
    """As forward; the gradient of the weight stays in float32."""
    sites = ("product", "sum", "mean", "normed", "g", "along", "rest", "dx", "term", "dweight")
    return Contract(out=case.out, outs={"dweight": "float32"}, sites=dict.fromkeys(sites, "float32") | ROOT)


_FORWARD = Op("rmsnorm", rmsnorm, "tpu:rmsnorm", "gpu:rmsnorm", inputs, contract)
_BACKWARD = Op("rmsnorm_bwd", rmsnorm_bwd, "tpu:rmsnorm_bwd", "gpu:rmsnorm_bwd", inputs_bwd, contract_bwd)
SHAPES = [dict(M=20, N=1000), dict(M=32, N=4096)]
DTYPES = ["float32", "bfloat16"]
RMSNORM = _FORWARD.with_cases(_FORWARD.grid(SHAPES, dtype=DTYPES))
RMSNORM_BWD = _BACKWARD.with_cases(_BACKWARD.grid(SHAPES, dtype=DTYPES))
OPS = (RMSNORM, RMSNORM_BWD)
