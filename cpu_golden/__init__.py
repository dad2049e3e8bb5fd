"""Float64 goldens in plain NumPy: what each operation means. See `cpu_golden.stages` for their staged form."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
