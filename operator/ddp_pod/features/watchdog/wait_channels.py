"""What processes wait for, by the kernel's function in which they do, and the file or the process in its arguments.

A child may wait until its rank reads what it has written, while the rank waits for its end; or until the rank ends its
input, while the rank reads its output. What the kernel does not show to this user stays unknown.
"""

import os
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from ...contract.processes import SLEEPING_STATES, find_family, name_command, process_state, read_stat
from ...failures.text import describe_exit, find_signal
from ...network.connections import find_peer
from .remedies import (
    ANY_CHILD_REMEDY,
    CHILD_REMEDY,
    FIFO_REMEDY,
    FILE_LOCK_REMEDY,
    OPEN_INPUT_REMEDY,
    OPEN_PIPE_REMEDY,
    SERVICE_REMEDY,
)

_MOST_CHILDREN: Final = 8  # of a rank
_MOST_FILES: Final = 256  # of a process
_WRITES: Final = "pipe_write"  # in the name of the kernel's function, whatever version (proc(5), wchan)
_SLEEPS: Final = "nanosleep"  # the same
_READS: Final = "pipe_read"
_WAITS_FOR_CHILD: Final = "do_wait"
_ANY_CHILD: Final = 0xFFFFFFFF  # -1 in the lower half of a register, see wait4(2)
_MOST_NAMED: Final = 3
_OPENS_PIPE: Final = "wait_for_partner"
_LOCKS_FILE: Final = "locks_lock_inode"
_LOCKS_LIMIT: Final = 1 << 18  # characters of the table of locks
_RECEIVES: Final = ("wait_woken", "sk_wait_data")  # of a TCP connection
_FUTEX: Final = "futex"
_FUTEX_PRIVATE: Final = 128
_FUTEX_COMMAND: Final = 127
_FUTEX_WAITS: Final = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_EXIT_CODE: Final = 49  # its index in ``read_stat``: 0 unless this user may see it
_COMMAND_LIMIT: Final = 60  # characters
_SAMPLES: Final = 10  # of a process's state
_SECONDS_BETWEEN_SAMPLES: Final = 0.01


class BlockedChild(NamedTuple):
    """A process that waits in a write to a full pipe."""

    pid: int
    command: str


def find_blocked_child(pid: int) -> BlockedChild | None:
    """Return a descendant of a process that writes into a full pipe which that process should read; None: none does."""
    for child in _list_children(pid):
        if _WRITES not in _read(f"/proc/{child}/wchan"):
            continue
        if _list_pipes(pid, os.R_OK) & _list_pipes(child, os.W_OK):
            return BlockedChild(child, _read_command(child))
    return None


def find_dead_child(pid: int) -> str:
    """Return how a helper of a process has ended that it has not awaited; empty: none has, or only with exit code 0.

    A helper runs the same program, as multiprocessing starts it: another one may end with any code.
    """
    own_name = _read(f"/proc/{pid}/comm").strip()
    for child in _list_children(pid):
        name = _read(f"/proc/{child}/comm").strip()
        try:
            fields = read_stat(child)
        except OSError:
            continue  # somebody has awaited it
        if len(fields) <= _EXIT_CODE or fields[0] != "Z" or (name, fields[1]) != (own_name, str(pid)):
            continue
        code = os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
        if code:
            return f"its process {child} ({name}) {'was' if find_signal(code) else 'has'} {describe_exit(code)}"
    return ""


class KernelWait(NamedTuple):
    """What a rank waits for outside of Python. ``is_final``: nothing but the rank itself could end the wait."""

    note: str
    remedy: str
    is_final: bool = False


def find_kernel_wait(pid: int) -> KernelWait | None:
    """Return what the main thread of a process waits for: a file, a connection or a child; None: unknown."""
    channel = _read(f"/proc/{pid}/wchan")
    arguments = _read_arguments(pid)
    if _OPENS_PIPE in channel:
        return KernelWait("it opens a FIFO that no process has open at its other end", FIFO_REMEDY)
    if not arguments:
        return None
    if channel.endswith(_WAITS_FOR_CHILD):
        return _explain_child(pid, arguments[:2])
    file = _read_link(pid, arguments[0])
    if _READS in channel:
        return _explain_read(pid, file)
    if _WRITES in channel:
        return _explain_write(pid, file)
    if _LOCKS_FILE in channel and file.startswith("/"):
        holder = _find_lock_holder(pid, arguments[0])
        by = f", which {_describe_process(holder)} holds" if holder else ""
        return KernelWait(f"it waits for the lock of {file[-_COMMAND_LIMIT:]}{by}", FILE_LOCK_REMEDY)
    if channel in _RECEIVES:
        peer = find_peer(file)
        return KernelWait(f"it waits for data from {peer}", SERVICE_REMEDY) if peer else None
    return None


def identify_wait(pid: int) -> str:
    """Return the kernel's function in which a process waits, with the path or the peer: equal in another attempt.

    Empty: the kernel does not show it.
    """
    channel = _read(f"/proc/{pid}/wchan").strip("0")
    arguments = _read_arguments(pid)
    file = _read_link(pid, arguments[0]) if arguments else ""
    name = file if file.startswith("/") else find_peer(file)
    return f"{channel} {name[-_COMMAND_LIMIT:]}".rstrip() if channel else ""


