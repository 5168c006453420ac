"""Kubernetes' own gang scheduling (1.36, alpha) on a real control plane.

With ``scheduling.gang: Native`` the operator creates the PodGroup. Without it the Job controller of 1.36 creates one
for a Job whose pods all run at once, if its gate is on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from ddp_operator.api.cluster_errors import AlreadyExists, Refused
from ddp_operator.api.constants import KIND
from ddp_operator.api.parse import parse_resource
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import FEATURES, SCHEMA
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.manifests.children import build_children, build_pod
from tests.support import ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]

GANGS = ("GenericWorkload", "GangScheduling")
GATES = (*GANGS, "WorkloadWithJob")
FURTHER = ("TopologyAwareWorkloadScheduling", "WorkloadAwarePreemption", "DRAWorkloadResourceClaims")
FIELDS = {"gangTopology": "example.com/rack", "disruptionMode": "All", "sharedClaims": ["fabric"]}
GROUP = "/apis/scheduling.k8s.io/v1alpha2"
WHOLE_NODE = {
    "name": "trainer",
    "image": "train:1",
    "command": ["python", "train.py"],
    "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}},
}


CLAIM_OBJECTS = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: channel}
spec: {}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: channels}
spec:
  driver: example.com
  pool: {name: channels, generation: 1, resourceSliceCount: 1}
  allNodes: true
  devices: [{name: channel-0}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: channel, namespace: default}
spec:
  spec:
    devices:
      requests: [{name: channel, exactly: {deviceClassName: channel}}]
"""


@pytest.fixture(scope="module")
def gang_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Two nodes of one CPU, and a scheduler with gang scheduling."""
    folder = tmp_path_factory.mktemp("gang")
    with ControlPlane(folder, gates=(*GATES, *FURTHER), api=["scheduling.k8s.io/v1alpha2"], cpus=1) as plane:
        if not plane.has_scheduler:
            pytest.skip("KUBEBUILDER_ASSETS has no kube-scheduler")
        if "v1alpha2" not in plane.kubectl("api-versions").stdout:
            pytest.skip("this Kubernetes has no scheduling.k8s.io/v1alpha2")
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds" / "ddptrainingjobs.yaml"))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        for name in ("namespace.yaml", "rbac.yaml"):
            plane.kubectl("apply", "-f", str(ROOT / "deploy" / "manifests" / name))
        rules = yaml.safe_load((ROOT / "charts" / "files" / "rules-native.yaml").read_text())
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "native"}}
        plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(role | {"rules": rules}))
        account = "--serviceaccount=ddp-operator:ddp-operator"
        plane.kubectl("create", "clusterrolebinding", "native", "--clusterrole=native", account)
        yield plane


@pytest.fixture
def operator(gang_plane: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator as its own service account, with the chart's role for native gangs."""
    kubeconfig = gang_plane.account("ddp-operator", "ddp-operator")
    (port,) = free_ports(1)
    with OperatorProcess(kubeconfig, tmp_path / "operator.log", port=port) as running:
        yield running


@pytest_asyncio.fixture
async def users(gang_plane: ControlPlane) -> AsyncIterator[ClusterActors]:
    async with ClusterActors(gang_plane.admin) as cluster_actors, cluster_actors.kubelet():
        yield cluster_actors


