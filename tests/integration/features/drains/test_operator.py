"""Real Kopf against the stand-in: requests to drain pods, from the request to the report that it is done."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.features.drains import DrainSettings, requests
from ddp_operator.features.drains.requests import EVICTION_RESPONDER
from tests.integration.test_operator_recovery import running
from tests.support.counts import read_counts
from tests.support.drain_requests import SOURCE, build_crd, build_drain_request, build_eviction
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn, validation
from tests.support.standin.resources import Kind

EVICTION = Kind("lifecycle.k8s.io", "v1alpha1", "Eviction", "evictions", subresources=("status",))

KIND = SOURCE.partition("/")[2]
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "nvsentinel"}}
CRDS = "apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "INTERVAL", 0.1)


async def test_drain_request_moves_pods_once_and_is_done(
    server: StandIn, kubeconfig: Any, actors: ClusterActors, start: Start
) -> None:
    for place, body in (("/api/v1/namespaces", NAMESPACE), (f"/apis/{CRDS}", build_crd())):
        await actors.client.request("POST", place, body=body)
    start(features={"drains": DrainSettings(drain_requests=SOURCE)})
    await running(actors)
    names = [(await actors.pod("digits-1", index))["metadata"]["name"] for index in (0, 1)]
    server.controllers.ends_pods = False  # they save
    async with ClusterActors(kubeconfig, "nvsentinel") as nvsentinel:
        request = build_drain_request(*names, node="node-0")
        del request["metadata"]["resourceVersion"]
        await nvsentinel.create(request | {"kind": KIND})
        moved = await actors.resource("digits", lambda resource: resource["status"]["attempt"] == 2)
        assert moved["status"]["lastRestart"]["cause"] == "Drained"
        assert moved["status"]["failedNodes"] == ["node-0"], "the other named pod runs on another node"
        name = request["metadata"]["name"]

        async def read(status: str) -> Any:
            conditions = ((await nvsentinel.get(KIND, name)) or {}).get("status", {}).get("conditions", [])
            return next((item for item in conditions if item["status"] == status), None)

        waiting = await actors.until(lambda: read("False"), "what is awaited")
        assert "these training pods save and move" in waiting["message"]
        server.end_pods(True)
        assert (await actors.until(lambda: read("True"), "the end"))["type"] == "DrainComplete"
    await actors.child_job("digits-2")
    last = await actors.resource("digits")
    assert (last["status"]["attempt"], read_counts(last["status"])["counted"]) == (2, 0)


async def test_active_eviction_moves_pod_and_is_completed(
    server: StandIn, actors: ClusterActors, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "KUBERNETES", "1.37")
    server.serve(EVICTION)
    start()
    await running(actors)
    job = await actors.child_job("digits-1")
    responders = job["spec"]["template"]["spec"]["evictionResponders"]
    assert responders == [{"name": EVICTION_RESPONDER, "priority": 10000}]
    pod = await actors.pod("digits-1", 1)
    eviction = build_eviction(pod["metadata"]["name"], pod["metadata"]["uid"])
    del eviction["metadata"]["resourceVersion"]
    await actors.create(eviction)
    await actors.gone("Pod", pod["metadata"]["name"])

    async def completed() -> Any:
        stored = await actors.get("Eviction", eviction["metadata"]["name"])
        assert stored is not None
        own = next(item for item in stored["status"]["responders"] if item["name"] == EVICTION_RESPONDER)
        return own.get("completionTime")

    await actors.until(completed, "the responder's completion")
