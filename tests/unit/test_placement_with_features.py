"""The placement of pods, with other features."""

from __future__ import annotations

import pytest

from tests.support.planned_children import pod_of


@pytest.mark.parametrize("gang", ["Native", "Volcano"])
def test_scheduler_that_job_names_precedes_that_of_its_gang(gang: str) -> None:
    assert pod_of(scheduling={"gang": gang, "schedulerName": "mine"})["spec"]["schedulerName"] == "mine"
