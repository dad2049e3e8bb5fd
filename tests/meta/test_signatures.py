"""One interface: an argument means the same and is left out to the same effect wherever it is."""

import inspect

from tests.support.functions import public

PACKAGES = ("cpu_golden", "tpu_kernels", "gpu_reference")
INTERNAL = ("cpu_golden.chunk_scan", "cpu_golden.fused_recurrent")
"""Behind both gated linear attentions, and only called by them."""
OF_ITS_FUNCTION = ("quantize", "dtype")
"""Arguments whose default is every function's own: of one layer or of all, what is quantised to or from."""


def test_an_argument_has_the_same_default_in_every_function_of_every_package():
    defaults: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for package in PACKAGES:
        for function, value in public(package).items():
            if value.__module__ in INTERNAL:
                continue
            for name, parameter in inspect.signature(value).parameters.items():
                if parameter.default is not parameter.empty:
                    argument = (name, function) if name in OF_ITS_FUNCTION else (name,)
                    text = str(parameter.default).removeprefix("torch.")
                    defaults.setdefault(argument, {}).setdefault(text, []).append(f"{package}.{function}")
    assert len(defaults) > 40
    assert not {argument: where for argument, where in defaults.items() if len(where) > 1}
