"""What `grouped_dense` returns, and what it accepts beyond what its matmuls and quantisers check."""

from typing import Any, NamedTuple

from op_arguments import Array, check_array, check_shape
from op_arguments.gmm import Problem
from op_arguments.quantize import check_block_size


class Grads(NamedTuple):
    """The gradients of `grouped_dense`; existing_out's is None where none was given."""

    lhs: Any
    rhs: Any
    existing_out: Any


def check_quantize_options(quantize: Any, bwd_quantize: Any, block_size: int | None) -> None:
    """Refuse a quantize or bwd_quantize other than "auto", True and False (ValueError), and a bad block_size."""
    for name, value in (("quantize", quantize), ("bwd_quantize", bwd_quantize)):
        if value != "auto" and not isinstance(value, bool):
            raise ValueError(f"{name} must be 'auto', True or False, got {value!r}")
    check_block_size(block_size)


def check_dout(dout: Array, p: Problem, *, exact: bool = False) -> None:
    """Refuse a gradient of the result that has not its shape (ValueError) and dtype (TypeError); `exact` as ever."""
    check_array("dout", dout, "M, N", (p.out_dtype,), exact=exact)
    check_shape("dout", dout, "M, N", (p.m, p.n))
