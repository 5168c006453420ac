"""From one status to the next: minor changes, Events, rows of the history, GPU-seconds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ddp_operator.api.cluster import Event
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import (
    CheckpointStatus,
    Condition,
    LastFailure,
    LostUsage,
    Nodes,
    Profile,
    Progress,
    Status,
    Usage,
)
from ddp_operator.decide import conditions as c
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.purposes import PRODUCTIVE
from ddp_operator.decide.transitions import Used, find_transitions
from ddp_operator.decide.writes import is_minor_change
from tests.support.builders import NOW


def scheduled(message: str = "none placed", reason: str = c.WAITING_FOR_PODS, status: Any = "False") -> Condition:
    time = format_time(NOW)
    return Condition(type=c.SCHEDULED, status=status, reason=reason, message=message, last_transition_time=time)


BEFORE = Status(phase="Pending", attempt=1, nodes=Nodes(desired=2), conditions=(scheduled(),))
TRAINING = Status(phase="Running", attempt=1, goodput="0.91", progress=Progress(step=1, percent="0.1%", eta="3d4h"))


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": Nodes(desired=2, ready=1)},
        {"conditions": (scheduled("1/2 pods scheduled"),)},
        {"nodes": Nodes(desired=2, ready=1), "conditions": (scheduled("1/2 pods scheduled"),)},
    ],
)
def test_change_of_counts_and_messages_is_minor(change: dict[str, Any]) -> None:
    assert is_minor_change(BEFORE, msgspec.structs.replace(BEFORE, **change))


def test_measurements_are_minor_unless_column_shows_them() -> None:
    def is_minor(**change: Any) -> bool:
        progress = msgspec.structs.replace(TRAINING.progress, step=2, **change)
        return is_minor_change(TRAINING, msgspec.structs.replace(TRAINING, progress=progress, goodput="0.92"))

    assert is_minor(val_loss="0.4")
    for change in ({"percent": "0.2%"}, {"eta": "3d3h"}, {"loss": "0.4"}):
        assert not is_minor(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "Running"},
        {"reason": "Stalled"},
        {"checkpoint": CheckpointStatus(step=1)},
        {"attempt": 2},
        {"last_failure": LastFailure(attempt=1, category="OOM")},
        {"progress": Progress(step=1)},  # the first one
        {"conditions": (scheduled(reason=c.UNSCHEDULABLE),)},
        {"conditions": (scheduled(status="True", reason=c.ALL_PODS_SCHEDULED),)},
        {"conditions": ()},
        {"observed_generation": 2},
    ],
)
def test_change_of_phase_or_reason_is_not_minor(change: dict[str, Any]) -> None:
    assert not is_minor_change(BEFORE, msgspec.structs.replace(BEFORE, **change))


def condition(kind: str, status: Any, reason: str = "R", message: str = "words") -> Condition:
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=NOW)


def events(old: Any, new: Any) -> list[tuple[str, str, str]]:
    before, after = (Status(conditions=(result,)) if result else Status() for result in (old, new))
    return [(event.type, event.reason, event.message) for event in list_transition_events(before, after)]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (None, condition("Accepted", "True"), []),
        (None, condition("Accepted", "False", "InvalidSpec"), [("Warning", "InvalidSpec", "words")]),
        (condition("Accepted", "False", "InvalidSpec"), condition("Accepted", "False", "InvalidSpec"), []),
        (
            condition("Accepted", "False", "InvalidSpec", "other"),
            condition("Accepted", "False", "InvalidSpec"),
            [("Warning", "InvalidSpec", "words")],
        ),
        (None, condition("Scheduled", "False", "WaitingForPods"), []),
        (None, condition("Scheduled", "True"), [("Normal", "Scheduled", "words")]),
        (condition("Scheduled", "True"), condition("Scheduled", "True", message="2 of 2"), []),
        (condition("Scheduled", "True"), condition("Scheduled", "True", "SidecarRestarted"), []),
        (None, condition("Scheduled", "False", "Unschedulable"), [("Warning", "Unschedulable", "words")]),
        (
            condition("Scheduled", "False", "Unschedulable", "0/2 nodes"),
            condition("Scheduled", "False", "Unschedulable", "0/3 nodes"),
            [],
        ),
        (None, condition("Rendezvoused", "True"), [("Normal", "Rendezvoused", "words")]),
        (None, condition("Rendezvoused", "Unknown"), []),
        (None, condition("Suspended", "False", "NotSuspended"), []),
        (
            condition("Suspended", "True"),
            condition("Suspended", "False", "NotSuspended"),
            [("Normal", "Resumed", "spec.suspend is false")],
        ),
        (condition("Suspended", "False"), condition("Suspended", "True"), [("Normal", "Suspended", "words")]),
        (condition("Failed", "False"), condition("Failed", "True", "OOM"), [("Warning", "Failed", "words")]),
        (condition("Succeeded", "False"), condition("Succeeded", "True"), [("Normal", "Succeeded", "words")]),
        (condition("Succeeded", "False"), condition("Succeeded", "False", "Finished"), []),
    ],
)  # fmt: skip
def test_transition_emits_its_event(old: Any, new: Any, text: Any) -> None:
    assert events(old, new) == text


def test_first_attempt_emits_no_event() -> None:
    assert list_transition_events(Status(), Status(attempt=1, job_name="a-1").remember(nodes=4)) == ()


def test_next_attempt_emits_its_failure_first() -> None:
    restart = condition("Restarting", "True", "GroupRestart", "restart 1 of 3: x")
    old = Status(attempt=1)
    new = Status(
        attempt=2, conditions=(restart,), last_failure=LastFailure(attempt=1, category="OOM", message="m" * 5000)
    )
    failure, begun = list_transition_events(old, new)
    assert (failure.reason, failure.message) == ("FailureOOM", f"attempt 1: OOM: {'m' * 298} …")
    assert begun == Event("Normal", "GroupRestart", "restart 1 of 3: x")


def test_repeated_pass_emits_nothing() -> None:
    status = Status(attempt=2, conditions=(condition("Accepted", "False"), condition("Scheduled", "True")))
    assert list_transition_events(status, status) == ()


def test_usage_change_is_minor_and_counted_once() -> None:
    old = Status(phase="Running", usage=Usage(gpus=8, gpu_seconds=10, waiting=10))
    assert old.usage is not None
    lost = (LostUsage(cause="OOM", gpu_seconds=5),)
    new = replace(old, usage=replace(old.usage, gpu_seconds=35, productive=20, lost=lost))
    assert is_minor_change(old, new)
    assert find_transitions(old, new, NOW) == (Used(PRODUCTIVE, 20), Used("OOM", 5))
    assert find_transitions(new, new, NOW) == ()
    of_profile = replace(new, profile=Profile(kind="ClusterDDPTrainingProfile", name="h100", digest="d", job={}))
    assert find_transitions(old, of_profile, NOW)[0] == Used(PRODUCTIVE, 20, "h100")
