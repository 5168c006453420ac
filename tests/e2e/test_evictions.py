"""Pods that are drained, evicted, tainted away or deleted, with every way in which a script may end at SIGTERM.

The ranks of all pods end after the same step, as those of docs/tutorial.md. No end is counted, the status names the
eviction, and training continues from the last step. The printed seconds are from the eviction to the first new step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.client import ApiException

from tests.support import ROOT
from tests.support.counts import read_counts
from tests.support.drain_requests import SOURCE, build_crd, build_drain_request
from tests.unit.test_docs import fenced

from .conftest import UserNamespace
from .test_recovery import Training, restarts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TRAIN = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

asked = []
signal.signal(signal.SIGTERM, HANDLER)
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
rank, world = dist.get_rank(), dist.get_world_size()
saved = os.environ["DDP_CHECKPOINT_DIR"] + "/" + os.environ["DDP_JOB_NAME"]
step = torch.tensor([int(open(saved).read()) if rank == 0 and os.path.exists(saved) else 0])
dist.broadcast(step, 0)
step = int(step)
print(f"attempt {os.environ['DDP_ATTEMPT']} world {world} begins at step {step}", flush=True)
while True:
    time.sleep(0.1)
    votes = torch.tensor([float(bool(asked)), float(os.path.exists(saved + ".enough"))])
    dist.all_reduce(votes)
    step += 1
    if rank == 0:
        with open(saved + ".tmp", "w") as file:
            file.write(str(step))
        os.rename(saved + ".tmp", saved)
        print(f"step {step} world {world} time {time.time():.2f}", flush=True)
    if votes[0]:
        ENDING
        break
    if votes[1]:
        break
"""
_SETS_FLAG = "lambda *_: asked.append(1)"
ENDINGS = {
    "exit 143": (_SETS_FLAG, "sys.exit(143)"),
    "exit 85": (_SETS_FLAG, "sys.exit(85)"),
    "exit 0": (_SETS_FLAG, "pass"),
    "ignores": ("signal.SIG_IGN", "pass"),
}
"""The handler of SIGTERM and the statement after the step at which all ranks have agreed to end."""


@contextmanager
def drain_node(cluster: UserNamespace, job: Training, pod: Any) -> Iterator[None]:
    """Drain the node of a pod, and uncordon it afterwards."""
    node = pod.spec.node_name
    try:
        drained = cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
            f"--pod-selector=ddp-operator.dev/job-name={job.name}",
        )  # fmt: skip
        assert drained.returncode == 0, drained.stderr
        yield
    finally:
        assert cluster.kubectl("uncordon", node).returncode == 0


@contextmanager
def evict_by_api(cluster: UserNamespace, job: Training, pod: Any) -> Iterator[None]:
    """Evict a pod by the Eviction API."""
    name = pod.metadata.name
    body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=cluster.namespace))
    cluster.core.create_namespaced_pod_eviction(name, cluster.namespace, body)
    yield


@contextmanager
def taint_node(cluster: UserNamespace, job: Training, pod: Any) -> Iterator[None]:
    """Taint the node of a pod with NoExecute, and remove the taint afterwards."""
    node = pod.spec.node_name
    try:
        assert cluster.kubectl("taint", "node", node, "ddp-e2e-eviction=yes:NoExecute").returncode == 0
        yield
    finally:
        assert cluster.kubectl("taint", "node", node, "ddp-e2e-eviction:NoExecute-").returncode == 0


@contextmanager
def delete_pod(cluster: UserNamespace, job: Training, pod: Any) -> Iterator[None]:
    """Delete a pod."""
    cluster.core.delete_namespaced_pod(pod.metadata.name, cluster.namespace)
    yield


@contextmanager
def request_drain(cluster: UserNamespace, job: Training, pod: Any) -> Iterator[None]:
    """Create a DrainRequest that names a pod, as NVSentinel's node-drainer does."""
    values = yaml.safe_load(os.environ.get("DDP_E2E_CHART_VALUES", "{}"))
    if values.get("settings", {}).get("drainRequests") != SOURCE:
        pytest.skip(
            f"settings.drainRequests of DDP_E2E_CHART_VALUES is not {SOURCE}: the operator reads no DrainRequest"
        )
    request = build_drain_request(pod.metadata.name, namespace=cluster.namespace, node=pod.spec.node_name)
    metadata = request["metadata"]
    metadata["name"] = pod.metadata.name
    del metadata["resourceVersion"]
    kind = ("nvsentinel.nvidia.com", "v1alpha1", metadata["namespace"], "drainrequests")
    _create_unless_present(lambda: cluster.core.create_namespace({"metadata": {"name": metadata["namespace"]}}))
    definitions = client.ApiextensionsV1Api(cluster.core.api_client)
    _create_unless_present(lambda: definitions.create_custom_resource_definition(build_crd()))
    cluster.until(lambda: _succeeds(lambda: cluster.custom.list_namespaced_custom_object(*kind)), "requests are served")
    cluster.custom.create_namespaced_custom_object(*kind, request)
    try:
        yield
    finally:
        cluster.custom.delete_namespaced_custom_object(*kind, metadata["name"])


