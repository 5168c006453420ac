"""The operator's process against objects of odd shapes: it keeps running, and serves the jobs of other namespaces."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

import pytest
import pytest_asyncio

from ddp_operator.api import child_names
from ddp_operator.api.constants import API_VERSION, KIND
from ddp_operator.api.other_kinds import KUEUE_JOB_UID_LABEL
from tests.support.builders import child_job, child_pod, job_manifest, resource, template
from tests.support.control_plane import free_ports
from tests.support.drain_requests import SOURCE, build_drain_request, build_eviction
from tests.support.odd_objects import list_odd_shapes, list_paths
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors, StandIn, validation
from tests.support.standin.resources import Kind

QUEUE: Final = "kueue.x-k8s.io/queue-name"
TEAM: Final = "team"
"""The namespace with the odd objects."""
DRAINS: Final = Kind("nvsentinel.nvidia.com", "v1alpha1", "DrainRequest", "drainrequests", subresources=("status",))
EVICTIONS: Final = Kind("lifecycle.k8s.io", "v1alpha1", "Eviction", "evictions", subresources=("status",))
CHECKED: Final = ("metadata", "metadata.name", "metadata.namespace", "metadata.labels")
"""Parts that every API server checks itself, or that have to match its path and the selector."""


class OddKind(NamedTuple):
    """A kind of object, and one of its objects in the shape in which its component writes it."""

    good: dict[str, Any]
    served: Kind | None = None
    each: int = 5
    """Odd values of each part of the object."""


def build_child(kind: str, api_version: str, **parts: Any) -> dict[str, Any]:
    """Return an object with the labels and the owner of a child of a job of the team."""
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "odd", "uid": "u", "controller": True}
    metadata = {"labels": child_names.child_labels("odd", 1), "ownerReferences": [owner], "finalizers": ["a/b"]}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata | {"name": "x", "namespace": TEAM}} | parts


def complete(good: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """Return an object with the metadata that an API server adds."""
    known = {"uid": "u", "resourceVersion": "7", "generation": 1, "creationTimestamp": "2026-11-20T12:00:00Z"}
    extra = {"annotations": {"a.ddp-operator.dev/b": "c"}, "deletionGracePeriodSeconds": 30}
    return {**good, "metadata": extra | known | good["metadata"] | {"namespace": namespace}}


WORKLOAD: Final = {
    "metadata": {"ownerReferences": [{"name": "train-1", "uid": "u", "controller": True}]},
    "spec": {"queueName": "q", "priority": 1, "podSets": [{"name": "main", "count": 2, "template": template()}]},
    "status": {
        "conditions": [{"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2026-11-20T12:00:00Z"}],
        "admission": {"clusterQueue": "gpu", "podSetAssignments": [{"flavors": {"cpu": "a"}, "resourceUsage": {}}]},
    },
}
OWN_QUEUE: Final = {"clusterQueue": "own"}
READ_ONE_BY_ONE: Final = (
    Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices"),
    Kind("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims"),
    Kind("scheduling.k8s.io", "v1beta1", "PodGroup", "podgroups"),
    Kind("ddp-operator.dev", "v1alpha1", "DDPTrainingProfile", "ddptrainingprofiles"),
    Kind("", "v1", "Secret", "secrets"),
    Kind("", "v1", "Event", "events"),
    Kind("coordination.k8s.io", "v1", "Lease", "leases"),
    Kind("kueue.x-k8s.io", "v1beta2", "ClusterQueue", "clusterqueues"),
)
"""Kinds of which the operator lists no objects of all namespaces; some it never reads."""

ODD_KINDS: Final = {
    "DrainRequest": OddKind(
        build_drain_request("a")
        | {"status": {"conditions": [{"type": "DrainComplete", "status": "False", "message": "m"}]}},
        DRAINS,
    ),
    "Eviction": OddKind(build_eviction("a", "b"), EVICTIONS),
    "Workload": OddKind(WORKLOAD, Kind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads", subresources=("status",))),
    "LocalQueue": OddKind(
        {"metadata": {}, "spec": {"clusterQueue": "gpu", "stopPolicy": "None"}},
        Kind("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues"),
        each=10,
    ),
    "Job": OddKind(
        build_child("Job", "batch/v1", spec=child_job(awaits_peers=True)["spec"], status=child_job()["status"])
    ),
    "Pod": OddKind(build_child("Pod", "v1", spec=child_pod()["spec"], status=child_pod(code=1)["status"])),
    "Service": OddKind(build_child("Service", "v1", spec={"selector": {"a": "b"}})),
    "ConfigMap": OddKind(build_child("ConfigMap", "v1", data={"a": "b"})),
    "NetworkPolicy": OddKind(build_child("NetworkPolicy", "networking.k8s.io/v1", spec={})),
    KIND: OddKind(resource("x", nodes=2, checkpoint={"path": "/c", "claimName": "c"}) | {"status": {"attempt": 1}}),
    **{
        kind.kind: OddKind({"metadata": {}, "spec": {"a": ["b"]}, "status": {"conditions": [{"type": "A"}]}}, kind)
        for kind in READ_ONE_BY_ONE
    },
}


@pytest_asyncio.fixture
async def team(server: StandIn, kubeconfig: Path) -> AsyncIterator[ClusterActors]:
    """A second namespace, and NVSentinel's."""
    async with ClusterActors(kubeconfig) as cluster:
        for name in (TEAM, "nvsentinel"):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await cluster.client.request("POST", "/api/v1/namespaces", body=body)
        yield cluster


