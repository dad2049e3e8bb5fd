"""Which accelerator a pytest-xdist worker owns: decided by the controller, set before the worker loads a framework.

A TPU chip belongs to one process, so there are never more workers than chips; GPUs are dealt out in turn, and workers
that share one do not reserve its memory. What a worker owns is in its specification, so the one that replaces a
crashed worker owns the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DEV = Path("/dev")


def tpu_chips(dev: Path, environment: Mapping[str, str]) -> list[str]:
    """The TPU chips of this host that a process may use, as `TPU_VISIBLE_CHIPS` calls them."""
    named = environment.get("TPU_VISIBLE_CHIPS")
    if named is not None:
        return [chip for chip in named.split(",") if chip]
    count = len([*dev.glob("accel[0-9]*")]) or len([*(dev / "vfio").glob("[0-9]*")])
    return [str(chip) for chip in range(count)]


def gpus(dev: Path, environment: Mapping[str, str]) -> list[str]:
    """The NVIDIA devices of this host that a process may use, as `CUDA_VISIBLE_DEVICES` calls them."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in dev.glob("nvidia[0-9]*")), key=int)


@dataclass(frozen=True)
class Plan:
    """How many workers there are, why, and the environment variables of each."""

    workers: int
    reason: str = ""
    environments: tuple[Mapping[str, str], ...] = field(default=())


def plan(workers: int, chips: Sequence[str], devices: Sequence[str]) -> Plan:
    """`workers` workers on a host with these TPU chips and GPUs; on one without either there is nothing to own."""
    if chips:
        count = min(workers, len(chips))
        asked = f" ({workers} asked for: a chip belongs to one process)" if count < workers else ""
        one = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
        each = tuple({"TPU_VISIBLE_CHIPS": chip, **one} for chip in chips[:count])
        return Plan(count, f"{count} of {len(chips)} TPU chips, a worker each{asked}", each)
    if devices:
        shared = workers > len(devices)
        frugal = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shared else {}
        each = tuple({"CUDA_VISIBLE_DEVICES": devices[n % len(devices)], **frugal} for n in range(workers))
        how = f"in turn on {len(devices)} GPUs, without reserving memory" if shared else "a GPU each"
        return Plan(workers, f"{workers} workers, {how}", each)
    return Plan(workers)


_PLAN = pytest.StashKey[Plan]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """pytest-xdist's `-n auto`: a worker per TPU chip; elsewhere pytest-xdist decides."""
    return len(tpu_chips(DEV, os.environ)) or None


def pytest_cmdline_main(config: pytest.Config) -> None:
    """After pytest-xdist has said how many workers there are, and before they start: say what each of them owns."""
    started = getattr(config.option, "tx", None) or []
    if not started or any(spec != "popen" for spec in started):  # none, or on other hosts
        return
    chosen = plan(len(started), tpu_chips(DEV, os.environ), gpus(DEV, os.environ))
    config.stash[_PLAN] = chosen
    if chosen.environments:
        config.option.tx = [
            "//".join(["popen", *(f"env:{name}={value}" for name, value in owned.items())])
            for owned in chosen.environments
        ]
        config.option.numprocesses = chosen.workers


def pytest_report_header(config: pytest.Config) -> str | None:
    """What the workers own."""
    chosen = config.stash.get(_PLAN, Plan(0))
    return f"parity workers: {chosen.reason}" if chosen.reason else None
