"""Where records of this process come from: code, versions, flags, commit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from parity import git, inputs
from parity.judging import magnitude, metrics
from parity.ledger.schema import SCHEMA, TIME, Provenance
from parity.ledger.sources import identity, identity_of, reached
from parity.op import Backend, Op

# What each backend's numbers depend on: distributions, and environment variables by the start of their names.
_VERSIONS = {"tpu": ("jax", "jaxlib", "libtpu"), "gpu": ("torch", "triton")}

_FLAGS = {
    "tpu": ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION"),
    "gpu": ("TRITON_", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
}


def here(op: Op, backend: Backend, device_kind: str, real: bool, utc: str | None = None) -> Provenance:
    """The provenance of what this process records of `op` from now on, without loading a framework.

    `utc` is when the recording began, where it began in another process: workers that share it share a provenance.
    Raises ModuleNotFoundError where the kernel's module is missing, AttributeError where the kernel is, ValueError as
    `Provenance`.
    """
    kernel: str = getattr(op, backend)
    commit, dirty = checkout(reached(kernel)[0].module.path.parent)
    return Provenance(
        schema=SCHEMA,
        op=op.name,
        backend=backend,
        device_kind=device_kind,
        real=real,
        kernel=identity(kernel),
        golden=identity_of(inspect.unwrap(op.golden)),
        revisions={"inputs": inputs.REVISION, "magnitude": magnitude.revision(op), "metrics": metrics.REVISION},
        versions=installed(backend, real),
        flags={
            name: " ".join(value.split())
            for name, value in os.environ.items()
            # Folders for caches and dumps are where, not how.
            if name.startswith(_FLAGS[backend]) and not name.endswith(("_DIR", "_HOME"))
        },
        commit=commit,
        dirty=dirty,
        utc=utc or now(),
    )


def now() -> str:
    """The time, as a provenance has it."""
    return datetime.now(UTC).strftime(TIME)


def installed(backend: Backend, real: bool) -> dict[str, str]:
    """The versions of what a backend's numbers depend on, and of the driver of a `real` device."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "ml_dtypes", *_VERSIONS[backend]):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/sys/module/nvidia/version")
    if backend == "gpu" and real and driver.exists():
        found["driver"] = driver.read_text().strip()
    return found


@cache
def checkout(folder: Path) -> tuple[str | None, bool | None]:
    """The commit that `folder` has checked out, and whether tracked files differ from it; None if git cannot say.

    Asked once: a process runs the code that it has imported, whatever is checked out later.
    """
    try:
        commit = git.run(folder, "rev-parse", "HEAD", timeout=30).decode().strip()
        return commit, bool(git.run(folder, "status", "--porcelain", "--untracked-files=no", timeout=30))
    except (OSError, subprocess.SubprocessError):
        return None, None
