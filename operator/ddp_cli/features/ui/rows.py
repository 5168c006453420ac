"""The list of jobs as typed rows, and the order in which a person must look at them. Pure."""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Final, NamedTuple

from ddp_cli.client.points import read_points
from ddp_cli.features.ui.curves import draw_sparkline
from ddp_cli.features.ui.run import RecordedRun
from ddp_cli.view.texts import format_estimate
from ddp_cli.view.why import Why, has_diverged, name_stragglers
from ddp_operator.api.kubeobjects import parse_time
from ddp_operator.api.parse import parse_status
from ddp_operator.api.resources import count_pod_gpus
from ddp_operator.api.status import ENDED_PHASES, Condition, Progress, QueueStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts, other_reasons

_NEWS: Final = timedelta(days=1)
"""A job that failed longer ago does not need a person any more."""
_LONGEST: Final = 300
_PATIENCE: Final = timedelta(minutes=5)
"""A job that still starts, or is restarted, after this time needs a person."""
_QUEUED: Final = (c.QUOTA_PENDING, c.QUEUE_STOPPED, c.WAITING_FOR_PODS, c.UNSCHEDULABLE)
_BROKEN: Final = frozenset(c.BLOCKING) - frozenset(_QUEUED)


class Attention(IntEnum):
    """What a row asks of a person, in the order of the list."""

    NEEDS_YOU = 0
    WAITING = 1
    TRAINING = 2
    SUSPENDED = 3
    ENDED = 4
    DELETED = 5

    @property
    def title(self) -> str:
        """Its words in the list."""
        return self.name.replace("_", " ").capitalize()


class State(NamedTuple):
    """The word on the badge of a job, and the name of its colour."""

    word: str
    tone: str


UNKNOWN: Final = State("Unknown", "bad")


@dataclass(frozen=True, slots=True)
class Row:
    """A job in the list. ``key``: its path below the page's address. ``needs_gpus``: it holds none now."""

    key: str
    name: str
    place: str
    phase: str = "Unknown"
    state: State = UNKNOWN
    attention: Attention = Attention.NEEDS_YOU
    reason: str = ""
    percent: float | None = None
    progress: Progress = field(default_factory=Progress)
    restarts: int | None = None
    gpus: str = ""
    needs_gpus: bool = False
    is_in_use: bool = False
    """Whether it has machines now: each minute of it costs GPUs."""

    curve: str = ""
    trains: bool = False
    """Whether its pace is that of now."""

    started: datetime | None = None
    """When it was submitted, if it ``waits`` for its first start."""

    waits: bool = False
    uid: str = ""


def name_state(status: Status, why: Why, attention: Attention) -> State:
    """Return what the badge of a job shows: what matters to a person, in the words of the list's filters."""
    phase: str = why.phase
    if phase == "Held" and status.dev is not None:
        phase = status.dev.result or phase
    if why.reason == other_reasons.INTERRUPTED or phase in ("Failed", "Rejected", "Unknown"):
        return State(other_reasons.INTERRUPTED if why.reason == other_reasons.INTERRUPTED else phase, "bad")
    if phase == "Succeeded":
        return State("Doubtful", "warn") if doubts.find_doubts(status) else State(phase, "good")
    if attention is Attention.NEEDS_YOU:
        word = (
            "Blocked" if _find_stop(status) is not None else "Diverged" if has_diverged(status.progress) else "At risk"
        )
        return State({other_reasons.STALLED: "Hangs", "NoOperator": "No operator"}.get(why.reason, word), "bad")
    tones = {Attention.TRAINING: "busy", Attention.SUSPENDED: "idle"}
    return State(phase if phase in ("Stopped", "Lost", "Held") else attention.title, tones.get(attention, "wait"))


def is_training(status: Status, why: Why) -> bool:
    """Return whether a job makes steps, so that its pace is that of now."""
    return status.phase == "Running" and _find_stop(status) is None and why.reason != "NoOperator"


def _find_stop(status: Status) -> Condition | None:
    """Return the condition for which a job makes no steps; None: it may make some, with a defect or without."""
    obstacle = c.find_obstacle(status)
    return None if obstacle is None or obstacle.reason in c.DEFECTS else obstacle


def judge_attention(status: Status, why: Why, now: datetime) -> Attention:
    """Return what a job asks of a person: this decides what stands on top, and what the pages emphasize."""
    phase = why.phase
    if phase == "Succeeded":
        return Attention.NEEDS_YOU if doubts.find_doubts(status) and _is_news(status, now) else Attention.ENDED
    if phase in ("Failed", "Rejected"):
        return Attention.NEEDS_YOU if _is_news(status, now) else Attention.ENDED
    if phase == "Suspended":
        return Attention.SUSPENDED
    if phase == "Held":
        return Attention.WAITING
    stop = _find_stop(status)
    if why.reason == "NoOperator" or phase == "Unknown" or why.reason in (other_reasons.STALLED, c.INADMISSIBLE):
        return Attention.NEEDS_YOU
    if stop is None:
        is_doubtful = status.is_false(c.TRAINS_AS_ONE) or status.is_false(c.UPLOADED)
        return Attention.NEEDS_YOU if is_doubtful or has_diverged(status.progress) else Attention.TRAINING
    is_late = now - stop.last_transition_time > _PATIENCE
    is_late = is_late and why.reason not in _QUEUED  # a queue may take days
    return Attention.NEEDS_YOU if why.reason in _BROKEN or is_late else Attention.WAITING


