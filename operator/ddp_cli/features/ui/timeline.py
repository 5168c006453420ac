"""The life of a job as bars, from its Events, its conditions, and the steps that it is known to have made. Pure."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from ddp_cli.features.ui.run import LATE_SECONDS, RESTART, RecordedRun, Row, count_steps, split_processes
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_pod.contract.failure_table import HANG, NODE_LOST, POD_DELETED

_MOST_BARS: Final = 200
_NO_STEPS: Final = "no steps"
_STALLED: Final = "stalled"
_SILENT: Final = "no contact"
_LOST: Final = "pod lost"
_STARTS: Final = {
    c.SCHEDULED: "start",
    c.RENDEZVOUSED: "first step",
    c.TRAINING: "steps",
    c.SUSPENDED: "suspended",
    c.RESUMED: "queue",
    other_reasons.STALLED: _STALLED,
    other_reasons.NODE_NOT_READY: _SILENT,
    other_reasons.NODE_SILENT: _SILENT,
    c.PEER_UNREACHABLE: _SILENT,
    **dict.fromkeys((c.GROUP_RESTART, c.RESTARTED_IN_PLACE, c.RESIZED, c.DISRUPTED, c.DRAINED), "restart"),
}
"""Reasons of Events and conditions, and what a job does after each."""
_BEFORE: Final = {
    HANG.name: _STALLED,
    NODE_LOST.name: _LOST,
    POD_DELETED.name: _LOST,
    c.POD_REPLACEMENT: _LOST,
}
"""Causes of a restart that state what the job did from its last step until they were found."""


class Bar(NamedTuple):
    """A part of a job's life, in seconds since its start."""

    kind: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """Its duration in seconds."""
        return self.end - self.start


class _Stretch(NamedTuple):
    """A time in which a process made steps. ``spacing``: between two known ones of them, at most."""

    first: float
    last: float
    spacing: float

    def find_end(self, kind: str) -> float:
        """Return until when a change of a kind is one that is known late, as that its process has begun."""
        return max(self.last, self.first + LATE_SECONDS) if kind == "first step" else self.last


class _Change(NamedTuple):
    """From when on a job does something. ``before``: what it did since its last step, if that is known now."""

    time: float
    kind: str
    before: str = ""
    spacing: float = 0.0


def list_bars(run: RecordedRun, now: datetime) -> list[Bar]:
    """Return what a job did from its start to its end: queue, start, first step, steps, stalls, restarts."""
    is_open = run.under_way and run.status.completion_time is None
    end = now.timestamp() if is_open else run.start + run.end
    known = [mark for mark in run.marks if mark.label != RESTART or mark.cause]  # not only by a later process's steps
    reported = [_Change(run.start + mark.time, "restart", _BEFORE.get(mark.label, "")) for mark in known]
    reported += _list_reported(run)
    stretches = _list_stretches(run, reported)
    outside = [change for change in reported if not _is_within(change, stretches)]
    changes = [
        _Change(run.start, "queue"),
        *(_Change(part.last, _NO_STEPS, spacing=part.spacing) for part in stretches),
        *sorted(outside, key=lambda change: change.time),
        *(_Change(part.first, "steps") for part in stretches),
    ]
    changes.sort(key=lambda change: change.time)
    is_over = run.status.phase in ENDED_PHASES or run.interrupted
    before = ""
    if is_over and changes[-1].kind == "restart":
        before = changes.pop().before  # nothing came after this failure
    elif changes[-1].kind == _NO_STEPS and run.status.is_true(c.PROGRESSING):
        changes.pop()  # newer steps are not read
    return _draw([*changes, _Change(end, "", before)], run.start)


def _is_within(change: _Change, stretches: Sequence[_Stretch]) -> bool:
    """Return whether steps were made before and after a change."""
    place = bisect_left(stretches, change.time, key=lambda part: part.first)
    return place > 0 and change.time < stretches[place - 1].find_end(change.kind)


def _list_reported(run: RecordedRun) -> Iterator[_Change]:
    """Yield the changes that Events and conditions report: Events are deleted after an hour."""
    for event in run.events:
        if event.reason in _STARTS:
            yield _Change(event.time, _STARTS[event.reason])
    for kind in (c.SCHEDULED, c.RENDEZVOUSED):
        condition = run.status.condition(kind)
        if condition is not None and condition.status == "True" and run.status.attempt == 1:
            yield _Change(condition.last_transition_time.timestamp(), _STARTS[kind])
    progressing = run.status.condition(c.PROGRESSING)
    if progressing is not None and progressing.reason in _STARTS and progressing.status == "False":
        yield _Change(progressing.last_transition_time.timestamp(), _STARTS[progressing.reason])


def _list_stretches(run: RecordedRun, reported: Sequence[_Change]) -> list[_Stretch]:
    """Return when steps were made: by each process, and before and after each stall."""
    stops = sorted(change.time for change in reported if change.kind in (_STALLED, _SILENT))
    turns = sorted(change.time for change in reported if change.kind != "first step")
    stretches = []
    ended = run.start
    for process in split_processes(run.rows):
        first = _find_first_step(process[0], ended, turns)
        ended = process[-1]["time"]
        made = [process[0]["time"]]
        made += [row["time"] for before, row in pairwise(process) if count_steps(row) != count_steps(before)]
        for _, part in groupby(made, key=lambda time: bisect_right(stops, time)):
            times = list(part)
            spacing = max((later - time for time, later in pairwise(times)), default=0.0)
            stretches.append(_Stretch(min(first, times[0]), times[-1], spacing))
            first = math.inf
    return stretches


def _find_first_step(row: Row, ended: float, turns: Sequence[float]) -> float:
    """Return when the first step of a process began: its first row has the seconds of the steps until then.

    That would hide what was reported between the two, so then it is the time of the row. ``ended``: the time of the
    last row of the process before it; ``turns``: when the job did something else, sorted.
    """
    began = row["time"] - row.get("step_seconds", 0.0)
    is_clear = began > ended and bisect_right(turns, began) == bisect_right(turns, row["time"])
    return began if is_clear else row["time"]


def _draw(changes: Sequence[_Change], start: float) -> list[Bar]:
    """Return a bar for each change that lasts; equal ones that follow each other are one."""
    bars: list[Bar] = []
    has_steps = False
    for change, after in pairwise(changes):
        kind = change.kind
        if kind == _NO_STEPS:
            kind = _name_pause(change, after)
        elif kind == "first step" and has_steps:
            kind = "restart"
        has_steps = has_steps or kind == "steps"
        until = min(after.time, changes[-1].time) - start
        if until <= change.time - start or not kind:
            continue
        if bars and bars[-1].kind == kind:
            bars[-1] = bars[-1]._replace(end=until)
        else:
            bars.append(Bar(kind, change.time - start, until))
    return bars[-_MOST_BARS:]


def _name_pause(pause: _Change, after: _Change) -> str:
    """Return what a job did between its last known step and a change."""
    seconds = after.time - pause.time
    known = after.kind if after.kind in (_STALLED, _SILENT) else after.before
    if seconds <= LATE_SECONDS and after.kind == "restart" and not known:
        return after.kind  # it had begun when it was reported
    if seconds <= pause.spacing:
        return "steps"  # the next point was not due yet
    if seconds <= LATE_SECONDS and after.kind not in ("", "steps") and not known:
        return after.kind
    return known or _NO_STEPS
