"""The `parity` command: one module a subcommand, with its ABOUT, add_arguments and command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from parity import projects
from parity.backends import prepare_environment
from parity.cli.options import ENDED, folder, version
from parity.guard import Ended
from parity.runners import supervision
from parity.words import said, shown

COMMANDS = (
    *("run", "list", "diff", "merge", "show", "explain", "stages", "plans", "schedule", "shrink", "replay", "bisect"),
    *("doctor", "runners", "contact"),
)  # fmt: skip


INTERRUPTED = 130
LONGEST_ERROR = 2000
"""Characters of an error: it may list what there is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 all is well, 1 a verdict fails or something regressed, 2 wrong usage, 3 a
    kernel that raised."""
    parser = _parser()
    given = parser.parse_args(arguments)
    prepare_environment()
    try:
        return int(given.command(given))
    except Ended as end:
        print(end)
        return ENDED
    except SystemExit as end:
        parser.error(f"the project's code must not end this command, it raised SystemExit: {shown(end.code)}")
    except (ValueError, NotImplementedError, MemoryError) as error:  # NotImplementedError: what `stages` cannot follow
        parser.error(shown(error or type(error).__name__, LONGEST_ERROR) + _place(error, given.root))
    except ModuleNotFoundError as error:
        parser.error(shown(f"{(error.name or '').partition('.')[0]} is needed and not installed here: {error}"))
    except BrokenPipeError:  # whoever reads the output, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        parser.error(said(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        place = _place(error, given.root)
        if not place:  # ours
            raise
        parser.error(f"the project's code raised {type(error).__name__}: {shown(error, LONGEST_ERROR)}{place}")


def _place(error: BaseException, root: Path) -> str:
    """Where the project's own code, a golden for instance, let an error through, in brackets; "" for one of ours."""
    ours = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(ours):
            return ""
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f" ({path}:{frame.lineno})"
    return ""


def console_main() -> int:
    """`main` as a command of its own: in a child, so that a kernel that ends the process is not taken for a pass."""
    for stream in (sys.stdout, sys.stderr):  # which may be of an encoding without ε
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    child = supervision.inherited() or (supervision.split() if supervision.can_split() else None)
    if isinstance(child, supervision.End):
        if child.said is None:
            how = f"ended with status {child.status}"
            if child.status < 0:
                how = f"was killed by {signal.Signals(-child.status).name}"
            print(f"CRASH  G1: the process {how} before it had a verdict", file=sys.stderr)
            return 1  # whatever status the kernel chose
        return child.code
    status = 1
    try:
        status = main()
        sys.stdout.flush()
    except SystemExit as end:
        status = int(end.code or 0)
    except OSError as error:  # the disk that the output goes to is full
        print(f"parity: error: {said(error)}", file=sys.stderr)
        status = 2
    finally:
        if child:
            child.finish(status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parity", description="Judge TPU and GPU kernels of the same operations against one float64 golden."
    )
    parser.add_argument("--version", action="version", version=f"kernel-parity {version()}")
    root = projects.of(Path.cwd()) or Path.cwd()
    parser.add_argument("--root", type=folder, default=root, help="the project's folder (default: the one this is in)")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"parity.cli.{name}")
        epilog = getattr(module, "EPILOG", None)
        command = subparsers.add_parser(name, help=module.ABOUT, description=module.ABOUT, epilog=epilog)
        module.add_arguments(command)
        command.set_defaults(command=module.command)
    return parser
