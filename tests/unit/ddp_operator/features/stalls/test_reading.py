"""What the feature reads of pods, how often, and what it keeps after a fault."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import Condition, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import stalls
from ddp_operator.features.stalls.peers import UnreachableReport
from ddp_operator.features.stalls.reading import StallReading
from tests.support.builders import NOW, child_pod, page
from tests.support.decisions import STARTED
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.observing import Answers, Look

HOOKS = Hooks((stalls.FEATURE,))
JOINING = replace(
    STARTED,
    conditions=(
        Condition(type=c.RENDEZVOUSED, status="False", reason=c.WAITING_FOR_WORKERS, last_transition_time=NOW),
    ),
)
PODS = (child_pod(0), child_pod(1))
REPORT = page(unreachable="cannot reach pod 0")


async def read(look: Look, seconds: float, *pods: Any, status: Status = JOINING) -> tuple[UnreachableReport, ...]:
    observation = await look.at(*pods, seconds=seconds, status=status)
    reading = observation.find_observed(StallReading)
    assert reading is not None
    return reading.unreachable


async def test_peers_are_read_while_pod_zero_waits_for_them() -> None:
    look = Look(Answers(pod0=page(phase="Rendezvous"), pod1=REPORT), HOOKS)
    assert await read(look, 1, *PODS) == ()
    for seconds in (6, 8, 20):
        assert await read(look, seconds, *PODS) == (UnreachableReport(1, "cannot reach pod 0"),)
    assert look.cluster.asked.count("page of train-1-1-abcde") == 2, "at most every ten seconds"
    look.cluster.pages["pod0"] = page(phase="Running", step=1)
    assert await read(look, 40, *PODS) == ()


async def test_report_of_pod_zero_needs_no_peers() -> None:
    look = Look(Answers(pod0=page(phase="WaitingForMaster", unreachable="cannot reach pod 0")), HOOKS)
    assert await read(look, 60, *PODS) == (UnreachableReport(0, "cannot reach pod 0"),)
    assert look.cluster.asked == ["page of train-1-0-abcde"]


async def test_report_is_dropped_with_pod_zero_and_kept_while_its_page_is_not_due() -> None:
    look = Look(Answers(pod0=page(phase="WaitingForMaster", unreachable="cannot reach pod 0")), HOOKS)
    known = (UnreachableReport(0, "cannot reach pod 0"),)
    assert await read(look, 60, *PODS) == known
    assert await read(look, 60.1, *PODS) == known
    assert await read(look, 70, PODS[1]) == ()


async def test_job_trains_beside_comparison_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OverflowError("date value out of range")

    monkeypatch.setattr("ddp_operator.features.stalls.reading.is_stalled", fail)
    harness = await ReconcilerHarness(hooks=HOOKS).train(page(phase="Running", step=3, steps=3))
    assert harness.status.phase == "Running"
    assert harness.state(c.PROGRESSING) == ("True", c.TRAINING)
    assert harness.state(c.FEATURES_WORK) == ("False", c.FEATURE_FAULT)
    assert "stalls: OverflowError" in harness.condition(c.FEATURES_WORK).message


async def test_stragglers_stay_until_ranks_are_compared_again() -> None:
    ranks = [{"rank": rank, "step": 9, "steps": 9, "computeSeconds": 9, "dataSeconds": 0} for rank in (0, 1)]
    harness = await ReconcilerHarness(hooks=HOOKS).train(page(phase="Running", ranks=ranks))
    slow = [{**ranks[0], "steps": 29, "computeSeconds": 29}, {**ranks[1], "steps": 29, "computeSeconds": 90}]
    harness.cluster.page = page(phase="Running", ranks=slow)
    for seconds in (40, 31):
        harness.clock.advance(seconds)
        await harness.settle()
        assert [straggler.rank for straggler in harness.status.stragglers] == [1]
