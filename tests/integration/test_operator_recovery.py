"""Real Kopf against the stand-in: lost pods, and lost nodes with their pods."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.constants import KIND
from tests.support.builders import job_manifest
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn
from tests.support.standin.kueue import WORKLOAD


async def running(actors: ClusterActors, **spec: Any) -> None:
    """Create a job on two nodes and make it run."""
    await actors.create(job_manifest(**spec))
    for index in (0, 1):
        await actors.run_pod("digits-1", index, node=f"node-{index}")
    await actors.phase("digits", "Running")


async def finish(actors: ClusterActors, job: str) -> dict[str, Any]:
    for index in (0, 1):
        await actors.run_pod(job, index)
    for index in (0, 1):
        await actors.finish_pod(job, index)
    done = await actors.phase("digits", "Succeeded")
    status: dict[str, Any] = done["status"]
    return status


async def test_pod_evicted_before_rendezvous_starts_uncounted_attempt(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    start()
    await running(actors)
    pod = await actors.pod("digits-1", 1)
    reports = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API",
    }
    conditions = [*pod["status"]["conditions"], reports | {"lastTransitionTime": None}]
    await actors.patch("Pod", pod["metadata"]["name"], {"status": {"conditions": conditions}}, "status")
    server.controllers.ends_pods = False  # as long as it takes to end
    await actors.delete("Pod", pod["metadata"]["name"])
    await actors.resource("digits", lambda resource: resource["status"]["attempt"] == 2)
    server.controllers.ends_pods = True
    await actors.child_job("digits-2")
    status = await finish(actors, "digits-2")
    assert (status["restarts"]["free"], status["restarts"]["counted"]) == (1, 0)
    assert status["lastFailure"]["category"] == "Preempted"
    assert "EvictionByEvictionAPI" in status["lastFailure"]["message"]


@pytest.mark.parametrize("may_read_nodes", [True, False])
async def test_pods_on_lost_node_block_nothing(
    server: StandIn, actors: ClusterActors, start: Start, may_read_nodes: bool
) -> None:
    start()
    if not may_read_nodes:
        server.faults.add(403, verb="get", resource="nodes", times=1_000_000)
    # No kubelet ends pods any more. The stand-in has no nodes, so they count as deleted.
    server.controllers.ends_pods = False
    await running(actors, recovery={"forceDeleteAfterSeconds": 0}, template=quick_to_stop())
    pod = await actors.pod("digits-1", 1)
    await actors.delete("Pod", pod["metadata"]["name"])
    job = await actors.child_job("digits-2")
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {field["values"][0] for field in term["matchFields"]} == {"node-0", "node-1"}
    server.controllers.ends_pods = True
    status = await finish(actors, "digits-2")
    assert status["restarts"]["counted"] == 0
    assert status["lastFailure"]["category"] == "NodeLost"
    assert sorted(status["failedNodes"]) == ["node-0", "node-1"]
    events = [event["reason"] for event in await actors.list("Event")]
    assert "FailureNodeLost" in events


async def test_pod_on_live_node_keeps_grace_period(server: StandIn, actors: ClusterActors, start: Start) -> None:
    start()
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    for number in (0, 1):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{number}"}, "status": ready}
        await actors.client.request("POST", "/api/v1/nodes", body=node)
        await actors.client.request(
            "PATCH",
            f"/api/v1/nodes/node-{number}/status",
            body={"status": ready},
            content_type="application/merge-patch+json",
        )
    server.controllers.ends_pods = False
    await running(actors, recovery={"forceDeleteAfterSeconds": 0}, template=quick_to_stop())
    asked = server.faults.add(503, verb="get", resource="nodes")
    pod = await actors.pod("digits-1", 1)
    await actors.delete("Pod", pod["metadata"]["name"])
    await actors.until(lambda: asked.hits, "a look at the node")
    waiting = await actors.resource("digits", lambda resource: "WaitingForFormerPods" in str(resource.get("status")))
    assert "failedNodes" not in waiting["status"]
    assert await actors.get("Job", "digits-2") is None
    assert len([pod for pod in server.list("Pod") if pod["status"]["phase"] == "Running"]) == 2
    server.controllers.ends_pods = True
    await actors.patch(KIND, "digits", {"metadata": {"labels": {"a": "b"}}})
    await finish(actors, "digits-2")


async def test_pod_creation_failure_reports_job_controller_message(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    server.controllers.job_controller = None
    start()
    await actors.create(job_manifest())
    job = await actors.child_job("digits-1")
    meta = job["metadata"]
    words = 'Error creating: pods "digits-1-0-x7k2p" is forbidden: exceeded quota: team, requested: pods=1'
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "digits-1.1", "namespace": meta["namespace"]},
        "involvedObject": {"kind": "Job", "name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
        "type": "Warning",
        "reason": "FailedCreate",
        "message": words,
        "lastTimestamp": "2026-11-20T12:00:00Z",
    }
    await actors.create(event)
    report = await actors.resource(
        "digits", lambda resource: "PodsForbidden" in str(resource.get("status")), "PodsForbidden"
    )
    (scheduled,) = [item for item in report["status"]["conditions"] if item["type"] == "Scheduled"]
    assert scheduled["message"] == words.replace("0-x7k2p", "*") + " (0/2 pods scheduled)"


async def test_missing_admission_reports_kueue_message(server: StandIn, actors: ClusterActors, start: Start) -> None:
    server.serve(WORKLOAD)
    start()
    manifest = job_manifest(suspend=False)
    manifest["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpu"}
    await actors.create(manifest)
    job = await actors.child_job("digits-1")
    words = "LocalQueue gpu doesn't exist"
    reserved = {"type": "QuotaReserved", "status": "False", "reason": "Inadmissible", "message": words}
    labels = {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}
    workload = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "spec": {"queueName": "gpu"}}
    await actors.create(
        workload | {"metadata": {"name": "job-digits-1-0a1b2", "labels": labels}, "status": {"conditions": [reserved]}}
    )
    await actors.patch("Job", "digits-1", {"spec": {"suspend": True}})  # as Kueue's webhook would
    report = await actors.resource("digits", lambda resource: words in str(resource.get("status")), "Kueue's words")
    (scheduled,) = [item for item in report["status"]["conditions"] if item["type"] == "Scheduled"]
    assert scheduled["reason"] == "Inadmissible"
    assert scheduled["message"].startswith(f"Job digits-1 is waiting for admission by queue gpu: {words}")


def quick_to_stop() -> dict[str, Any]:
    container = {"name": "trainer", "image": "train:1", "command": ["python", "train.py"]}
    return {"spec": {"containers": [container], "terminationGracePeriodSeconds": 1}}


@pytest.mark.parametrize("kind", ["Pod", "Job"])
async def test_removed_labels_are_restored(actors: ClusterActors, start: Start, kind: str) -> None:
    """The operator finds its children, and the Service its pods, by these labels; the Job controller has its own."""
    start()
    await running(actors)
    name = "digits-1" if kind == "Job" else (await actors.pod("digits-1", 1))["metadata"]["name"]
    taken = {"ddp-operator.dev/job-name": None, "ddp-operator.dev/attempt": None}
    await actors.patch(kind, name, {"metadata": {"labels": taken}})

    async def labelled() -> bool:
        result = await actors.get(kind, name)
        labels = result["metadata"]["labels"] if result else {}
        return (labels.get("ddp-operator.dev/job-name"), labels.get("ddp-operator.dev/attempt")) == ("digits", "1")

    await actors.until(labelled, "the labels are back")
    await actors.phase("digits", "Running")
    for index in (0, 1):
        await actors.finish_pod("digits-1", index)
    done = await actors.phase("digits", "Succeeded")
    assert done["status"]["restarts"]["total"] == 0
