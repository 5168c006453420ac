"""The API server's side of the cluster protocol, with a store and without one."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from ddp_operator.api.cluster import Event, Key, Snapshot
from ddp_operator.api.cluster_errors import ClusterError, Refused, ServerError, VersionConflict
from ddp_operator.api.constants import API_VERSION, KIND, LABEL_JOB_NAME, LABEL_MANAGED_BY, MANAGED_BY
from ddp_operator.kube import resync, scrape
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.resources import path
from ddp_operator.kube.resync import Resync
from ddp_pod.contract.run_report import REPORT_LIMIT
from tests.support.builders import job_manifest
from tests.support.standin import ClusterActors, StandIn
from tests.support.standin.kueue import WORKLOAD

KEY = Key("default", "digits")
LABELS = {LABEL_JOB_NAME: "digits", LABEL_MANAGED_BY: MANAGED_BY}


def child(kind: str, name: str, **more: Any) -> dict[str, Any]:
    version = "batch/v1" if kind == "Job" else "v1"
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "digits", "uid": "u", "controller": True}
    if kind == "Pod":
        owner |= {"apiVersion": "batch/v1", "kind": "Job", "name": "digits-1"}
    meta = {"name": name, "namespace": "default", "labels": dict(LABELS), "ownerReferences": [owner]}
    return {"apiVersion": version, "kind": kind, "metadata": meta, **more}


def service(name: str = "digits") -> dict[str, Any]:
    return child("Service", name, spec={"ports": [{"port": 1}]})


def job(name: str = "digits-1") -> dict[str, Any]:
    pod = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train:1"}]}
    spec = {"completions": 1, "parallelism": 1, "completionMode": "Indexed", "template": {"spec": pod}}
    return child("Job", name, spec=spec)


@pytest.fixture(autouse=True)
def keep_children(server: StandIn) -> None:
    """Keep children whose owner has an invented UID."""
    server.controllers.collects_garbage = False


@pytest.fixture
def store() -> ObjectCache:
    return ObjectCache()


@pytest_asyncio.fixture
async def cluster(actors: ClusterActors, store: ObjectCache) -> AsyncIterator[KubeCluster]:
    """A cluster whose store has no watch: it contains only the cluster's own writes."""
    kube_cluster = KubeCluster(actors.client, store)
    store.apply(KIND, await actors.create(job_manifest()))
    yield kube_cluster
    await kube_cluster.close()


async def seen(cluster: KubeCluster) -> Snapshot:
    snapshot = await cluster.observe(KEY)
    assert snapshot is not None
    return snapshot


def names(objects: tuple[Any, ...]) -> list[str]:
    return [obj["metadata"]["name"] for obj in objects]


async def test_workloads_are_read_in_version_that_is_served(
    cluster: KubeCluster, server: StandIn, actors: ClusterActors
) -> None:
    mine = {"metadata": {"name": "train-1", "namespace": "default", "uid": "u"}}
    with pytest.raises(Refused, match="Kueue is not installed"):
        await cluster.workloads_of(mine)
    server.serve(replace(WORKLOAD, version="v1beta2"))
    assert await cluster.workloads_of(mine) == ()
    for name, uid in (("job-train-1-a", "u"), ("job-other-1-a", "v")):
        metadata = {"name": name, "namespace": "default", "labels": {"kueue.x-k8s.io/job-uid": uid}}
        await actors.client.request(
            "POST", path("Workload.v1beta2", "default"), body={"metadata": metadata}, kind="workloads"
        )
    assert names(await cluster.workloads_of(mine)) == ["job-train-1-a"]
    server.faults.add(403, verb="list", resource="workloads")
    with pytest.raises(Refused):
        await cluster.workloads_of(mine)


async def test_store_equals_api_server(cluster: KubeCluster, actors: ClusterActors, server: StandIn) -> None:
    server.controllers.job_controller = None
    await cluster.create(service())
    await cluster.create(job())
    assert await KubeCluster(actors.client).observe(KEY) == await seen(cluster)


async def test_forbidden_create_has_reason_forbidden(cluster: KubeCluster, server: StandIn) -> None:
    server.faults.add(403, verb="create", resource="jobs")
    with pytest.raises(Refused) as caught:
        await cluster.create(job())
    assert caught.value.reason == "Forbidden"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (422, "jobs.batch \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"),
        (400, 'admission webhook "validate.kyverno.svc-fail" denied the request: no'),
    ],
)
async def test_job_denied_by_policy_is_forbidden_not_invalid(
    cluster: KubeCluster, server: StandIn, status: int, words: str
) -> None:
    server.faults.add(status, verb="create", resource="jobs", message=words)
    with pytest.raises(Refused) as caught:
        await cluster.create(job())
    assert (caught.value.reason, caught.value.message) == ("Forbidden", words)


