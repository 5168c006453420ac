"""Kueue, in a namespace whose LocalQueue is called default: jobs without any label of Kueue's are queued all the same.

Skipped where the cluster has no Kueue. What the tests make beside their namespace (a ResourceFlavor, a ClusterQueue) is
called after it and deleted with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from .conftest import Cluster, adapt
from .test_cluster import DIGITS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KUEUE = "kueue.x-k8s.io"
TRAIN = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(int(os.environ["STEPS"])):
    dist.barrier()
    print("step", step, flush=True)
    time.sleep(0.5)
"""


class Queue:
    """A queue with room for two pods, and the jobs in it."""

    def __init__(self, cluster: Cluster, version: str) -> None:
        self.cluster, self.version, self.name = cluster, version, cluster.namespace
        # Some clusters let Kueue act on namespaces that carry a label only.
        cluster.core.patch_namespace(self.name, {"metadata": {"labels": {"queue-test": "true"}}})
        room = {"cpu": "100", "memory": "1Ti", "pods": "2"}
        flavor = {
            "name": self.name,
            "resources": [{"name": resource, "nominalQuota": amount} for resource, amount in room.items()],
        }
        self._apply("ResourceFlavor", spec={})
        self._apply(
            "ClusterQueue",
            spec={
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": list(room), "flavors": [flavor]}],
            },
        )
        self._apply("WorkloadPriorityClass", name=f"{self.name}-high", value=1000)
        self._apply("LocalQueue", name="default", spec={"clusterQueue": self.name})

    def _apply(self, kind: str, *, name: str = "", **content: Any) -> None:
        manifest = {"apiVersion": f"{KUEUE}/{self.version}", "kind": kind, "metadata": {"name": name or self.name}}
        done = self.cluster.apply(manifest | content)
        assert done.returncode == 0, done.stderr

    def remove(self) -> None:
        """Delete what outlives the namespace; Kueue keeps a queue until nothing is in it."""
        self.cluster.kubectl("delete", "ddp", "--all", "--timeout=60s")
        self.cluster.kubectl("delete", "localqueue", "default", "--wait=false")
        for kind in ("clusterqueue", "resourceflavor"):
            self.cluster.kubectl("delete", kind, self.name, "--wait=false")
        self.cluster.kubectl("delete", "workloadpriorityclass", f"{self.name}-high")

    def submit(self, name: str, steps: int, *, urgent: bool = False, **spec: Any) -> None:
        """Create a job of two pods."""
        job = adapt(DIGITS, name)
        container = job["spec"]["template"]["spec"]["containers"][0]
        container["command"], container["args"] = ["python3", "-c", TRAIN], []
        container["resources"] = {"requests": {"cpu": "100m"}}
        container["env"] = [*container.get("env", []), {"name": "STEPS", "value": str(steps)}]
        job["spec"] |= {"nodes": 2, **spec}
        if urgent:
            job["metadata"]["labels"] = {f"{KUEUE}/priority-class": f"{self.name}-high"}
        done = self.cluster.apply(job)
        assert done.returncode == 0, done.stderr

    def waits(self, name: str) -> str:
        """Wait until a job waits for quota without a pod; return what it says."""

        def probe() -> str:
            conditions = {one["type"]: one for one in self.cluster.status(name).get("conditions") or []}
            found = conditions.get("Scheduled", {})
            queued = found.get("reason") == "QuotaPending" and not self.cluster.pods(name)
            return str(found["message"]) if queued else ""

        return str(self.cluster.until(probe, f"{name} waits for quota"))

    def succeeds(self, *names: str) -> None:
        """Wait for the end of jobs that have lost nothing on the way."""
        for name in names:
            status = self.cluster.phase(name, "Succeeded", "Failed")
            assert (status["phase"], status["attempt"], status["restarts"]["total"]) == ("Succeeded", 1, 0), status


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[Queue]:
    """A queue of Kueue's for the namespace."""
    groups = client.ApisApi(cluster.core.api_client).get_api_versions().groups
    versions = [group.preferred_version.version for group in groups if group.name == KUEUE]
    if not versions:
        pytest.skip("Kueue is not installed in the cluster")
    found = Queue(cluster, versions[0])
    try:
        yield found
    finally:
        found.remove()


def test_a_job_without_a_label_waits_for_its_quota_and_loses_nothing(cluster: Cluster, queue: Queue) -> None:
    queue.submit("first", 60)
    cluster.phase("first", "Running")
    queue.submit("second", 5)
    assert "queue default to admit it" in queue.waits("second")
    job = cluster.batch.read_namespaced_job("second-1", cluster.namespace)
    assert (job.spec.suspend, job.metadata.generation) == (True, 1), "nobody but Kueue resumes it"
    queue.succeeds("first", "second")


def test_a_preempted_job_goes_on_in_the_same_attempt(cluster: Cluster, queue: Queue) -> None:
    queue.submit("patient", 20)
    cluster.phase("patient", "Running")
    queue.submit("urgent", 20, urgent=True)
    cluster.phase("urgent", "Running")
    queue.waits("patient")
    queue.succeeds("urgent", "patient")


def test_a_job_that_is_suspended_gives_its_quota_back_until_it_is_resumed(cluster: Cluster, queue: Queue) -> None:
    queue.submit("first", 20, suspend=True)
    cluster.phase("first", "Suspended")
    queue.submit("second", 20)
    cluster.phase("second", "Running")
    cluster.kubectl("patch", "ddp", "second", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    cluster.phase("second", "Suspended")
    cluster.kubectl("patch", "ddp", "first", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    cluster.phase("first", "Running")
    cluster.kubectl("patch", "ddp", "second", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    queue.waits("second")
    queue.succeeds("first", "second")