def build_row(
    resource: Mapping[str, Any], now: datetime, *, key: str, place: str = "", command: str = "", under_way: bool = True
) -> Row:
    """Return the row of a resource; one that cannot be read has a row with the reason.

    ``command``, ``under_way``: of a run on this machine, as in ``RecordedRun``.
    """
    metadata = resource["metadata"]
    row = Row(key, str(metadata["name"]), place or str(metadata.get("namespace") or ""))
    try:
        status = parse_status(resource)
        points = read_points(status.points)
        run = RecordedRun(resource, status, points, (), row.name, under_way=under_way, command=command)
        return _fill(row, run, run.explain(now), now)
    except Exception as error:  # the fields come from users and other versions; a row may not end the page
        return replace(row, reason=f"This job cannot be read: {type(error).__name__}: {error}"[:_LONGEST])


def _fill(row: Row, run: RecordedRun, why: Why, now: datetime) -> Row:
    status = run.status
    attention = judge_attention(status, why, now)
    progress = status.progress or Progress()
    metadata = run.resource["metadata"]
    held = str((status.usage and status.usage.gpus) or "")
    needs_gpus = not held and status.phase in (None, "Pending", "Suspended")
    created = parse_time(metadata.get("creationTimestamp"))
    waits = attention is not Attention.ENDED and status.progress is None and not status.is_true(c.SCHEDULED)
    points = [(point["time"], point["loss"]) for point in run.rows if "loss" in point]
    return replace(
        row,
        phase=why.phase,
        state=name_state(status, why, attention),
        attention=attention,
        reason=describe_state(status, why, attention, now),
        percent=100.0 if why.phase == "Succeeded" and not doubts.find_doubts(status) else read_percent(progress),
        progress=progress,
        restarts=status.restarts.all,
        gpus="" if status.phase in ENDED_PHASES else held or _count_gpus(run.resource),
        needs_gpus=needs_gpus,
        is_in_use=not needs_gpus and status.phase not in ENDED_PHASES,
        curve=draw_sparkline(points),
        trains=is_training(status, why),
        started=(waits and created) or status.start_time or created,
        waits=waits,
        uid=str(metadata.get("uid") or ""),
    )


def describe_state(status: Status, why: Why, attention: Attention, now: datetime) -> str:
    """Return in few words why a job is in its state: the list has room for three short lines."""
    failure = status.last_failure
    obstacle = c.find_obstacle(status)
    text = describe_what(why)
    if failure is not None and why.phase in ("Failed", "Rejected"):
        text = f"{failure.category} of rank {failure.rank}: {failure.message}"
    elif obstacle is not None and why.reason == other_reasons.STALLED:
        text = obstacle.message
    elif status.queue is not None and attention is Attention.WAITING and why.phase != "Held":
        text = _describe_queue(status.queue, now)
    elif attention is Attention.TRAINING:
        text = name_stragglers(status)
    return (text[:1].upper() + text[1:])[:_LONGEST]


def describe_what(why: Why) -> str:
    """Return the explanation without the name of the job, which the list and the page have beside it."""
    text = why.what.removeprefix(why.name).strip()
    for verb in ("is ", "has been ", "has "):
        text = text.removeprefix(verb)
    return text[:1].upper() + text[1:]


def read_percent(progress: Progress) -> float | None:
    """Return the finished part, 0 to 100; None: it is unknown."""
    try:
        value = float((progress.percent or "").rstrip("%"))
    except ValueError:
        return None
    return min(100.0, max(0.0, value)) if math.isfinite(value) else None


def _describe_queue(queue: QueueStatus, now: datetime) -> str:
    """Return the expected start and the place in a queue."""
    start = ""
    if queue.start_p50 is not None:
        start = f"Expected to start in about {format_estimate((queue.start_p50 - now).total_seconds())}. "
    waits = f", waits for {queue.waits_for}" if queue.waits_for else ""
    return f"{start}Place {queue.position} of {queue.of} in {queue.cluster_queue}{waits}"


def _count_gpus(resource: Mapping[str, Any]) -> str:
    with suppress(AttributeError, LookupError, TypeError, ValueError):  # an incomplete or invalid spec
        spec = resource["spec"]
        return str(count_pod_gpus(spec["template"]["spec"]) * int(spec.get("nodes") or 1) or "")
    return ""


def _is_news(status: Status, now: datetime) -> bool:
    return status.completion_time is None or now - status.completion_time < _NEWS


def sort_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that need a person first, of these the jobs that cost GPUs now, then the newest."""
    return sorted(
        rows, key=lambda row: (row.attention, not row.is_in_use, -(row.started.timestamp() if row.started else 0.0))
    )
