"""A run or job as rows, marks, Events and pods: what its page shows. Read here from a run's folder."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ddp_cli.local.ending import explain_interruption, read_record
from ddp_cli.local.folder import RunFolder
from ddp_cli.view.failures import describe_place
from ddp_cli.view.why import Why, explain_why, keep_local_advice
from ddp_operator.api.parse import parse_status
from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.failures import describe_detail
from ddp_operator.decide.report import Page
from ddp_pod.contract.failure_table import UNKNOWN
from ddp_pod.contract.thinning import is_new_process

Point = tuple[float, float]
Row = Mapping[str, float]

_FAILURE = "Failure"
_OTHER_CAUSES = (c.RESIZED, c.DISRUPTED, c.POD_REPLACEMENT, c.RESUMED, c.NODES_READMITTED)
_SAME_ATTEMPT = (c.RESTARTED_IN_PLACE, c.POD_REPLACEMENT, c.RESIZED)
"""Restarts that can leave the attempt as it is."""
RESTART = "restart"
_SAME_SECONDS = 60.0
_PACE = ("samples_per_second", "steps_per_second")
_ATTEMPT = re.compile(r"\Aattempt \d+: ")
"""How the message of a failure begins, whose mark has a result."""
LATE_SECONDS = 15.0
"""After this time the operator has reported an in-place restart."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A failure or restart: seconds since the run's start, a short label, the full cause, what followed, and the number
    of the attempt that began with it, else 0."""

    time: float
    label: str
    cause: str = ""
    result: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """A line of events.log. ``time``: Unix seconds."""

    time: float
    type: str
    reason: str
    message: str


class PodFacts(NamedTuple):
    """A pod of the newest attempt, with its index and its last report; None: not known."""

    number: int | None
    name: str = ""
    node: str = ""
    state: str = ""
    report: Page | None = None


@dataclass(slots=True)
class RecordedRun:
    """A run for the page. Times are seconds since its start, ``start`` is in Unix seconds, and nothing follows ``end``.

    ``command`` and ``facts`` (host, versions, commit) are empty for an older folder. ``under_way``: a `ddp run` still
    writes the folder. ``rows`` and ``events`` may be given in any order; rows after a process's last step are left out.
    """

    resource: Mapping[str, Any]
    status: Status
    rows: Sequence[Row]
    events: Sequence[LoggedEvent]
    name: str
    under_way: bool
    command: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    pods: Sequence[PodFacts] = ()
    start: float = field(init=False)
    end: float = field(init=False)
    marks: Sequence[Mark] = field(init=False)

    def __post_init__(self) -> None:
        """Sort what was given, and find the start, the end and the marks."""
        rows = sorted(self.rows, key=lambda row: row["time"])
        self.rows = [row for process in split_processes(rows) for row in _end_at_last_step(process)]
        self.events = sorted(self.events, key=lambda event: event.time)
        ended = self.status.completion_time
        times = [time.timestamp() for time in (self.status.start_time, ended) if time]
        times += [row["time"] for row in rows] + [event.time for event in self.events]
        self.start = min(times, default=0.0)
        self.end = (ended.timestamp() if ended else max(times, default=0.0)) - self.start
        causes = [*self.events, *_recall_restart(self.status, self.events)]
        self.marks = marks = find_marks(self.rows, causes, self.start)
        if marks and not marks[-1].result and _is_fatal(self.status, self.events):
            marks[-1] = replace(marks[-1], result="the job failed")

    @property
    def interrupted(self) -> bool:
        """Whether `ddp run` ended before the job did."""
        failed = self.status.condition(c.FAILED)
        closed = failed is not None and failed.reason == other_reasons.INTERRUPTED
        return closed or (not self.under_way and self.status.phase not in ENDED_PHASES)

    def explain(self, now: datetime, why: Why | None = None) -> Why:
        """Return its explanation, with advice for its place. ``why``: what is known from more than its status."""
        why = why or explain_why(self.resource, (), now)
        if self.interrupted:
            text = explain_interruption(self.resource, self.status, self.command)
            what, _, remedy = text.partition(" Start it with: ")
            return Why(
                why.name, "Failed", other_reasons.INTERRUPTED, what, f"Start it with: {remedy}" if remedy else ""
            )
        return keep_local_advice(why) if self.command else why

    @property
    def step_hint(self) -> str:
        """Why no step of the script is visible, and the remedy; empty: one is, or pod 0 has not reported."""
        return next((pod.report.step_hint for pod in self.pods if pod.report is not None and pod.number == 0), "")

    @property
    def checkpoints(self) -> list[Point]:
        """The time of each checkpoint's first report, and its step."""
        times: dict[float, float] = {}
        for row in self.rows:
            if row.get("checkpoint_step", 0.0) > 0:
                times.setdefault(row["checkpoint_step"], row["time"] - self.start)
        return [(time, step) for step, time in times.items()]


def read_run(path: Path) -> RecordedRun:
    """Return the contents of a run folder; missing parts are empty. Raises: ValueError, if it is not a run folder."""
    folder = RunFolder(path)
    if not folder.status.exists():
        raise ValueError(f"{path}: not a run folder of `ddp run`: status.yaml is missing")
    under_way = folder.in_use  # read before the status: a run that ends meanwhile was not interrupted
    try:
        resource = read_record(folder)
    except ValueError as error:
        raise ValueError(
            f"{folder.status}: invalid ({str(error).splitlines()[0]}); restore or delete the run"
        ) from None
    status = parse_status(resource)
    reports = folder.read_pod_reports(status.attempt)
    state = "" if under_way else "ended"
    return RecordedRun(
        resource,
        status,
        [row for row in folder.read_rows() if "time" in row],
        parse_events(folder.read_events()),
        name=path.resolve().name,
        command=folder.command_line,
        facts=folder.facts,
        under_way=under_way,
        pods=[PodFacts(number, state=state, report=page) for number, page in reports],
    )


