"""End a rank whose program is over, but whose threads, exit handlers or children keep the process alive.

The interpreter waits for all of them without a limit, and the peers of the rank wait for its end.
"""

import _thread
import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from ..base.exceptions import LIBRARY
from ..base.files import try_write_json
from ..contract.plan import WatchdogConfig
from ..contract.processes import count_cpu_seconds

_SECONDS_TO_END = 5.0  # most programs need less, and nobody needs to know what they wait for
_SECONDS_BETWEEN_CHECKS = 1.0
_BUSY_SHARE = 0.01  # of a CPU
_BUSY_SWITCHES = 5.0  # in a second: a thread that transfers data sleeps and wakes more often than one that polls
_MOST_NAMED = 2


class _Work(NamedTuple):
    """What the process has done so far: CPU seconds, and how often its awaited threads have gone to sleep."""

    cpu_seconds: float
    switches: int


def guard_end(watchdog: WatchdogConfig | None, path: str) -> None:
    """Start the thread that watches the end of the process. ``path``: of the file that tells what it waits for.

    A thread that does nothing is awaited for ``stall_seconds``, one that works for ``checkpoint_seconds``: it may save.
    """
    if watchdog is None or watchdog.action == "Report":
        return
    # Not threading.Thread: the interpreter would wait for it.
    _thread.start_new_thread(_watch_end, (watchdog, path))


def _watch_end(watchdog: WatchdogConfig, path: str) -> None:
    began = time.monotonic()
    since = time.time()
    written = ""
    time.sleep(_SECONDS_TO_END)
    idle_since = began
    checked = time.monotonic()
    work = _measure_work()
    while True:
        keeper = _describe_keepers()
        if keeper != written:
            written = keeper
            try_write_json(path, {"keeper": keeper, "since": since})
        time.sleep(_SECONDS_BETWEEN_CHECKS)
        now = time.monotonic()
        before = work
        work = _measure_work()
        if _is_busy(before, work, now - checked):
            idle_since = now
        checked = now
        if now - idle_since >= watchdog.stall_seconds or now - began >= watchdog.checkpoint_seconds:
            try_write_json(path, {"keeper": keeper, "since": since, "ended": True})
            _end(keeper, now - began)


def _is_busy(before: _Work, work: _Work, seconds: float) -> bool:
    cpu = work.cpu_seconds - before.cpu_seconds
    return cpu > _BUSY_SHARE * seconds or work.switches - before.switches > _BUSY_SWITCHES * seconds


def _end(keeper: str, seconds: float) -> None:
    """End the process as the program would have: its output is complete, and its exit handlers had their time."""
    text = f"[launcher] the program of this rank ended {seconds:.0f} s ago, but {keeper}: ending the process with 0\n"
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr:
                stream.write(text)
            stream.flush()
        except Exception:
            continue  # the script may have replaced or closed it
    os._exit(0)


def _measure_work() -> _Work:
    threads = [thread.native_id for thread in _list_awaited()] or [os.getpid()]  # the main thread has the process's id
    return _Work(count_cpu_seconds([os.getpid()]), sum(map(_count_switches, threads)))


def _count_switches(thread: int) -> int:
    """Return how often a thread has waited for something; 0 if it has ended, or on systems other than Linux."""
    try:
        with open(f"/proc/self/task/{thread}/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return int(lines["voluntary_ctxt_switches"])
    except (OSError, KeyError, ValueError):
        return 0


def _list_awaited() -> list[Any]:
    """Return the threads for which the interpreter waits."""
    threading = sys.modules.get("threading")
    if threading is None:
        return []
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if thread is not main and not thread.daemon]


def _describe_keepers() -> str:
    """Return what keeps the process alive: threads, children of multiprocessing, or the main thread itself."""
    frames = sys._current_frames()
    awaited = _list_awaited()
    if awaited:
        texts = [f"thread {thread.name}{_describe_place(frames.get(thread.ident))}" for thread in awaited]
        return _join(texts, "keeps its process alive", "keep its process alive")
    children = list(_list_children())
    if children:
        return _join(children, "is awaited", "are awaited")
    threading = sys.modules.get("threading")
    main = frames.get(threading.main_thread().ident) if threading is not None else None
    return f"its main thread{_describe_place(main)} has not ended"


def _list_children() -> Iterator[str]:
    process = sys.modules.get("multiprocessing.process")
    for child in process.active_children() if process is not None else ():
        if not child.daemon:
            yield f"process {child.name} (pid {child.pid})"


def _join(names: Sequence[str], one: str, many: str) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more} {one if len(names) == 1 else many}"


def _describe_place(frame: FrameType | None) -> str:
    """Return the innermost line that is not in a library, as `` (Uploader.run, train.py:20)``; empty without one."""
    while frame is not None:
        code = frame.f_code
        if not LIBRARY.search(code.co_filename):
            name = getattr(code, "co_qualname", code.co_name)
            return f" ({name}, {os.path.basename(code.co_filename)}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
