"""Read a command line of torchrun as a user typed it, without refusing anything.

``manifests.torchrun`` decides what a job may contain. This module serves `ddp convert`, and the hint that `ddp run`
prints.
"""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ddp_operator.manifests.torchrun import (
    OPTIONS,
    OWNED_FLAGS,
    OWNED_SWITCHES,
    TORCHRUN_MODULES,
    is_interpreter,
)

FORM_FLAGS: Final = ("module", "m", "use-env")
"""Flags that state how the script is named or started."""
_FLAGS: Final = {
    **dict.fromkeys(OWNED_FLAGS, True),
    **dict.fromkeys(OWNED_SWITCHES, False),
    **OPTIONS,
    "module": False,
    "m": False,
    "r": True,
    "t": True,
    "use-env": False,
}
"""Flags of torchrun with dashes, and whether each has a value."""


@dataclass(frozen=True, slots=True)
class TypedFlag:
    """A flag of torchrun."""

    name: str
    """Full name with dashes, without the leading ones: ``nproc-per-node`` for ``--nproc_per_node=2``."""
    typed: str
    """The flag without its value, as typed."""
    value: str
    arguments: tuple[str, ...]
    """The flag and its value, as typed."""


class TypedLine(NamedTuple):
    """The flags of torchrun in a command line, and its other arguments in order."""

    flags: list[TypedFlag]
    rest: list[str]


def count_launcher_arguments(arguments: Sequence[str]) -> int:
    """Return how many of the first arguments start torchrun: ``torchrun``, or ``[python] -m torch.distributed.run``."""
    if not arguments:
        return 0
    if posixpath.basename(arguments[0]) == "torchrun":
        return 1
    start = 1 if is_interpreter(arguments[0]) else 0
    module = list(arguments[start : start + 2])
    is_torchrun = len(module) == 2 and module[0] == "-m" and module[1] in TORCHRUN_MODULES
    return start + 2 if is_torchrun else 0


def split_flags(arguments: Sequence[str], *, until_script: bool = False) -> TypedLine:
    """Separate torchrun's flags from the other arguments.

    ``until_script``: stop at the first argument that is not a flag of torchrun.
    """
    flags: list[TypedFlag] = []
    rest: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        typed, equals, value = argument.partition("=")
        name = _normalize(typed)
        if name not in _FLAGS or (rest and until_script):
            rest.append(argument)
            continue
        parts = [argument]
        following = arguments[position : position + 1]
        if _FLAGS[name] and not equals and following and not following[0].startswith("-"):
            value = following[0]
            parts.append(value)
            position += 1
        flags.append(TypedFlag(name, typed, value, tuple(parts)))
    return TypedLine(flags, rest)


def _normalize(typed: str) -> str:
    """Return a flag's name with dashes, empty for an argument that is no flag."""
    if typed.startswith("--"):
        return typed.removeprefix("--").replace("_", "-")
    return typed[1:] if typed.startswith("-") else ""
