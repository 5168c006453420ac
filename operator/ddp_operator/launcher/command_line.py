"""The user's command line: what follows ``python``, and whether it is there."""

import os
import sys
from typing import NamedTuple, Optional, Sequence


class PythonLine(NamedTuple):
    """What follows ``python`` on its command line. ``kind`` is script, module or code."""

    flags: list[str]
    kind: str
    target: str
    args: list[str]


def split_python_line(words: Sequence[str]) -> PythonLine:
    """Split interpreter flags, program and arguments as CPython does. Raises: ValueError."""
    flags: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "-":
            raise ValueError("reads the script from standard input, which a pod does not have")
        if not word.startswith("-"):
            return PythonLine(flags, "script", word, rest)
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs" and rest:
                flags.append(rest.pop(0))
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter not in "mcWX":
                continue
            value = word[place + 1 :]
            if not value:
                if not rest:
                    raise ValueError(f"-{letter} needs a value")
                value = rest.pop(0)
            if place > 1:
                flags.append(word[:place])
            if letter in "mc":
                return PythonLine(flags, {"m": "module", "c": "code"}[letter], value, rest)
            flags.append(f"-{letter}{value}")
            break
        else:
            flags.append(word)
    raise ValueError("names no script")


def find_missing_program(line: Optional[PythonLine], program: Sequence[str]) -> Optional[str]:
    """Return the complaint when what the user wants to run is not there, before torch is even imported."""
    if line is None:
        import shutil  # only here: the common case should not pay for it

        return None if shutil.which(program[0]) else f"program not found: {program[0]} (looked in PATH)"
    if line.kind == "script" and not os.path.exists(line.target):
        return f"training script not found: {line.target} (looked in {os.getcwd()})"
    if line.kind == "module" and not line.flags:
        from importlib import util

        sys.path.insert(0, os.getcwd())
        try:
            found = util.find_spec(line.target.partition(".")[0])
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            return f"training module not found: {line.target} (looked in {os.getcwd()} and site-packages)"
    return None
