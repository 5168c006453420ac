"""A user's view of a running job that loses pods and nodes or changes its size, on real kubelets.

The training script saves only its step, after every step, and never ends. Its output shows where it resumed. The
printed seconds are from the fault to the first new step; no test depends on them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.counts import read_counts

from .conftest import DIGITS, UserNamespace, adapt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TRAIN = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

asked = []
signal.signal(signal.SIGTERM, lambda *about: asked.append(1))
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
rank, world = dist.get_rank(), dist.get_world_size()
saved = os.environ["DDP_CHECKPOINT_DIR"] + "/" + os.environ["DDP_JOB_NAME"]
step = torch.tensor([int(open(saved).read()) if rank == 0 and os.path.exists(saved) else 0])
dist.broadcast(step, 0)
step = int(step)
print(f"attempt {os.environ['DDP_ATTEMPT']} world {world} begins at step {step}", flush=True)
while True:
    time.sleep(0.1)
    stop = torch.tensor([float(bool(asked))])
    dist.all_reduce(stop)
    step += 1
    if rank == 0:
        with open(saved + ".tmp", "w") as file:
            file.write(str(step))
        os.rename(saved + ".tmp", saved)
        print(f"step {step} world {world} time {time.time():.2f}", flush=True)
    if stop:
        dist.barrier()
        sys.exit(85)
"""
BEGINS = re.compile(r"attempt (\d+) world (\d+) begins at step (\d+)")
STEP = re.compile(r"step (\d+) world (\d+) time ([\d.]+)")


class Training:
    """One job that trains with that script."""

    def __init__(
        self,
        cluster: UserNamespace,
        name: str,
        *,
        script: str = TRAIN,
        annotations: dict[str, str] | None = None,
        folder: str = "",
        **spec: Any,
    ) -> None:
        """``folder``: of the shared disk, for a job that shares no checkpoints with others of the namespace."""
        if not os.environ.get("DDP_E2E_CHECKPOINTS"):
            pytest.skip("DDP_E2E_CHECKPOINTS names no volume that all nodes share")
        self.cluster = cluster
        self.name = name
        job = adapt(DIGITS, name)
        job["metadata"]["annotations"] = annotations or {}
        pod = job["spec"]["template"]["spec"]
        container = pod["containers"][0]
        container["command"] = ["python3", "-c", script]
        container["args"] = []
        container["resources"] = {"requests": {"cpu": "100m"}}
        pod["volumes"] = [
            *pod.get("volumes", ()),
            {"name": "e2e-checkpoints", **yaml.safe_load(os.environ["DDP_E2E_CHECKPOINTS"])},
        ]
        container["volumeMounts"] = [
            *container.get("volumeMounts", ()),
            {
                "name": "e2e-checkpoints",
                "mountPath": "/e2e-checkpoints",
                "subPath": f"{cluster.namespace}/{folder}".rstrip("/"),
            },
        ]
        job["spec"] |= {
            "nodes": 2,
            "checkpoint": {"path": "/e2e-checkpoints", "graceSeconds": 10},
            "metrics": {"logPatterns": [r"^step (?P<step>\d+)"]},
            "scheduling": {"placement": "Spread"},
        } | spec
        self.manifest = job
        applied = cluster.apply(job)
        assert applied.returncode == 0, applied.stderr

    def patch(self, **spec: Any) -> None:
        """Change members of the spec."""
        text = json.dumps({"spec": spec})
        patched = self.cluster.kubectl("patch", "ddp", self.name, "--type", "merge", "--patch", text)
        assert patched.returncode == 0, patched.stderr

    @property
    def status(self) -> dict[str, Any]:
        return self.cluster.status(self.name)

    def pod(self, index: int) -> Any:
        """Return the running pod of an index."""

        def probe() -> Any:
            prefix = f"{self.status.get('jobName')}-{index}-"
            pods = [pod for pod in self.cluster.pods(self.name) if pod.metadata.name.startswith(prefix)]
            return next((pod for pod in pods if pod.status.phase == "Running"), None)

        return self.cluster.until(probe, f"pod {index} runs")

    def living(self) -> list[Any]:
        """Return the running pods."""
        return [pod for pod in self.cluster.pods(self.name) if pod.status.phase == "Running"]

    def log(self) -> str:
        """Return the output of rank 0 in the current pod 0, or an empty text if there is no pod 0."""
        prefix = f"{self.status.get('jobName')}-0-"
        newest_first = sorted(
            self.cluster.pods(self.name), key=lambda pod: pod.metadata.creation_timestamp, reverse=True
        )
        for pod in newest_first:
            if pod.metadata.name.startswith(prefix):
                return self.cluster.kubectl("logs", pod.metadata.name).stdout
        return ""

    def trained(self, *, since: int = 0, steps: int = 5, world: int = 2) -> int:
        """Wait until this many ranks have made this many steps beyond a step. Return the last step."""

        def probe() -> int | None:
            results = [int(step) for step, ranks, _ in STEP.findall(self.log()) if int(ranks) == world]
            return results[-1] if len(results) >= steps and results[-1] >= since + steps else None

        return int(self.cluster.until(probe, f"{self.name}: {steps} steps after {since} by {world} ranks"))

    def recovered(self, done: int, deed: Callable[[], object], what: str, *, world: int = 2) -> float:
        """Inject a fault, wait until the job trains again, and check that no saved step is lost.

        Print the seconds that it took, and return them.
        """
        begun = time.time()
        deed()
        first: list[tuple[str, str, str]] = []

        def probe() -> bool:
            log = self.log()
            starts = [match for match in BEGINS.finditer(log) if int(match[3]) >= done and int(match[2]) == world]
            if starts:
                steps = STEP.findall(log[starts[-1].end() :])
                first[:] = steps[:1] if steps and float(steps[0][2]) > begun else []
            return bool(first)

        self.cluster.until(probe, f"{self.name} trains again after {what}, from step {done} or later")
        seconds = float(first[0][2]) - begun
        print(f"{what}: the next step after {seconds:.1f} s")
        return seconds


