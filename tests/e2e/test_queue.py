"""A real Kueue, in a namespace whose LocalQueue is called default: jobs without any label are queued too.

Skipped where the cluster has no Kueue. Objects that the tests create outside their namespace (a ResourceFlavor, a
ClusterQueue) are named after it and deleted with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from kubernetes import client

from tests.support.counts import read_counts
from tests.support.file_server import FileServer, pattern, serve_file

from .conftest import DIGITS, UserNamespace, adapt, make_writable, new_namespace
from .test_inputs import here
from .test_recovery import TRAIN as TRAINING
from .test_recovery import Training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KUEUE = "kueue.x-k8s.io"
TRAIN = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(int(os.environ["STEPS"])):
    dist.barrier()
    if os.environ.get("FAIL") and step == 5 and os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10":
        raise RuntimeError("once")
    print("step", step, flush=True)
    time.sleep(0.5)
"""


# Rank 1 does once what a file in its pod requests.
OBEY = """
def obey():
    if rank == 1:
        if os.path.exists("/tmp/raise"):
            os.remove("/tmp/raise")
            raise RuntimeError("as it was asked")
        if os.path.exists("/tmp/hang"):
            os.remove("/tmp/hang")
            time.sleep(1e9)
        if os.path.exists("/tmp/die"):
            os.remove("/tmp/die")
            os.kill(os.getpid(), signal.SIGKILL)

while True:
    obey()
"""


class Queue:
    """A queue with quota for two pods, and the jobs in it."""

    def __init__(self, cluster: UserNamespace, version: str) -> None:
        self.cluster = cluster
        self.version = version
        self.name = cluster.namespace
        # In some clusters Kueue manages only namespaces with a label.
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

    def widen(self, pods: int) -> None:
        """Set the ClusterQueue's quota to this number of pods."""
        path = "/spec/resourceGroups/0/flavors/0/resources/2/nominalQuota"
        patch = f'[{{"op":"replace","path":"{path}","value":"{pods}"}}]'
        done = self.cluster.kubectl("patch", "clusterqueue", self.name, "--type=json", "-p", patch)
        assert done.returncode == 0, done.stderr

    def hold(self, policy: str) -> None:
        """Set the ClusterQueue's stopPolicy."""
        self.cluster.kubectl(
            "patch", "clusterqueue", self.name, "--type=merge", "-p", f'{{"spec":{{"stopPolicy":"{policy}"}}}}'
        )

    def workload(self, name: str) -> dict[str, Any]:
        """Return the newest Workload of a job's first attempt, or None."""
        items = self.cluster.custom.list_namespaced_custom_object(KUEUE, self.version, self.name, "workloads")["items"]
        mine = [item for item in items if item["metadata"]["ownerReferences"][0]["name"] == f"{name}-1"]
        return max(mine, key=lambda item: str(item["metadata"]["creationTimestamp"]), default={})

    def submit(
        self,
        name: str,
        steps: int,
        *,
        urgent: bool = False,
        queue: str = "",
        annotations: dict[str, str] | None = None,
        fails: bool = False,
        **spec: Any,
    ) -> None:
        """Create a job of two pods. ``fails``: rank 1 does, once."""
        job = adapt(DIGITS, name)
        job["metadata"] |= {"annotations": annotations or {}, "labels": {f"{KUEUE}/queue-name": queue} if queue else {}}
        container = job["spec"]["template"]["spec"]["containers"][0]
        container["command"] = ["python3", "-c", TRAIN]
        container["args"] = []
        container["resources"] = {"requests": {"cpu": "100m"}}
        container["env"] = [*container.get("env", []), {"name": "STEPS", "value": str(steps)}]
        container["env"] += [{"name": "FAIL", "value": "1"}] if fails else []
        job["spec"] |= {"nodes": 2, **spec}
        if urgent:
            job["metadata"]["labels"][f"{KUEUE}/priority-class"] = f"{self.name}-high"
        done = self.cluster.apply(job)
        assert done.returncode == 0, done.stderr

    def scheduled(self, name: str) -> dict[str, Any]:
        """Return a job's condition Scheduled."""
        conditions = self.cluster.status(name).get("conditions") or []
        return next((condition for condition in conditions if condition["type"] == "Scheduled"), {})

    def waits(self, name: str, words: str = "", reason: str = "QuotaPending") -> str:
        """Wait until a job waits for this reason without a pod. Return the message, which contains ``words``."""

        def probe() -> str:
            scheduled = self.scheduled(name)
            waits = scheduled.get("reason") == reason and words in scheduled["message"] and not self.cluster.pods(name)
            return str(scheduled["message"]) if waits else ""

        return str(self.cluster.until(probe, f"{name} waits: {reason}, {words}"))

    def resize(self, name: str, nodes: int) -> None:
        """Change a job's number of nodes, as its user does."""
        done = self.cluster.kubectl("scale", "ddp", name, f"--replicas={nodes}")
        assert done.returncode == 0, done.stderr

    def pods(self, name: str) -> dict[str, str]:
        """Return the phase of each of a job's pods by its UID."""
        return {pod.metadata.uid: pod.status.phase for pod in self.cluster.pods(name)}

    def succeeds(self, *names: str) -> None:
        """Wait for the successful end of jobs without a restart."""
        for name in names:
            status = self.cluster.phase(name, "Succeeded", "Failed")
            assert (status["phase"], status["attempt"], read_counts(status)["total"]) == ("Succeeded", 1, 0), status


