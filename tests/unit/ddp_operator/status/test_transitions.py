"""Which changes of a status may wait a moment."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddp_operator.api.status import Condition, LastFailure, Nodes, Progress, Status
from ddp_operator.kubeobjects.timestamps import format_time
from ddp_operator.status import conditions as c
from ddp_operator.status.transitions import is_minor_change
from tests.support.builders import NOW


def scheduled(message: str = "none placed", reason: str = c.WAITING_FOR_PODS, status: Any = "False") -> Condition:
    time = format_time(NOW)
    return Condition(type=c.SCHEDULED, status=status, reason=reason, message=message, last_transition_time=time)


BEFORE = Status(phase="Pending", attempt=1, nodes=Nodes(desired=2), conditions=(scheduled(),))


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


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "Running"},
        {"attempt": 2},
        {"last_failure": LastFailure(attempt=1, category="OOM")},
        {"progress": Progress(step=1)},
        {"conditions": (scheduled(reason=c.UNSCHEDULABLE),)},
        {"conditions": (scheduled(status="True", reason=c.ALL_PODS_SCHEDULED),)},
        {"conditions": ()},
        {"observed_generation": 2},
    ],
)
def test_change_of_a_phase_or_reason_is_not_minor(change: dict[str, Any]) -> None:
    assert not is_minor_change(BEFORE, msgspec.structs.replace(BEFORE, **change))
