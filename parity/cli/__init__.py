"""The `parity` command: one module a subcommand, with its ABOUT, add_arguments and command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from parity.backends import prepare_environment
from parity.cli.options import folder, version

COMMANDS = (
    *("run", "list", "diff", "merge", "show", "explain", "stages", "plans", "schedule", "shrink", "replay", "bisect"),
    *("doctor", "runners", "contact"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 all is well, 1 a verdict fails or something regressed, 2 wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    prepare_environment()
    try:
        return int(given.command(given))
    except (ValueError, NotImplementedError) as error:  # NotImplementedError: a kernel that `stages` cannot follow
        parser.error(str(error))
    except ModuleNotFoundError as error:
        parser.error(f"{(error.name or '').partition('.')[0]} is needed and not installed here: {error}")
    except BrokenPipeError:  # whoever reads the output, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parity", description="Judge TPU and GPU kernels of the same operations against one float64 golden."
    )
    parser.add_argument("--version", action="version", version=f"kernel-parity {version()}")
    parser.add_argument("--root", type=folder, default=Path.cwd(), help="the project's folder (default: this one)")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"parity.cli.{name}")
        command = subparsers.add_parser(name, help=module.ABOUT, description=module.ABOUT)
        module.add_arguments(command)
        command.set_defaults(command=module.command)
    return parser