async def test_server_that_fails_at_creation_is_quoted(cluster: KubeCluster, server: StandIn) -> None:
    words = 'Internal error occurred: failed calling webhook "audit.example.com"'
    server.faults.add(500, verb="create", resource="services", message=words)
    with pytest.raises(ServerError) as caught:
        await cluster.create(service("extra"))
    assert caught.value.message == f"Service extra: {words}"


async def test_vanished_namespace_is_no_refusal(cluster: KubeCluster) -> None:
    lost = service()
    lost["metadata"]["namespace"] = "gone"
    with pytest.raises(ClusterError, match="not found"):
        await cluster.create(lost)


async def test_written_status_is_in_cache_before_watch_reports_it(cluster: KubeCluster, server: StandIn) -> None:
    version = (await seen(cluster)).resource["metadata"]["resourceVersion"]
    await cluster.patch_status(KEY, {"phase": "Running"}, resource_version=version)
    cached = (await seen(cluster)).resource
    stored = server.get(KIND, "digits")
    assert stored is not None
    assert cached["status"] == {"phase": "Running"}
    assert cached["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"] != version


async def test_written_status_is_not_joined_to_older_spec_in_cache(cluster: KubeCluster, server: StandIn) -> None:
    before = (await seen(cluster)).resource
    changed = server.change(KIND, "digits", lambda job: job["spec"].update(nodes=5))
    await cluster.patch_status(KEY, {"phase": "Running"}, resource_version=changed["metadata"]["resourceVersion"])
    assert (await seen(cluster)).resource == before  # until the watch reports both changes


async def test_status_of_deleted_resource_drops_it_from_cache(cluster: KubeCluster, server: StandIn) -> None:
    version = (await seen(cluster)).resource["metadata"]["resourceVersion"]
    server.remove(KIND, "digits")
    with pytest.raises(VersionConflict):
        await cluster.patch_status(KEY, {"phase": "Running"}, resource_version=version)
    assert await cluster.observe(KEY) is None


@pytest.mark.parametrize("fault", [429, 500, "drop", "timeout"])
async def test_transient_error_of_every_call_is_cluster_error(kubeconfig: Path, server: StandIn, fault: Any) -> None:
    async with ClusterActors(kubeconfig) as actors:
        actors.client._timeout = 0.3
        cluster = KubeCluster(actors.client)
        # More than once: an HTTP client may repeat a GET whose kept connection was cut.
        server.faults.add(fault, times=100)
        for call in (
            cluster.observe(KEY),
            cluster.create(service()),
            cluster.patch_job("default", "x", {}),
            cluster.delete("Job", "default", "x", uid="u"),
            cluster.patch_status(KEY, {}, resource_version="1"),
        ):
            with pytest.raises(ClusterError):
                await call
        await cluster.close()


async def test_events_name_resource_and_are_distinct(cluster: KubeCluster, server: StandIn) -> None:
    resource = (await seen(cluster)).resource
    for number in range(3):
        await cluster.emit(resource, Event("Warning", "Problem", f"{number}" + "x" * 5000))
    await cluster.close()
    events = server.list("Event")
    assert [event["message"][0] for event in events] == ["0", "1", "2"]
    assert {len(event["message"].encode()) for event in events} == {1024}
    assert {event["involvedObject"]["uid"] for event in events} == {resource["metadata"]["uid"]}


async def test_comparison_with_lists_mends_store(
    cluster: KubeCluster, actors: ClusterActors, store: ObjectCache
) -> None:
    changed: list[Key] = []
    syncing = Resync(actors.client, store, namespaces=["default"], interval=3600, on_change=changed.append)
    await cluster.create(service())
    await cluster.create(service("extra"))
    await actors.delete("Service", "extra")  # without a watch no event arrives
    await actors.create(child("ConfigMap", "launcher"))
    await syncing.resync()
    snapshot = await seen(cluster)
    assert (names(snapshot.services), names(snapshot.config_maps)) == (["digits"], ["launcher"])
    assert changed == [KEY, KEY]
    await syncing.resync()
    assert changed == [KEY, KEY]


async def test_child_that_loses_its_controller_unseen_is_dropped_by_comparison(
    cluster: KubeCluster, actors: ClusterActors, store: ObjectCache
) -> None:
    changed: list[Key] = []
    await cluster.create(job())
    await actors.patch("Job", "digits-1", {"metadata": {"ownerReferences": []}})
    assert store.entry("Job", "default", "digits-1") is not None
    syncing = Resync(actors.client, store, namespaces=["default"], interval=3600, on_change=changed.append)
    await syncing.resync()
    assert store.entry("Job", "default", "digits-1") is None
    assert changed == [KEY]


