"""Python's words without comments, line breaks, indentation and the commas before a closing bracket.

By one expression and not by `tokenize`, so that fragments of code can be read too, and every Python says the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from keyword import iskeyword
from typing import NamedTuple

_STRING = (
    r"[rbfuRBFU]{0,2}(?:"
    r"\'\'\'(?:\\.|[^\\])*?\'\'\'|"
    r'"""(?:\\.|[^\\])*?"""|'
    r"'(?:\\.|[^\\'\n])*'|"
    r'"(?:\\.|[^\\"\n])*")'
)
_NUMBER = r"0[xXbBoO][\da-fA-F_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?[jJ]?"
_OPERATOR = r"\*\*=|//=|>>=|<<=|\.\.\.|->|:=|==|!=|<=|>=|[-+*/%@&|^]=|\*\*|//|<<|>>|[^\s\w]"
_WORD = re.compile(rf"(?P<skip>#[^\n]*|\\\n|\s+)|{_STRING}|{_NUMBER}|\w+|{_OPERATOR}", re.DOTALL)


class Token(NamedTuple):
    """A word, and where it begins and ends in the text."""

    word: str
    start: int
    end: int


@lru_cache(maxsize=64)
def tokens(text: str) -> tuple[Token, ...]:
    """The tokens of a piece of Python, in order."""
    found = [Token(m.group(), m.start(), m.end()) for m in _WORD.finditer(text) if m.group("skip") is None]
    followed = zip(found, [*(token.word for token in found[1:]), ""], strict=False)
    return tuple(token for token, after in followed if token.word != "," or after not in (")", "]", "}"))


def normal(text: str) -> str:
    """A piece of Python on one line, the same whatever its layout and comments."""
    return _line([token.word for token in tokens(text)])


def _line(words: Sequence[str]) -> str:
    line = "".join(words[:1])
    for before, word in pairwise(words):
        is_called = word in ("(", "[") and (before[-1] in "\"')]}" or before.isidentifier()) and not iskeyword(before)
        line += word if is_called or before in ("(", "[", "{", ".") or word in (*")]},.:",) else f" {word}"
    return line


def difference(before: str, after: str, around: int = 16) -> tuple[str, str]:
    """The tokens in which two pieces of Python differ, with at most `around` tokens before and behind, on one line."""
    old, new = ([token.word for token in tokens(text)] for text in (before, after))
    least = min(len(old), len(new))
    same = next((n for n in range(least) if old[n] != new[n]), least)
    rest = next((n for n in range(least - same) if old[-1 - n] != new[-1 - n]), least - same)
    first, last = max(same - around, 0), max(rest - around, 0)
    return _line(old[first : len(old) - last]), _line(new[first : len(new) - last])


def occurrences(fragment: str, text: str) -> Iterator[Sequence[Token]]:
    """The tokens in a text that are a fragment's.

    A fragment that begins with spaces begins a line there, and one that ends with a line break ends one.
    """
    wanted = [token.word for token in tokens(fragment)]
    found = tokens(text)
    words = [token.word for token in found]
    for n, word in enumerate(words):
        end = n + len(wanted)
        if word == wanted[0] and words[n:end] == wanted:
            before = text[found[n - 1].end if n else 0 : found[n].start]
            after = text[found[end - 1].end : found[end].start if end < len(found) else len(text)]
            begins = n == 0 or "\n" in before or not fragment[0].isspace()
            ends = end == len(found) or "\n" in after or not fragment.endswith("\n")
            if begins and ends:
                yield found[n:end]
