"""Events and Workloads of objects that wait: how often they are read, and what the status then has."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import QueueStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import observe_attempt
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.queue_places import QueuePlace
from ddp_operator.decide.scheduling import describe_scheduling
from ddp_operator.decide.state import Problem, State
from ddp_operator.features.waiting import FEATURE
from ddp_operator.features.waiting.pods import explain_scheduling
from tests.support.builders import NOW, child_pod, job, resource, template
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.fake_features import FakeService
from tests.support.observing import Answers, Look
from tests.support.odd_objects import ODD_VALUES
from tests.support.queued_job import QueuedJob

HOOKS = Hooks((FEATURE,))
STATUS = Status(attempt=1, job_name="train-1", start_time=NOW).remember(nodes=2)
BOUND = {"conditions": [{"type": "PodScheduled", "status": "True"}]}


def event(reason: str, message: str, *, kind: str = "Warning", at: float = 0, **changes: Any) -> dict[str, Any]:
    moment = format_time(NOW + timedelta(seconds=at))
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": moment} | changes


async def test_reconcile_reads_events_in_growing_intervals_and_reports_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await ReconcilerHarness(hooks=HOOKS).settle()
    questions = []

    async def events_of(item: Any) -> Any:
        questions.append(item["metadata"]["name"])
        return (event("FailedMount", f"MountVolume.SetUp failed {len(questions) > 0}"),)

    monkeypatch.setattr(harness.cluster, "events_of", events_of)
    for pod in harness.pods():
        harness.cluster.store.change(
            pod, spec={**pod["spec"], "nodeName": "node-a"}, status={"phase": "Pending"} | BOUND
        )
    await harness.settle()
    assert questions == [], "too early"
    for _ in range(100):
        harness.clock.advance(5)
        await harness.settle()
    assert harness.state("Scheduled") == ("False", "VolumeNotReady")
    assert 8 <= len(questions) <= 40
    assert harness.events.count("VolumeNotReady") == 1


async def test_every_due_read_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass at the requested time finds that it is due, although the interval has grown meanwhile."""
    harness = await ReconcilerHarness(resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=1), HOOKS).settle()
    queued = harness.cluster.store.list("Job")[0]
    harness.cluster.store.change(queued, spec={**queued["spec"], "suspend": True})
    looks = []

    async def workloads_of(item: Any) -> Any:
        looks.append(harness.clock())
        return ()

    monkeypatch.setattr(harness.cluster, "workloads_of", workloads_of)
    passes = 0
    await harness.settle()
    while harness.clock() < NOW + timedelta(minutes=5):
        assert harness.requeue is not None
        harness.clock.advance(harness.requeue)
        await harness.settle()
        passes += 1
    assert len(looks) >= passes - 2, "but for the first seconds"


async def test_forbidden_events_do_not_stop_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await ReconcilerHarness(hooks=HOOKS).settle()

    async def refuse(item: Any) -> Any:
        raise Refused("events is forbidden", reason="Forbidden")

    monkeypatch.setattr(harness.cluster, "events_of", refuse)
    for pod in harness.pods():
        harness.cluster.store.change(
            pod, spec={**pod["spec"], "nodeName": "node-a"}, status={"phase": "Pending"} | BOUND
        )
    harness.clock.advance(9)
    await harness.settle()
    assert harness.state("Scheduled") == ("True", "AllPodsScheduled")


async def test_message_of_events_is_kept_until_next_read() -> None:
    look = Look(hooks=HOOKS)
    look.cluster.events = [
        {"type": "Warning", "reason": "FailedCreate", "message": "no", "lastTimestamp": "2026-11-20T12:00:00Z"}
    ]
    first = await look.at(seconds=60)
    assert [problem.message for problem in first.problems.values()] == ["no"]
    look.cluster.events = []
    assert (await look.at(seconds=61)).problems == first.problems
    assert (await look.at(seconds=600)).problems == {}
    assert look.cluster.asked == ["events of train-1"] * 2


async def test_claim_of_unschedulable_pod_and_object_of_its_volume_are_named() -> None:
    look = Look(hooks=HOOKS)
    unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "unbound volume claims"}
    pods = child_pod(0, "Pending", status={"conditions": [unbound]}), child_pod(1, "Pending", node="node-a")
    look.cluster.events = [
        {"type": "Warning", "reason": "FailedMount", "message": 'no key (for volume "cfg")', "lastTimestamp": "1"}
    ]
    volumes = [
        {"name": "cfg", "configMap": {"name": "settings"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}},
    ]
    spec = {"template": template(volumes=volumes)}
    observation = await look.at(*pods, seconds=60, spec=spec)
    assert look.cluster.asked == ["events of corpus", "events of train-1-1-abcde"]
    typed = job(status=STATUS, nodes=2, **spec)
    attempt = observe_attempt(State(typed, observation, NOW), STATUS, None)
    fact = explain_scheduling(attempt, describe_scheduling(typed, observation, 1, 2, NOW))
    assert (fact.reason, "claim corpus: FailedMount: no key" in fact.message) == ("VolumeNotReady", True)
    [_, problem] = observation.problems.values()
    assert problem.message == 'no key (for volume "cfg") (volume cfg is ConfigMap settings)'


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
async def test_odd_events_explain_nothing(value: Any) -> None:
    cluster = Answers()
    cluster.events = [value]
    observation = await Look(cluster, HOOKS).at(seconds=60)
    assert isinstance(observation.problems, dict)


