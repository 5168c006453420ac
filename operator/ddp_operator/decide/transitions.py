"""From one status to the next: history rows to add, Events to emit, transitions to count. Pure.

A repeated pass has equal statuses, so it adds, emits and counts nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Literal

from msgspec.structs import replace

from ddp_operator.api.cluster import Event
from ddp_operator.api.columns import render_columns
from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.status import (
    ENDED_PHASES,
    Condition,
    ConditionStatus,
    History,
    LastFailure,
    Status,
)
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import find_doubts
from ddp_operator.decide.failures import describe_failure, describe_restart
from ddp_operator.decide.kueue import QUEUE_REASONS
from ddp_operator.decide.losses import describe_replacement
from ddp_operator.decide.usage import list_purposes
from ddp_pod.contract.failure_table import CATEGORIES, CUDA, UNKNOWN
from ddp_pod.contract.numbers import parse_count

RECOVERY_LEVELS: Final = ("process", "pod", "group")
NO_FAILURE: Final = "None"
"""Category of a restart without a failure: a resize, a disruption of unknown cause."""
RESTART_CATEGORIES: Final = (NO_FAILURE, *CATEGORIES)
STAGES: Final = ("rendezvous", "first_step")
_MAX_MESSAGE: Final = 1000
_MAX_LOGGED: Final = 300

_WARNINGS: Final = frozenset((*c.BLOCKING, c.UNREACHABLE)) - {c.QUOTA_PENDING}
_EVENT_TYPES: Final = (
    *(c.SUSPENDED, c.INPUTS_READY, c.SCHEDULED, c.RENDEZVOUSED, c.NODES_HEALTHY),
    *(c.FEATURES_WORK, c.UPLOADED),
    *(c.TRAINS_AS_ONE, c.TRAINING_COMPLETE, c.SUCCEEDED, c.FAILED),
)
"""Conditions whose transitions are Events, in the order in which they happen."""
_HEALTHY_IF_TRUE: Final = (c.TRAINS_AS_ONE, c.TRAINING_COMPLETE, c.NODES_HEALTHY, c.FEATURES_WORK, c.UPLOADED)
_SILENCE_EVENTS: Final[Mapping[str, Literal["Normal", "Warning"]]] = {
    c.HELD: "Normal",
    c.NODE_NOT_READY: "Warning",
    c.NODE_SILENT: "Warning",
    c.PEER_UNREACHABLE: "Warning",
    c.WAITING_FOR_PEERS: "Normal",
}
"""Reasons of Progressing of which each new one is an Event."""
MAX_ROWS: Final = 60
COLUMNS: Final = (
    *("time", "restarts", "epoch", "step", "loss", "samples_per_second", "steps_per_second", "learning_rate"),
    *("validation_accuracy", "validation_loss", "checkpoint_step"),
)
_SOON: Final = 0.9  # of the usual gap: passes are a little early and late


@dataclass(frozen=True, slots=True)
class Failed:
    """A new failure."""

    category: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """Training was restarted on one of the three levels."""

    level: Literal["process", "pod", "group"]
    category: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Reached:
    """The first attempt reached a stage, seconds after it was started or resumed."""

    stage: Literal["rendezvous", "first_step"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has succeeded or failed."""

    result: Literal["Succeeded", "Failed"]


@dataclass(frozen=True, slots=True)
class Used:
    """GPUs held for a purpose: Productive, Waiting, or a cause of ``status.usage.lost``. ``profile`` may be empty."""

    purpose: str
    gpu_seconds: int
    profile: str = ""


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """A node caused a failure of a job with GPUs: it was lost, its GPU failed, or the job left it as unhealthy."""

    node: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """A job has succeeded, but may not have trained as intended."""

    reason: str


Transition = Doubted | Failed | Restarted | Reached | Ended | Used | NodeFailed


def find_transitions(old: Status, new: Status, now: datetime) -> tuple[Transition, ...]:
    """Return the transitions between two statuses of one job."""
    return tuple(_iterate_transitions(old, new, now))


