"""Strings that others wrote, as one of our lines may have them; and commands, as a shell takes them."""

from __future__ import annotations

import shlex

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
