"""The accelerators of this machine, found in its files and by `nvidia-smi`, without loading a framework."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from parity.op import Backend

GB = 10**9
_GIB = 2**30
_GOOGLE, _AMD = "0x1ae0", "0x1002"  # PCI vendors
_TPUS = {
    "0x005e": ("v4", "TPU v4", 32),
    "0x0062": ("v5p", "TPU v5", 95),
    "0x0063": ("v5e", "TPU v5 lite", 16),
    "0x006f": ("v6e", "TPU v6 lite", 32),
    "0x0076": ("tpu7x", "TPU7x", 192),
}
"""PCI devices: the label, what JAX calls the chip (jax._src.hardware_utils), GiB of its memory (Cloud TPU's pages)."""


@dataclass(frozen=True)
class Device:
    """One accelerator: what its framework calls it, and its memory in bytes (0: unknown)."""

    backend: Backend
    kind: str
    memory: int = 0

    @property
    def labels(self) -> frozenset[str]:
        """What a requirement may call it: "v6e" of a TPU; "h200", or "mi300" and "mi300x", of a GPU."""
        if self.backend == "tpu":
            return frozenset(label for label, kind, _ in _TPUS.values() if kind == self.kind)
        words = re.findall(r"[a-z]+\d+[a-z]*", self.kind.lower())
        return frozenset([*words, *(re.sub(r"[a-z]*$", "", word) for word in words)])

    def __str__(self) -> str:
        return f"{self.kind}, {self.memory / GB:.0f} GB" if self.memory else self.kind


@dataclass(frozen=True)
class Requirement:
    """A device that a runner must have: a backend, and a label unless any will do."""

    backend: Backend
    label: str = ""

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """From "tpu:v6e", "gpu:h200", "tpu" or "gpu". Raises ValueError for anything else."""
        backend, colon, label = text.lower().partition(":")
        if backend not in get_args(Backend) or bool(colon) != bool(re.fullmatch(r"\w+", label)):
            raise ValueError(f"must be tpu, gpu, or one of them with a label (tpu:v6e, gpu:h200), got {text!r}")
        return cls("tpu" if backend == "tpu" else "gpu", label)

    def __str__(self) -> str:
        return f"{self.backend}:{self.label}" if self.label else self.backend

    def meets(self, device: Device) -> bool:
        """Whether a device is one of these."""
        return device.backend == self.backend and (not self.label or self.label in device.labels)

    @property
    def pretended(self) -> Device:
        """A device that meets it."""
        for label, kind, gib in _TPUS.values():
            if self.backend == "tpu" and self.label in ("", label):
                return Device("tpu", kind, gib * _GIB)
        maker = "AMD Instinct" if self.label.startswith("mi") else "NVIDIA"
        return Device(self.backend, f"{maker} {(self.label or 'gpu').upper()}")


def devices(root: Path = Path("/")) -> tuple[Device, ...]:
    """The accelerators of this machine, whose files lie under `root`."""
    return (*_tpus(root), *_nvidia_gpus(), *_amd_gpus(root))


def _tpus(root: Path) -> Iterator[Device]:
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if _text(vendor) == _GOOGLE and (found := _TPUS.get(_text(vendor.with_name("device")))):
            _, kind, gib = found
            yield Device("tpu", kind, gib * _GIB)


def _nvidia_gpus() -> Iterator[Device]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver
        return
    for line in answer.splitlines():
        name, _, mib = line.rpartition(",")
        yield Device("gpu", name.strip(), int(mib) * 2**20 if mib.strip().isdigit() else 0)


def _amd_gpus(root: Path) -> Iterator[Device]:
    for vendor in sorted(root.glob("sys/class/drm/card*/device/vendor")):
        memory = _text(vendor.with_name("mem_info_vram_total"))
        if _text(vendor) == _AMD and memory.isdigit():
            name = _text(vendor.with_name("product_name")) or f"AMD {_text(vendor.with_name('device'))}"
            yield Device("gpu", name, int(memory))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@cache
def torch_build() -> str:
    """What torch was built for: "cuda", "hip" (ROCm), "cpu"; "" where it is not installed. Does not import it."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return ""
    version = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return next((name for name in ("cuda", "hip") if version.get(name)), "cpu")