async def test_changed_queue_is_set_on_waiting_job_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await ReconcilerHarness(resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=1), HOOKS).settle()
    job = harness.cluster.store.list("Job")[0]
    harness.cluster.store.change(job, spec={**job["spec"], "suspend": True})
    asked = []

    async def kueue_object(kind: str, namespace: str, name: str) -> Any:
        asked.append(name)
        return {"metadata": {"name": name}, "spec": {"stopPolicy": "Hold"}}

    async def workloads_of(item: Any) -> Any:
        return ({"metadata": {"name": "w"}},)

    monkeypatch.setattr(harness.cluster, "kueue_object", kueue_object)
    monkeypatch.setattr(harness.cluster, "workloads_of", workloads_of)
    harness.clock.advance(100)
    await harness.settle()
    held = present(harness.status.condition("Scheduled"))
    assert held.message.endswith("LocalQueue gpu is stopped (spec.stopPolicy is Hold)")
    assert harness.raw is not None
    harness.cluster.store.change(harness.raw, meta={"labels": {"kueue.x-k8s.io/queue-name": "other"}})
    await harness.settle()
    assert harness.cluster.store.list("Job")[0]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "other"
    harness.clock.advance(5)  # the Job controller has just reported that it is suspended
    await harness.settle()
    assert asked == ["gpu", "other"]


async def test_launcher_missing_for_kubelet_is_recreated_without_watch_event(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await ReconcilerHarness(hooks=HOOKS).settle()
    [config_map] = harness.cluster.store.list("ConfigMap")
    remembered = await harness.observe()
    truth = harness.cluster.observe
    harness.cluster.store.delete(config_map)

    async def observe(key: Key) -> Snapshot:
        result = present(await truth(key))
        return dataclasses.replace(result, config_maps=remembered.config_maps)

    async def events_of(item: Any) -> Any:
        name = config_map["metadata"]["name"]
        words = f'MountVolume.SetUp failed for volume "ddp-launcher" : configmap "{name}" not found'
        return ({"type": "Warning", "reason": "FailedMount", "message": words},)

    monkeypatch.setattr(harness.cluster, "observe", observe)
    monkeypatch.setattr(harness.cluster, "events_of", events_of)
    for pod in harness.pods():
        harness.cluster.store.change(pod, spec=pod["spec"] | {"nodeName": "node-a"})
    await harness.reconcile()
    assert harness.cluster.store.list("ConfigMap") == []
    harness.clock.advance(10)
    await harness.reconcile()
    assert harness.children()["ConfigMap"] == [config_map["metadata"]["name"]]


async def test_problem_that_feature_finds_replaces_that_of_kueue() -> None:
    service = FakeService(place=QueuePlace(problem=Problem(c.INADMISSIBLE, "9 > 8")))
    harness = await QueuedJob({"places": service}, FEATURE).start()
    assert harness.state(c.SCHEDULED) == ("False", c.INADMISSIBLE)
    assert "9 > 8" in harness.condition(c.SCHEDULED).message
    assert harness.status.queue is None


async def test_place_is_in_message_until_job_is_admitted() -> None:
    times = {"start_p50": NOW + timedelta(hours=1), "start_p90": NOW + timedelta(hours=2)}
    place = QueueStatus(cluster_queue="gpu", position=1, of=3, waits_for="gpu: 8 > 0", **times)
    driver = QueuedJob({"places": FakeService(place=QueuePlace(place))}, FEATURE)
    harness = await driver.start()
    assert harness.status.queue == place
    assert harness.condition(c.SCHEDULED).message == (
        "Job train-1 is waiting for admission by queue q; position 1/3 in ClusterQueue gpu, requested > free quota "
        "(gpu: 8 > 0); expected start 2026-11-20T13:00:00Z, with 90% by 2026-11-20T14:00:00Z"
    )
    await driver.admit()
    assert harness.status.queue is None


async def test_fault_of_place_is_forgotten_once_job_is_admitted() -> None:
    driver = QueuedJob({"odd": FakeService(place=ZeroDivisionError("a bug"))}, FEATURE)
    harness = await driver.start()
    assert harness.state(c.FEATURES_WORK) == ("False", c.FEATURE_FAULT)
    await driver.admit()
    await driver.wait(60)
    assert harness.state(c.FEATURES_WORK) == ("True", c.NO_FAULT)


async def test_job_whose_pods_run_has_no_fault() -> None:
    harness = await ReconcilerHarness(hooks=HOOKS).train()
    assert harness.status.condition(c.FEATURES_WORK) is None
