"""`parity runners`: the runners that a workflow is to use, by their labels."""

from __future__ import annotations

import argparse
import json
import sys

from parity import matrix
from parity.backends.devices import Requirement
from parity.op import BACKENDS

ABOUT = "print the jobs of a workflow for the runners of [tool.parity.runners] that are attached"

EXTRAS = {"tpu": "jax,libtpu,tests", "gpu": "triton,tests"}
BROUGHT = "tests"
"""The extra of a runner with AMD's GPU: torch and Triton for ROCm come with its image, from no package index."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity runners`."""
    parser.add_argument(
        "--attached", default="", metavar="LABELS", help="the labels of runners that there are, or none: words"
    )


def command(given: argparse.Namespace) -> int:
    """`parity runners`: 0. Lines NAME=JSON for a workflow; who is absent, on stderr.

    tpu, gpu: the jobs, each with its label, the device it must have and the extra to install; join: whether both have
    jobs. Raises ValueError for a label that pyproject.toml does not have.
    """
    known = {label: Requirement.parse(device) for label, device in matrix.runners(given.root).items()}
    attached = given.attached.replace(",", " ").split()
    if strangers := sorted({*attached} - known.keys()):
        there = ", ".join(known) or "none"
        raise ValueError(
            f"--attached must be labels of [tool.parity.runners], got {', '.join(strangers)} (there are {there})"
        )
    jobs = {
        backend: [
            {"label": label, "device": str(device), "extra": extra(device)}
            for label, device in known.items()
            if device.backend == backend and label in attached
        ]
        for backend in BACKENDS
    }
    for backend, of_backend in jobs.items():
        print(f"{backend}={json.dumps(of_backend)}")
    print(f"join={json.dumps(all(jobs.values()))}")
    for label, device in known.items():
        if label not in attached:
            print(f"skipped: {label} ({device}): no such runner is attached", file=sys.stderr)
    return 0


def extra(device: Requirement) -> str:
    """What to install on a runner with that device."""
    return BROUGHT if device.label.startswith("mi") else EXTRAS[device.backend]
