"""Where a script ends its own process, or sets a timer that does: an exit code and a signal name no line.

The functions of os and signal for this are replaced before the program starts. The launcher reads what they note.
"""

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import update_wrapper
from types import FrameType
from typing import Any, Final

from ..base.exceptions import LIBRARY
from ..base.files import is_own_file, write_json
from .end_notes import OwnEnd

_TIMERS: Final = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
"""The signals of setitimer's three timers, by their numbers."""
_TEXT_LIMIT: Final = 160
_ARGUMENT_LIMIT: Final = 100
_OWN_MODULES: Final = re.compile(r"(json|codecs|os|posixpath|signal|enum|encodings)\b")  # which the notes call
_MOST_CHANGES: Final = 32  # of the call that is noted for an exit code


def observe_own_ends(path: str) -> None:
    """Note such calls of this process and of those that it forks. ``path``: of the file."""
    notes: dict[int, OwnEnd] = {}
    changes: Counter[int] = Counter()

    def note(code: int, call: str, frame: FrameType, *, is_timer: bool) -> None:
        if LIBRARY.search(frame.f_code.co_filename):
            return  # multiprocessing ends its processes so
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        place = f"{name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        end = OwnEnd(os.getpid(), call, place[:_TEXT_LIMIT], is_timer)
        if notes.get(code) == end or changes[code] == _MOST_CHANGES:
            return
        changes[code] += 1
        notes[code] = end
        if changes[code] == _MOST_CHANGES:
            del notes[code]  # a timer that is set in turn at two lines would be written in each step
        write_json(path, {str(known): noted for known, noted in notes.items()})

    def replace(module: Any, name: str, find_code: Callable[..., int], *, is_timer: bool = False) -> None:
        """Replace a function. ``find_code``: returns the exit code of a call, as a shell has it, or 0."""

        def observe(*arguments: Any, **options: Any) -> None:
            code = find_code(*arguments, **options)
            if code:
                text = repr(arguments[0])[:_ARGUMENT_LIMIT] if type(next(iter(arguments), 0)) is str else ""
                note(code, f"{module.__name__}.{name}({text})", sys._getframe(2), is_timer=is_timer)

        setattr(module, name, _ObservedFunction(module.__name__, getattr(module, name), observe))

    replace(os, "_exit", _find_exit_code)
    replace(os, "abort", _find_abort)
    replace(os, "kill", _find_kill)
    replace(os, "killpg", _find_group_kill)
    replace(signal, "raise_signal", _find_signal)
    replace(signal, "alarm", _find_alarm, is_timer=True)
    replace(signal, "setitimer", _find_timer, is_timer=True)
    process = os.getpid()

    def observe_exit() -> None:
        """Observe the exits of a child: those of the process itself are exceptions that are recorded."""
        if os.getppid() == process:
            replace(sys, "exit", _find_status)

    os.register_at_fork(after_in_child=observe_exit)


class _ObservedFunction:
    """A function with an observer of its calls. Like a builtin one it does not become a method in a class."""

    def __init__(self, module: str, original: Any, observe: Callable[..., None]) -> None:
        update_wrapper(self, original)
        self.__module__ = module
        self._name: str = original.__name__
        self._original = original
        self._observe = observe

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            self._observe(*arguments, **options)
        except Exception as error:  # a bug here must never reach the script, and a full disk not hide its end
            if _is_of_script(error):
                raise
        return self._original(*arguments, **options)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce__(self) -> str:
        return self._name  # by which pickle and copy find it in its module


def _is_of_script(error: Exception) -> bool:
    """Return whether a handler of a signal has raised an exception: it runs wherever the process is."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if not is_own_file(frame.f_code.co_filename) and not _OWN_MODULES.match(str(frame.f_globals.get("__name__"))):
            return True
        trace = trace.tb_next
    return False


def _find_exit_code(status: int) -> int:
    return status & 255


def _find_status(status: object = None) -> int:
    return status & 255 if isinstance(status, int) else int(status is not None)


def _find_abort() -> int:
    return _find_signal(signal.SIGABRT)


def _find_kill(pid: int, number: int) -> int:
    return _find_signal(number) if pid in (0, os.getpid()) else 0


def _find_group_kill(group: int, number: int) -> int:
    return _find_signal(number) if group in (0, os.getpgrp()) else 0


def _find_signal(number: int) -> int:
    is_fatal = number and signal.getsignal(number) is signal.SIG_DFL
    return 128 + number if is_fatal else 0


def _find_alarm(seconds: int) -> int:
    # Also with a handler: the timer may outlive it.
    return 128 + signal.SIGALRM if seconds else 0


def _find_timer(which: int, seconds: float, interval: float = 0.0) -> int:
    return 128 + _TIMERS[which] if seconds else 0
