"""One interface: an argument means the same and is left out to the same effect wherever it is."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCANS = ("chunk_scan", "fused_recurrent")
"""Behind both gated linear attentions; those of the goldens are only called by them."""
PACKAGES = ("cpu_golden", "tpu_kernels", "gpu_reference")
OF_ITS_FUNCTION = ("quantize", "dtype")
"""Arguments whose default is every function's own: of one layer or of all, what is quantised to or from."""


def public(package: str) -> dict[str, Callable]:
    names = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__", "hardware", "stages"}
    names -= set(SCANS) if package == "cpu_golden" else set()
    modules = [importlib.import_module(f"{package}.{name}") for name in sorted(names)]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    }


def test_an_argument_has_the_same_default_in_every_function_of_every_package():
    defaults: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for package in PACKAGES:
        for function, value in public(package).items():
            for name, parameter in inspect.signature(value).parameters.items():
                if parameter.default is not parameter.empty:
                    argument = (name, function) if name in OF_ITS_FUNCTION else (name,)
                    text = str(parameter.default).removeprefix("torch.")
                    defaults.setdefault(argument, {}).setdefault(text, []).append(f"{package}.{function}")
    assert len(defaults) > 40
    assert not {argument: where for argument, where in defaults.items() if len(where) > 1}
