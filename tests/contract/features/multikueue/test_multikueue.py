"""Two operators and a stand-in for MultiKueue: a job is queued in one cluster and runs in the other one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from ddp_operator.api import child_names
from ddp_operator.api.cluster import Key
from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.constants import KIND
from ddp_operator.api.other_kinds import ANNOTATION_CLUSTER
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.multikueue import FEATURE, service
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.resources import path
from ddp_operator.reconcile.placing import PlacingReconciler
from ddp_operator.reconcile.reconciler import Reconciler
from ddp_operator.reconcile.turns import Turns
from tests.support import PATIENCE, ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import ControlPlane
from tests.support.multikueue import FLAVOR, KINDS, ORIGIN, WORKLOAD, MultiKueue, build_crd, has, set_status
from tests.support.standin import ClusterActors, StandIn

QUEUE = {"kueue.x-k8s.io/queue-name": "team"}
KEY = Key("default", "digits")
PLACES = ("standin", pytest.param("control-plane", marks=[pytest.mark.apiserver, pytest.mark.timeout(600)]))


def start_operator(cluster: KubeCluster, *, is_worker: bool) -> Reconciler:
    """Return an operator with this feature."""
    return PlacingReconciler(
        cluster, turns=Turns(), hooks=Hooks([FEATURE], {FEATURE.name: service.MultiKueue(is_worker=is_worker)})
    )


class TwoClusters:
    """A manager and a worker cluster, each with an operator, and Kueue in both."""

    def __init__(self, users: list[ClusterActors], accounts: list[ClusterActors]) -> None:
        self.manager, self.worker = users
        self.kueue = MultiKueue(self.manager, self.worker)
        self.clusters = [KubeCluster(account.client) for account in accounts]
        self.operators = [
            start_operator(cluster, is_worker=is_worker)
            for cluster, is_worker in zip(self.clusters, (False, True), strict=True)
        ]

    async def submit(self, **spec: Any) -> None:
        """Create the job in the manager cluster."""
        manifest = job_manifest(KEY.name, managedBy="kueue.x-k8s.io/multikueue", nodes=1, **spec)
        manifest["metadata"]["labels"] = QUEUE
        await self.manager.create(manifest)

    async def until(self, where: ClusterActors, kind: str, name: str, ready: Callable[[Any], Any]) -> Any:
        """Let Kueue and both operators act until an object is as expected; ``ready(None)``: it does not exist."""
        last: Any = None
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    last = await where.get(kind, name)
                    if ready(last):
                        return last
                    # A conflict, or an API server that has new definitions; the next round repeats the calls.
                    for act in (self.kueue.round, *(partial(operator.reconcile, KEY) for operator in self.operators)):
                        with suppress(ClusterError, ResponseError):
                            await act()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{kind} {name} is never as expected; last seen: {last}") from None

    async def until_copied(self, phase: str) -> Any:
        """Wait until the job of the manager cluster names the worker cluster and has a phase from there."""
        return await self.until(self.manager, KIND, KEY.name, lambda job: phase_of(job) == (phase, "east"))


def phase_of(job: Any) -> tuple[str, str]:
    """Return the phase and the named cluster."""
    annotations = job["metadata"].get("annotations") or {}
    return (job.get("status") or {}).get("phase", ""), annotations.get(ANNOTATION_CLUSTER, "")


def build_worker_role() -> list[Any]:
    """Return the role that the chart adds in a worker cluster, and its binding."""
    rules = yaml.safe_load((ROOT / "charts" / "files" / "rules-worker.yaml").read_text())
    group = "rbac.authorization.k8s.io"
    head = {"apiVersion": f"{group}/v1", "metadata": {"name": "worker"}}
    account = {"kind": "ServiceAccount", "name": "ddp-operator", "namespace": "ddp-operator"}
    reference = {"apiGroup": group, "kind": "ClusterRole", "name": "worker"}
    return [
        head | {"kind": "ClusterRole", "rules": rules},
        head | {"kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [account]},
    ]


async def _serves_workloads(actors: ClusterActors) -> bool:
    """Return whether the API server serves the definitions, which it does some time after it has accepted them."""
    with suppress(ClusterError, ResponseError):
        await actors.list(WORKLOAD)
        return True
    return False


@pytest_asyncio.fixture(params=PLACES)
async def both(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TwoClusters]:
    """Two stand-ins, or two real API servers."""
    for name in ("_WAITING_INTERVAL", "_RUNNING_INTERVAL"):
        monkeypatch.setattr(service, name, 0.0)
    users = []
    accounts = []
    async with AsyncExitStack() as stack:
        for name in ("manager", "worker"):
            folder = tmp_path / name
            folder.mkdir()
            if request.param == "standin":
                server = stack.enter_context(StandIn())
                for kind in KINDS:
                    server.serve(kind)
                kubeconfig = account = server.write_kubeconfig(folder)
            else:
                plane = stack.enter_context(ControlPlane(folder))
                plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds"))
                plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(map(build_crd, KINDS)))
                plane.kubectl("wait", "--for=condition=Established", "crd", "--all")
                for file in ("namespace.yaml", "rbac.yaml"):
                    plane.kubectl("apply", "-f", str(ROOT / "deploy" / "manifests" / file))
                if name == "worker":
                    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(build_worker_role()))
                kubeconfig = plane.admin
                account = plane.account("ddp-operator", "ddp-operator")
            users.append(await stack.enter_async_context(ClusterActors(kubeconfig)))
            accounts.append(await stack.enter_async_context(ClusterActors(account)))
            await users[-1].until(partial(_serves_workloads, users[-1]), "served definitions")
        clusters = TwoClusters(users, accounts)
        if request.param != "standin":
            await stack.enter_async_context(clusters.worker.kubelet())
        await clusters.kueue.install()
        yield clusters
        for cluster in clusters.clusters:
            await cluster.close()


async def test_job_runs_in_worker_cluster_with_one_workload_for_all_attempts(both: TwoClusters) -> None:
    await both.submit()
    await both.until_copied("Pending")
    job = await both.until(both.worker, "Job", "digits-1", bool)
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == FLAVOR["nodeLabels"]
    assert FLAVOR["tolerations"][0].items() <= pod["tolerations"][-1].items()
    assert QUEUE.keys() & job["metadata"]["labels"].keys() == set(), "Kueue would queue it a second time"
    assert await both.manager.list("Job") == []

    # A new attempt is a new Job, with the same Workload and quota.
    [before] = await both.worker.list(WORKLOAD)
    await both.worker.run_pod("digits-1", 0)
    await both.until_copied("Running")
    await both.worker.finish_pod("digits-1", 0, exit_code=82)
    await both.until(both.worker, "Job", "digits-2", bool)
    [after] = await both.worker.list(WORKLOAD)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]

    await both.worker.run_pod("digits-2", 0)
    await both.worker.finish_pod("digits-2", 0)
    ended = await both.until_copied("Succeeded")
    assert ended["status"]["attempt"] == 2
    await both.until(both.worker, KIND, KEY.name, lambda copied: copied is None)
    [workload] = await both.manager.list(WORKLOAD)
    assert has(workload, "Finished")


async def test_evicted_job_returns_its_quota_and_runs_again(both: TwoClusters) -> None:
    await both.submit()
    await both.until(both.worker, "Job", "digits-1", bool)
    await both.until_copied("Pending")
    [first] = await both.worker.list(KIND)
    both.kueue.worker_has_quota = False
    await both.kueue.evict(both.worker)
    waiting = await both.until(both.manager, KIND, KEY.name, lambda job: phase_of(job) == ("Pending", ""))
    await both.until(both.manager, KIND, KEY.name, lambda job: "waiting for quota in cluster east" in str(job))
    assert waiting["status"].get("attempt", 0) == 0
    await both.until(both.worker, KIND, KEY.name, lambda copied: copied is None)

    both.kueue.worker_has_quota = True
    again = await both.until(both.worker, KIND, KEY.name, bool)
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    await both.until_copied("Pending")


async def test_eviction_stops_the_pods_without_the_manager(both: TwoClusters) -> None:
    await both.submit()
    await both.until(both.worker, "Job", "digits-1", bool)
    await both.worker.run_pod("digits-1", 0)
    await both.until_copied("Running")
    del both.operators[0]  # it would return the quota, and Kueue would delete the job
    both.kueue.worker_has_quota = False
    await both.kueue.evict(both.worker)
    name = (await both.worker.list(WORKLOAD))[0]["metadata"]["name"]
    await both.until(both.worker, "Job", "digits-1", lambda job: job["spec"]["suspend"])
    returned = await both.until(both.worker, WORKLOAD, name, lambda workload: not has(workload, "QuotaReserved"))
    assert returned["status"].get("admission") is None
    assert not has(returned, "Admitted")


async def test_suspended_job_takes_an_edit_to_the_worker_cluster(both: TwoClusters) -> None:
    await both.submit()
    await both.until(both.worker, "Job", "digits-1", bool)
    await both.until_copied("Pending")
    await both.manager.patch(KIND, KEY.name, {"spec": {"suspend": True}})
    await both.until(both.worker, KIND, KEY.name, lambda copied: copied is None)
    await both.until(both.manager, KIND, KEY.name, lambda job: phase_of(job) == ("Suspended", ""))
    await both.manager.patch(KIND, KEY.name, {"spec": {"suspend": False, "nodes": 3}})
    copied = await both.until(both.worker, KIND, KEY.name, bool)
    [workload] = await both.worker.list(WORKLOAD)
    assert (copied["spec"]["nodes"], workload["spec"]["podSets"][0]["count"]) == (3, 3)


VICTIM = {
    "kind": "Workload",
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "spec": {
        "active": True,
        "queueName": "team",
        "podSets": [
            {
                "name": "main",
                "count": 1,
                "template": {"spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "1m"}}}]}},
            }
        ],
    },
}
"""The Workload of a pod with little, which another client has created without an owner."""


@pytest.mark.parametrize(
    ("name", "labels", "problem"),
    [
        ("victim", {}, "Workload victim is no copy of MultiKueue"),
        ("victim", ORIGIN, "Workload victim belongs to another job"),
        ("digits-0123abcd", ORIGIN | child_names.child_labels("digits"), "it has 1 pods, and the job 64"),
    ],
)
async def test_job_takes_no_workload_by_its_labels(
    both: TwoClusters, name: str, labels: dict[str, str], problem: str
) -> None:
    where = both.worker
    body = VICTIM | {"metadata": {"name": name, "labels": labels}}
    await where.client.request("POST", path(WORKLOAD, where.namespace), body=body)
    victim = await where.get(WORKLOAD, name)
    assert victim is not None
    admitted = {"QuotaReserved": ("True", "So", ""), "Admitted": ("True", "So", "")}
    await set_status(where, victim, admitted)
    manifest = job_manifest(KEY.name, nodes=64)
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    manifest["metadata"]["labels"] = QUEUE | ORIGIN
    manifest["metadata"]["annotations"] = {"kueue.x-k8s.io/prebuilt-workload-name": name}
    await where.create(manifest)
    worker = both.operators[1]
    for _ in range(5):
        with suppress(ClusterError):
            await worker.reconcile(KEY)
    job = await where.get(KIND, KEY.name)
    assert job is not None
    [message] = [item["message"] for item in job["status"]["conditions"] if item["type"] == "Suspended"]
    assert problem in message
    assert await where.list("Job") == []
    kept = await where.get(WORKLOAD, name)
    assert kept is not None
    assert not kept["metadata"].get("ownerReferences"), "it would be deleted with the job"


async def test_job_of_cluster_that_is_no_worker_adopts_nothing(both: TwoClusters) -> None:
    both.operators[1] = start_operator(both.clusters[1], is_worker=False)
    await both.submit()
    held = await both.until(both.worker, KIND, KEY.name, lambda job: job and phase_of(job)[0] == "Suspended")
    [message] = [item["message"] for item in held["status"]["conditions"] if item["type"] == "Suspended"]
    assert "this cluster is no worker of MultiKueue; set settings.multikueueWorker of the chart to true" in message
    [workload] = await both.worker.list(WORKLOAD)
    assert not workload["metadata"].get("ownerReferences")


async def test_edited_copy_runs_no_more_pods_than_its_workload_has(both: TwoClusters) -> None:
    await both.submit()
    await both.until(both.worker, "Job", "digits-1", bool)
    await both.worker.patch(KIND, KEY.name, {"spec": {"nodes": 64}})
    held = await both.until(both.worker, KIND, KEY.name, lambda job: phase_of(job)[0] == "Suspended")
    [message] = [item["message"] for item in held["status"]["conditions"] if item["type"] == "Suspended"]
    assert "it has 1 pods, and the job 64" in message
    jobs = await both.worker.list("Job")
    assert all(job["spec"]["suspend"] for job in jobs)
