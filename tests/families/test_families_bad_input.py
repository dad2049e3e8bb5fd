"""Bad input to every public function: none goes without tests, and no array of another shape or dtype gets by."""

import inspect
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.delta_rule.test_delta_rule_bad_input import FED
from tests.gla.test_gla_bad_input import FORMS, GATES, GRADS, TENSORS
from tests.gmm.test_gmm_bad_input import GOOD as GMM
from tests.moe.test_moe_bad_input import GOOD as MOE
from tests.moe.test_moe_grouped_dense_bad_input import GOOD as GROUPED_DENSE
from tests.mxfp8.test_mxfp8_bad_input import GOOD as MXFP8
from tests.quantize.test_quantize_bad_input import GOOD as QUANTIZE
from tests.quantized_gmm.test_quantized_gmm_bad_input import GOOD as QUANTIZED_GMM
from tests.support.bad_input import FRAMEWORKS, call, f32
from tests.support.functions import public

BF16 = ml_dtypes.bfloat16
TABLES = {**FED, **MOE, **GROUPED_DENSE, **MXFP8, **QUANTIZE, **QUANTIZED_GMM}
ATTENTIONS = {
    f"{form}_{module}_{way}": {**TENSORS, **GATES[module], **(GRADS if way == "bwd" else {})}
    for module, forms in FORMS.items()
    for form in forms
    for way in ("fwd", "bwd")
}
OPTIONAL = {
    "gmm": dict(existing_out=f32(8, 5)),
    "tgmm": dict(existing_out=f32(3, 4, 5)),
    "gmm_quantized": dict(existing_out=np.ones((8, 6), BF16)),
    "tgmm_quantized": dict(existing_out=np.ones((3, 4, 6), BF16)),
    "grouped_gemm": dict(existing_out=np.ones((8, 6), BF16)),
    "grouped_dense": dict(existing_out=f32(8, 32)),
}
GOOD = {
    name: given | OPTIONAL.get(name, {})
    for name, given in {"gmm": GMM["gmm"], "tgmm": GMM["tgmm"], **TABLES, **ATTENTIONS}.items()
}
# Changes of one array's shape that leave arguments as good as they were: sizes that no other array has.
OF_TIME = {"a longer 0", "a shorter 0", "a longer 1", "a shorter 1"}
FREE = {
    "softplus_gate": OF_TIME,
    "bounded_gate": OF_TIME,
    "causal_conv1d": {"x longer 1", "x shorter 1"},
    "gmm": {"rhs shorter 0"},  # a shard
    "permute": {"x longer 1", "x shorter 1", "indices longer 1", "indices shorter 1"},
    "unpermute": {"rows longer 0", "rows shorter 0", "rows longer 1", "rows shorter 1"},
    "moe_layer": {"x longer 0", "x shorter 0", "w_router longer 1", "w_router shorter 1"},
    "moe_layer_bwd": {"w_router longer 1", "w_router shorter 1"},
    "grouped_dense": {"rhs shorter 0"},
    "grouped_dense_bwd": {"rhs shorter 0"},
    "mxfp8_quantize": {"x deeper", "x longer 0", "x shorter 0", "x longer 1", "x shorter 1"},
    "mxfp8_dual_quantize": {"x deeper", "x longer 0", "x shorter 0", "x longer 1", "x shorter 1"},
    "mxfp8_dequantize": {"qvalue longer 1", "qvalue shorter 1"},  # a short last block
    "swizzle_scales": {"scale deeper", "scale longer 0", "scale shorter 0", "scale longer 1", "scale shorter 1"},
    "unswizzle_scales": {"swizzled deeper"},
    "fp8_quantize": {"x longer 0", "x shorter 0"},
    "int8_quantize": {"x longer 0", "x shorter 0"},
    "fp8_dual_quantize": {"x deeper"},
    "fp8_dequantize": {"scale shorter 1"},  # one scale for all
    "int8_dequantize": {"scale shorter 1"},
    "gmm_quantized": {"lhs_scale shorter 1", "rhs_scale longer 1"},  # blocks of 32 and of all 64
    "tgmm_quantized": {"lhs_scale shorter 0", "rhs_scale longer 0"},
}


