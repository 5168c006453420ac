"""Where the ranks were whose collectives did not match, after gloo has aborted one: its error names no rank.

The aborted rank's main thread is in faulthandler's report. The others have lost their connection to it in a collective,
and their tracebacks show in which. Those of other pods share it through the rendezvous store.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ..base.exceptions import LIBRARY
from ..base.files import is_own_file
from ..contract.failure_record import Failure
from .kinds import OTHER_SIZES

_REPORT: Final = "Fatal Python error: "
# The first line of what faulthandler.dump_traceback_later() writes, before the stacks of all threads.
_TIME_LIMIT: Final = re.compile(r"^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$", re.M)
_WAITS: Final = re.compile(r"[/\\]torch[/\\](distributed[/\\]|nn[/\\]parallel[/\\]dist|autograd[/\\]graph\.py)")
_THREAD: Final = re.compile(r"^(?:Current t|T)hread 0x\w+[^\n]*:$", re.M)
_TRACEBACK: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+),? in (?P<function>.*)$', re.M)
_SHIM: Final = "_run_and_record"  # of the rank's own process, below the script
_DECORATOR: Final = "wrapper"
_MOST: Final = 4  # ranks
_PLACE_LIMIT: Final = 200  # characters


class RankPlace(NamedTuple):
    """A rank of a pod, and its line of the script with the library's function that it has called."""

    rank: int
    pod: int
    place: str


def find_timed_stack(output: str) -> str:
    """Return the main thread's stack at which faulthandler.dump_traceback_later() has ended a rank; empty: it has not.

    Output of the script after the stacks shows that it went on.
    """
    report = _TIME_LIMIT.split(output)[-1]
    is_last = all(_FRAME.match(line) or _THREAD.match(line) or line in ("", "  ...") for line in report.splitlines())
    return _read_main_stack(report) if is_last else ""


def is_wait(stack: str) -> bool:
    """Return whether the innermost call of a stack waits for other ranks."""
    return bool(_WAITS.search(stack.rpartition("\n")[2]))


def find_main_stack(output: str) -> str:
    """Return the main thread's stack in the last report of a crash, the innermost call last; empty: unknown."""
    return _read_main_stack(output.rpartition(_REPORT)[2])


def _read_main_stack(report: str) -> str:
    for thread in _THREAD.split(report)[1:]:
        frames = list(_FRAME.finditer(thread))
        if any(frame["function"] == _SHIM for frame in frames):
            lines = [frame[0] for frame in reversed(frames) if not is_own_file(frame["path"])]
            return "\n".join(["Stack (most recent call last):", *lines])
    return ""


def add_places(failures: Sequence[Failure], peers: Sequence[RankPlace] = ()) -> list[Failure]:
    """Return the failures of a pod's ranks, those about collectives that do not match with the ranks' places.

    ``peers``: the places of ranks of other pods that have lost a peer.
    """
    own = _list_places(failures, _is_side) if any(map(_is_mismatch, failures)) else []
    text = f"mismatch between collectives: {_describe([*own, *peers], with_pods=bool(peers))}"
    return [
        replace(failure, message=f"{text} ({failure.message})") if own and _is_mismatch(failure) else failure
        for failure in failures
    ]


def find_lost_places(failures: Sequence[Failure]) -> list[RankPlace]:
    """Return where ranks of a pod have lost a peer: the error of that peer may not name them."""
    return _list_places(failures, _is_secondary)[:_MOST]


def read_places(records: Sequence[Any], pod: int) -> list[RankPlace]:
    """Return the places that pods have shared, without those of one pod and malformed ones."""
    places = [
        RankPlace(*record) for record in records if type(record) is list and len(record) == len(RankPlace._fields)
    ]
    kinds = [int, int, str]
    return [
        place._replace(place=place.place[:_PLACE_LIMIT])
        for place in places
        if list(map(type, place)) == kinds and place.pod != pod
    ]


def _describe(places: Sequence[RankPlace], *, with_pods: bool) -> str:
    """Return where some ranks were: of each place one, and then further ones."""
    firsts = {place.place: place for place in reversed(places)}.values()
    shown = [*firsts, *(place for place in places if place not in firsts)][:_MOST]
    return "; ".join(
        f"rank {place.rank}{f' (pod {place.pod})' if with_pods else ''} was at {place.place}" for place in sorted(shown)
    )


def _is_mismatch(failure: Failure) -> bool:
    return bool(OTHER_SIZES.search(failure.message)) and not failure.secondary


def _is_secondary(failure: Failure) -> bool:
    return failure.secondary


def _is_side(failure: Failure) -> bool:
    return failure.secondary or _is_mismatch(failure)


def _list_places(failures: Sequence[Failure], condition: Callable[[Failure], bool]) -> list[RankPlace]:
    places = [
        RankPlace(failure.rank or 0, failure.pod_index or 0, find_place(failure.traceback)[:_PLACE_LIMIT])
        for failure in failures
        if condition(failure)
    ]
    return [place for place in places if place.place]


def find_place(traceback: str) -> str:
    """Return the innermost line of the script in a traceback, and the library's function that it called."""
    frames = list(_FRAME.finditer(traceback.rpartition(_TRACEBACK)[2]))
    own = [number for number, frame in enumerate(frames) if not LIBRARY.search(frame["path"])]
    if not own:
        return ""
    line = frames[own[-1]]
    place = f"{line['function']} ({os.path.basename(line['path'])}:{line['line']})"
    called = [frame["function"] for frame in frames[own[-1] + 1 :] if frame["function"] != _DECORATOR]
    return f"{place} in {called[0]}" if called else place
