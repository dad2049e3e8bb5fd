"""What a pytest item of the matrix runs, and the report of one that left none."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from parity import projects
from parity.backends import has_cuda, has_tpu
from parity.op import Backend, Case, Op
from parity.words import command


def chosen(item: pytest.Item) -> tuple[Op, Case, Backend] | None:
    """The op, the case and the backend that a test of the matrix runs; None of any other, and of one without cases."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("parity_cases") is None:
        return None
    found = item.callspec.params["run"]
    return cast(tuple[Op, Case, Backend], found) if isinstance(found, tuple) else None


def shared(item: pytest.Item) -> Any:
    """What tests that run the same compiled kernel have in common; the item itself where it is not of the matrix."""
    if (trial := chosen(item)) is None:
        return item
    _, case, backend = trial
    return item.path, backend, case.with_data("normal").id


def entry(item: pytest.Item) -> dict[str, Any]:
    """The case that a test runs, as `Judgement.summary` calls it; empty for any other test."""
    if (trial := chosen(item)) is None:
        return {}
    op, case, backend = trial
    real = has_tpu() if backend == "tpu" else has_cuda()
    return {"op": op.name, "case": case.id, "backend": backend, "real": real}


def failed(entry: dict[str, Any], outcome: str, reason: str) -> dict[str, Any]:
    """The summary of a case, by its `entry`, that came to no judgement."""
    return {**entry, "outcome": outcome, "gate": "G1", "reason": reason, "passed": False, "bound": 0.0}


def message(outcome: str, reason: str, nodeid: str, log: str = "") -> str:
    """Why a test came to no judgement, the last lines of a log, and the command that runs it alone."""
    return "\n".join(filter(None, [f"{outcome}  G1: {reason}   {nodeid}", log, f"rerun: {rerun(nodeid)}"]))


HOME = pytest.StashKey[Path]()
"""The project of tests that are in none: the only one of the run, else pytest's root folder."""
PROJECTS = pytest.StashKey[set[Path]]()
"""The projects of this run: those that its paths are of, and those of the tests that ran."""


def project(config: pytest.Config, path: Path) -> Path:
    """The project that a test file is in: its own, else the one of this run."""
    return projects.of(path) or config.stash[HOME]


def project_of(config: pytest.Config, nodeid: str) -> Path:
    """The project of a test that has run, in whatever process."""
    found = project(config, config.rootpath / nodeid.partition("::")[0])
    config.stash[PROJECTS].add(found)
    return found


def ledgers(config: pytest.Config) -> list[Path]:
    """The folders of this run's records: the one that the command line names, or that of each project."""
    named = config.getoption("--parity-records")
    found = config.stash[PROJECTS] or {config.stash[HOME]}
    return [named] if named else [each / "records" for each in sorted(found)]


def located(config: pytest.Config, given: Iterable[str]) -> list[Path]:
    """The files and folders that command-line arguments name, without node ids; where there are none, the start."""
    start = config.invocation_params.dir
    return [start / argument.partition("::")[0] for argument in given] or [start]


def paths(config: pytest.Config) -> list[Path]:
    """What this run collects from."""
    return located(config, config.args)


def spelled(config: pytest.Config, path: Path) -> str:
    """A path as the folder has it that pytest was started in."""
    return Path(os.path.relpath(path, config.invocation_params.dir)).as_posix()


def from_start(config: pytest.Config, nodeid: str) -> str:
    """A node id as the folder that pytest was started in has it: pytest counts from its root folder."""
    path, *names = nodeid.split("::")
    return "::".join([spelled(config, config.rootpath / path), *names])


def rerun(nodeid: str, *options: str) -> str:
    """The command that runs a test alone, in this process."""
    return command("pytest", "-n0", *options, nodeid)
