"""What several subcommands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from parity.ledger import diff
from parity.op import Case

EXPRESSION = "only cases whose id or model matches, as pytest's -k: words, and, or, not, ( )"


def folder(text: str) -> Path:
    """An argument that names a folder."""
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text}")
    return path


def file(text: str) -> Path:
    """An argument that names a file to be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {text}")
    return path


def positive(text: str) -> int:
    """An argument that is a positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(text)


def matches(case: Case, expression: str) -> bool:
    """Whether a case is one that -k asks for."""
    return diff.matches(expression, f"{case.id} {case.model}")