def put_odd_objects(server: StandIn, kind: str) -> int:
    """Store objects of odd shapes: each part of one is odd in some ways. Returns their number."""
    odd = ODD_KINDS[kind]
    namespace = "nvsentinel" if kind == "DrainRequest" else TEAM
    good = complete(odd.good, namespace)
    parts = [path for path in list_paths(good) if path not in CHECKED]
    objects = list(list_odd_shapes(good, parts, odd.each))
    for number, (_, obj) in enumerate(objects):
        obj["metadata"]["name"] = f"odd-{number}"
        server.put_unchecked(kind, f"odd-{number}", obj, namespace)
    return len(objects)


LISTED: Final = [kind for kind in ODD_KINDS if kind not in {kind.kind for kind in READ_ONE_BY_ONE}]


@pytest.mark.parametrize("kinds", [*([kind] for kind in LISTED), [kind.kind for kind in READ_ONE_BY_ONE]], ids=",".join)
async def test_operator_serves_other_namespaces_with_odd_objects(
    server: StandIn,
    kubeconfig: Path,
    actors: ClusterActors,
    team: ClusterActors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[str],
) -> None:
    monkeypatch.setattr(validation, "KUBERNETES", "1.37")  # its pods may have responders of Evictions
    known = {kind.kind for kind in server.call(lambda: server._api.kinds)}
    for served in (ODD_KINDS[kind].served for kind in (*kinds, "Workload", "LocalQueue")):
        if served is not None and served.kind not in known:
            server.serve(served)
            known.add(served.kind)
    server.controllers.job_controller = None  # the stand-in's controllers cannot read odd objects
    server.controllers.collects_garbage = False
    server.controllers.ends_pods = False
    server.call(setattr, server._api, "webhook", suspend_queued_job)
    for kind in kinds:
        assert put_odd_objects(server, kind) >= 30
    (port,) = free_ports(1)
    env = {"DDP_OPERATOR_DRAIN_REQUESTS": SOURCE}
    with OperatorProcess(kubeconfig, tmp_path / "log", port=port, env=env, warm=True) as operator:
        await actors.create(job_manifest("before"))
        await actors.child_job("before-1")
        for kind in kinds:
            put_odd_objects(server, kind)
        await actors.create(job_manifest("after"))
        await actors.child_job("after-1")
        await queue_job(server, actors)
        await actors.resource("queued", lambda job: find_position(job) == 1)
        for page in ("healthz", "metrics"):
            assert await asyncio.to_thread(read_status, f"{operator.url}/{page}") == 200
        assert re.findall(r".*Traceback.*|.*internal error.*", operator.log) == []


