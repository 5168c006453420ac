"""The changes of a status that may be written later."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import CheckpointStatus, Condition, LastFailure, Nodes, Progress, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.transitions import is_minor_change
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
