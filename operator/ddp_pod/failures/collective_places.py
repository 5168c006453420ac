"""Where the ranks were whose collectives did not match, after gloo has aborted one: its error names no rank.

The aborted rank's main thread is in faulthandler's report. The others have lost their connection to it in a collective,
and their tracebacks show in which.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from ..base.exceptions import LIBRARY
from ..base.files import is_own_file
from ..contract.failure_record import Failure
from .kinds import OTHER_SIZES

_REPORT: Final = "Fatal Python error: "
_THREAD: Final = re.compile(r"^(?:Current t|T)hread 0x\w+[^\n]*:$", re.M)
_TRACEBACK: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+),? in (?P<function>.*)$', re.M)
_SHIM: Final = "_run_and_record"  # of the rank's own process, below the script
_DECORATOR: Final = "wrapper"
_MOST: Final = 4  # ranks


def find_main_stack(output: str) -> str:
    """Return the main thread's stack in the last report of a crash, the innermost call last; empty: unknown."""
    for thread in _THREAD.split(output.rpartition(_REPORT)[2])[1:]:
        frames = list(_FRAME.finditer(thread))
        if any(frame["function"] == _SHIM for frame in frames):
            lines = [frame[0] for frame in reversed(frames) if not is_own_file(frame["path"])]
            return "\n".join(["Stack (most recent call last):", *lines])
    return ""


def add_places(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures of a pod's ranks, those about collectives that do not match with the ranks' places."""
    places = list(dict.fromkeys(_list_places(sorted(failures, key=_get_rank))))
    text = f"mismatch between collectives: {'; '.join(places[:_MOST])}"
    return [
        replace(failure, message=f"{text} ({failure.message})") if places and _is_mismatch(failure) else failure
        for failure in failures
    ]


def _get_rank(failure: Failure) -> int:
    return failure.rank or 0


def _is_mismatch(failure: Failure) -> bool:
    return bool(OTHER_SIZES.search(failure.message)) and not failure.secondary


def _list_places(failures: Sequence[Failure]) -> Iterator[str]:
    """Yield the places of ranks that are in a collective which does not match, or have lost their peer in one."""
    if not any(map(_is_mismatch, failures)):
        return
    for failure in failures:
        place = _find_place(failure.traceback) if failure.secondary or _is_mismatch(failure) else ""
        if place:
            yield f"rank {failure.rank} was at {place}"


def _find_place(traceback: str) -> str:
    """Return the innermost line of the script in a traceback, and the library's function that it called."""
    frames = list(_FRAME.finditer(traceback.rpartition(_TRACEBACK)[2]))
    own = [number for number, frame in enumerate(frames) if not LIBRARY.search(frame["path"])]
    if not own:
        return ""
    line = frames[own[-1]]
    place = f"{line['function']} ({os.path.basename(line['path'])}:{line['line']})"
    called = [frame["function"] for frame in frames[own[-1] + 1 :] if frame["function"] != _DECORATOR]
    return f"{place} in {called[0]}" if called else place
