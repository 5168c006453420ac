"""The column REASON: one term for the reason to wait, or for the failure."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.status import LastFailure, LastRestart, Phase, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import set_conditions, summarize
from tests.support.builders import NOW

OOM = LastFailure(attempt=1, category="OutOfMemory", conclusion="the budget is used up")
TRAINS = [
    c.Fact(c.ACCEPTED, "True", c.VALID),
    c.Fact(c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED),
    c.Fact(c.PROGRESSING, "True", c.TRAINING),
]


def reason(phase: Phase, *facts: c.Fact, **status: Any) -> str:
    return summarize(set_conditions(Status(phase=phase, **status), [*TRAINS, *facts], NOW, 1)).reason


def no(kind: str, why: str) -> c.Fact:
    return c.Fact(kind, "False", why)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (reason("Running"), ""),
        (reason("Running", no(c.PROGRESSING, c.STALLED)), "Stalled"),
        (reason("Pending", no(c.SCHEDULED, c.IMAGE_PULL), no(c.RENDEZVOUSED, c.WAITING_FOR_RANKS)), "ImagePull"),
        (reason("Rejected", no(c.ACCEPTED, c.INVALID_SPEC), no(c.SCHEDULED, c.IMAGE_PULL)), "InvalidSpec"),
        (reason("Suspended", c.Fact(c.SUSPENDED, "True", c.SUSPENDED_BY_SPEC)), ""),
        (reason("Suspended", no(c.SUSPENDED, c.STOPPING)), "Stopping"),
        (reason("Succeeded", no(c.DISTRIBUTED, c.NO_PROCESS_GROUP)), "NoProcessGroup"),
        (reason("Succeeded", last_failure=OOM), ""),
    ],
)
def test_first_obstacle_is_reason(result: str, expected: str) -> None:
    assert result == expected


def test_restart_reason_is_failure_category_unless_blocked() -> None:
    again = c.Fact(c.RESTARTING, "True", c.GROUP_RESTART)
    assert reason("Restarting", again, last_failure=OOM) == "OutOfMemory"
    assert reason("Restarting", again, no(c.SCHEDULED, c.WAITING_FOR_PODS), last_failure=OOM) == "OutOfMemory"
    assert reason("Restarting", again, no(c.SCHEDULED, c.UNSCHEDULABLE), last_failure=OOM) == "Unschedulable"


@pytest.mark.parametrize(
    ("cause", "recovery_seconds", "expected"),
    [
        ("OutOfMemory", None, "OutOfMemory"),
        ("None", None, "WaitingForWorkers"),
        ("OutOfMemory", 9, "WaitingForWorkers"),
    ],
)
def test_reason_of_restart_in_same_pods_is_failure_category(
    cause: str, recovery_seconds: int | None, expected: str
) -> None:
    restart = LastRestart(attempt=1, level="SamePods", time=NOW, cause=cause, recovery_seconds=recovery_seconds)
    starting = no(c.RENDEZVOUSED, c.WAITING_FOR_WORKERS)
    assert reason("Running", starting, last_failure=OOM, last_restart=restart) == expected


def test_failed_job_reason_is_failure_category() -> None:
    ended = c.Fact(c.FAILED, "True", c.RESTART_BUDGET_EXHAUSTED)
    assert reason("Failed", ended, last_failure=OOM) == "OutOfMemory"
    deadline = c.Fact(c.FAILED, "True", c.DEADLINE_EXCEEDED)
    survived = LastFailure(attempt=1, category="OutOfMemory")
    assert reason("Failed", deadline, last_failure=survived) == "DeadlineExceeded"
