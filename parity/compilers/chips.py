"""The published peaks of TPU chips: what a static schedule is measured against."""

from dataclasses import dataclass

_PACKED_ROWS = {"f32": 8, "bf16": 16, "fp8": 32, "int8": 32}
"""Rows of the left operand in one `vmatmul`: a register has 8 sublanes of 32 bits."""


@dataclass(frozen=True)
class Chip:
    """A TPU chip. All figures but cores are one TensorCore's: its share of what is published for the chip.

    topology: libtpu's name of the smallest one. cores per chip. mxus: matrix units, each width × width.
    rows_per_cycle: rows of the left operand that one of them takes in a cycle, by operand type (float32 goes as
    bfloat16, and so does an 8-bit type without a peak of its own). ghz: the clock that follows from the published
    bfloat16 peak, 2 · width² · mxus · rows_per_cycle · ghz. hbm_gbs in GB/s.

    Sources: Cloud TPU documentation, system architecture and the pages of each version (TFLOPs, HBM GB/s, TensorCores);
    `jax.experimental.pallas.tpu.get_tpu_info` (matrix units).
    """

    topology: str
    cores: int
    mxus: int
    width: int
    rows_per_cycle: dict[str, int]
    ghz: float
    hbm_gbs: float

    def vmatmul_cycles(self, operand: str) -> float:
        """Cycles that a `vmatmul` of "f32", "bf16", "fp8" or "int8" operands keeps a matrix unit busy."""
        return _PACKED_ROWS[operand] / self.rows_per_cycle[operand]

    def teraflops(self, operand: str) -> float:
        """Peak of one core, in 10¹² multiplications and additions per second."""
        return 2e-3 * self.width**2 * self.mxus * self.rows_per_cycle[operand] * self.ghz


def packed_rows(operand: str) -> int:
    """Rows of the left operand that one `vmatmul` multiplies."""
    return _PACKED_ROWS[operand]


def _rows(bf16: int, *, fp8: int = 0, int8: int = 0) -> dict[str, int]:
    return {"f32": bf16, "bf16": bf16, "fp8": fp8 or bf16, "int8": int8 or bf16}


CHIPS = {
    # 275 Tflop/s, 1228 GB/s
    "v4": Chip("v4:2x2x1", 2, mxus=4, width=128, rows_per_cycle=_rows(1), ghz=1.05, hbm_gbs=614),
    # 197 Tflop/s, int8 394, 819 GB/s
    "v5e": Chip("v5e:2x2", 1, mxus=4, width=128, rows_per_cycle=_rows(1, int8=2), ghz=1.5, hbm_gbs=819),
    # 459 Tflop/s, int8 918, 2765 GB/s
    "v5p": Chip("v5p:2x2x1", 2, mxus=4, width=128, rows_per_cycle=_rows(1, int8=2), ghz=1.75, hbm_gbs=1382.5),
    # 918 Tflop/s, fp8 918, int8 1836, 1638 GB/s
    "v6e": Chip("v6e:2x2", 1, mxus=2, width=256, rows_per_cycle=_rows(2, int8=4), ghz=1.75, hbm_gbs=1638),
    # 2307 Tflop/s, fp8 4614, 7380 GB/s
    "tpu7x": Chip("tpu7x:2x2x1", 2, mxus=2, width=256, rows_per_cycle=_rows(2, fp8=4), ghz=2.2, hbm_gbs=3690),
}