def whole_nodes(name: str, nodes: int, *, pod: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a job whose pods need a whole node each. ``pod``: further fields of the pods."""
    return job_manifest(name, nodes=nodes, template={"spec": {"containers": [WHOLE_NODE], **(pod or {})}}, **spec)


async def start(users: ClusterActors, name: str, nodes: int, **spec: Any) -> None:
    """Create an attempt's children as the operator does."""
    resource = await users.create(whole_nodes(name, nodes, **spec))
    cluster = KubeCluster(users.client, hooks=Hooks(FEATURES))
    for child in build_children(parse_resource(resource, SCHEMA), attempt=1, nodes=nodes):
        with suppress(AlreadyExists):  # shared by all jobs
            await cluster.create(child)
    await cluster.close()


async def pods_of(users: ClusterActors, name: str) -> list[Any]:
    return await users.list("Pod", f"batch.kubernetes.io/job-name={name}-1")


async def test_all_pods_of_attempt_are_placed_or_none(users: ClusterActors) -> None:
    await start(users, "big", 3)

    async def judged() -> list[Any] | None:
        pods = await pods_of(users, "big")
        reports = [condition for pod in pods for condition in pod["status"].get("conditions", ())]
        return pods if len(pods) == 3 and len(reports) == 3 else None

    pods = await users.until(judged, "the scheduler's word on three pods")
    await asyncio.sleep(1)
    pods = await pods_of(users, "big")
    assert [pod["spec"].get("nodeName") for pod in pods] == [None, None, None]  # two would fit
    assert all(pod["spec"]["schedulingGroup"]["podGroupName"] for pod in pods)
    groups = await users.client.request("GET", f"{GROUP}/namespaces/default/podgroups")
    (group,) = groups["items"]
    assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3

    await users.delete("Job", "big-1")
    await users.until(lambda: no_pods(users, "big"), "their end")
    await start(users, "small", 2)

    await until_placed(users, "small", 2)
    # For an elastic job, decide/decide.py starts a new attempt instead.
    cluster = KubeCluster(users.client)
    with pytest.raises(Refused, match="cannot change parallelism for a Job referencing gang-scheduled PodGroup"):
        await cluster.patch_job("default", "small-1", {"spec": {"completions": 1, "parallelism": 1}})
    await cluster.close()
    await remove(users, "big", "small")


def placed(pods: list[Any]) -> int:
    """Return how many pods have a node."""
    return sum("nodeName" in pod["spec"] for pod in pods)


def is_unschedulable(resource: Any) -> bool:
    """Return whether a job's status reports that the scheduler has no room for its pods."""
    conditions = {entry["type"]: entry for entry in resource.get("status", {}).get("conditions", ())}
    scheduled = conditions.get("Scheduled", {})
    return (scheduled.get("status"), scheduled.get("reason")) == ("False", "Unschedulable")


async def until_placed(users: ClusterActors, name: str, nodes: int) -> None:
    """Wait until so many pods of a job have a node."""

    async def probe() -> bool:
        return placed(await pods_of(users, name)) == nodes

    await users.until(probe, f"{nodes} placed pods of {name}")


async def test_one_of_two_native_gangs_for_whole_cluster_waits_whole(
    users: ClusterActors, operator: OperatorProcess
) -> None:
    filler = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "filler"}, "spec": {"containers": [WHOLE_NODE]}}
    await users.create(filler)

    async def filler_is_placed() -> bool:
        pod = await users.get("Pod", "filler")
        return pod is not None and "nodeName" in pod["spec"]

    await users.until(filler_is_placed, "a pod on one of the two nodes")
    for name in ("first", "second"):
        await users.create(whole_nodes(name, 2, scheduling={"gang": "Native"}))
    for name in ("first", "second"):  # without gangs, one pod would take the free node
        await users.resource(name, is_unschedulable)
    for name in ("first", "second"):
        assert placed(await pods_of(users, name)) == 0
    await users.delete("Pod", "filler")

    async def one_is_placed() -> str | None:
        names = [name for name in ("first", "second") if placed(await pods_of(users, name)) == 2]
        return names[0] if names else None

    runs = await users.until(one_is_placed, "a job that has both nodes")
    waits = {"first": "second", "second": "first"}[runs]
    resource = await users.resource(waits, is_unschedulable)
    assert resource["status"]["phase"] == "Pending"
    assert placed(await pods_of(users, waits)) == 0
    for index in (0, 1):
        await users.run_pod(f"{runs}-1", index)
    await users.phase(runs, "Running")
    assert placed(await pods_of(users, waits)) == 0

    for index in (0, 1):
        await users.finish_pod(f"{runs}-1", index)
    await users.phase(runs, "Succeeded")
    await until_placed(users, waits, 2)
    await remove(users, runs, waits)


async def test_replacement_pod_of_native_gang_is_placed_beside_its_peer(users: ClusterActors) -> None:
    await start(users, "lost", 2, scheduling={"gang": "Native"})
    await until_placed(users, "lost", 2)
    pod = await users.pod("lost-1", 1)
    await users.delete("Pod", pod["metadata"]["name"], gracePeriodSeconds=0)
    job = await users.get("Job", "lost-1")
    assert job is not None
    replacement = build_pod(job, 1, suffix="new")
    assert replacement["spec"]["schedulingGroup"] == {"podGroupName": "lost-1"}
    await users.create(replacement)
    await until_placed(users, "lost", 2)
    await remove(users, "lost")


