"""What has become of a lost node: known once it is back, and recorded with the failure of its pod."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import LastFailure, Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.state import State, Suspicion
from ddp_operator.features.lost_nodes import FEATURE
from ddp_operator.features.lost_nodes.evidence import LeaseAge
from ddp_operator.features.lost_nodes.leases import LeaseReading
from ddp_operator.features.lost_nodes.returns import DELETED, LostPod, describe_return, record_returns
from tests.support.builders import NOW, child_pod, job, observe
from tests.support.decisions import STARTED, present, run_pass

RENEWED = LeaseReading(LeaseAge(2.0, 10.0))
OLD = LeaseReading(LeaseAge(60.0, 10.0))
UNKNOWN = LeaseReading(None, "no response")


@pytest.mark.parametrize(
    ("boot", "lease", "text"),
    [
        ("second", RENEWED, "node a has restarted"),
        ("second", OLD, "node a has restarted"),
        (DELETED, UNKNOWN, "node a was deleted"),
        ("first", OLD, ""),
        ("first", UNKNOWN, ""),
        ("", RENEWED, ""),
    ],
)
def test_node_has_restarted_or_is_still_away(boot: str, lease: LeaseReading, text: str) -> None:
    lost = LostPod("a", "first", NOW - timedelta(seconds=30))
    assert describe_return(lost, boot, lease, NOW) == text


@pytest.mark.parametrize(
    ("is_frozen", "why"),
    [(False, "it had no network, or stood still"), (True, "its processes had stood still")],
)
def test_node_that_did_not_restart_is_back_once_it_would_have_reported_its_boot(*, is_frozen: bool, why: str) -> None:
    lost = LostPod("a", "first", NOW - timedelta(seconds=30), is_frozen=is_frozen)
    assert describe_return(lost, "first", RENEWED, NOW) == ""
    later = describe_return(lost, "first", RENEWED, NOW + timedelta(seconds=14))
    assert later == f"node a was back at 2026-11-20T11:59:58Z without a restart: {why}"


def test_return_reaches_the_status_of_a_pass() -> None:
    found = {"train-1-1-x": Suspicion(NOW, "node a has restarted", is_lost=False)}
    failure = LastFailure(attempt=1, category="NodeLost", pod="train-1-1-x", message="it is lost")
    status = replace(STARTED, last_failure=failure)
    decision = run_pass(
        child_pod(0), child_pod(1), status=status, observed={"suspicions": found}, hooks=Hooks((FEATURE,))
    )
    assert present(decision.status.last_failure).message == "it is lost; node a has restarted"


def test_return_is_recorded_once_and_only_for_the_failure_of_its_pod() -> None:
    typed = job()
    found = Suspicion(NOW, "node a has restarted", is_lost=False)
    state = State(typed, observe(typed, (), (), suspicions={"train-1-1-x": found}), NOW)
    lost = Status(last_failure=LastFailure(attempt=1, category="NodeLost", pod="train-1-1-x", message="it is lost"))
    recorded = record_returns(state, lost)
    assert recorded.last_failure is not None
    assert recorded.last_failure.message == "it is lost; node a has restarted"
    assert record_returns(state, recorded) == recorded
    for other in (Status(), Status(last_failure=LastFailure(attempt=1, category="NodeLost", pod="train-1-0-y"))):
        assert record_returns(state, other) == other