def _explain_child(pid: int, arguments: Iterable[int]) -> KernelWait | None:
    """Explain the wait for the end of a child, whose id is among the arguments of the system call."""
    children = _list_children(pid)
    ids = [argument & _ANY_CHILD for argument in arguments]
    child = next((child for child in children if child in ids), None)
    if child is None:
        others = ", ".join(map(_describe_process, children[:_MOST_NAMED]))
        note = f"it waits for the end of any child, as os.wait() does: {others}"
        return KernelWait(note, ANY_CHILD_REMEDY) if children and _ANY_CHILD in ids else None
    text = f"it waits for the end of its {_describe_process(child)}"
    if _waits_for_input_of(child, pid):
        return KernelWait(f"{text}, which waits for input from the rank", OPEN_INPUT_REMEDY, is_final=True)
    return KernelWait(text, CHILD_REMEDY)


def _explain_read(pid: int, file: str) -> KernelWait | None:
    """Explain a read from an empty pipe, by the processes that could write into it."""
    if not file.startswith("pipe:"):
        return KernelWait(f"it reads {file[-_COMMAND_LIMIT:]}", "") if file.startswith("/") else None
    writers = [child for child in _list_children(pid) if file in _list_pipes(child, os.W_OK)]
    if not writers:
        is_own = file in _list_pipes(pid, os.W_OK)
        note = "it reads from a pipe whose writing end it has open itself"
        return KernelWait(note, OPEN_PIPE_REMEDY) if is_own else None
    text = f"it reads from a pipe of its {_describe_process(writers[0])}"
    if all(_waits_for_input_of(writer, pid) for writer in writers):
        return KernelWait(f"{text}, which waits for input from the rank", OPEN_INPUT_REMEDY, is_final=True)
    return KernelWait(text, CHILD_REMEDY)


def _explain_write(pid: int, file: str) -> KernelWait | None:
    """Explain a write into a full pipe, by the processes that should read from it."""
    readers = [child for child in _list_children(pid) if file in _list_pipes(child, os.R_OK)]
    if not readers:
        return None
    note = f"it waits until its {_describe_process(readers[0])} reads its input: the pipe is full"
    return KernelWait(note, CHILD_REMEDY)


def _waits_for_input_of(child: int, pid: int) -> bool:
    """Return whether a child waits to read from a pipe into which only its parent could write."""
    arguments = _read_arguments(child)
    if _READS not in _read(f"/proc/{child}/wchan") or not arguments:
        return False
    file = _read_link(child, arguments[0])
    others = [other for other in _list_children(pid) if other != child]
    is_shared = any(file in _list_pipes(other, os.W_OK) for other in others)
    return not is_shared and file in _list_pipes(pid, os.W_OK)


def _find_lock_holder(pid: int, descriptor: int) -> int:
    """Return the process that holds the lock of a file which a process has open; 0: unknown (proc(5), locks)."""
    try:
        status = os.stat(f"/proc/{pid}/fd/{descriptor}")
        with open("/proc/locks", encoding="ascii") as file:
            rows = [line.split()[1:] for line in file.read(_LOCKS_LIMIT).splitlines()]
    except OSError:
        return 0
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    held = [row for row in rows if len(row) > 4 and row[0] != "->" and row[4] == name]  # the others wait
    return next((int(row[3]) for row in held if row[3].isdecimal()), 0)


def _list_children(pid: int) -> list[int]:
    return find_family(pid, 1 + _MOST_CHILDREN)[1 : 1 + _MOST_CHILDREN]


def _describe_process(pid: int) -> str:
    return f"process {pid} ({_read_command(pid)})"


def _read_command(pid: int) -> str:
    return name_command(_read(f"/proc/{pid}/cmdline").split("\0"))


def _read_arguments(pid: int, count: int = 3) -> list[int]:
    """Return the first arguments of the system call in which a process waits; empty: unknown."""
    try:
        return [int(value, 16) for value in _read(f"/proc/{pid}/syscall").split()[1 : 1 + count]]
    except ValueError:
        return []


def _read_link(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""


def waits_for_missing_thread(pid: int) -> bool:
    """Return whether a process waits without limit for another of its threads, and has none.

    So it was forked while a thread of its parent had a lock or a task, or it holds the lock itself. A private futex is
    of one process alone (futex(2), FUTEX_PRIVATE_FLAG).
    """
    arguments = _read_arguments(pid, 4)
    if _FUTEX not in _read(f"/proc/{pid}/wchan") or len(arguments) < 4 or _count_threads(pid) != 1:
        return False
    operation, timeout = arguments[1], arguments[3]
    return bool(operation & _FUTEX_PRIVATE) and operation & _FUTEX_COMMAND in _FUTEX_WAITS and timeout == 0


def _count_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def sleeps_by_clock(pid: int) -> bool:
    """Return whether the main thread of a process waits for a time, rather than for a device or another process."""
    return _SLEEPS in _read(f"/proc/{pid}/wchan")


def measure_sleep(pid: int) -> float:
    """Return in which share of several samples a process's main thread sleeps."""
    count = 0
    for _ in range(_SAMPLES):
        count += process_state(pid) in SLEEPING_STATES
        time.sleep(_SECONDS_BETWEEN_SAMPLES)
    return count / _SAMPLES


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
