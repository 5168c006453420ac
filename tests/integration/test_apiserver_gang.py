"""Kubernetes' own gang scheduling (1.36, alpha) on a real control plane: an unmodified attempt's Job is a gang.

The Job controller creates a Workload and a PodGroup for a Job whose pods all run at once, without further fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio

from ddp_operator.api.parse import parse_resource
from ddp_operator.cluster import AlreadyExists, Refused
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.manifests.children import build_children
from tests.support import ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import ControlPlane
from tests.support.standin import ClusterActors

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]

GATES = ("GenericWorkload", "GangScheduling", "WorkloadWithJob")
GROUP = "/apis/scheduling.k8s.io/v1alpha2"


@pytest.fixture(scope="module")
def gang_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Two nodes of one CPU, and a scheduler with gang scheduling."""
    folder = tmp_path_factory.mktemp("gang")
    with ControlPlane(folder, gates=GATES, api=["scheduling.k8s.io/v1alpha2"], cpus=1) as plane:
        if not plane.has_scheduler:
            pytest.skip("KUBEBUILDER_ASSETS has no kube-scheduler")
        if "v1alpha2" not in plane.kubectl("api-versions").stdout:
            pytest.skip("this Kubernetes has no scheduling.k8s.io/v1alpha2")
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds" / "ddptrainingjobs.yaml"))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        yield plane


@pytest_asyncio.fixture
async def users(gang_plane: ControlPlane) -> AsyncIterator[ClusterActors]:
    async with ClusterActors(gang_plane.admin) as cluster_actors:
        yield cluster_actors


async def start(users: ClusterActors, name: str, nodes: int) -> None:
    """Create an attempt's children as the operator does; each pod requests a whole node."""
    container = {"name": "trainer", "image": "train:1", "command": ["python", "train.py"]}
    container |= {"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}}
    manifest = job_manifest(name, nodes=nodes, template={"spec": {"containers": [container]}})
    resource = await users.create(manifest)
    cluster = KubeCluster(users.client)
    for child in build_children(parse_resource(resource), attempt=1, nodes=nodes):
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

    async def placed() -> set[str]:
        return {pod["spec"]["nodeName"] for pod in await pods_of(users, "small") if pod["spec"].get("nodeName")}

    async def all_placed() -> bool:
        return len(await placed()) == 2

    await users.until(all_placed, "both pods on nodes")
    # status/decide.py starts a new attempt for an elastic job instead.
    cluster = KubeCluster(users.client)
    with pytest.raises(Refused, match="cannot change parallelism for a Job referencing gang-scheduled PodGroup"):
        await cluster.patch_job("default", "small-1", {"spec": {"completions": 1, "parallelism": 1}})
    await cluster.close()


async def no_pods(users: ClusterActors, name: str) -> bool:
    return not await pods_of(users, name)
