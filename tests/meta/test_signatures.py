"""One interface: an argument means the same and is left out to the same effect wherever it is."""

import inspect

import pytest

from tests.support.functions import public

PACKAGES = ("cpu_golden", "tpu_kernels", "gpu_reference")
INTERNAL = tuple(
    f"cpu_golden.{name}" for name in ("chunk_scan", "fused_recurrent", "chunk_delta_rule", "recurrent_delta_rule")
)
"""Behind both gated linear attentions and both delta rules, and only called by them."""
OF_ITS_FUNCTION = ("quantize", "dtype")
"""Arguments whose default is every function's own: of one layer or of all, what is quantised to or from."""


def test_a_kernel_is_shown_with_its_own_name_words_and_options():
    kernels = {name: function for package in PACKAGES[1:] for name, function in public(package).items()}
    assert {function.__name__ for function in kernels.values()} == kernels.keys()
    docs = {function.__doc__ for name, function in kernels.items() if name.startswith(("chunk", "fused"))}
    assert len(docs) == sum(name.startswith(("chunk", "fused")) for name in kernels) and None not in docs
    for name, function in kernels.items():
        shown = inspect.signature(function).parameters
        assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values()), name
        is_routed = name.startswith("chunk_") and "delta" not in name and "kda" not in name
        assert ("fused" in shown) == is_routed, name


def test_a_missing_argument_is_an_error_of_the_function_called():
    for package in PACKAGES[1:]:
        for name, function in public(package).items():
            with pytest.raises(TypeError, match=rf"^{name.replace('fused_chunk', 'chunk')}\(\) missing"):
                function()


def test_a_misspelt_option_is_an_error_of_the_function_called():
    packages = [public(package) for package in PACKAGES]
    shared = set.intersection(*(set(functions) for functions in packages)) - {"chunk_fwd", "chunk_bwd"}
    assert len(shared) > 20
    for name in shared:
        for function in (functions[name] for functions in packages):
            parameters = inspect.signature(function).parameters.values()
            given = {p.name: None for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
            with pytest.raises(
                TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'misspelt'$"
            ):
                function(**given, misspelt=1)


def test_an_argument_has_one_default_in_all_packages():
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
