"""What a rank notes while it runs, for the case that it ends without an exception: mapped files, and its own calls."""

import os
from typing import Final, NamedTuple

from ..base.files import read_json

SHELL_PREFIX: Final = "_ddp_"
"""Of the names in what a rank's bash runs before its script."""
_SHELL_END_LIMIT: Final = 300  # characters
_SCRIPT_LIMIT: Final = 1 << 20  # characters


class MappedFile(NamedTuple):
    """A file that a process maps into its memory. ``end``: bytes of the file that are mapped, from its beginning."""

    path: str
    inode: int
    end: int


class OwnEnd(NamedTuple):
    """A call by which a script ends a process at once, or later if it sets a timer. ``place``: of the call."""

    pid: int
    call: str
    place: str
    is_timer: bool


def note_path(runtime: str, local_rank: int, kind: str) -> str:
    """Return a file of a rank's notes. ``kind``: MAPPINGS, OWN_END or SHELL_END."""
    return os.path.join(runtime, "output", f"{local_rank}.{kind}")


def read_mapped_files(path: str) -> list[MappedFile]:
    """Return the files that a rank mapped when they were read last; empty if that is unknown."""
    known = read_json(path).get("files")
    items = known if isinstance(known, list) else ()
    return [MappedFile(*item) for item in items if isinstance(item, list) and list(map(type, item)) == [str, int, int]]


def read_own_ends(path: str) -> dict[int, OwnEnd]:
    """Return the last call for each exit code, as a shell has it."""
    ends = {}
    for code, raw in read_json(path).items():
        is_valid = isinstance(raw, list) and list(map(type, raw)) == [int, str, str, bool]
        if code.isdecimal() and is_valid:
            ends[int(code)] = OwnEnd(*raw)
    return ends


def read_shell_end(path: str, exit_code: int) -> str:
    """Return at which command a bash script ended with an exit code, as a text; empty: none did.

    A subshell, and a line that bash cannot read, may follow the command that bash knows.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            code, script, command = file.read(_SHELL_END_LIMIT).split("\n", 2)
    except (OSError, ValueError):
        return ""
    if code != str(exit_code) or SHELL_PREFIX in command:  # it has run no command of the script
        return ""
    text = " ".join(command.split())
    line = _find_line(script, text)
    place = f"{os.path.basename(script)}:{line}" if line else os.path.basename(script)
    return f"{place} ended at or after `{text}`"


def _find_line(script: str, command: str) -> int:
    """Return the only line of a script that has a command; 0: there are several, or it cannot be read."""
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            lines = file.read(_SCRIPT_LIMIT).splitlines()
    except (OSError, ValueError):
        return 0
    found = [number for number, line in enumerate(lines, 1) if command and command in " ".join(line.split())]
    return found[0] if len(found) == 1 else 0
