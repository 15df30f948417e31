"""Nesting depth of each character of Python code: in brackets, and in indented blocks."""

from __future__ import annotations

import io
import token
import tokenize

import numpy as np

# Python 3.12 began to take f-strings apart.
_FSTRING_START, _FSTRING_END = getattr(token, "FSTRING_START", -1), getattr(token, "FSTRING_END", -1)
_SIGNS = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)


def nesting(code: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Bracket and indent depth after the first i characters, each (len(code) + 1,) int16; None for unreadable text.

    Brackets are those that ``tokenize`` calls operators, so none in strings, comments or, on every Python version,
    f-strings. An indent counts from the last character of its white space, a dedent from the first character of the
    line's first token. A value depends on the text up to its character only.
    """
    starts = np.cumsum([0, *(len(line) + 1 for line in code.split("\n"))]).tolist()
    # +p or −p for a level that opens or closes once p characters are read.
    brackets: list[int] = []
    indents: list[int] = []
    in_fstring = 0
    try:
        for kind, text, (row, col), end, _ in tokenize.generate_tokens(io.StringIO(code).readline):
            if kind == token.OP and text in _SIGNS and not in_fstring:
                brackets.append(_SIGNS[text] * (starts[end[0] - 1] + end[1]))
            elif kind == token.INDENT:
                indents.append(starts[end[0] - 1] + end[1])
            elif kind == token.DEDENT:
                indents.append(-(starts[row - 1] + col + 1))
            elif kind == _FSTRING_START:
                in_fstring += 1
            elif kind == _FSTRING_END:
                in_fstring -= 1
    except (tokenize.TokenError, SyntaxError):
        return None
    depth, indent = _levels(brackets, len(code)), _levels(indents, len(code))
    return None if depth.min() < 0 else (depth, indent)


def _levels(changes: list[int], length: int) -> np.ndarray:
    signed = np.array([change for change in changes if abs(change) <= length], dtype=np.int64)
    steps = np.zeros(length + 1, dtype=np.int16)
    np.add.at(steps, np.abs(signed), np.sign(signed).astype(np.int16))
    return steps.cumsum(dtype=np.int16)
