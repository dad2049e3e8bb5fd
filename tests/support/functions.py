"""The functions of the kernel packages by name alone: which module has them is nothing that a test need know."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parity.backends import runner

PACKAGES = {"golden": "cpu_golden", "tpu": "tpu_kernels", "gpu": "gpu_reference"}
FRAMEWORKS = {"golden": "numpy", "tpu": "jax", "gpu": "triton"}
BACKENDS = [pytest.param(backend, marks=getattr(pytest.mark, backend)) for backend in ("tpu", "gpu")]


def public(package: str) -> dict[str, Callable]:
    """The public functions of all modules of a package, by name; what only its kernels share (`_lib`) left out."""
    names = [found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    modules = [importlib.import_module(f"{package}.{name}") for name in names if not name.startswith("_")]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    }


def run(backend: str, function: str, inputs: dict[str, Any], **arguments: Any) -> Any:
    """What a function of "golden", "tpu" or "gpu" returns for NumPy inputs, in NumPy. Skips without the framework."""
    pytest.importorskip(FRAMEWORKS[backend])
    kernel = public(PACKAGES[backend])[function]
    return kernel(**inputs, **arguments) if backend == "golden" else runner(backend).run(kernel, inputs, arguments)


def of_any_size(largest: float) -> np.ndarray:
    """Float32 arguments [600] of both signs and every size from 2^-6 to `largest`, ascending."""
    sizes = np.geomspace(2.0**-6, largest, 300)
    return np.concatenate([-sizes[::-1], sizes]).astype(np.float32)