async def test_empty_label_on_unowned_pod_blocks_nothing(actors: ClusterActors, store: ObjectCache) -> None:
    nobodys = child("Pod", "p", spec={"containers": [{"name": "c", "image": "i"}]})
    nobodys["metadata"]["labels"][LABEL_JOB_NAME] = ""
    await actors.create(nobodys)
    syncing = Resync(actors.client, store, namespaces=[], interval=3600, on_change=lambda key: None)
    running = asyncio.create_task(syncing.run())
    await actors.until(syncing.synced.is_set, "agreement")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_long_lists_are_read_page_by_page(
    actors: ClusterActors, store: ObjectCache, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resync, "CHUNK", "2")
    for number in range(5):
        await actors.create(child("ConfigMap", f"c{number}"))
    await Resync(actors.client, store, namespaces=[], interval=3600, on_change=lambda key: None).resync()
    assert len(store.entries("ConfigMap")) == 5
    assert server.calls.count(("list", "configmaps", 200)) == 3


async def test_first_comparison_follows_watches(actors: ClusterActors, store: ObjectCache) -> None:
    resource = await actors.create(job_manifest())
    syncing = Resync(actors.client, store, namespaces=[], interval=3600, on_change=lambda key: None)
    running = asyncio.create_task(syncing.run())
    await asyncio.sleep(0.1)
    assert not syncing.synced.is_set()
    store.apply(KIND, resource)
    await actors.until(syncing.synced.is_set, "agreement")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give pages all the time that a busy machine needs."""
    monkeypatch.setattr(scrape, "TIMEOUT", 120.0)


async def scraped(cluster: KubeCluster, page: Page, namespace: str = "default") -> bytes | None:
    """Read the report of a pod, which ``page`` serves."""
    app = web.Application()
    app.router.add_get("/report", page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        pod = {"metadata": {"namespace": namespace}, "status": {"podIP": "127.0.0.1"}}
        return await cluster.read_report(pod, runner.addresses[0][1])
    finally:
        await runner.cleanup()


@pytest.mark.usefixtures("patient")
async def test_metrics_page_is_read_without_credentials(cluster: KubeCluster) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="authorization" if "Authorization" in request.headers else "ddp_step 1\n")

    assert await scraped(cluster, page) == b"ddp_step 1\n"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("status", "page"), [(404, b""), (401, b""), (503, None)])
async def test_server_without_metrics_page_has_an_empty_one(
    cluster: KubeCluster, status: int, page: bytes | None
) -> None:
    """Another program on the port differs from a launcher that cannot be reached."""

    async def respond(_: web.Request) -> web.Response:
        return web.Response(status=status, text="no such page")

    assert await scraped(cluster, respond) == page


@pytest.mark.usefixtures("patient")
async def test_slow_pages_of_one_namespace_leave_connections_to_others(cluster: KubeCluster) -> None:
    opened = 0

    async def slow(_: web.Request) -> web.Response:
        nonlocal opened
        opened += 1
        await asyncio.sleep(3600)
        return web.Response()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="ddp_step 1\n")

    reads = [asyncio.create_task(scraped(cluster, slow, namespace="slow")) for _ in range(300)]
    while opened < scrape.CONNECTIONS_OF_NAMESPACE:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await scraped(cluster, page, namespace="other") == b"ddp_step 1\n"
    assert opened == scrape.CONNECTIONS_OF_NAMESPACE
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.usefixtures("patient")
async def test_endless_page_is_abandoned(cluster: KubeCluster) -> None:
    sent = 0

    async def page(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
                sent += 65536
        except ConnectionError:
            return response

    assert await scraped(cluster, page) is None
    assert sent < 64 * REPORT_LIMIT


async def test_silent_page_is_abandoned(cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "TIMEOUT", 0.1)

    async def page(_: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response()

    assert await scraped(cluster, page) is None


async def test_slow_page_is_abandoned(cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "TIMEOUT", 0.2)

    async def page(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.02)

    assert await scraped(cluster, page) is None


async def test_redirect_is_not_followed(cluster: KubeCluster) -> None:
    async def page(request: web.Request) -> web.Response:
        if "there" in request.query:
            return web.Response(text="a secret of the operator's network")
        return web.Response(status=302, headers={"Location": "/report?there"})

    assert await scraped(cluster, page) is None


@pytest.mark.usefixtures("patient")
async def test_packed_page_is_not_unpacked(cluster: KubeCluster) -> None:
    packed = gzip.compress(b"x" * 100_000_000)

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    page_read = await scraped(cluster, page)
    assert page_read is not None
    assert len(page_read) <= len(packed)


@pytest.mark.parametrize("status", [{}, {"podIP": ""}, {"podIP": "127.0.0.1"}, {"podIP": "::1"}, {"podIP": "a b"}])
async def test_unresponsive_pod_returns_no_page(cluster: KubeCluster, status: dict[str, str]) -> None:
    assert await cluster.read_report({"metadata": {"namespace": "default"}, "status": status}, 1) is None
