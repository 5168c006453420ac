"""What is known about a rank that a signal has killed: the signal's meaning, faulthandler's report, mapped files."""

import itertools
import linecache
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from ..base.exceptions import LIBRARY
from ..base.files import is_own_file
from ..base.pod import Pod
from ..base.runtime_files import MAPPINGS
from ..rank.end_notes import MappedFile, note_path, read_mapped_files

SHARED_MEMORY: Final = "/dev/shm"
_MIB: Final = 1 << 20
_SMALL_MIB: Final = 64  # of shared memory: what container runtimes give without a request
_FULL_SHARE: Final = 0.1  # of shared memory, below which free space is short
_FRAMES_SHOWN: Final = 15
_LONGEST_CYCLE: Final = 8  # calls from one of a recursive function to its next one
_OUTERMOST: Final = "<module>"
_CUT: Final = "  ..."  # after a hundred calls
_MARK: Final = "Fatal Python error: "
_REPORT: Final = re.compile(rf"^{_MARK}[^\n]*$", re.M)
_LINE_SHOWN: Final = 200
_THREAD: Final = re.compile(r"^(?P<current>Current t|T)hread 0x\w+[^\n]*:$")
_FRAME: Final = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')


class SignalKind(NamedTuple):
    """A signal that ends a process. ``remedy``: what to do without more evidence.

    ``is_crash``: whether the process's own code has caused it.
    """

    remedy: str
    is_crash: bool = False


RECURSION_REMEDY: Final = (
    "end the recursion earlier, replace it by a loop, or raise the stack's limit (`ulimit -s`, threading.stack_size)"
)
CRASH_REMEDY: Final = "it crashed in native code of a library or a kernel; the log has the Python stack, if any"
_CALL_REMEDY: Final = (
    "check what the line that crashed passes on (sizes, indices, types, pointers, objects that are freed by now), or "
    "use another version of the library that it calls"
)
_SHORTENED: Final = (
    "memory was accessed for which its file has no data, as after it was shortened or rewritten in place: write a new "
    "file and rename it"
)
_NO_STORAGE: Final = "or its storage has failed (dmesg)"
SHARED_MEMORY_REMEDY: Final = (
    "/dev/shm is full: raise spec.sharedMemory and the container memory limit, or use fewer DataLoader workers"
)
_TIMER: Final = "a timer of the script or of a profiler ran out, and no handler was installed for its signal"
_SENT: Final = "another process, or the script itself, has sent the signal, and the script has no handler for it"
SIGNALS: Final[Mapping[int, SignalKind]] = {
    signal.SIGSEGV: SignalKind(CRASH_REMEDY, is_crash=True),
    signal.SIGABRT: SignalKind(CRASH_REMEDY, is_crash=True),
    signal.SIGBUS: SignalKind(f"{_SHORTENED}; {_NO_STORAGE}", is_crash=True),
    signal.SIGFPE: SignalKind(
        "native code has divided an integer by zero, unless a process has sent the signal; the log has the Python "
        "stack, if any",
        is_crash=True,
    ),
    signal.SIGILL: SignalKind(
        "the CPU of the node lacks an instruction, so use a build of the library for this CPU or another node; or "
        "native code has stopped itself by a trap",
        is_crash=True,
    ),
    signal.SIGTRAP: SignalKind("native code has stopped itself by a trap", is_crash=True),
    signal.SIGSYS: SignalKind(
        "a seccomp profile forbids a system call (securityContext.seccompProfile), unless a process has sent the "
        "signal",
    ),
    signal.SIGXCPU: SignalKind(
        "the process has used the CPU time of its limit: raise it (ulimit -t, RLIMIT_CPU) or remove it"
    ),
    signal.SIGXFSZ: SignalKind(
        "a file has reached the limit of its size: raise it (ulimit -f, RLIMIT_FSIZE) or remove it"
    ),
    signal.SIGPIPE: SignalKind("the process at the other end of a pipe has ended: see its own messages"),
    signal.SIGALRM: SignalKind(_TIMER),
    signal.SIGVTALRM: SignalKind(_TIMER),
    signal.SIGPROF: SignalKind(_TIMER),
    signal.SIGUSR1: SignalKind(_SENT),
    signal.SIGUSR2: SignalKind(_SENT),
    signal.SIGHUP: SignalKind(
        "a terminal that is closed sends SIGHUP: start the program by nohup or setsid, or in tmux; otherwise find the "
        "process or the person who has sent it"
    ),
}
"""Signals with a meaning of their own. Others that request or force an end are in ``failure_table``."""


class CrashReport(NamedTuple):
    """Faulthandler's report of a crash. ``text``: the thread that crashed; ``note``: what its stack shows.

    ``remedy``: by that; empty for the signal's own.
    """

    text: str
    note: str = ""
    remedy: str = ""


