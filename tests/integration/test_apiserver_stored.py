"""Jobs that version 0.1 stored, at a real API server: under its definition first, then under this one, and served."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from ddp_operator.api.parse import parse_resource
from ddp_operator.constants import KIND
from ddp_operator.kube.resources import path
from ddp_operator.settings import Settings
from tests.support import ROOT
from tests.support.control_plane import ControlPlane
from tests.support.running_operator import RunningOperator
from tests.support.standin import ClusterActors

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]

FOLDER = ROOT / "tests/golden/stored/0.1"
JOBS: dict[str, dict[str, Any]] = {
    job["metadata"]["name"]: job for job in json.loads((FOLDER / "jobs.json").read_text(encoding="utf-8"))
}


@pytest.fixture(scope="module")
def older_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with the definition of 0.1, and today's account."""
    with ControlPlane(tmp_path_factory.mktemp("older-plane")) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(FOLDER / "crd.json"))
        for name in ("namespace.yaml", "rbac.yaml"):
            plane.kubectl("apply", "-f", str(ROOT / "deploy/manifests" / name))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        yield plane


@pytest_asyncio.fixture
async def users(older_plane: ControlPlane) -> AsyncIterator[ClusterActors]:
    async with ClusterActors(older_plane.admin) as found:
        yield found


async def upgrade(plane: ControlPlane, users: ClusterActors) -> None:
    """Apply today's definition and wait until the API server goes by it."""
    plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy/crds/ddptrainingjobs.yaml"))
    newer = JOBS["pending"] | {"metadata": {"name": "newer"}}
    newer["spec"] = newer["spec"] | {"spares": 1}

    async def known() -> bool:
        answer = await users.client.request("POST", path(KIND, "default"), body=newer, params={"dryRun": "All"})
        return "spares" in answer["spec"]

    await users.until(known, "today's definition")


async def test_jobs_of_the_version_before_are_kept_read_and_served(
    older_plane: ControlPlane, users: ClusterActors
) -> None:
    for name, job in JOBS.items():
        await users.create({**job, "metadata": {"name": name, "labels": job["metadata"].get("labels", {})}})
        if "status" in job:
            await users.patch(KIND, name, {"status": job["status"]}, "status")
    await upgrade(older_plane, users)

    for found in await users.list(KIND):
        name, stored = found["metadata"]["name"], JOBS[found["metadata"]["name"]]
        assert (found["spec"], found.get("status")) == (stored["spec"], stored.get("status")), name
        parse_resource(found)
        await users.patch(KIND, name, {"metadata": {"labels": {"seen": "yes"}}})  # today's rules take what is stored

    kubeconfig = older_plane.account("ddp-operator", "ddp-operator")
    with RunningOperator(Settings(kubeconfig=str(kubeconfig), health_port=0)).start():
        await users.child_job("pending-1")
        for name in ("pending", "running", "restarted"):
            await users.patch(KIND, name, {"spec": {"suspend": True}})
        async with users.kubelet():  # a scheduler may have bound the pods
            for name in ("pending", "running", "restarted"):
                done = await users.phase(name, "Suspended")
                assert done["status"]["observedGeneration"] == 2
    for name in ("succeeded", "failed"):
        found = await users.get(KIND, name)
        assert found is not None
        kept = ("phase", "attempt", "completionTime", "restarts", "lastFailure")
        assert [found["status"].get(part) for part in kept] == [JOBS[name]["status"].get(part) for part in kept]
