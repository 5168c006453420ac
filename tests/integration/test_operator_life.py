"""Real Kopf against the stand-in: the life of a job, and the objects that remain after it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import aiohttp
import pytest

from ddp_operator.api.constants import KIND, LABEL_JOB_NAME
from ddp_operator.decide import describe
from ddp_operator.manager.operator import Operator
from ddp_operator.reconcile import reconciler
from tests.support.builders import job_manifest
from tests.support.running_operator import RunningOperator, Start
from tests.support.standin import ClusterActors, StandIn

CHILDREN = ("services", "configmaps", "jobs", "pods")


def owners(obj: dict[str, Any]) -> list[tuple[str, str]]:
    return [(owner["kind"], owner["uid"]) for owner in obj["metadata"].get("ownerReferences", [])]


def written(server: StandIn) -> list[tuple[str, ...]]:
    """Return all writes except the leader's to its Lease, which it always renews."""
    return [write for write in server.writes if write[1] != "leases"]


@pytest.fixture(autouse=True)
def _nothing_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write counts and messages at once, so that an idle operator has written everything, also on a slow machine."""
    monkeypatch.setattr(reconciler, "MINOR_INTERVAL", 0.0)
    monkeypatch.setattr(describe, "_PAGE_PATIENCE", timedelta(hours=1))  # pods here have no page


def rests(server: StandIn, operator: Operator) -> bool:
    """Return whether the operator runs, has read everything, and has nothing to do and nothing to write."""
    store = operator.store
    queue = operator.queue
    writer = operator.cluster._writer
    if not operator.sync.synced.is_set() or not queue.alive or len(queue) or queue.active:
        return False
    for kind in (KIND, "Job", "Pod"):
        results = [obj["metadata"] for obj in server.list(kind)]
        if operator.settings.namespaces:
            results = [meta for meta in results if meta["namespace"] in operator.settings.namespaces]
        if set(store.entries(kind)) != {meta["uid"] for meta in results}:
            return False
        if not all(store.is_current(kind, meta) for meta in results):
            return False
    return not writer._queue._unfinished_tasks  # type: ignore[attr-defined]


async def settle(server: StandIn, running: RunningOperator) -> int:
    """Return the number of writes once the operator is idle in several consecutive checks without a write."""
    looks = 0
    before = -1
    while looks < 5:
        still = before == (before := len(written(server)))
        looks = looks + 1 if still and rests(server, running.operator) else 0
        await asyncio.sleep(0.1)
    return before


async def test_time_to_first_job_is_measured_once_resource(actors: ClusterActors, start: Start) -> None:
    await actors.create(job_manifest("before"))
    running = start()
    await actors.child_job("before-1")
    await actors.create(job_manifest("after"))
    registry = running.operator.metrics.registry
    name = "ddp_operator_create_to_job_duration_seconds_count"
    await actors.until(lambda: registry.get_sample_value(name), "a measurement")
    assert registry.get_sample_value(name) == 1  # how long the other one had waited is unknown
    phase = {"namespace": "default", "phase": "Pending"}
    await actors.until(lambda: registry.get_sample_value("ddp_operator_jobs", phase) == 2, "two jobs are counted")


async def test_job_gets_its_children_runs_and_succeeds(server: StandIn, actors: ClusterActors, start: Start) -> None:
    start()
    resource = await actors.create(job_manifest())
    await actors.child_job("digits-1")
    for index in (0, 1):
        await actors.run_pod("digits-1", index)
    await actors.phase("digits", "Running")
    for index in (0, 1):
        await actors.finish_pod("digits-1", index)
    done = await actors.phase("digits", "Succeeded")

    for kind in ("Service", "Job"):
        child = (await actors.list(kind, f"{LABEL_JOB_NAME}=digits"))[-1]
        assert owners(child) == [(KIND, resource["metadata"]["uid"])]
    [launcher] = await actors.list("ConfigMap", f"{LABEL_JOB_NAME}=")
    assert [kind for kind, _ in owners(launcher)] == ["CustomResourceDefinition"]
    assert done["status"]["nodes"]["succeeded"] == 2

    async def reasons() -> set[str]:
        return {event["reason"] for event in await actors.list("Event")}

    await actors.until(lambda: server.list("Event"), "events")
    events = await actors.list("Event")
    assert {event["involvedObject"]["uid"] for event in events} == {resource["metadata"]["uid"]}
    messages = [(event["reason"], event["message"]) for event in events]
    assert len(messages) == len(set(messages))


async def test_resource_has_no_operator_metadata_and_is_deleted_at_once(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    running = start()
    await actors.create(job_manifest())
    await actors.run_pod("digits-1", 0)
    await settle(server, running)
    resource = await actors.get(KIND, "digits")
    assert resource is not None
    assert set(resource["metadata"]) & {"finalizers", "annotations", "labels"} == set()
    await actors.delete(KIND, "digits")
    assert await actors.get(KIND, "digits") is None
    await actors.until(lambda: not any(map(server.list, ("Service", "Job", "Pod"))), "no child left")


async def test_unchanged_job_causes_no_write(server: StandIn, actors: ClusterActors, start: Start) -> None:
    running = start(resync_interval=1.0)
    operator = running.operator
    await actors.create(job_manifest())
    for index in (0, 1):
        await actors.run_pod("digits-1", index)
    await actors.phase("digits", "Running")
    before = await settle(server, running)
    reconciles = operator.metrics.registry.get_sample_value("ddp_operator_reconcile_duration_seconds_count")
    # Changes without effect on a decision: a label on a pod, another watch, a comparison of lists.
    pod = await actors.pod("digits-1", 1)
    await actors.patch("Pod", pod["metadata"]["name"], {"metadata": {"labels": {"colour": "blue"}}})
    server.cut_watches()
    await actors.until(
        lambda: (
            operator.metrics.registry.get_sample_value("ddp_operator_reconcile_duration_seconds_count") != reconciles
        ),
        "a reconcile",
    )
    await settle(server, running)
    assert written(server)[before:] == [("patch", "pods", "default", pod["metadata"]["name"])]


async def test_restarted_operator_writes_nothing_and_continues(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    with start() as running:
        await actors.create(job_manifest())
        for index in (0, 1):
            await actors.run_pod("digits-1", index)
        await actors.phase("digits", "Running")
        await settle(server, running)
    before = len(written(server))
    again = start()
    await actors.until(
        lambda: again.operator.metrics.registry.get_sample_value("ddp_operator_reconcile_duration_seconds_count"),
        "a reconcile",
    )
    await settle(server, again)
    assert written(server)[before:] == []
    for index in (0, 1):
        await actors.finish_pod("digits-1", index)
    await actors.phase("digits", "Succeeded")


async def test_only_named_namespaces_are_served(server: StandIn, actors: ClusterActors, start: Start) -> None:
    for name in ("team-a", "team-b"):
        await actors.client.request(
            "POST", "/api/v1/namespaces", body={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
    running = start(namespaces=("team-a",))
    for name in ("team-b", "team-a"):
        actors.namespace = name
        await actors.create(job_manifest())
    await actors.run_pod("digits-1", 0)
    await settle(server, running)
    assert {job["metadata"]["namespace"] for job in server.list("Job")} == {"team-a"}


async def test_health_and_metrics_are_served(server: StandIn, actors: ClusterActors, start: Start) -> None:
    running = start()
    await actors.create(job_manifest())
    await actors.child_job("digits-1")
    async with aiohttp.ClientSession(running.url) as session:
        for page in ("/healthz", "/readyz"):
            async with session.get(page) as response:
                assert (response.status, await response.text()) == (200, "ok\n")
        async with session.get("/metrics") as response:
            text = await response.text()
    assert 'ddp_operator_api_requests_total{code="201",resource="jobs",verb="create"}' in text
    assert "ddp_operator_queue_depth " in text
    assert "_created" not in text
    assert 'ddp_operator_reconcile_errors_total{cause="Bug"} 0.0' in text


async def test_operator_without_workers_is_not_alive(server: StandIn, actors: ClusterActors, start: Start) -> None:
    running = start()
    await actors.create(job_manifest())
    await actors.child_job("digits-1")
    running.operator.queue.alive = False
    async with aiohttp.ClientSession(running.url) as session, session.get("/healthz") as response:
        assert (response.status, await response.text()) == (503, "a reconcile ended unexpectedly\n")


async def test_operator_without_synced_caches_is_not_ready(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    fault = server.faults.add(500, verb="list", resource="pods", times=1_000_000)
    running = start()
    await actors.create(job_manifest())
    async with aiohttp.ClientSession(running.url) as session, session.get("/readyz") as response:
        assert response.status == 503
    await actors.until(lambda: fault.hits > 2, "attempts to list pods")
    assert server.writes_of(*CHILDREN) == []
    server.faults.clear()
    await actors.child_job("digits-1")
