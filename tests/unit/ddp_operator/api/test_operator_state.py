"""The operator's state of a stored status: of the release before, spoiled, lost, and of a newer version."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddp_operator.api.status import STATE_VERSION, RestartCounts, Status
from ddp_operator.api.stored_fields import read_status
from tests.support.builders import Json
from tests.support.full_status import OF_0_2_0, build_full_status, list_paths, spoil

FULL = build_full_status()
SHOWN: Json = {
    "phase": "Running",
    "attempt": 3,
    "nodes": {"desired": 4},
    "restarts": {"all": 6, "inPlace": 3, "used": 2, "limit": 5},
    "progress": {"step": 120},
    "checkpoint": {"step": 100},
}
"""What users see of a job; the operator's state is lost."""


def read(status: Any) -> tuple[Status, str]:
    stored = read_status({"status": status})
    assert stored.left_out == ()
    assert msgspec.convert(stored.stored, Status) == stored.status
    return stored.status, stored.state_problem


def test_state_of_0_2_0_is_taken_over() -> None:
    status, problem = read(OF_0_2_0)
    assert problem == ""
    assert status.counts == RestartCounts(
        total=2, counted=4, free=1, disrupted_in_a_row=1, used=2, without_progress=1, step=90, checkpoint_step=80,
        in_place=3, in_place_before=2, in_place_after_loss=1, replaced=1,
    )  # fmt: skip
    assert status.counts.all == OF_0_2_0["restarts"]["all"]
    state = status.operator_state
    assert (state.version, state.nodes, state.children) == (STATE_VERSION, 2, ("uid-1", "uid-2"))
    assert state.usage_time is not None
    assert (state.idle_since, state.start_step) == (state.usage_time, 40)
    assert status.points == ("time,step", "1763640000,40")


def test_spoiled_count_of_0_2_0_keeps_the_others() -> None:
    status, problem = read({**OF_0_2_0, "restarts": {**OF_0_2_0["restarts"], "withoutProgress": "many"}})
    assert problem == "cannot be read at status.operatorState.restarts.withoutProgress"
    assert (status.counts.used, status.counts.counted, status.counts.without_progress) == (2, 4, 0)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (None, "is missing"),
        ("text", "is no object"),
        ([1], "is no object"),
        ({}, f"has version None, and this operator reads {STATE_VERSION}"),
        ({"version": 2, "restarts": {"used": 0}}, f"has version 2, and this operator reads {STATE_VERSION}"),
        ({"version": "1"}, f"has version '1', and this operator reads {STATE_VERSION}"),
        ({"version": 1, "restarts": 5}, "cannot be read at status.operatorState.restarts"),
        ({"version": 1, "restarts": {"used": []}}, "cannot be read at status.operatorState.restarts.used"),
    ],
    ids=str,
)
def test_lost_state_keeps_the_budget_that_users_see(state: Any, problem: str) -> None:
    stored = SHOWN if state is None else {**SHOWN, "operatorState": state}
    status, found = read(stored)
    assert found == problem
    counts = status.counts
    assert (counts.total, counts.used, counts.counted, counts.all) == (2, 2, 2, 6)
    assert (counts.step, counts.checkpoint_step) == (120, 100), "older steps and checkpoints are no progress"
    assert (status.operator_state.version, status.attempt_nodes) == (STATE_VERSION, 4)


def test_long_version_is_named_briefly() -> None:
    _, problem = read({**SHOWN, "operatorState": {"version": "9" * 100_000}})
    assert len(problem) < 100


@pytest.mark.parametrize("status", [{}, {"phase": "Pending"}, {"attempt": 0}], ids=str)
def test_job_that_has_not_started_has_no_problem(status: Json) -> None:
    assert read(status)[1] == ""


def test_newer_state_of_job_that_has_not_started_is_not_kept() -> None:
    status, problem = read({"operatorState": {"version": 7, "restarts": {"used": 9}}})
    assert problem
    assert (status.operator_state.version, status.counts) == (STATE_VERSION, RestartCounts())


@pytest.mark.parametrize("path", [path for path in list_paths(FULL) if path.startswith("status.operatorState")])
def test_spoiled_member_is_named_and_users_fields_are_kept(path: str) -> None:
    status, problem = read(spoil(FULL, path))
    assert problem
    assert status.counts.used >= FULL["restarts"]["used"]
    whole = msgspec.convert(FULL, Status)
    assert msgspec.structs.replace(status, operator_state=whole.operator_state) == whole
