"""The user's command line: what follows ``python``."""

from collections.abc import Sequence
from typing import NamedTuple

_FLAGS_WITH_VALUE = "mcWX"
_KINDS = {"m": "module", "c": "code"}


class PythonLine(NamedTuple):
    """What follows ``python`` on its command line. ``kind`` is script, module or code."""

    flags: list[str]
    kind: str
    target: str
    args: list[str]


def split_python_line(words: Sequence[str]) -> PythonLine:
    """Split interpreter flags, program and arguments as CPython does. Raises: ValueError."""
    flags: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "-":
            raise ValueError("reads the script from standard input, which a pod does not have")
        if not word.startswith("-"):
            return PythonLine(flags, "script", word, list(words[position:]))
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs":
                flags += words[position : position + 1]
                position += 1
            continue

        index = _find_flag_with_value(word)
        if index is None:
            flags.append(word)
            continue
        letter = word[index]
        value = word[index + 1 :]
        if not value:
            if position == len(words):
                raise ValueError(f"-{letter} needs a value")
            value = words[position]
            position += 1
        if index > 1:
            flags.append(word[:index])
        if letter in _KINDS:
            return PythonLine(flags, _KINDS[letter], value, list(words[position:]))
        flags.append(f"-{letter}{value}")
    raise ValueError("names no script")


def _find_flag_with_value(word: str) -> int | None:
    """Return the index of the first letter of a group of short flags that takes a value."""
    for index, letter in enumerate(word[1:], 1):
        if letter in _FLAGS_WITH_VALUE:
            return index
    return None