async def test_job_waits_behind_job_with_any_number_of_steps(
    server: StandIn, kubeconfig: Path, actors: ClusterActors, team: ClusterActors, tmp_path: Path
) -> None:
    for kind in ("Workload", "LocalQueue"):
        served = ODD_KINDS[kind].served
        assert served is not None
        server.serve(served)
    server.controllers.job_controller = None
    server.controllers.collects_garbage = False
    server.call(setattr, server._api, "webhook", suspend_queued_job)
    put_running_job(server)
    (port,) = free_ports(1)
    with OperatorProcess(kubeconfig, tmp_path / "log", port=port, warm=True) as operator:
        await queue_job(server, actors)
        await actors.resource("queued", lambda job: find_position(job) == 1)
        assert re.findall(r".*Traceback.*|.*internal error.*", operator.log) == []


def put_running_job(server: StandIn) -> None:
    """Store a job of the team that runs in the same ClusterQueue, and states 900 million steps that take decades."""
    progress = {"step": 1, "totalSteps": 900_000_000, "stepsPerSecond": "0.9", "eta": "11574d"}
    running = complete(resource("odd", managedBy="example.com/other"), TEAM)
    server.put_unchecked(KIND, "odd", running | {"status": {"attempt": 1, "progress": progress}}, TEAM)
    job = complete(ODD_KINDS["Job"].good, TEAM)
    server.put_unchecked("Job", "odd-1", job | {"metadata": job["metadata"] | {"name": "odd-1", "uid": "j"}}, TEAM)
    flavor = {"name": "a", "resources": [{"name": "pods", "nominalQuota": "2"}]}
    cluster_queue = {"metadata": {"name": "own"}, "spec": {"resourceGroups": [{"flavors": [flavor]}]}}
    cluster_queue["spec"]["queueingStrategy"] = "StrictFIFO"
    server.serve(Kind("kueue.x-k8s.io", "v1beta2", "ClusterQueue", "clusterqueues", namespaced=False))
    server.put_unchecked("ClusterQueue", "own", complete(cluster_queue, ""), "")
    local_queue = complete({"metadata": {"name": "q"}, "spec": OWN_QUEUE}, TEAM)
    server.put_unchecked("LocalQueue", "q", local_queue, TEAM)
    conditions = [{"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2026-11-20T12:00:00Z"}]
    ended = {"type": "Finished", "status": "True", "lastTransitionTime": "2026-11-20T13:00:00Z"}
    for number in range(7):
        metadata = {"name": f"w{number}", "uid": f"w{number}", "ownerReferences": [{"name": f"odd-{number + 1}"}]}
        status = {
            "conditions": conditions if number == 0 else [*conditions, ended],
            "admission": {
                "clusterQueue": "own",
                "podSetAssignments": [{"flavors": {"pods": "a"}, "resourceUsage": {"pods": "2"}}],
            },
        }
        workload = complete({"metadata": metadata, "spec": WORKLOAD["spec"], "status": status}, TEAM)
        server.put_unchecked("Workload", f"w{number}", workload, TEAM)


async def queue_job(server: StandIn, actors: ClusterActors) -> None:
    """Create a job that waits in a queue, and Kueue's objects for it: its position needs those of all namespaces."""
    server.put_unchecked("LocalQueue", "q", complete({"metadata": {"name": "q"}, "spec": OWN_QUEUE}, "default"))
    manifest = job_manifest("queued")
    manifest["metadata"]["labels"] = {QUEUE: "q"}
    await actors.create(manifest)
    job = await actors.child_job("queued-1")
    metadata = {"name": "own", "uid": "own", "labels": {KUEUE_JOB_UID_LABEL: job["metadata"]["uid"]}}
    workload = {"metadata": metadata, "spec": WORKLOAD["spec"], "status": {}}
    server.put_unchecked("Workload", "own", complete(workload, "default"))


def suspend_queued_job(job: dict[str, Any]) -> None:
    """Suspend a Job with a queue, as Kueue does."""
    if QUEUE in (job["metadata"].get("labels") or {}):
        job["spec"]["suspend"] = True


def find_position(job: dict[str, Any]) -> int | None:
    """Return the position of a job in its queue."""
    position: int | None = ((job.get("status") or {}).get("queue") or {}).get("position")
    return position


def read_status(url: str) -> int:
    """Return the HTTP status of a page."""
    with urlopen(url, timeout=60) as response:
        status: int = response.status
        return status
