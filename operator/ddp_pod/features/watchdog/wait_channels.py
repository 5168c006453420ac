"""What processes wait for, by the kernel's function in which they do.

A child may wait until its rank reads what it has written, while the rank waits for its end; or for the end of its
input, which the rank keeps open while it reads the child's output.
"""

import os
from typing import Final, NamedTuple

from ...contract.processes import find_family

_MOST_CHILDREN: Final = 8  # of a rank
_MOST_FILES: Final = 256  # of a process
_READS: Final = "pipe_read"
_WRITES: Final = "pipe_write"  # in the name of the kernel's function, whatever version (proc(5), wchan)
_SLEEPS: Final = "nanosleep"  # the same
_COMMAND_LIMIT: Final = 60  # characters


class BlockedChild(NamedTuple):
    """A process that waits in a write to a full pipe, or ``reads`` from an empty one."""

    pid: int
    command: str
    reads: bool = False


def find_blocked_child(pid: int) -> BlockedChild | None:
    """Return a descendant of a process that waits until that one reads from a pipe, or writes to it; None: none does.

    One that reads counts only if the other process reads its output meanwhile, and has started it as a program: a
    forked one has all pipes of its parent.
    """
    own_command = _read_command(pid)
    for child in find_family(pid, 1 + _MOST_CHILDREN)[1:]:
        channel = _read(f"/proc/{child}/wchan")
        if _WRITES not in channel and _READS not in channel:
            continue
        if not _list_pipes(pid, os.R_OK) & _list_pipes(child, os.W_OK):
            continue
        command = _read_command(child)
        if _WRITES in channel:
            return BlockedChild(child, command)
        is_awaited = _READS in _read(f"/proc/{pid}/wchan") and command != own_command
        if is_awaited and _list_pipes(pid, os.W_OK) & _list_pipes(child, os.R_OK):
            return BlockedChild(child, command, reads=True)
    return None


def _read_command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:_COMMAND_LIMIT]


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
