"""The Events about a job, from one status to the next. Pure: a repeated pass has equal statuses, and no Event."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal

from ddp_operator.api.cluster import Event, Object
from ddp_operator.api.status import Condition, ConditionStatus, LastFailure, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts, other_reasons
from ddp_operator.decide.failures import describe_failure, describe_restart
from ddp_operator.decide.losses import describe_replacement

_MAX_MESSAGE: Final = 1000
_WARNINGS: Final = frozenset((*c.BLOCKING, other_reasons.UNREACHABLE)) - {c.QUOTA_PENDING}
_EVENT_TYPES: Final = (
    *(c.SUSPENDED, c.INPUTS_READY, c.SCHEDULED, c.RENDEZVOUSED, c.NODES_HEALTHY),
    *(c.FEATURES_WORK, c.UPLOADED),
    *(c.TRAINS_AS_ONE, c.TRAINING_COMPLETE, c.SUCCEEDED, c.FAILED),
)
"""Conditions whose transitions are Events, in the order in which they happen."""
_HEALTHY_IF_TRUE: Final = (c.TRAINS_AS_ONE, c.TRAINING_COMPLETE, c.NODES_HEALTHY, c.FEATURES_WORK, c.UPLOADED)
_SILENCE_EVENTS: Final[Mapping[str, Literal["Normal", "Warning"]]] = {
    c.HELD: "Normal",
    other_reasons.NODE_NOT_READY: "Warning",
    other_reasons.NODE_SILENT: "Warning",
    c.PEER_UNREACHABLE: "Warning",
    c.WAITING_FOR_PEERS: "Normal",
}
"""Reasons of Progressing of which each new one is an Event."""


def report_changes(
    features: Mapping[str, ConditionStatus], resource: Object, old: Status, new: Status, now: datetime
) -> list[tuple[Object, Event]]:
    """Return the Events about a job whose status was written."""
    return [(resource, event) for event in list_transition_events(old, new, features)]


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


def find_new_failure(old: Status, new: Status) -> LastFailure | None:
    """Return the failure that the status has since this change; None: it has the same as before."""
    return new.last_failure if new.last_failure != old.last_failure else None


def _report_failure(old: Status, new: Status) -> Iterator[Event]:
    failure = find_new_failure(old, new)
    if failure is not None:
        message = f"attempt {failure.attempt}: {describe_failure(failure)}"
        yield Event("Warning", f"Failure{failure.category}", message[:_MAX_MESSAGE])


def _report_restart_in_same_pods(old: Status, new: Status) -> Iterator[Event]:
    if new.attempt != old.attempt or new.counts.own_in_place <= old.counts.own_in_place:
        return
    counted = new.counts.counted > old.counts.counted
    number = f"restart {new.restarts.used} of {new.restarts.limit}" if counted else "restart, not counted"
    message = describe_restart(f"{number}, in the same pods", find_new_failure(old, new), new.checkpoint)
    yield Event("Normal", c.RESTARTED_IN_PLACE, message)


def _report_replacement(old: Status, new: Status) -> Iterator[Event]:
    if new.attempt == old.attempt and new.counts.replaced > old.counts.replaced:
        yield Event("Normal", c.POD_REPLACEMENT, describe_replacement(new, find_new_failure(old, new)))


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
    stall = before.message if before is not None and former_reason == other_reasons.STALLED else None
    if progressing.reason == other_reasons.STALLED and stall != progressing.message:
        yield Event("Warning", other_reasons.STALLED, progressing.message)
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
    if condition.status == "False" or condition.reason in doubts.DOUBTS:
        return Event("Warning", condition.reason, condition.message)
    if condition.type == c.UPLOADED and before is not None:
        return Event("Normal", condition.reason, condition.message)
    return None
