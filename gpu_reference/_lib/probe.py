"""Probes in kernels: `if INTERPRETED: sums = probe("acc", sums, where)`, of which a compiled kernel has nothing."""

from typing import Any

import triton.language as tl

from gpu_reference._lib.hardware import is_interpreted
from op_arguments import probe as probes

INTERPRETED = tl.constexpr(is_interpreted())
probe: Any = probes.probe if is_interpreted() else None  # Triton compiles no kernel that refers to a Python function