def _create_unless_present(create: Callable[[], object]) -> None:
    try:
        create()
    except ApiException as error:
        if error.status != 409:
            raise


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except ApiException:
        return False
    return True


_UNOBSERVED = "was lost while no operator watched"
WAYS = {
    "drain": (drain_node, "Preempted", "EvictionByEvictionAPI"),
    "eviction": (evict_by_api, "Preempted", "EvictionByEvictionAPI"),
    "DrainRequest": (request_drain, "Preempted", "Drained"),
    "NoExecute taint": (taint_node, "NodeLost", "DeletionByTaintManager"),
    "deleted pod": (delete_pod, "PodDeleted", "it was deleted"),
}
"""The eviction, and the category and a part of the message of the failure in the status."""


def check_nothing_counted(cluster: UserNamespace, job: Training, category: str, text: str) -> None:
    """Check that no restart is counted, and that the status and the user's command name the eviction."""
    status = job.status
    counts = {name: read_counts(status)[name] for name in ("counted", "used", "withoutProgress")}
    assert counts == {"counted": 0, "used": 0, "withoutProgress": 0}, status
    failure = status["lastFailure"]
    if _UNOBSERVED in failure["message"]:  # the operator's own pod was on the node
        assert failure["category"] == "Preempted", failure
    else:
        assert failure["category"] == category, failure
        assert text in failure["message"], failure
    why = cluster.why(job.name)
    assert "UserError" not in why, why


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_evicted_pod_is_nobodys_fault(cluster: UserNamespace, ending: str, way: str) -> None:
    handler, statement = ENDINGS[ending]
    script = TRAIN.replace("HANDLER", handler).replace("ENDING", statement)
    job = Training(cluster, "moved", script=script, recovery={"maxRestarts": 1})
    evict, category, text = WAYS[way]
    for index in (1, 0):
        done = job.trained()
        with ExitStack() as stack:
            strike = partial(stack.enter_context, evict(cluster, job, job.pod(index)))
            job.recovered(done, strike, f"{way} of pod {index}, {ending}")
            # Another eviction before the operator observes training would belong to the same interruption.
            cluster.until(lambda: not restarts(job), "the recovery is told")
        check_nothing_counted(cluster, job, category, text)
    name = job.pod(0).metadata.name
    ended = cluster.kubectl("exec", name, "--", "sh", "-c", 'touch "$DDP_CHECKPOINT_DIR/$DDP_JOB_NAME.enough"')
    assert ended.returncode == 0, ended.stderr
    status = cluster.phase(job.name, "Succeeded", "Failed")
    assert (status["phase"], read_counts(status)["counted"]) == ("Succeeded", 0), status


def test_ten_evictions_of_documented_script_are_not_counted(cluster: UserNamespace) -> None:
    (script,) = fenced((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), "python")
    assert script.count("default=20") == 1
    job = Training(
        cluster,
        "tutorial",
        script=script.replace("default=20", "default=1000000"),
        metrics={"logPatterns": [r"^epoch (?P<epoch>\d+)/(?P<epochs>\d+): loss (?P<loss>\S+)"]},
        recovery={"maxRestarts": 1},
    )

    def read_recovered(evictions: int) -> dict[str, Any] | None:
        status = job.status
        report = read_counts(status)
        is_counted = report["replaced"] + report["free"] == evictions
        restart = status.get("lastRestart") or {}
        has_recovered = evictions == 0 or "recoverySeconds" in restart
        has_epochs = bool(re.search(r"^epoch \d+/", job.log(), re.MULTILINE))
        return status if status.get("phase") == "Running" and is_counted and has_recovered and has_epochs else None

    cluster.until(lambda: read_recovered(0), "the first epoch")
    for number in range(10):
        with evict_by_api(cluster, job, job.pod(number % 2)):
            status = cluster.until(lambda number=number: read_recovered(number + 1), f"training after {number + 1}")
        seconds = status["lastRestart"]["recoverySeconds"]
        print(f"eviction {number + 1}, of pod {number % 2}: the next step after {seconds} s")
        check_nothing_counted(cluster, job, "Preempted", "EvictionByEvictionAPI")
    assert status["attempt"] == 1, status