def _iterate_transitions(old: Status, new: Status, now: datetime) -> Iterator[Transition]:
    category = _find_failure_category(old, new)
    if category != NO_FAILURE:
        yield Failed(category)
    yield from _list_restarts(old, new, category)
    if new.attempt == 1:
        yield from _list_stages(old, new, now)
    for result in (c.SUCCEEDED, c.FAILED):
        if new.is_true(result) and not old.is_true(result):
            yield Ended("Succeeded" if result == c.SUCCEEDED else "Failed")
            yield from (Doubted(condition.reason) for condition in find_doubts(new))
    yield from _list_failed_nodes(old, new, category)
    yield from _list_usage(old, new)


def describe_end(metadata: Mapping[str, Any], old: Status, new: Status) -> dict[str, object]:
    """Return what a log line states about a job that has ended. ``old``: the status before; it still has the GPUs."""
    failure = new.last_failure if new.phase == "Failed" else None
    end = new.condition(c.FAILED if new.phase == "Failed" else c.SUCCEEDED)
    start = new.start_time
    ended = new.completion_time
    return {
        "event": "JobEnded",
        **{name: metadata[name] for name in ("namespace", "name", "uid")},
        "phase": new.phase,
        "reason": end.reason if end is not None else "",
        "category": failure.category if failure is not None else "",
        "message": (end.message if end is not None else "")[:_MAX_LOGGED],
        "node": failure.node_name if failure is not None else "",
        "attempts": new.attempt,
        "restarts": new.counts.all,
        "seconds": round((ended - start).total_seconds()) if start and ended else 0,
        "step": new.progress.step if new.progress is not None else None,
        "checkpointStep": new.checkpoint.step if new.checkpoint is not None else None,
        "pods": new.nodes.desired,
        "gpus": old.usage.gpus if old.usage is not None else 0,
        "gpuSeconds": new.usage.gpu_seconds if new.usage is not None else 0,
        "queue": (metadata.get("labels") or {}).get(KUEUE_QUEUE_LABEL, ""),
    }


def _find_failure_category(old: Status, new: Status) -> str:
    failure = _find_new_failure(old, new)
    if failure is None:
        return NO_FAILURE
    return failure.category if failure.category in CATEGORIES else UNKNOWN.name


def _list_restarts(old: Status, new: Status, category: str) -> Iterator[Restarted]:
    cause = UNKNOWN.name if category == NO_FAILURE else category
    in_place = new.counts.own_in_place - old.counts.own_in_place
    if in_place > 0:
        yield Restarted("process", cause, in_place)
    if new.attempt > max(1, old.attempt):
        yield Restarted("group", category, new.attempt - max(1, old.attempt))
    elif new.counts.replaced > old.counts.replaced:
        yield Restarted("pod", cause)


def _list_failed_nodes(old: Status, new: Status, category: str) -> Iterator[NodeFailed]:
    if not (_holds_gpus(old) or _holds_gpus(new)):
        return
    nodes = {name: None for name in new.failed_nodes if name not in old.failed_nodes}
    if category == CUDA.name and new.last_failure is not None and new.last_failure.node_name:
        nodes[new.last_failure.node_name] = None
    yield from map(NodeFailed, nodes)


def _list_usage(old: Status, new: Status) -> Iterator[Used]:
    before = list_purposes(old.usage)
    profile = new.profile.name if new.profile is not None else ""
    for purpose, seconds in list_purposes(new.usage).items():
        spent = seconds - before.get(purpose, 0)
        if spent > 0:  # repeated steps were productive before
            yield Used(purpose, spent, profile)


def _holds_gpus(status: Status) -> bool:
    return status.usage is not None and status.usage.gpus > 0


def _list_stages(old: Status, new: Status, now: datetime) -> Iterator[Reached]:
    start = new.start_time
    if start is None or new.dev is not None:  # each run of `ddp dev` reaches them
        return
    seconds = max(0.0, (now - start).total_seconds())
    # Pods join again after a restart; only the first time counts.
    restarted = any(counts.in_place or counts.replaced for counts in (old.counts, new.counts))
    joined = new.is_true(c.RENDEZVOUSED) and not old.is_true(c.RENDEZVOUSED)
    if joined and not restarted and old.progress is None:
        yield Reached("rendezvous", seconds)
    if old.progress is None and new.progress is not None and new.progress.step:
        yield Reached("first_step", seconds)


