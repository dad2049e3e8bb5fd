"""What `grouped_dense` takes and returns, beyond what its matmuls and quantisers check."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from op_arguments import Array, Tiling, check_array, check_shape, check_tiles
from op_arguments.gmm import Problem
from op_arguments.quantize import check_block_size

Quantize = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class DenseOptions:
    """The options of `grouped_dense` and its gradients.

    transpose_rhs, preferred_element_type: those of `gmm`.
    quantize: multiply in e4m3, lhs with one scale per row and `block_size` elements of K, rhs with one per block_size x
    block_size elements (None: whole axes), the recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3). bwd_quantize: the
    same for the two matmuls of the backward pass: dout by rows and blocks of N for lhs's gradient, by columns and
    global blocks of M for rhs's. "auto" quantises where the matrix unit multiplies fp8 natively. block_size must divide
    K and N where anything is quantised; M need not be a multiple of it.
    tiling: (tm, tk, tn) of the forward pass, whose backward matmuls take (tm, tn, tk) and (tm, tk, tn), or a look-up
    (m, k, n) -> (tm, tk, tn) that is asked for each of them.
    Raises ValueError or TypeError for any other value.
    """

    transpose_rhs: bool = False
    quantize: Quantize = "auto"
    bwd_quantize: Quantize = "auto"
    block_size: int | None = 128
    preferred_element_type: Any = None
    tiling: Tiling | None = None

    def __post_init__(self) -> None:
        for name, value in (("quantize", self.quantize), ("bwd_quantize", self.bwd_quantize)):
            if value != "auto" and not isinstance(value, bool):
                raise ValueError(f"{name} must be 'auto', True or False, got {value!r}")
        check_block_size(self.block_size)

    @property
    def swapped_tiling(self) -> Tiling | None:
        """That of a matmul in which K and N have changed places; a look-up is asked with its sizes anyway."""
        if self.tiling is None or callable(self.tiling):
            return self.tiling
        tm, tk, tn = check_tiles(self.tiling)
        return tm, tn, tk


class Grads(NamedTuple):
    """The gradients of `grouped_dense`; existing_out's is None where none was given."""

    lhs: Any
    rhs: Any
    existing_out: Any


def check_dout(dout: Array, p: Problem, *, exact: bool = False) -> None:
    """Refuse a gradient of the result that has not its shape (ValueError) and dtype (TypeError); `exact` as ever."""
    check_array("dout", dout, "M, N", (p.out_dtype,), exact=exact)
    check_shape("dout", dout, "M, N", (p.m, p.n))
