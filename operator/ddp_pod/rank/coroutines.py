"""The coroutines for which the main thread's event loop waits: the thread's own stack ends in the loop."""

import sys
import threading
from collections.abc import Iterator
from itertools import islice
from types import CoroutineType, FrameType, GeneratorType
from typing import Any, Final

_LOOP: Final = ("asyncio/base_events.py", "run_until_complete")
_TASKS: Final = ("asyncio/taskgroups.py", "asyncio/tasks.py")  # these wait for tasks to which no future leads
_MOST_FRAMES: Final = 32


def find_awaited_frames() -> list[FrameType]:
    """Return the frames that the main thread's event loop waits for, the outermost first."""
    asyncio = sys.modules.get("asyncio")
    future = _find_main_future()
    return [] if asyncio is None or future is None else list(islice(_walk(asyncio, future), _MOST_FRAMES))


def _find_main_future() -> Any:
    """Return the future until which the main thread's event loop runs; None: it runs none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_LOOP[0]) and frame.f_code.co_name == _LOOP[1]:
            return frame.f_locals.get("future")
        frame = frame.f_back
    return None


def _walk(asyncio: Any, future: Any) -> Iterator[FrameType]:
    """Yield the frames of a task, and those of the task for which it waits."""
    seen: set[int] = set()
    while type(future) is asyncio.Task and id(future) not in seen:
        seen.add(id(future))
        frame = None
        for frame in _list_frames(future.get_coro()):
            yield frame
        waiting = _find_awaited(asyncio, future)
        if waiting is None and frame is not None and frame.f_code.co_filename.endswith(_TASKS):
            tasks = sorted(asyncio.all_tasks(future.get_loop()), key=lambda task: str(task.get_name()))
            waiting = next((task for task in tasks if id(task) not in seen), None)
        future = waiting


def _list_frames(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits."""
    for _ in range(_MOST_FRAMES):
        if type(coroutine) is CoroutineType:
            frame = coroutine.cr_frame
            awaited = coroutine.cr_await
        elif type(coroutine) is GeneratorType:
            frame = coroutine.gi_frame
            awaited = coroutine.gi_yieldfrom
        else:
            return
        if frame is not None:
            yield frame
        coroutine = awaited


def _find_awaited(asyncio: Any, task: Any) -> Any:
    """Return the task for which a task waits; None: none."""
    future = getattr(task, "_fut_waiter", None)
    children = getattr(future, "_children", ())  # of gather
    waiting = [child for child in (future, *children) if type(child) is asyncio.Task and not child.done()]
    return next(iter(waiting), None)
