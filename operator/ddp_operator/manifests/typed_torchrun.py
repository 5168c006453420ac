"""Read a command line of torchrun as a user typed it, without refusing anything.

``manifests.torchrun`` decides what a job may contain. This module serves the commands that translate a torchrun command
line: `ddp convert`, and the hint that `ddp run` prints.
"""

import posixpath
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ddp_operator.manifests.torchrun import TORCHRUN_FLAGS, TORCHRUN_MODULES

FORM_FLAGS: Final = ("module", "m", "use-env")
"""Flags that state how the script is named or started."""
_FLAGS: Final = {**TORCHRUN_FLAGS, "use-env": False}
_INTERPRETER: Final = re.compile(r"python(\d+(\.\d+)?)?")


@dataclass(frozen=True, slots=True)
class TypedFlag:
    """A flag of torchrun."""

    name: str
    """Full name with dashes, without the leading ones: ``nproc-per-node`` for ``--nproc_per_node=2``."""
    typed: str
    """The flag without its value, as typed."""
    value: str
    words: tuple[str, ...]
    """The flag and its value, as typed."""


class TypedLine(NamedTuple):
    """The flags of torchrun in a command line, and its other words in order."""

    flags: list[TypedFlag]
    rest: list[str]


def is_interpreter(word: str) -> bool:
    """Return whether a word is a Python interpreter, such as /usr/bin/python3.11."""
    return _INTERPRETER.fullmatch(posixpath.basename(word)) is not None


def count_launcher_words(words: Sequence[str]) -> int:
    """Return how many of the first words start torchrun: ``torchrun``, or ``[python] -m torch.distributed.run``."""
    if not words:
        return 0
    if posixpath.basename(words[0]) == "torchrun":
        return 1
    start = 1 if is_interpreter(words[0]) else 0
    module = list(words[start : start + 2])
    is_torchrun = len(module) == 2 and module[0] == "-m" and module[1] in TORCHRUN_MODULES
    return start + 2 if is_torchrun else 0


def split_flags(words: Sequence[str], *, until_script: bool = False, only: Collection[str] | None = None) -> TypedLine:
    """Separate torchrun's flags from the other words.

    ``until_script``: stop at the first word that is no flag of torchrun; the rest belongs to the script. ``only``:
    consider no flags but these, as typed.
    """
    flags: list[TypedFlag] = []
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        typed, equals, value = word.partition("=")
        name = _normalize(typed)
        is_flag = name in _FLAGS and (only is None or typed in only)
        if not is_flag or (rest and until_script):
            rest.append(word)
            continue
        parts = [word]
        if _FLAGS[name] and not equals and remaining and not remaining[0].startswith("-"):
            value = remaining.pop(0)
            parts.append(value)
        flags.append(TypedFlag(name, typed, value, tuple(parts)))
    return TypedLine(flags, rest)


def _normalize(typed: str) -> str:
    """Return a flag's name with dashes, empty for a word that is no flag."""
    if typed.startswith("--"):
        return typed.removeprefix("--").replace("_", "-")
    return typed[1:] if typed.startswith("-") else ""
