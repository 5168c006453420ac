"""Pods that others ask to leave: which ones their Job replaces, what starts a new attempt, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.state import Decision, EvictPod, Refusal
from tests.support.builders import child_job, child_pod
from tests.support.decisions import STARTED, present, read_condition, read_state, run_pass
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.fake_features import FakeService
from tests.unit.ddp_operator.decide.test_losses import JOB, MET

WHO = "DrainRequest nvsentinel/drain-node-a: GPU 3: XID 79"
ONE = {"train-1-1-abcde": WHO}
BOTH = ONE | {"train-1-0-abcde": WHO}
QUEUED = {"labels": {"kueue.x-k8s.io/queue-name": "q"}}
QUEUED_JOB = child_job(queue="q", status={"startTime": "2026-11-20T11:00:00Z"})
PENDING = child_pod(1, "Pending")


def run(*pods: Any, departures: Any = ONE, raw_job: Any = JOB, **more: Any) -> Decision:
    pods = pods or (child_pod(0), child_pod(1))
    return run_pass(*pods, jobs=[raw_job], observed={"departures": departures}, **({"status": MET} | more))


def evicted(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, EvictPod)]


@pytest.mark.parametrize(
    ("changes", "names", "attempt"),
    [
        ({}, ["train-1-1-abcde"], 1),
        ({"departures": {"another": WHO}}, [], 1),
        ({"suspend": True}, [], 1),
        ({"departures": BOTH}, [], 2),
        ({"raw_job": child_job()}, [], 2),
        ({"status": STARTED}, [], 2),
        ({"status": STARTED, "refusal": Refusal("InvalidSpec", "no")}, [], 1),
        ({"refusal": Refusal("InvalidSpec", "no")}, ["train-1-1-abcde"], 1),
        ({"recovery": {"avoidFailedNodes": False}, "departures": BOTH}, [], 2),
        ({"raw_job": QUEUED_JOB, "departures": BOTH, **QUEUED}, ["train-1-0-abcde", "train-1-1-abcde"], 1),
    ],
    ids=[
        *("peers wait", "another pod", "suspended", "all pods", "peers can't wait", "not joined", "refused attempt"),
        *("refused spec", "nodes are not avoided", "queued"),
    ],
)
def test_drained_pod_moves_alone_or_with_attempt(changes: Any, names: list[str], attempt: int) -> None:
    decision = run(**changes)
    assert (evicted(decision), decision.status.attempt) == (names, attempt)
    assert decision.status.counts.counted == 0
    if attempt == 2:
        assert present(decision.status.last_restart).cause == c.DRAINED
        assert decision.status.failed_nodes == ("node-a",)
        assert read_condition(decision, c.RESTARTING).message == f"attempt 2 avoids drained nodes: node-a: {WHO}"
    elif names or "refusal" in changes:
        assert read_state(decision, c.NODES_HEALTHY) == ("False", c.DRAINED)
        assert WHO in read_condition(decision, c.NODES_HEALTHY).message


def test_drained_pod_that_has_not_run_is_evicted_without_restart() -> None:
    decision = run(child_pod(0), PENDING, status=STARTED)
    assert (evicted(decision), decision.status.attempt) == (["train-1-1-abcde"], 1)


def test_pod_that_saves_is_not_evicted_again() -> None:
    assert evicted(run(child_pod(0), child_pod(1, deleting=True, grace=30))) == []


def test_condition_of_drain_ends_with_it_and_is_absent_without_any() -> None:
    drained = run()
    assert read_state(run(departures={}, status=drained.status), c.NODES_HEALTHY) == ("True", c.NO_TROUBLE)
    assert run(departures={}).status.condition(c.NODES_HEALTHY) is None


def test_repeated_moves_without_step_are_delayed_more_and_more() -> None:
    status = MET
    delays = []
    for attempt in range(1, 6):
        names = {f"train-{attempt}-{index}-abcde": WHO for index in (0, 1)}
        pods = [child_pod(index, attempt=attempt) for index in (0, 1)]
        decision = run(*pods, departures=names, raw_job=child_job(attempt), status=status)
        status = decision.status
        waiting = run_pass(jobs=[], status=status, seconds=1)
        delays.append(waiting.requeue_after)
    assert status.attempt == 6
    assert delays[-1] is not None
    assert max(present(delay) for delay in delays) == delays[-1] > 10


async def test_drained_pod_saves_and_is_replaced_in_its_job_once() -> None:
    service = FakeService()
    harness = ReconcilerHarness(hooks=Hooks(services={"moves": service}))
    await harness.train()
    first, second = harness.pods()
    service.departures = {second["metadata"]["name"]: WHO}
    await harness.settle()
    assert harness.status.attempt == 1
    failure = present(harness.status.last_failure)
    assert (failure.category, failure.message) == ("Preempted", f"the pod was lost: Drained: {WHO}")
    assert harness.events.count(c.DRAINED) == 1
    harness.clock.advance(11)
    await harness.train()
    assert harness.pods()[0]["metadata"]["uid"] == first["metadata"]["uid"]
    assert harness.pods()[1]["metadata"]["uid"] != second["metadata"]["uid"]
    assert (harness.status.counts.replaced, harness.status.counts.counted) == (1, 0)
    assert harness.state(c.NODES_HEALTHY) == ("True", c.NO_TROUBLE)
