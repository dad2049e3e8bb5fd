# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What the Triton kernels ask of the device that they run on."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton.language as tl
from triton.runtime import interpreter

from gpu_reference._lib import hardware
from parity.backends.emulation.tensor_core import emulated
from tests.support.interpreter import interpreted

CPU = torch.zeros(1)
ELSEWHERE = torch.zeros(1, device="meta")


@interpreted
def test_tensors_of_the_cpu_need_the_interpreter(monkeypatch):
    with emulated():
        assert hardware.check_devices({"lhs": CPU, "rhs": None}) == torch.device("cpu")
    monkeypatch.setattr(hardware, "is_interpreted", lambda: False)
    with pytest.raises(RuntimeError, match="only if TRITON_INTERPRET=1 was set before triton was imported"):
        hardware.check_devices({"lhs": CPU})
    assert hardware.check_devices({"lhs": ELSEWHERE}) == torch.device("meta")


@interpreted
@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [("3.6.0", "2.4.0", False), ("3.6.0", "2.10.1", False), ("3.6.0", "2.3.5", True), ("3.7.0", "2.4.0", True)],
)
def test_an_interpreter_that_numpy_is_too_new_for_is_named(triton, numpy, runs, monkeypatch):
    monkeypatch.setattr(hardware.triton, "__version__", triton)
    monkeypatch.setattr(hardware, "version", {"numpy": numpy}.get)
    if runs:
        hardware.check_devices({"lhs": CPU})
    else:
        with pytest.raises(RuntimeError, match=rf"Triton {triton} cannot loop with NumPy {numpy}.* or numpy<2\.4"):
            hardware.check_devices({"lhs": CPU})
    hardware.check_devices({"lhs": ELSEWHERE})
    with emulated():
        hardware.check_devices({"lhs": CPU})


def test_all_tensors_are_on_one_device():
    with pytest.raises(ValueError, match="on one device, got lhs on cpu, rhs on meta"):
        hardware.check_devices({"lhs": CPU, "rhs": ELSEWHERE})


@interpreted
def test_the_interpreters_own_bfloat16_is_found_out():
    assert not hardware.computes_bfloat16(torch.device("cpu"))
    with emulated():
        assert hardware.computes_bfloat16(torch.device("cpu"))
    assert not hardware.computes_bfloat16(torch.device("cpu"))
    assert hardware.computes_bfloat16(torch.device("cuda"))


@interpreted
def test_float32_replaces_bfloat16_only_where_not_computed():
    seen = []

    def results(tensors, dtype, scale=None):
        return torch.bfloat16, {"o": dtype, "h": None}

    @hardware.bfloat16_as_float32_where_interpreted(results)
    def function(tensors, dtype, scale=None):
        seen.append((tensors["lhs"][0].dtype, tensors["lhs"][1], tensors["sizes"].dtype, dtype, scale))
        return tensors["lhs"][0], {"o": CPU, "h": CPU}

    tensors = {"lhs": (CPU.bfloat16(), None), "sizes": CPU.int()}
    one, two = function(tensors, torch.bfloat16, scale="kept")
    assert (one.dtype, two["o"].dtype, two["h"].dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    function(tensors, torch.float16)
    with emulated():
        function(tensors, torch.bfloat16)
    assert seen == [
        (torch.float32, None, torch.int32, torch.float32, "kept"),
        (torch.float32, None, torch.int32, torch.float16, None),
        (torch.bfloat16, None, torch.int32, torch.bfloat16, None),
    ]


TARGETS = ("sm_70", "sm_75", "sm_80", "sm_88", "sm_89", "sm_90a", "sm_100a", "sm_120", "gfx942", "gfx950")


def test_what_the_matrix_unit_of_each_target_multiplies():
    def multiply(dtype):
        return [target for target in TARGETS if hardware.supports_matmul(dtype, target)]

    assert multiply(torch.bfloat16) == multiply(torch.float16) == multiply(torch.float32) == list(TARGETS)
    assert multiply(torch.int8) == [target for target in TARGETS if target != "sm_70"]
    fp8 = ["sm_89", "sm_90a", "sm_100a", "sm_120", "gfx950"]
    assert multiply(torch.float8_e4m3fn) == multiply(torch.float8_e5m2) == fp8
    assert not hardware.supports_matmul(torch.float64, "sm_90")
    assert not torch.cuda.is_available() or hardware.supports_matmul(torch.bfloat16)


def test_which_targets_take_scales_and_which_sum_fp8_in_full():
    tiles = {target: hardware.block_scaled_tile(target) for target in TARGETS}
    scaled = {"sm_100a": (128, 32), "sm_120": (16, 32), "gfx950": (16, 128)}
    assert tiles == dict.fromkeys(TARGETS) | scaled
    assert [t for t in TARGETS if not hardware.sums_fp8_in_float32(t)] == ["sm_89", "sm_90a"]


def test_a_device_has_an_architecture_and_the_cpu_none():
    assert hardware.architecture(torch.device("cpu")) is None
    assert torch.cuda.is_available() or hardware.architecture() is None


def test_an_architecture_is_the_name_of_the_compilers_target(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for hip, properties, expected in [
        (None, {"major": 9, "minor": 0}, "sm_90"),
        (None, {"major": 12, "minor": 1}, "sm_121"),
        ("6.4", {"gcnArchName": "gfx942:sramecc+:xnack-"}, "gfx942"),
        ("6.4", {"gcnArchName": "gfx950"}, "gfx950"),
    ]:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: SimpleNamespace(**p))
        assert hardware.architecture() == hardware.architecture(torch.device("cuda")) == expected


def test_without_a_device_there_is_no_matrix_unit(monkeypatch):
    monkeypatch.setattr(hardware, "architecture", lambda: None)
    assert not hardware.supports_matmul(torch.bfloat16)
    assert hardware.supports_matmul(torch.bfloat16, "sm_80")
    monkeypatch.setattr(hardware, "architecture", lambda: "sm_90")
    assert hardware.supports_matmul(torch.float8_e5m2)


@interpreted
@pytest.mark.parametrize("is_one", [lambda f: f is tl.cdiv, lambda f: f is not tl.cdiv], ids=["Triton's", "the kernel"])
def test_kernels_are_interpreted_where_both_triton_and_they_are(is_one, monkeypatch):
    """Not where one of the two is."""
    assert hardware.is_interpreted()

    class Asked(type):
        def __instancecheck__(cls, function):
            return is_one(function)

    monkeypatch.setattr(hardware, "InterpretedFunction", Asked("InterpretedFunction", (), {}))
    assert not hardware.is_interpreted()


@interpreted
@pytest.mark.parametrize("added", [None, 0, 0x7FFF, 0x8000], ids=["right", "cut", "half to zero", "half away"])
def test_bfloat16_that_is_rounded_otherwise_is_found_out(added, monkeypatch):
    """added: to the bits of a float32, before the lower half is cut off."""
    with emulated():
        right = interpreter.interpreter_builder.cast_impl

        def cast(handle, dtype):
            if added is None or (handle.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
                return right(handle, dtype)
            bits = (handle.data.view(np.uint32) + np.uint32(added)) >> 16
            return interpreter.TensorHandle(bits.astype(np.uint16), tl.bfloat16)

        # With setattr, pytest 8.3 leaves `right` on the builder, for all later tests.
        monkeypatch.setitem(vars(interpreter.interpreter_builder), "cast_impl", cast)
        assert hardware.computes_bfloat16(torch.device("cpu")) == (added is None)