def is_minor_change(old: Status, new: Status) -> bool:
    """Return whether two statuses differ only in pod counts, messages and measurements, and in no printed column.

    Such a write can wait. Otherwise a large job would cause one write per pod, and `kubectl get -w` would repeat lines.
    """
    if _list_condition_states(old) != _list_condition_states(new) or render_columns(old) != render_columns(new):
        return False
    same = {name: getattr(old, name) for name in ("nodes", "conditions", "goodput", "stragglers", "usage")}
    state = old.operator_state
    new = new.remember(children=state.children, usage_time=state.usage_time, idle_since=state.idle_since)
    if old.progress is not None and new.progress is not None:  # the first progress is not a minor change
        same["progress"] = old.progress
    return replace(new, **same) == old


def _list_condition_states(status: Status) -> list[tuple[str, str, str, int, str]]:
    return [
        (
            condition.type,
            condition.status,
            condition.reason,
            condition.observed_generation,
            # Messages of a queue change seldom, and users wait for them.
            condition.message if condition.reason in QUEUE_REASONS else "",
        )
        for condition in status.conditions
    ]


def list_transition_events(
    old: Status, new: Status, features: Mapping[str, ConditionStatus] = MappingProxyType({})
) -> tuple[Event, ...]:
    """Return the Events for the change from one status to the next, in chronological order.

    ``features``: the types of their conditions, each with the status that needs no attention.
    """
    return (
        *_report_refusal(old, new),
        *_report_failure(old, new),
        *_report_restart_in_same_pods(old, new),
        *_report_replacement(old, new),
        *_report_attempt(old, new),
        *_report_progressing(old, new),
        *_report_conditions(old, new, features),
    )


def _report_refusal(old: Status, new: Status) -> Iterator[Event]:
    accepted = new.condition(c.ACCEPTED)
    before = old.condition(c.ACCEPTED)
    if accepted is None or accepted.status == "True":
        return
    if before is None or before.message != accepted.message:
        yield Event("Warning", accepted.reason, accepted.message)


def _find_new_failure(old: Status, new: Status) -> LastFailure | None:
    return new.last_failure if new.last_failure != old.last_failure else None


def _report_failure(old: Status, new: Status) -> Iterator[Event]:
    failure = _find_new_failure(old, new)
    if failure is not None:
        message = f"attempt {failure.attempt}: {describe_failure(failure)}"
        yield Event("Warning", f"Failure{failure.category}", message[:_MAX_MESSAGE])


def _report_restart_in_same_pods(old: Status, new: Status) -> Iterator[Event]:
    if new.attempt != old.attempt or new.counts.own_in_place <= old.counts.own_in_place:
        return
    counted = new.counts.counted > old.counts.counted
    number = f"restart {new.restarts.used} of {new.restarts.limit}" if counted else "restart, not counted"
    message = describe_restart(f"{number}, in the same pods", _find_new_failure(old, new), new.checkpoint)
    yield Event("Normal", c.RESTARTED_IN_PLACE, message)


def _report_replacement(old: Status, new: Status) -> Iterator[Event]:
    if new.attempt == old.attempt and new.counts.replaced > old.counts.replaced:
        yield Event("Normal", c.POD_REPLACEMENT, describe_replacement(new, _find_new_failure(old, new)))


def _report_attempt(old: Status, new: Status) -> Iterator[Event]:
    """Return the Event of a restart or a resize. For the first attempt the Job controller's Events are enough."""
    if (new.attempt, new.attempt_nodes) == (old.attempt, old.attempt_nodes):
        return
    restarting = new.condition(c.RESTARTING)
    if old.attempt and restarting is not None:
        yield Event("Normal", restarting.reason, restarting.message)


