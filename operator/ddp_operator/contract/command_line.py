"""The user's command line: what follows ``python``, and whether the program exists."""

import os
import sys
from typing import NamedTuple, Optional, Sequence

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


def _find_flag_with_value(word: str) -> Optional[int]:
    """Return the index of the first letter of a group of short flags that takes a value."""
    for index, letter in enumerate(word[1:], 1):
        if letter in _FLAGS_WITH_VALUE:
            return index
    return None


def find_missing_program(line: Optional[PythonLine], program: Sequence[str]) -> Optional[str]:
    """Return a message if the user's program does not exist. It is checked before PyTorch is imported.

    ``line``: the Python command line; None if ``program`` is no Python.
    """
    if line is None:
        import shutil  # not imported at the start of every pod

        return None if shutil.which(program[0]) else f"program not found: {program[0]} (looked in PATH)"
    if line.kind == "script" and not os.path.exists(line.target):
        return f"training script not found: {line.target} (looked in {os.getcwd()})"
    if line.kind == "module" and not line.flags and not _exists_module(line.target):
        return f"training module not found: {line.target} (looked in {os.getcwd()} and site-packages)"
    return None


def _exists_module(name: str) -> bool:
    from importlib import util

    sys.path.insert(0, os.getcwd())
    try:
        return util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)
