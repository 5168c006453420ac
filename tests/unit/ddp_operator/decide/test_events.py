"""Events: one for each transition, none for a pass that changes nothing."""

from typing import Any

import pytest

from ddp_operator.api.cluster import Event
from ddp_operator.api.status import Condition, LastFailure, Status
from ddp_operator.decide.transitions import list_transition_events
from tests.support.builders import NOW


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
    assert list_transition_events(Status(), Status(attempt=1, attempt_nodes=4, job_name="a-1")) == ()


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
