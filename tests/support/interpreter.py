"""What tests need that look into Triton's interpreter."""

import os

import pytest

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off")
"""For tests of kernels on the CPU. The root conftest turns the interpreter on where there is no GPU."""