def condition(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next((item for item in status.get("conditions", ()) if item["type"] == name), {})


def restarts(job: Training) -> bool:
    return any(item["type"] == "Restarting" and item["status"] == "True" for item in job.status["conditions"])


def test_deleted_pod_loses_no_saved_step_and_is_not_counted(cluster: UserNamespace) -> None:
    job = Training(cluster, "worker")
    for index, what in ((1, "a worker's pod was deleted"), (0, "the master's pod was deleted")):
        done = job.trained()
        name = job.pod(index).metadata.name
        job.recovered(done, partial(cluster.core.delete_namespaced_pod, name, cluster.namespace), what)
        # Another loss before the operator observes training would belong to the same interruption.
        cluster.until(lambda: not restarts(job), "the recovery is told")
    status = job.status
    report = read_counts(status)
    assert (status["attempt"], report["replaced"], report["total"], report["counted"]) == (1, 2, 0, 0), status
    assert status["lastRestart"]["level"] == "ReplacedPod"


def test_spare_replaces_deleted_pod(cluster: UserNamespace) -> None:
    job = Training(cluster, "spared", spares=1)
    done = job.trained()
    cluster.until(lambda: job.status["nodes"].get("spares") == 1, "a spare is ready")
    names = [job.pod(index).metadata.name for index in (1, 2)]
    # The pod that reaches the rendezvous last is the spare; only the other one trains.
    [name] = [name for name in names if BEGINS.search(cluster.kubectl("logs", name).stdout)]
    job.recovered(
        done, partial(cluster.core.delete_namespaced_pod, name, cluster.namespace), "a pod beside a spare was"
    )
    cluster.until(lambda: job.status["nodes"].get("spares") == 1, "the successor of the deleted pod is the next spare")
    status = job.status
    report = read_counts(status)
    assert (status["attempt"], report["replaced"], report["total"], report["counted"]) == (1, 1, 0, 0), status
    assert status["phase"] == "Running", status


def test_drill_kills_rank_and_measures_its_restart_in_place(cluster: UserNamespace) -> None:
    job = Training(cluster, "exercise")
    done = job.trained()
    pods = [job.pod(index).metadata.name for index in range(2)]
    ddp = [str(Path(sys.executable).with_name("ddp")), "drill", "exercise", "--kill", "1", "--output", "json"]
    ddp += ["--kubeconfig", cluster.kubeconfig, "--namespace", cluster.namespace]
    drill = subprocess.run(ddp, text=True, capture_output=True, timeout=600, check=False)
    assert drill.returncode == 0, drill.stderr
    message = json.loads(drill.stdout)
    print(message)
    assert message["level"] == "process"
    assert message["stepsLost"] == 0
    assert message["resumedFrom"] >= done
    assert [job.pod(index).metadata.name for index in range(2)] == pods


def test_elastic_job_grows_shrinks_and_loses_pod_without_losing_its_job(cluster: UserNamespace) -> None:
    job = Training(cluster, "stretch", elastic={"minNodes": 1, "maxNodes": 3})
    done = job.trained()
    for size in (3, 2):
        job.recovered(
            done, partial(cluster.kubectl, "scale", "ddp/stretch", f"--replicas={size}"),
            f"kubectl scale to {size} pods", world=size,
        )  # fmt: skip
        done = job.trained(since=done, world=size)
    name = job.pod(1).metadata.name
    job.recovered(
        done, partial(cluster.core.delete_namespaced_pod, name, cluster.namespace), "one of two pods deleted", world=1
    )
    job.trained(since=done)  # and its successor joins again
    status = job.status
    assert status["attempt"] == 1
    assert read_counts(status)["total"] == 0


def test_preflight_measures_network_between_pods(cluster: UserNamespace) -> None:
    job = Training(cluster, "before", preflight={"mode": "Fail", "checks": ["dns", "tcp", "allreduce", "pairs"]})
    job.trained(steps=1)
    result = cluster.until(lambda: job.status.get("preflight"), "the preflight's figures in status")
    assert "failed" not in result
    assert float(result["allReduceMegabytesPerSecond"]) > 0
    assert result["transport"] == "Socket"
    nodes = " and ".join(job.pod(index).spec.node_name for index in (0, 1))
    assert result["slowest"].startswith(f"pods 0 and 1 (nodes {nodes}): "), result
    print(result)


@pytest.mark.parametrize(
    ("code", "reason", "attempts"),
    [("3", "RepeatedFailure", 2), ("10 + int(os.environ['DDP_ATTEMPT'])", "CrashLoop", 3)],
    ids=["the same way", "another way each time"],
)
def test_job_that_fails_without_step_stops_early(cluster: UserNamespace, code: str, reason: str, attempts: int) -> None:
    job = adapt(DIGITS, "loop")
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["command"] = ["python3", "-c", f"import os; os._exit({code})"]
    container["args"] = []
    job["spec"]["recovery"] = {"inPlaceRestarts": 0, "maxRestarts": 50}
    assert cluster.apply(job).returncode == 0
    status = cluster.phase("loop", "Failed", "Succeeded")
    failed = condition(status, "Failed")
    assert (failed["status"], failed["reason"]) == ("True", reason), failed
    assert status["attempt"] == attempts
    assert status["lastFailure"]["exitCode"] == (3 if attempts == 2 else 13)


@pytest.fixture
def lose_node(cluster: UserNamespace) -> Iterator[Callable[[str], None]]:
    """Return a function that switches a node off abruptly; it is switched on again afterwards."""
    stop = os.environ.get("DDP_E2E_NODE_STOP")
    start = os.environ.get("DDP_E2E_NODE_START")
    if not stop or not start:
        pytest.skip("DDP_E2E_NODE_STOP and DDP_E2E_NODE_START say no way to switch a node off and on")
    lost: list[str] = []

    def switch(command: str, node: str) -> None:
        subprocess.run([*shlex.split(command), node], check=True, timeout=300, stdin=subprocess.DEVNULL)

    def lose(node: str) -> None:
        lost.append(node)
        switch(stop, node)

    try:
        yield lose
    finally:
        for node in lost:
            switch(start, node)


@pytest.mark.parametrize("budget", [{}, {"inPlaceRestarts": 0, "maxRestarts": 0}], ids=["default", "no-restarts"])
def test_lost_node_does_not_block_and_is_avoided(
    cluster: UserNamespace, lose_node: Callable[[str], None], budget: dict[str, int]
) -> None:
    job = Training(cluster, "outage", recovery={"forceDeleteAfterSeconds": 10, **budget})
    done = job.trained()
    pods = [job.pod(index) for index in range(2)]
    nodes = {pod.spec.node_name for pod in pods}
    assert len(nodes) == 2, "the cluster has only one node with room"
    lost = pods[1].spec.node_name
    job.recovered(done, partial(lose_node, lost), f"node {lost} was lost")
    status = job.status
    assert status["failedNodes"] == [lost]
    counts = read_counts(status)
    # Launchers without restarts cannot wait for a new pod.
    assert (counts["free"], counts["replaced"]) == ((1, 0) if budget else (0, 1))
    assert counts["counted"] == 0
    assert status["lastFailure"]["category"] == "NodeLost", status["lastFailure"]
    assert all(job.pod(index).spec.node_name != lost for index in range(2))
    # The pod on the dead node was declared failed; otherwise the Job controller would have waited for it.
    cluster.until(
        lambda: pods[1].metadata.name not in {pod.metadata.name for pod in cluster.pods("outage")},
        "the lost pod is gone",
    )


@pytest.fixture
def report_trouble(cluster: UserNamespace) -> Iterator[Callable[[str], None]]:
    """Return a function that writes a condition of a node, as detectors of GPU errors do; removed afterwards."""
    ill: list[str] = []

    def write(node: str, **members: Any) -> None:
        # Identified by its type: a strategic merge leaves the kubelet's own conditions unchanged.
        messages = {"type": "XidCriticalError", **members}
        cluster.core.patch_node_status(node, {"status": {"conditions": [messages]}})

    def report(node: str) -> None:
        ill.append(node)
        write(node, status="True", reason="Xid79", message="GPU 3 has fallen off the bus")

    try:
        yield report
    finally:
        for node in ill:
            write(node, **{"$patch": "delete"})


def test_node_with_broken_gpu_is_left_and_avoided(
    cluster: UserNamespace, report_trouble: Callable[[str], None]
) -> None:
    job = Training(cluster, "ill", recovery={"nodeHealth": {"conditions": ["Xid*"], "action": "Migrate"}})
    done = job.trained()
    nodes = [job.pod(index).spec.node_name for index in range(2)]
    assert nodes[0] != nodes[1], "the cluster has only one node with room"
    assert condition(job.status, "NodesHealthy")["status"] == "True"
    job.recovered(done, partial(report_trouble, nodes[1]), f"node {nodes[1]} reported a broken GPU")
    status = job.status
    assert (status["attempt"], status["failedNodes"]) == (2, [nodes[1]]), status
    assert (read_counts(status)["free"], read_counts(status)["counted"]) == (1, 0)
    assert status["lastRestart"]["cause"] == "NodeUnhealthy"
    assert {job.pod(index).spec.node_name for index in range(2)} == {nodes[0]}
    assert condition(job.status, "NodesHealthy")["status"] == "True"
    events = cluster.kubectl("get", "events", "--field-selector", "involvedObject.kind=DDPTrainingJob").stdout
    assert f"avoids unhealthy nodes: {nodes[1]}: XidCriticalError (GPU 3 has fallen off the bus)" in events


def test_rank_that_hangs_in_script_without_exporter_is_named_and_ended(cluster: UserNamespace) -> None:
    script = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()

def load_batch(step):
    if step == 50 and rank == 1:
        time.sleep(1e9)

for step in range(1, 1000):
    load_batch(step)
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
    print(f"step {step}", flush=True)
"""
    recovery = {"inPlaceRestarts": 0, "maxRestarts": 0}
    watchdog = {"stallSeconds": 10, "startSeconds": 120, "checkpointSeconds": 10}
    Training(cluster, "hangs", script=script, recovery=recovery, watchdog=watchdog)

    def stalled() -> str | None:
        for condition in cluster.status("hangs").get("conditions", ()):
            if (condition["type"], condition["reason"]) == ("Progressing", "Stalled") and "rank 1" in condition[
                "message"
            ]:
                return str(condition["message"])
        return None

    assert "load_batch" in cluster.until(stalled, "the place where rank 1 hangs in status")
    failure = cluster.phase("hangs", "Failed")["lastFailure"]
    assert (failure["category"], failure["rank"]) == ("Hang", 1), failure
    assert "load_batch" in failure["message"]