def read_crash(output: str) -> CrashReport | None:
    """Return the last report in the end of a rank's output; None without one.

    Stacks of other threads are left out: what they did has nothing to do with the crash.
    """
    reports = list(_REPORT.finditer(output))
    if not reports:
        return None
    head = reports[-1][0]
    lines = output[reports[-1].end() :].splitlines()
    start = _find_current(lines)
    stack = [] if start is None else lines[start + 1 :]
    frames = list(_read_frames(stack))
    if not frames:
        has_threads = any(map(_THREAD.match, lines))
        return CrashReport(head, "in a thread without Python code" if has_threads else "")
    shown = [f'  File "{frame["path"]}", line {frame["line"]} in {frame["function"]}' for frame in frames]
    text = "\n".join([head, *shown[:_FRAMES_SHOWN]])
    recursion = _describe_recursion(frames)
    if recursion and _CUT in stack:
        return CrashReport(text, recursion, RECURSION_REMEDY)
    quoted = _quote_abort(output[: reports[-1].start()], head)
    own = next((frame for frame in frames if not LIBRARY.search(frame["path"])), None)
    return CrashReport(text, quoted) if own is None else _name_caller(text, quoted, own)


def _name_caller(text: str, quoted: str, own: re.Match[str]) -> CrashReport:
    """Return the report with the line of the script from which native code was called that has failed."""
    place = f"in native code, called by {own['function']} ({os.path.basename(own['path'])}:{own['line']})"
    line = linecache.getline(own["path"], int(own["line"])).strip()
    remedy = f"{_CALL_REMEDY}: `{line[:_LINE_SHOWN]}`" if line else ""
    return CrashReport(text, " ".join(filter(None, (place, quoted))), remedy)


def _find_current(lines: list[str]) -> int | None:
    """Return the number of the line before the stack of the thread that crashed; None without one."""
    return next((n for n, line in enumerate(lines) if (m := _THREAD.match(line)) and m["current"] != "T"), None)


def _quote_abort(before: str, head: str) -> str:
    """Return the line before an abort: the C library and assertions print their reason there."""
    line = before.rstrip().rpartition("\n")[2].strip()
    return f"after the line {line[:_LINE_SHOWN]!r}" if line and head.endswith("Aborted") else ""


def is_complete(output: str) -> bool:
    """Return whether the end of a rank's output has no report of a crash, or a line after the stack that it is about.

    A report without that stack, of a thread that is not Python's, counts as complete with any other.
    """
    _, mark, report = output.rpartition(_MARK)
    lines = report.splitlines()
    start = _find_current(lines)
    if start is None:
        return not mark or any(map(_THREAD.match, lines))
    frames = list(itertools.takewhile(_FRAME.match, lines[start + 1 :]))
    is_followed = len(lines) > start + 1 + len(frames)
    return is_followed or (bool(frames) and frames[-1].endswith(f" in {_OUTERMOST}"))


def _read_frames(lines: list[str]) -> Iterator[re.Match[str]]:
    for line in lines:
        frame = _FRAME.match(line)
        if frame is None:
            return
        if not is_own_file(frame["path"]):
            yield frame


def _describe_recursion(frames: list[re.Match[str]]) -> str:
    """Return which function calls itself, the script's if there is one; empty if the stack does not show that."""
    calls = [(frame["path"], frame["line"], frame["function"]) for frame in frames]
    # The innermost calls are those of the last one of them.
    repeated = [call for call, count in Counter(calls).items() if count >= len(calls) // (_LONGEST_CYCLE + 1)]
    own = [call for call in repeated if not LIBRARY.search(call[0])]
    if not repeated:
        return ""
    path, line, function = next((call for call in own if not call[2].startswith("<")), (own or repeated)[0])
    return f"recursion of {function} ({os.path.basename(path)}:{line}) has exhausted the stack"


def find_shortened(files: list[MappedFile]) -> str:
    """Return which mapped file is shorter than what is mapped of it; empty if none is.

    A mapping ends at the end of a page. A file of the same name that took the place of the mapped one has no effect.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    for file in files:
        try:
            status = os.stat(file.path)
        except (OSError, ValueError):
            continue
        if status.st_ino == file.inode and -(-status.st_size // page) * page < file.end:
            return f"the file {file.path} has only {status.st_size} bytes, and the rank maps {file.end}"
    return ""


class BusError(NamedTuple):
    """What is known about a SIGBUS, and what to do."""

    note: str
    remedy: str


def explain_bus_error(pod: Pod, local_rank: int) -> BusError:
    """Explain a SIGBUS of a rank by a shortened file, or how much space shared memory has.

    A process that ends gives its shared memory back, so that a small one counts as full.
    """
    shortened = find_shortened(read_mapped_files(note_path(pod.runtime, local_rank, MAPPINGS)))
    if shortened:
        return BusError(shortened, _SHORTENED)
    try:
        space = os.statvfs(SHARED_MEMORY)
    except OSError:
        return BusError("no mapped file is known that was shortened", f"{_SHORTENED}; {_NO_STORAGE}")
    free = space.f_bavail * space.f_frsize // _MIB
    size = space.f_blocks * space.f_frsize // _MIB
    note = f"{SHARED_MEMORY} of {size} MiB has {free} MiB free"
    if size <= _SMALL_MIB or free <= size * _FULL_SHARE:
        return BusError(note, SHARED_MEMORY_REMEDY)
    return BusError(note, f"{_SHORTENED}; {_NO_STORAGE}")