async def test_native_gang_without_gates_is_refused(plane: ControlPlane) -> None:
    async with ClusterActors(plane.admin) as actors:
        with pytest.raises(Refused, match=r"does not serve PodGroups of scheduling\.k8s\.io; enable the feature gates"):
            await start(actors, "refused", 2, scheduling={"gang": "Native"})
        await actors.delete(KIND, "refused")


async def test_gang_waits_for_topology_domain_with_room(users: ClusterActors, gang_plane: ControlPlane) -> None:
    for node, rack in (("node-0", "a"), ("node-1", "b")):
        gang_plane.kubectl("label", "--overwrite", "node", node, f"example.com/rack={rack}")
    await start(users, "rack", 2, scheduling={"gang": "Native", "gangTopology": "example.com/rack"})

    async def are_refused() -> bool:
        pods = await pods_of(users, "rack")
        reports = [condition["status"] for pod in pods for condition in pod["status"].get("conditions", ())]
        return reports == ["False", "False"]

    await users.until(are_refused, "the scheduler's refusal of both pods")
    assert placed(await pods_of(users, "rack")) == 0  # the cluster has room, but no rack has
    gang_plane.kubectl("label", "--overwrite", "node", "node-1", "example.com/rack=a")
    await until_placed(users, "rack", 2)
    await remove(users, "rack")


async def test_preemption_takes_all_pods_of_gang(users: ClusterActors, gang_plane: ControlPlane) -> None:
    gang_plane.kubectl("create", "priorityclass", "low", "--value=10")
    gang_plane.kubectl("create", "priorityclass", "high", "--value=100")
    await start(
        users, "victim", 2, pod={"priorityClassName": "low"}, scheduling={"gang": "Native", "disruptionMode": "All"}
    )
    await until_placed(users, "victim", 2)
    victims = {pod["metadata"]["uid"] for pod in await pods_of(users, "victim")}
    await start(users, "urgent", 1, pod={"priorityClassName": "high"}, scheduling={"gang": "Native"})

    await until_placed(users, "urgent", 1)
    left = {
        pod["metadata"]["uid"] for pod in await pods_of(users, "victim") if "deletionTimestamp" not in pod["metadata"]
    }
    assert left & victims == set()  # one node would be enough
    await remove(users, "victim", "urgent")


async def test_pods_of_gang_share_one_claim(users: ClusterActors, gang_plane: ControlPlane) -> None:
    gang_plane.kubectl("create", "-f", "-", stdin=CLAIM_OBJECTS)
    entries = {"resourceClaims": [{"name": "fabric", "resourceClaimTemplateName": "channel"}]}
    shared = {"gang": "Native", "sharedClaims": ["fabric"]}
    await start(users, "share", 2, pod=entries, scheduling=shared)  # the pool has one device
    await until_placed(users, "share", 2)
    claims = (await users.client.request("GET", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"))["items"]
    assert [[owner["kind"], owner["name"]] for claim in claims for owner in claim["metadata"]["ownerReferences"]] == [
        ["PodGroup", "share-1"]
    ]
    await remove(users, "share")


async def test_native_gang_with_fields_of_gates_that_are_off_is_refused(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    entries = {"resourceClaims": [{"name": "fabric", "resourceClaimTemplateName": "channel"}]}
    with ControlPlane(tmp_path, controllers=False, gates=GANGS, api=["scheduling.k8s.io/v1alpha2"]) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds"))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        with OperatorProcess(plane.admin, tmp_path / "operator.log", port=port):
            async with ClusterActors(plane.admin) as actors:
                await actors.create(whole_nodes("off", 2, pod=entries, scheduling={"gang": "Native", **FIELDS}))
                resource = await actors.phase("off", "Rejected")
                groups = await actors.client.request("GET", f"{GROUP}/namespaces/default/podgroups")
    (accepted,) = [entry for entry in resource["status"]["conditions"] if entry["type"] == "Accepted"]
    for name, gate in zip(FIELDS, FURTHER, strict=True):
        refusal = f"spec.scheduling.{name}: the API server ignores it; enable the feature gate {gate}"
        assert refusal in accepted["message"]
    assert groups["items"] == []  # a dry run was enough


async def remove(users: ClusterActors, *names: str) -> None:
    """Delete jobs and wait for the end of their pods, so that the next test has the nodes."""
    for name in names:
        await users.delete(KIND, name)
    for name in names:
        await users.until(lambda name=name: no_pods(users, name), f"the end of the pods of {name}")


async def no_pods(users: ClusterActors, name: str) -> bool:
    return not await pods_of(users, name)