def test_everything_public_is_tested():
    """A function that a package has and these lists have not would be refused nothing."""
    goldens, helpers = public("cpu_golden"), {"expand", "mxfp8_values"}
    homes = {goldens[function].__module__ for function in TABLES}
    of_homes = {name for name, value in goldens.items() if value.__module__ in homes}
    assert {name for name in of_homes - helpers if not name.endswith("_definition")} == TABLES.keys()


def arrays(function: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in GOOD[function].items() if isinstance(x, np.ndarray)}


def of_other_shapes(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "deeper", x[None]
    yield "flatter", x[0]
    for axis, size in enumerate(x.shape):
        yield f"longer {axis}", np.concatenate([x, x.take([0], axis)], axis)
        yield f"shorter {axis}", x.take(range(size - 1), axis)


def refusal(package: str, function: str, **change: Any) -> str | None:
    """What a function says of arguments of which one has changed, or None where it takes them."""
    try:
        call(package, function, GOOD[function] | change)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("function", GOOD)
def test_another_shape_is_refused_by_an_arguments_name(function):
    parameters = inspect.signature(public("cpu_golden")[function]).parameters
    taken = set()
    for name, x in arrays(function).items():
        for change, other in of_other_shapes(x):
            said = refusal("cpu_golden", function, **{name: other})
            if said is None:
                taken.add(f"{name} {change}")
            else:
                assert said.partition(" must ")[0] in {*parameters, "axis"}, (name, change, said)
    assert taken == FREE.get(function, set())


@pytest.mark.parametrize("function", GOOD)
def test_integers_and_booleans_are_refused_by_name(function):
    for name, x in arrays(function).items():
        for dtype in (np.int64, np.bool_):
            said = refusal("cpu_golden", function, **{name: x.astype(dtype)})
            assert said is not None and said.startswith(f"{name} must "), (name, dtype, said)


@pytest.mark.parametrize("function", GOOD)
def test_what_has_a_shape_or_a_dtype_alone_is_no_array(function):
    for name, x in arrays(function).items():
        for other in (SimpleNamespace(shape=x.shape), SimpleNamespace(dtype=x.dtype), x.tolist()):
            with pytest.raises(TypeError, match=rf"^{name} must be an? .*array.*, got {type(other).__name__}$"):
                call("cpu_golden", function, GOOD[function] | {name: other})


@pytest.mark.parametrize("package", FRAMEWORKS)
@pytest.mark.parametrize("function", GOOD)
def test_a_kernel_refuses_float64(package, function, monkeypatch):
    """Goldens take it. JAX would make it float32 on the way: the TPU's functions are given NumPy's."""
    if package == "tpu_kernels":
        monkeypatch.setattr("tests.support.bad_input.PACKAGES", {package: lambda x: x})
    for name, x in arrays(function).items():
        said = refusal(package, function, **{name: x.astype(np.float64)})
        assert said is not None and " must " in said and said.endswith("got float64"), (name, said)


NARROW = {
    ("mxfp8_quantize", "mxfp8_dual_quantize", "fp8_quantize", "fp8_dual_quantize", "int8_quantize"): {"x"},
    ("int8_dequantize", "fp8_dequantize"): {"scale"},
    ("gmm_quantized", "tgmm_quantized"): {"lhs_scale", "rhs_scale", "existing_out"},
    ("grouped_gemm", "grouped_dense"): {"existing_out"},
    ("grouped_dense_bwd",): {"dout"},
}
"""What a golden takes in narrow dtypes alone: what it quantises, scales, and what is added to the result of such."""
OTHERS_DTYPE = r"must (be float64, got float32|have \w+'s dtype float(32, got float64|64, got float32))$"


@pytest.mark.parametrize("function", GOOD)
def test_a_golden_takes_float64_where_others_are_too(function):
    refused = set()
    for name, x in arrays(function).items():
        said = (
            refusal("cpu_golden", function, **{name: x.astype(np.float64)}) if x.dtype in (np.float32, BF16) else None
        )
        if said and not re.search(OTHERS_DTYPE, said):
            refused.add(name)
    assert refused == next((names for functions, names in NARROW.items() if function in functions), set())
