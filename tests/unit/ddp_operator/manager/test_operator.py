"""What the operator's process keeps of resources beside the cache."""

from __future__ import annotations

import pytest

from ddp_operator.api.constants import KIND
from ddp_operator.manager import operator
from ddp_operator.manager.operator import Operator
from ddp_operator.manager.settings import Settings
from tests.support.builders import child_job, resource


async def test_times_of_resources_that_never_get_a_job_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "MOST_ARRIVED", 3)
    process = Operator(Settings())
    for number in range(9):
        process.on_event(KIND, "ADDED", resource(name=f"job-{number}"))
    assert [key.name for key in process._arrived] == ["job-6", "job-7", "job-8"]
    process.on_event("Job", "ADDED", child_job(name="job-8"))
    assert [key.name for key in process._arrived] == ["job-6", "job-7"]
