"""A resource that this operator cannot read: its condition, and the kept part of its status."""

from __future__ import annotations

import msgspec
import pytest

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status
from ddp_operator.decide.refusals import report_unreadable
from tests.support.builders import NOW, Json
from tests.support.decisions import present

ERROR = InvalidManifest([FieldError("spec.x", "is unknown")])


def resource(**status: object) -> Json:
    return {"metadata": {"generation": 4}, "status": status}


@pytest.mark.parametrize(
    ("status", "phase", "unattended"),
    [({}, "Rejected", False), ({"attempt": 2, "phase": "Running"}, "Running", True)],
)
def test_unreadable_running_job_continues_and_new_job_is_rejected(status: Json, phase: str, unattended: bool) -> None:
    old, new = report_unreadable(resource(**status), ERROR, NOW)
    assert old == msgspec.convert(status, Status)
    assert new.phase == phase
    accepted = present(new.condition("Accepted"))
    assert (accepted.status, accepted.reason) == ("False", "VersionMismatch")
    assert accepted.observed_generation == new.observed_generation == 4
    assert ("the job's pods keep running" in accepted.message) is unattended


def test_job_that_has_ended_keeps_its_status() -> None:
    ended = {"type": "Succeeded", "status": "True", "reason": "AllNodesSucceeded"}
    ended["lastTransitionTime"] = format_time(NOW)
    old, new = report_unreadable(resource(phase="Succeeded", attempt=1, conditions=[ended]), ERROR, NOW)
    assert old == new
    assert old.phase == "Succeeded"


@pytest.mark.parametrize("result", [{}, {"status": None}, {"status": {"phase": 5}}, {"metadata": {}}])
def test_unreadable_status_is_treated_as_empty(result: Json) -> None:
    old, new = report_unreadable(result, ERROR, NOW)
    assert (old, new.phase) == (Status(), "Rejected")
