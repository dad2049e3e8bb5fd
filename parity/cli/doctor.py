"""`parity doctor`: what this machine has, what runs for real on it, what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement as Package
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table

from parity.backends import EMULATED, has_cuda, has_tpu
from parity.backends.devices import GB, Device, Requirement, devices, torch_build
from parity.cli.options import DISTRIBUTION, version
from parity.compilers import cache
from parity.judging import goldens
from parity.ledger.provenance import installed
from parity.ledger.schema import folder_name
from parity.op import BACKENDS, Backend

ABOUT = "say what this machine has: devices, versions, caches, ledgers, and what is missing"

EXTRAS = {
    "jax": "the TPU's kernels",
    "triton": "the GPU's kernels",
    "libtpu": "a TPU, and its compiler without one: parity schedule",
    "ray": "parity run --ray",
    "tests": "the tests of kernels",
    "dev": "make test",
}
"""What each extra is for."""
EMULATION = {
    "tpu": "emulated: Pallas interpreted, the MXU's passes",
    "gpu": "emulated: Triton interpreted, tensor cores",
}


@dataclass(frozen=True)
class Side:
    """What this machine is to a backend: the device that computes, or why none does."""

    device: Device | None  # None: emulated, or not here at all
    words: str

    @property
    def kind(self) -> str:
        """The device kind of its records."""
        return self.device.kind if self.device else EMULATED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity doctor`."""
    parser.add_argument(
        "--require", type=requirement, action="append", default=[], metavar="DEVICE",
        help="exit with 1 unless kernels run on such a device here: tpu:v6e, gpu:h200, tpu, gpu; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--pretend", type=requirement, action="append", default=[], metavar="DEVICE",
        help="as on a machine with this device and its framework, to try what a runner would do",
    )  # fmt: skip


def requirement(text: str) -> Requirement:
    """An argument that names a device."""
    try:
        return Requirement.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def command(given: argparse.Namespace) -> int:
    """`parity doctor`: 0, or 1 where a device that is required is not here or cannot be used."""
    pretended = tuple(wanted.pretended for wanted in given.pretend)
    found = pretended or devices()
    sides = {b: side(b, found, usable=bool(pretended)) for b in BACKENDS}
    screen = Console(width=None if os.isatty(1) else 120, highlight=False, markup=False)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory() / GB:.0f} GB"
    head = [f"{DISTRIBUTION} {version()}", f"Python {platform.python_version()}", machine]
    screen.print(" · ".join([*head, *(["devices pretended"] if pretended else [])]))
    for title, rows in (
        ("backends", [(b, sides[b].words) for b in BACKENDS]),
        ("versions", list(_versions())),
        ("missing", list(_missing())),
        ("caches", list(_caches())),
        ("ledgers", list(_ledgers(given.root / "records", sides))),
    ):
        _print(screen, title, rows)
    unmet = [wanted for wanted in given.require if not any(s.device and wanted.meets(s.device) for s in sides.values())]
    for wanted in unmet:
        here = ", ".join(map(str, found)) or "no accelerator"
        screen.print(f"required {wanted}: not met; {wanted.backend} is {sides[wanted.backend].words}; found {here}")
    return 1 if unmet else 0


def side(backend: Backend, found: Sequence[Device], *, usable: bool) -> Side:
    """What a backend's kernels run on here. usable: whatever the framework says."""
    mine = [device for device in found if device.backend == backend]
    lacking = None if usable and mine else _lacking(backend, mine)
    if mine and lacking is None:
        return Side(mine[0], f"real: {len(mine)} × {mine[0]}" if len(mine) > 1 else f"real: {mine[0]}")
    framework = {"tpu": ("jax",), "gpu": ("torch", "triton")}[backend]
    if missing := [name for name in framework if not find_spec(name)]:
        return Side(None, f"not here: {' and '.join(missing)} not installed")
    return Side(None, f"{EMULATION[backend]} ({lacking or 'no device'})")


