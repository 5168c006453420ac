"""Real Kopf against the stand-in: lost pods, and lost nodes with their pods."""

from __future__ import annotations

from typing import Any

from ddp_operator.api.constants import KIND
from tests.support.builders import job_manifest
from tests.support.counts import read_counts
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn


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
    assert (read_counts(status)["free"], read_counts(status)["counted"]) == (1, 0)
    assert status["lastFailure"]["category"] == "Preempted"
    assert "EvictionByEvictionAPI" in status["lastFailure"]["message"]


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


def quick_to_stop() -> dict[str, Any]:
    container = {"name": "trainer", "image": "train:1", "command": ["python", "train.py"]}
    return {"spec": {"containers": [container], "terminationGracePeriodSeconds": 1}}
