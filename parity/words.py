"""Strings that others wrote, as one of our lines may have them; and commands, as a shell takes them."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable

LONGEST = 300
"""Characters of a foreign string that are shown."""


def shown(text: object, most: int = LONGEST) -> str:
    """Foreign text as one line of at most `most` printable characters: what is not printable is escaped."""
    whole = str(text)
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in whole[:most])
    return f"{line}…" if len(whole) > most else line


def said(error: BaseException) -> str:
    """What an exception says, in one line: its type, and the first line of its text."""
    try:
        first = str(error).strip().partition("\n")[0]
    except BaseException:  # the class is the kernel's, and so is what its text does
        first = "its text cannot be had"
    return shown(": ".join(filter(None, [type(error).__name__, first])))


def command(*words: object) -> str:
    """A command that a shell takes as these words."""
    return shlex.join(map(str, words))


def one_of(names: Iterable[object], got: object) -> str:
    """What to say of a name that is none of `names`: those, the one that was given, and the nearest."""
    valid = [str(name) for name in names]
    listed = f"must be one of {', '.join(valid)}" if valid else "must be left out, for there are none"
    return f"{listed}, got {got!r}{nearest(valid, got)}"


def nearest(names: Iterable[str], got: object) -> str:
    """In brackets the one of `names` that is spelled most like what was given; "" where none is like it."""
    near = difflib.get_close_matches(str(got), list(names), n=1)
    return f" (nearest: {near[0]})" if near else ""