def _lacking(backend: Backend, found: Sequence[Device]) -> str | None:
    """Why a backend's devices cannot be used; None if they can."""
    if not found:
        return None
    why = None
    if backend == "tpu":
        if not find_spec("libtpu"):
            why = f"libtpu is not: {_install('libtpu')}"
        elif not has_tpu():
            why = "its files, /dev/accel* or /dev/vfio/*, are not"
        elif "tpu" not in (chosen := os.environ.get("JAX_PLATFORMS", "tpu")):
            why = f"JAX_PLATFORMS={chosen} excludes it"
    elif (built := torch_build()) != ("hip" if found[0].kind.startswith("AMD") else "cuda"):
        why = f"torch is built for {built}" if built else "torch is not installed"
    elif not has_cuda():
        why = "CUDA_VISIBLE_DEVICES hides it, TRITON_INTERPRET=1, or its files, /dev/nvidia* or /dev/kfd, are not"
    return why and f"{found[0].kind} is here, {why}"


def _install(extra: str) -> str:
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _packages() -> Iterator[tuple[str, Package]]:
    """What each extra needs, and "" the package itself."""
    for line in importlib.metadata.requires(DISTRIBUTION) or ():
        package = Package(line)
        extras = [extra for extra in EXTRAS if package.marker and package.marker.evaluate({"extra": extra})]
        for extra in extras if package.marker else [""]:
            if canonicalize_name(package.name) != DISTRIBUTION:
                yield extra, package


def _installed(package: Package) -> str:
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> Iterator[tuple[str, ...]]:
    shown = ("jax", "libtpu", "torch", "triton", "numpy", "ray")
    for _, package in {package.name: (extra, package) for extra, package in _packages()}.values():
        here = _installed(package)
        if here and not package.specifier.contains(here, prereleases=True):
            yield package.name, here, f"not supported, needs {package.specifier}: pip install '{package}'"
        elif here and package.name in shown:
            yield package.name, here, f"supported: {package.specifier}"


def _missing() -> Iterator[tuple[str, ...]]:
    lacking: dict[str, list[str]] = {}
    for extra, package in _packages():
        if not _installed(package):
            lacking.setdefault(extra, []).append(package.name)
    for extra, names in lacking.items():
        yield (
            ", ".join(names),
            EXTRAS.get(extra, "all of it"),
            _install(extra) if extra else f"pip install {DISTRIBUTION}",
        )


def _caches() -> Iterator[tuple[str, ...]]:
    size = sum(file.stat().st_size for file in cache.folder().rglob("*") if file.is_file())
    yield "compilers", f"{size / 1e6:.0f} MB", str(cache.folder())
    yield "goldens", os.environ.get(goldens.URL, "not shared (pytest --parity-golden-cache=URL)")


def _ledgers(root: Path, sides: dict[Backend, Side]) -> Iterator[tuple[str, ...]]:
    for folder in sorted(path for b in BACKENDS for path in (root / b).glob("*") if path.is_dir()):
        backend: Backend = "tpu" if folder.parent.name == "tpu" else "gpu"
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        provenances = [json.loads(line)["provenance"] for line in lines if line.startswith('{"id"')]
        if not provenances:
            continue
        newest = max(provenances, key=lambda provenance: provenance["utc"])
        fits = "of another machine: compared with, not measured here"
        if folder.name == folder_name(sides[backend].kind):
            here = installed(backend, real=newest["real"])
            moved = [f"{name} {newest['versions'].get(name)} → {here[name]}" for name in here if name != "python"
                     and here[name] != newest["versions"].get(name)]  # fmt: skip
            fits = "fits this machine" + (f", but for {', '.join(moved)}" if moved else "")
        yield f"{backend}/{folder.name}", f"{len(lines) - len(provenances):,} records", newest["utc"][:10], fits


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _print(screen: Console, title: str, rows: Sequence[tuple[str, ...]]) -> None:
    if not rows:
        return
    table = Table.grid(*[""] * (1 + max(map(len, rows))), padding=(0, 2, 0, 0))
    table.columns[0].min_width = len("backends")
    for n, row in enumerate(rows):
        table.add_row("" if n else title, *row)
    screen.print(table)
