"""`parity doctor`, on this machine and on pretended ones."""

import re
import time
from pathlib import Path

import pytest

from parity import cli
from parity.backends.devices import Device, Requirement, devices

ROOT = Path(__file__).parents[3]
GIB = 2**30
SMI = '#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 81559"\necho "NVIDIA H100 80GB HBM3, 81559"\n'
H100 = Device("gpu", "NVIDIA H100 80GB HBM3", 81559 * 2**20)
V6E = Device("tpu", "TPU v6 lite", 32 * GIB)
MI300X = Device("gpu", "AMD Instinct MI300X", 192 * GIB)


@pytest.fixture
def doctor(capsys):
    """What it prints, and its exit code."""

    def run(*arguments):
        code = cli.main(["--root", str(ROOT), "doctor", *arguments])
        return capsys.readouterr().out, code

    return run


def files(folder, **of_device):
    return {f"{folder}/{name}": text for name, text in of_device.items()}


@pytest.mark.parametrize(
    ("found", "smi", "expected"),
    [
        ({}, "", ()),
        (files("sys/bus/pci/devices/0", vendor="0x10de", device="0x006f"), "", ()),
        (files("sys/bus/pci/devices/0", vendor="0x1ae0", device="0x006f")
         | files("sys/bus/pci/devices/1", vendor="0x1ae0", device="0x006f"), "", (V6E, V6E)),
        (files("sys/bus/pci/devices/0", vendor="0x1ae0", device="0x0076"), "", (Device("tpu", "TPU7x", 192 * GIB),)),
        ({}, SMI, (H100, H100)),
        ({}, "#!/bin/sh\nexit 9\n", ()),  # no driver
        (files("sys/class/drm/card1/device", vendor="0x1002", product_name="AMD Instinct MI300X",
               mem_info_vram_total="206158430208"),
         "", (MI300X,)),
        (files("sys/class/drm/card1/device", vendor="0x1002", device="0x74a1", mem_info_vram_total="16"),
         "", (Device("gpu", "AMD 0x74a1", 16),)),
    ],
)  # fmt: skip
def test_devices_are_found_without_a_framework(found, smi, expected, tmp_path, monkeypatch):
    for name, text in found.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    if smi:
        (tmp_path / "nvidia-smi").write_text(smi)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices(tmp_path) == expected


@pytest.mark.parametrize(
    ("device", "met"),
    [
        (V6E, "tpu tpu:v6e"),
        (Device("tpu", "TPU v5 lite"), "tpu tpu:v5e"),
        (Device("tpu", "TPU v5"), "tpu tpu:v5p"),
        (Device("tpu", "TPU7x"), "tpu tpu:tpu7x"),
        (H100, "gpu gpu:h100"),
        (Device("gpu", "NVIDIA H200"), "gpu gpu:h200"),
        (Device("gpu", "NVIDIA GH200 480GB"), "gpu gpu:gh200"),
        (MI300X, "gpu gpu:mi300 gpu:mi300x"),
    ],
)
def test_a_requirement_is_met_by_its_device_alone(device, met):
    words = "tpu tpu:v5e tpu:v5p tpu:v6e tpu:tpu7x gpu gpu:h100 gpu:h200 gpu:gh200 gpu:b200 gpu:mi300 gpu:mi300x"
    assert [word for word in words.split() if Requirement.parse(word).meets(device)] == met.split()


def test_one_screen_says_what_is_here_in_five_seconds(doctor):
    began = time.process_time()
    screen, code = doctor()
    assert time.process_time() - began < 5
    assert code == 0 and len(screen.splitlines()) < 40
    for expected in (r"^backends +tpu +(real|emulated)", r"^versions ", r"jax +\S+ +supported: ", r"^caches +compilers",
                     r"^ledgers ", r"tpu/emulated +[\d,]+ records +20\d\d-\d\d-\d\d +fits this machine"):  # fmt: skip
        assert re.search(expected, screen, re.MULTILINE), screen


@pytest.mark.parametrize(
    ("here", "required", "code", "says"),
    [
        ("", "tpu", 1, "required tpu: not met"),
        ("tpu:v6e", "tpu:v6e", 0, "tpu  real: TPU v6 lite, 34 GB"),
        ("tpu:v6e", "tpu:v5e", 1, "required tpu:v5e: not met; tpu is real: TPU v6 lite, 34 GB"),
        ("tpu:v6e", "gpu:h200", 1, "found TPU v6 lite, 34 GB"),
        ("gpu:h200", "gpu:h200", 0, "gpu  real: NVIDIA H200"),
        ("gpu:mi300", "gpu:mi300", 0, "gpu  real: AMD Instinct MI300"),
    ],
)
def test_what_is_required_is_met_by_what_is_here(here, required, code, says, doctor, monkeypatch):
    monkeypatch.setattr("parity.cli.doctor.devices", lambda: ())
    screen, found = doctor("--require", required, *(["--pretend", here] if here else []))
    assert found == code and says in screen, screen


@pytest.mark.parametrize(
    ("device", "machine", "why"),
    [
        (V6E, {}, None),
        (V6E, {"find_spec": lambda name: name != "libtpu"}, "libtpu is not: pip install 'kernel-parity[libtpu]'"),
        (V6E, {"has_tpu": lambda: False}, "its files, /dev/accel* or /dev/vfio/*, are not"),
        (V6E, {"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS=cpu excludes it"),
        (H100, {}, None),
        (H100, {"torch_build": lambda: "cpu"}, "torch is built for cpu"),
        (H100, {"torch_build": lambda: ""}, "torch is not installed"),
        (H100, {"has_cuda": lambda: False}, "CUDA_VISIBLE_DEVICES hides it"),
        (MI300X, {"torch_build": lambda: "cuda"}, "torch is built for cuda"),
        (MI300X, {"torch_build": lambda: "hip"}, None),
    ],
)
def test_a_device_that_the_framework_cannot_use_is_no_runner(device, machine, why, doctor, monkeypatch):
    able = {"find_spec": lambda name: True, "has_tpu": lambda: True, "has_cuda": lambda: True}
    able |= {"torch_build": lambda: "cuda", "devices": lambda: (device,), "JAX_PLATFORMS": "tpu,cpu"}
    for name, value in (able | machine).items():
        if isinstance(value, str):
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(f"parity.cli.doctor.{name}", value)
    screen, code = doctor("--require", device.backend)
    assert code == (why is not None), screen
    assert f"real: {device}" in screen if why is None else f"{device.kind} is here, {why}" in " ".join(screen.split())


def test_versions_that_are_not_supported_and_extras_that_are_not_here_come_with_a_command(doctor, monkeypatch):
    needs = ["numpy>=99", "jax<999; extra == 'jax'", "no-such-package>=1; extra == 'ray'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    screen = " ".join(doctor()[0].split())
    assert "not supported, needs >=99: pip install 'numpy>=99'" in screen
    assert "supported: <999" in screen
    assert "no-such-package parity run --ray pip install 'kernel-parity[ray]'" in screen


@pytest.mark.parametrize("word", ["hpu", "tpu:", "gpu:h 200"])
def test_a_device_that_nobody_has_heard_of_is_wrong_usage(word, doctor, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor("--require", word)
    assert ended.value.code == 2
    assert "must be tpu, gpu, or one of them with a label" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and re.fullmatch(r"kernel-parity \d+\.\d+\.\d+\n", capsys.readouterr().out)