@pytest.fixture
def queue(cluster: UserNamespace) -> Iterator[Queue]:
    """A LocalQueue of Kueue for the namespace."""
    groups = client.ApisApi(cluster.core.api_client).get_api_versions().groups
    versions = [group.preferred_version.version for group in groups if group.name == KUEUE]
    if not versions:
        pytest.skip("Kueue is not installed in the cluster")
    result = Queue(cluster, versions[0])
    try:
        yield result
    finally:
        result.remove()


def test_job_without_queue_label_waits_for_quota_and_loses_nothing(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("first", 60)
    cluster.phase("first", "Running")
    queue.submit("second", 5)
    assert "admission by queue default" in queue.waits("second")
    job = cluster.batch.read_namespaced_job("second-1", cluster.namespace)
    assert (job.spec.suspend, job.metadata.generation) == (True, 1), "nobody but Kueue resumes it"
    queue.succeeds("first", "second")


def test_preempted_job_continues_in_same_attempt(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("patient", 20)
    cluster.phase("patient", "Running")
    queue.submit("urgent", 20, urgent=True)
    cluster.phase("urgent", "Running")
    queue.waits("patient")
    queue.succeeds("urgent", "patient")


def test_suspended_job_releases_quota_until_resumed(cluster: UserNamespace, queue: Queue) -> None:
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


def test_held_or_drained_queue_is_reason_until_released(cluster: UserNamespace, queue: Queue) -> None:
    queue.hold("Hold")
    queue.submit("job", 40)
    held = queue.waits("job", "is not active", "QueueStopped")
    assert f"ClusterQueue {queue.name} of LocalQueue default" in held
    queue.hold("None")
    cluster.phase("job", "Running")
    queue.hold("HoldAndDrain")
    queue.waits("job", "evicted (ClusterQueueStopped)", "QueueStopped")
    assert "stopPolicy" in cluster.why("job")
    queue.hold("None")
    queue.succeeds("job")


def test_deactivated_job_stops_and_continues_when_reactivated(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("job", 40)
    cluster.phase("job", "Running")
    name = queue.workload("job")["metadata"]["name"]
    for active in ("false", "true"):
        cluster.kubectl("patch", "workload", name, "--type=merge", "-p", f'{{"spec":{{"active":{active}}}}}')
        if active == "false":
            queue.waits("job", f"Workload {name} is deactivated", "WorkloadDeactivated")
    queue.succeeds("job")


def test_waiting_job_keeps_position_when_queue_name_is_corrected(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("job", 5, queue="nowhere", annotations={f"provreq.{KUEUE}/a": "b"})
    queue.waits("job", "LocalQueue nowhere doesn't exist", "Inadmissible")
    before = queue.workload("job")["metadata"]["uid"]
    assert queue.workload("job")["metadata"]["annotations"][f"provreq.{KUEUE}/a"] == "b"
    cluster.kubectl("label", "ddp", "job", f"{KUEUE}/queue-name=default", "--overwrite")
    queue.succeeds("job")
    assert queue.workload("job")["metadata"]["uid"] == before


def test_job_larger_than_quota_is_reported_and_starts_once_smaller(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("job", 5, nodes=3, elastic={"minNodes": 1, "maxNodes": 4})
    queue.waits("job", "request > maximum capacity", "Inadmissible")
    assert "ddp scale job" in cluster.why("job")
    before = queue.workload("job")["metadata"]["uid"]
    queue.resize("job", 2)
    queue.succeeds("job")
    assert queue.workload("job")["metadata"]["uid"] == before


def test_size_for_which_job_would_be_stopped_waits(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("job", 40, elastic={"minNodes": 1, "maxNodes": 4})
    cluster.phase("job", "Running")
    before = queue.pods("job").keys()
    queue.resize("job", 3)
    cluster.until(lambda: "size 3 waits" in queue.scheduled("job").get("message", ""), "the size is said to wait")
    cluster.kubectl("label", "ddp", "job", f"{KUEUE}/queue-name=other", "--overwrite")
    cluster.until(lambda: "queue other and size 3" in queue.scheduled("job").get("message", ""), "and so is the queue")
    assert queue.pods("job").keys() == before
    queue.succeeds("job")


def test_elastic_kueue_job_grows_within_quota_and_keeps_training(cluster: UserNamespace, queue: Queue) -> None:
    elastic = {"minNodes": 1, "maxNodes": 3}
    queue.submit("job", 60, nodes=1, elastic=elastic, annotations={f"{KUEUE}/elastic-job": "true"})
    cluster.phase("job", "Running")
    if not cluster.batch.read_namespaced_job("job-1", queue.name).spec.template.spec.scheduling_gates:
        pytest.skip("this Kueue has the feature gate ElasticJobsViaWorkloadSlices switched off")
    (first,) = queue.pods("job")
    queue.resize("job", 2)
    cluster.until(lambda: list(queue.pods("job").values()) == ["Running"] * 2, "two pods run")
    grown = queue.pods("job").keys()
    assert first in grown
    queue.resize("job", 3)
    words = "waiting for quota; its peers continue: "
    cluster.until(lambda: words in queue.scheduled("job").get("message", ""), "the third pod waits for quota")
    assert {uid for uid, phase in queue.pods("job").items() if phase == "Running"} == set(grown)
    queue.resize("job", 2)
    status = cluster.phase("job", "Succeeded", "Failed")
    assert (status["phase"], status["attempt"], read_counts(status)["counted"]) == ("Succeeded", 1, 0)


def test_lost_pod_keeps_queue_admission(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("job", 20)
    cluster.phase("job", "Running")
    before = queue.workload("job")["metadata"]["uid"]
    lost = cluster.pods("job")[1].metadata.name
    cluster.kubectl("delete", "pod", lost, "--wait=false")
    status = cluster.phase("job", "Succeeded", "Failed")
    assert (status["phase"], status["attempt"], read_counts(status)["counted"]) == ("Succeeded", 1, 0)
    assert queue.workload("job")["metadata"]["uid"] == before


def test_failed_rank_keeps_queue_admission(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("job", 20, fails=True)
    cluster.phase("job", "Running")
    before = queue.workload("job")["metadata"]["uid"], queue.pods("job").keys()
    status = cluster.phase("job", "Succeeded", "Failed")
    assert (status["phase"], status["attempt"], status["lastFailure"]["signature"][:12]) == (
        "Succeeded",
        1,
        "RuntimeError",
    )
    assert (queue.workload("job")["metadata"]["uid"], queue.pods("job").keys()) == before


def test_job_deleted_while_waiting_leaves_queue(cluster: UserNamespace, queue: Queue) -> None:
    queue.submit("first", 20)
    cluster.phase("first", "Running")
    queue.submit("second", 5)
    queue.waits("second")
    assert queue.workload("second")
    cluster.kubectl("delete", "ddp", "second", "--wait=false")
    cluster.until(lambda: not queue.workload("second"), "its Workload is gone")
    queue.succeeds("first")


def test_lost_pod_is_replaced_at_once_in_same_job_and_workload(cluster: UserNamespace, queue: Queue) -> None:
    def workloads() -> set[str]:
        uids = cluster.kubectl("get", "workloads", "-o", "jsonpath={.items[*].metadata.uid}")
        return set(uids.stdout.split())

    job = Training(cluster, "keeps")
    done = job.trained()
    held = workloads()
    assert len(held) == 1
    for index, what in ((1, "a worker's pod was deleted"), (0, "the master's pod was deleted")):
        name = job.pod(index).metadata.name
        job.recovered(done, partial(cluster.core.delete_namespaced_pod, name, cluster.namespace), what)
        done = job.trained(since=done)
        # Another loss before the operator has seen the steps is part of the same interruption.
        cluster.until(lambda: job.status["phase"] == "Running", "the operator sees that training goes on")
    status = job.status
    report = read_counts(status)
    assert (status["attempt"], report["total"], report["counted"], report["replaced"]) == (1, 0, 0, 2), status
    assert (status["lastRestart"]["level"], workloads()) == ("ReplacedPod", held)


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_failure_keeps_workload_and_healthy_pods(cluster: UserNamespace, queue: Queue, elastic: bool) -> None:
    job = Training(
        cluster,
        "stays",
        script=TRAINING.replace("while True:\n", OBEY),
        annotations={f"{KUEUE}/elastic-job": "true"} if elastic else {},
        recovery={"maxRestarts": 10},
        watchdog={"stallSeconds": 10, "startSeconds": 120, "checkpointSeconds": 10},
        **({"elastic": {"minNodes": 1, "maxNodes": 2}} if elastic else {}),
    )
    done = job.trained()
    gates = cluster.batch.read_namespaced_job("stays-1", queue.name).spec.template.spec.scheduling_gates

    def held() -> tuple[str, str]:
        """Return the UIDs of the only Job and the only Workload."""
        (child,) = cluster.batch.list_namespaced_job(queue.name).items
        (workload,) = cluster.kubectl("get", "workloads", "-o", "jsonpath={.items[*].metadata.uid}").stdout.split()
        return child.metadata.uid, workload

    before = held()

    def fail(done: int, deed: str, category: str, counted: int) -> int:
        """Make rank 1 act, and check that training continues unchanged. Return the last step."""
        pods = [job.pod(index).metadata for index in range(2)]
        job.recovered(
            done, partial(cluster.kubectl, "exec", pods[1].name, "--", "touch", f"/tmp/{deed}"), f"{deed} in rank 1"
        )
        done = job.trained(since=done)
        cluster.until(lambda: read_counts(job.status)["counted"] == counted, f"failure {counted} is counted")
        status = job.status
        assert (status["lastFailure"]["category"], status["lastRestart"]["level"]) == (category, "SamePods")
        assert held() == before
        assert [job.pod(index).metadata.uid for index in range(2)] == [pod.uid for pod in pods]
        return done

    for counted, (deed, category) in enumerate((("raise", "UserError"), ("hang", "Hang"), ("die", "Killed")), 1):
        done = fail(done, deed, category, counted)
    for index, world in ((1, 1 if elastic else 2), (0, 2)):
        second = job.pod(1 - index).metadata.uid
        lost = job.pod(index).metadata
        delete = partial(cluster.core.delete_namespaced_pod, lost.name, cluster.namespace)
        job.recovered(done, delete, f"the loss of pod {index}", world=world)
        done = job.trained(since=done)
        assert held() == before
        assert job.pod(1 - index).metadata.uid == second
        assert job.pod(index).metadata.uid != lost.uid
        if not elastic:  # actions of a replacement pod count as well
            done = fail(done, "raise", "UserError", 5 - index)
    status = job.status
    assert (status["attempt"], read_counts(status)["total"]) == (1, 0), status
    if elastic and gates:  # otherwise the change of size waits
        stays = job.pod(0).metadata.uid
        job.recovered(done, partial(queue.resize, "stays", 1), "another size", world=1)
        job.trained(since=done, world=1)
        assert held() == before
        assert [pod.metadata.uid for pod in job.living()] == [stays]


def test_spare_is_in_quota_from_start_and_replaces_lost_pod(cluster: UserNamespace, queue: Queue) -> None:
    job = Training(cluster, "spared", spares=1)
    queue.waits("spared", "request > maximum capacity", "Inadmissible")
    queue.widen(3)
    done = job.trained()
    before = queue.workload("spared")
    assert [pods["count"] for pods in before["spec"]["podSets"]] == [3]
    cluster.until(lambda: job.status["nodes"].get("spares") == 1, "a spare is ready")
    for _ in range(2):  # the successor of the first one is the next spare
        taking = {pod.metadata.uid: pod for pod in job.living()}
        lost = job.pod(1) if "world" in cluster.kubectl("logs", job.pod(1).metadata.name).stdout else job.pod(2)
        delete = partial(cluster.core.delete_namespaced_pod, lost.metadata.name, cluster.namespace)
        job.recovered(done, delete, "the loss of a pod beside a spare in a queue")
        done = job.trained(since=done)
        cluster.until(lambda: job.status["nodes"].get("spares") == 1, "a spare is ready again")
        assert len({pod.metadata.uid for pod in job.living()} & taking.keys()) == 2
    status = job.status
    report = read_counts(status)
    assert (status["attempt"], report["replaced"], report["total"], report["counted"]) == (1, 2, 0, 0), status
    assert queue.workload("spared")["metadata"]["uid"] == before["metadata"]["uid"]


def test_queue_does_not_delay_replacement_of_lost_pod(cluster: UserNamespace, queue: Queue) -> None:
    with new_namespace() as elsewhere:
        jobs = {"in a queue": Training(cluster, "queued"), "without one": Training(elsewhere, "unqueued")}
        assert queue.workload("queued")
        seconds: dict[str, list[float]] = {where: [] for where in jobs}
        for _ in range(3):
            for where, job in jobs.items():
                done = job.trained()
                lost = job.pod(1).metadata.name
                delete = partial(job.cluster.core.delete_namespaced_pod, lost, job.cluster.namespace)
                seconds[where].append(job.recovered(done, delete, f"the loss of a pod {where}"))
        for where, job in jobs.items():
            report = read_counts(job.status)
            assert (report["replaced"], report["total"], report["counted"]) == (3, 0, 0), where
    queued, free = (statistics.median(second) for second in seconds.values())
    print(
        f"medians: {queued:.1f} s in a queue, {free:.1f} s without one, ratio {queued / free:.2f} (target: at most 1.3)"
    )


def test_inputs_are_fetched_before_training_pods_use_quota(queue: Queue) -> None:
    """Kueue also queues the Job that fetches; its pods are gone when the training pods need the quota."""
    seen: list[dict[str, Any]] = []

    def look(start: int, count: int) -> bytes:
        if count > 1 and not seen:
            seen.append(queue.workload("fed"))
        return pattern(start, count)

    cache = f"/var/tmp/{queue.name}"
    make_writable(queue.cluster, cache)
    with serve_file(FileServer(look, 5_000_000), host=here(queue.cluster)) as server:
        queue.submit("fed", 3, inputs=[{"url": f"{server.url}/data.bin", "mountPath": "/data", "nodePath": cache}])
        queue.succeeds("fed")
    assert seen == [{}]
    assert queue.workload("fed")