def _recall_restart(status: Status, events: Sequence[LoggedEvent]) -> list[LoggedEvent]:
    """Return an event for the last restart, if it has none any more: the API server deletes Events after an hour."""
    restart = status.last_restart
    if restart is None or not restart.cause:
        return []
    time = restart.time.timestamp()
    if any(_is_cause(event) and abs(event.time - time) < _SAME_SECONDS for event in events):
        return []
    failure = status.last_failure
    is_failure = failure is not None and failure.category == restart.cause
    message = f"{describe_place(failure)}: {describe_detail(failure)}" if failure is not None and is_failure else ""
    return [LoggedEvent(time, "Warning", f"{_FAILURE}{restart.cause}" if is_failure else restart.cause, message)]


def _is_cause(event: LoggedEvent) -> bool:
    return event.reason.startswith(_FAILURE) or event.reason in _OTHER_CAUSES


def _is_fatal(status: Status, events: Sequence[LoggedEvent]) -> bool:
    """Return whether the last failure of the sorted events ended the job: no attempt and no restart followed it."""
    failure = status.last_failure
    times = [event.time for event in events if event.reason.startswith(_FAILURE)]
    if not times or status.phase != "Failed" or failure is None or failure.attempt != status.attempt:
        return False
    # A restart is reported with its failure, and the order of Events in a second is not known.
    return not any(event.reason in _SAME_ATTEMPT and event.time >= times[-1] // 1 for event in events)


def split_processes(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each process of rank 0. A new one has a later attempt, or its step counter decreases."""
    parts: list[list[Row]] = []
    for row in rows:
        if not parts or is_new_process(parts[-1][-1], row):
            parts.append([])
        parts[-1].append(row)
    return parts


def count_steps(row: Row) -> float:
    """Return what grows with each step of a process; if no steps are counted, each row is one."""
    return row.get("steps", row.get("step", row["time"]))


def _end_at_last_step(process: Sequence[Row]) -> list[Row]:
    """Return the rows of a process until its last step, with what was measured after it, but for the pace."""
    last = len(process) - 1
    while last and count_steps(process[last - 1]) == count_steps(process[last]):
        last -= 1
    measured = {name: value for name, value in process[-1].items() if name not in _PACE}
    return [*process[:last], {**process[last], **measured, "time": process[last]["time"]}]


def _describe_restart(before: Row, after: Row) -> tuple[str, int]:
    """Return the result and the attempt of a mark between two rows."""
    attempt = int(after.get("attempt", 0))
    former = int(before.get("attempt", attempt))
    result = f"restarted {'as' if attempt > former else 'in'} attempt {attempt}" if attempt else "restarted"
    return result, attempt if attempt > former else 0


def find_marks(rows: Sequence[Row], events: Sequence[LoggedEvent], start: float) -> list[Mark]:
    """Return each failure, and each other restart of rank 0's process with its event.

    An event may be some seconds later than the first row after the restart.
    """
    marks = []
    gaps = [(before[-1], after[0]) for before, after in pairwise(split_processes(rows))]
    causes = [event for event in events if _is_cause(event)]
    for event in causes:
        # An event's time is truncated to a second.
        inside = (gap for gap in gaps if gap[0]["time"] - 1 < event.time <= gap[1]["time"])
        earlier = (gap for gap in gaps if gap[1]["time"] < event.time <= gap[1]["time"] + LATE_SECONDS)
        gap = next(chain(inside, earlier), None)
        if gap is not None:
            gaps.remove(gap)
        elif not event.reason.startswith(_FAILURE):
            continue  # the mark of the failure before it has the details
        last = gap[0]["time"] if gap else 0.0
        time = last if gap is not None and event.time > gap[1]["time"] else max(event.time, last)
        label = event.reason.removeprefix(_FAILURE)
        cause = _ATTEMPT.sub("", event.message).removeprefix(f"{label} ")
        result = _describe_restart(*gap) if gap is not None else ()
        marks.append(Mark(time - start, RESTART if label == UNKNOWN.name else label, cause, *result))
    marks += [Mark(gap[0]["time"] - start, RESTART, "", *_describe_restart(*gap)) for gap in gaps]
    return sorted(marks, key=lambda mark: mark.time)


def split_step_time(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with data, compute and wait in milliseconds a step since the row before; none if not measured."""
    needed = ("steps", "step_seconds", "data_seconds", "compute_seconds")
    found: list[Row] = []
    for before, after in pairwise(rows):
        if is_new_process(before, after) or not all(name in before and name in after for name in needed):
            continue
        steps, whole, data, compute = (after[name] - before[name] for name in needed)
        if steps > 0 and min(whole, data, compute) >= 0:
            wait = max(0.0, whole - data - compute)
            parts = {"data": data, "compute": compute, "wait": wait}
            found.append({**after, **{name: 1000 * seconds / steps for name, seconds in parts.items()}})
    return found if any(row["data"] or row["compute"] for row in found) else []


def parse_events(text: str) -> list[LoggedEvent]:
    """Return the lines of an events.log."""
    events = []
    for line in text.splitlines():
        match = re.fullmatch(r"(\S+) (\w+) (\w+): (.*)", line)
        if match:
            with suppress(ValueError):
                events.append(LoggedEvent(datetime.fromisoformat(match[1]).timestamp(), *match.groups()[1:]))
    return events