def _report_progressing(old: Status, new: Status) -> Iterator[Event]:
    """Return the Event of steps that have stopped or continue, or of a pod that has stopped reporting."""
    before = old.condition(c.PROGRESSING)
    progressing = new.condition(c.PROGRESSING)
    if progressing is None:
        return
    former_reason = before.reason if before is not None else ""
    stall = before.message if before is not None and former_reason == c.STALLED else None
    if progressing.reason == c.STALLED and stall != progressing.message:
        yield Event("Warning", c.STALLED, progressing.message)
    elif stall is not None and progressing.status == "True":
        yield Event("Normal", c.TRAINING, "training is making progress again")
    elif progressing.reason in _SILENCE_EVENTS and progressing.reason != former_reason:
        yield Event(_SILENCE_EVENTS[progressing.reason], progressing.reason, progressing.message)


def _report_conditions(old: Status, new: Status, features: Mapping[str, ConditionStatus]) -> Iterator[Event]:
    for kind in (*_EVENT_TYPES, *features):
        before = old.condition(kind)
        condition = new.condition(kind)
        if condition is None or (before is not None and _is_same_state(before, condition)):
            continue
        if kind in features:
            event = _build_feature_event(condition, features[kind])
        else:
            event = _build_condition_event(before, condition)
        if event is not None:
            yield event


def _is_same_state(before: Condition, condition: Condition) -> bool:
    if before.status == condition.status == "True":
        return True
    return (before.status, before.reason) == (condition.status, condition.reason)


def _build_condition_event(before: Condition | None, condition: Condition) -> Event | None:
    """Return the Event of a changed condition; None: the change has no Event."""
    if condition.type in _HEALTHY_IF_TRUE:
        return _build_health_event(before, condition)
    if condition.status == "True":
        severity: Literal["Normal", "Warning"] = "Warning" if condition.type == c.FAILED else "Normal"
        return Event(severity, condition.type, condition.message or condition.reason)
    is_warning = condition.type in (c.INPUTS_READY, c.SCHEDULED) and condition.reason in _WARNINGS
    if is_warning or (condition.type == c.RENDEZVOUSED and condition.reason == c.PEER_UNREACHABLE):
        return Event("Warning", condition.reason, condition.message)
    if condition.type == c.SUSPENDED and before is not None and before.status == "True":
        return Event("Normal", "Resumed", "spec.suspend is false")
    return None


def _build_feature_event(condition: Condition, expected: ConditionStatus) -> Event | None:
    """Return the Event of a feature's condition that needs attention."""
    if condition.status == expected:
        return None
    reason = condition.type if condition.status == "True" else condition.reason
    return Event("Warning", reason, condition.message or condition.reason)


def _build_health_event(before: Condition | None, condition: Condition) -> Event | None:
    """Return the Event of a condition that is True for a healthy job."""
    if condition.status == "False" or condition.reason in c.DOUBTS:
        return Event("Warning", condition.reason, condition.message)
    if condition.type == c.UPLOADED and before is not None:
        return Event("Normal", condition.reason, condition.message)
    return None


def extend_history(status: Status, now: datetime) -> Status:
    """Return the status with a row for this moment, unless the last row is recent or has the same values.

    Above the limit every second row is dropped, and from then on rows are added half as often.
    """
    progress = status.progress
    rows = status.history.rows if status.history is not None else ()
    if progress is None or progress.step is None:
        return status
    values = (
        status.restarts.all,
        progress.epoch,
        progress.step,
        progress.loss,
        progress.samples_per_second,
        progress.steps_per_second,
        progress.learning_rate,
        progress.val_accuracy,
        progress.val_loss,
        status.checkpoint.step if status.checkpoint else None,
    )
    text = ",".join("" if value is None else str(value) for value in values)
    if rows and rows[-1].partition(",")[2] == text:
        return status

    time = int(now.timestamp())
    if _is_recent(rows, time) and status.phase not in (*ENDED_PHASES, c.HELD):
        return status
    rows = (*rows, f"{time},{text}")
    if len(rows) > MAX_ROWS:
        rows = (*rows[:-1:2], rows[-1])
    return replace(status, history=History(columns=",".join(COLUMNS), rows=rows))


def _is_recent(rows: tuple[str, ...], time: int) -> bool:
    """Return whether the last row is younger than the usual gap between rows."""
    heads = [row.partition(",")[0] for row in rows]
    times = [time for time in map(parse_count, heads) if time is not None]
    gaps = [after - before for before, after in pairwise(times)]
    return bool(gaps) and time - times[-1] < _SOON * median(gaps)
