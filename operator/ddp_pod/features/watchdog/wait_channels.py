"""What processes wait for, by the kernel's function in which they do.

A child may wait until its rank reads what it has written, while the rank waits for its end.
"""

import os
from typing import Final, NamedTuple

from ...contract.processes import find_family

_MOST_CHILDREN: Final = 8  # of a rank
_MOST_FILES: Final = 256  # of a process
_WRITES: Final = "pipe_write"  # in the name of the kernel's function, whatever version (proc(5), wchan)
_SLEEPS: Final = "nanosleep"  # the same
_COMMAND_LIMIT: Final = 60  # characters


class BlockedChild(NamedTuple):
    """A process that waits in a write to a full pipe."""

    pid: int
    command: str


def find_blocked_child(pid: int) -> BlockedChild | None:
    """Return a descendant of a process that writes into a full pipe which that process should read; None: none does."""
    for child in find_family(pid, 1 + _MOST_CHILDREN)[1:]:
        if _WRITES not in _read(f"/proc/{child}/wchan"):
            continue
        if _list_pipes(pid, os.R_OK) & _list_pipes(child, os.W_OK):
            command = _read(f"/proc/{child}/cmdline").replace("\0", " ").strip()
            return BlockedChild(child, command[:_COMMAND_LIMIT])
    return None


def sleeps_by_clock(pid: int) -> bool:
    """Return whether the main thread of a process waits for a time, rather than for a device or another process."""
    return _SLEEPS in _read(f"/proc/{pid}/wchan")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4 * _COMMAND_LIMIT)
    except OSError:
        return ""


def _list_pipes(pid: int, access: int) -> set[str]:
    """Return the pipes that a process has open to read (``os.R_OK``) or to write (``os.W_OK``), as ``pipe:[123]``."""
    folder = f"/proc/{pid}/fd"
    pipes = set()
    try:
        for name in os.listdir(folder)[:_MOST_FILES]:
            path = os.path.join(folder, name)
            target = os.readlink(path)
            if target.startswith("pipe:") and os.lstat(path).st_mode >> 6 & access:
                pipes.add(target)
    except OSError:
        return pipes
    return pipes
