"""Interference with a job in training on real kubelets: evictions, edits, a recreated resource, a killed operator.

As in ``test_recovery``: no test depends on how long something takes, and the seconds are printed.
"""

from __future__ import annotations

import pytest
from kubernetes import client

from tests.support.counts import read_counts

from .conftest import DIGITS, CheckoutOperator, UserNamespace, adapt
from .test_recovery import Training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_evicted_pod_loses_no_saved_step_and_is_not_counted(cluster: UserNamespace) -> None:
    job = Training(cluster, "evicted")
    done = job.trained()
    name = job.pod(1).metadata.name

    def evict() -> None:
        about = client.V1ObjectMeta(name=name, namespace=cluster.namespace)
        cluster.core.create_namespaced_pod_eviction(name, cluster.namespace, client.V1Eviction(metadata=about))

    job.recovered(done, evict, "a pod was evicted")
    status = job.status
    report = read_counts(status)
    assert (status["attempt"], report["replaced"], report["counted"]) == (1, 1, 0), status
    failure = status["lastFailure"]
    assert (failure["category"], failure["podIndex"]) == ("Preempted", 1), failure
    assert "EvictionByEvictionAPI" in failure["message"], failure


def test_killed_operator_loses_nothing(cluster: UserNamespace, operator: CheckoutOperator | None) -> None:
    if operator is None:
        pytest.skip("the operator is installed in the cluster and none of this test's processes (DDP_E2E_OPERATOR)")
    job = Training(cluster, "orphan")
    done = job.trained()
    name = job.pod(1).metadata.name

    def interfere() -> None:
        operator.kill()
        try:
            cluster.core.delete_namespaced_pod(name, cluster.namespace)
            cluster.until(lambda: name not in {pod.metadata.name for pod in cluster.pods("orphan")}, f"{name} is gone")
        finally:
            operator.start()

    job.recovered(done, interfere, "the operator was killed, then a pod deleted, then the operator started")
    status = job.status
    # The restart counts depending on the evidence that remains: a pod that was deleted during the outage leaves none.
    jobs = [item.metadata.name for item in cluster.batch.list_namespaced_job(cluster.namespace).items]
    if status["attempt"] == 1:  # the operator took longer to start than the Job controller to replace the pods
        assert jobs == ["orphan-1"], jobs
        return
    assert (status["attempt"], read_counts(status)["total"]) == (2, 1), status
    assert status["lastFailure"]["attempt"] == 1, status
    assert "orphan-2" in jobs
    assert set(jobs) <= {"orphan-1", "orphan-2"}, jobs


def test_job_recreated_under_same_name_resumes_from_checkpoint(cluster: UserNamespace) -> None:
    job = Training(cluster, "phoenix")
    done = job.trained()
    former = {pod.metadata.uid for pod in cluster.pods("phoenix")}
    old = cluster.get("phoenix")
    assert old is not None

    def recreate() -> None:
        assert cluster.kubectl("delete", "ddp", "phoenix").returncode == 0
        applied = cluster.apply(job.manifest)
        assert applied.returncode == 0, applied.stderr

    job.recovered(done, recreate, "the resource was deleted and made anew")
    new = cluster.get("phoenix")
    assert new is not None
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert new["status"]["attempt"] == 1
    assert "lastFailure" not in new["status"]
    assert not former & {pod.metadata.uid for pod in cluster.pods("phoenix")}


def test_job_suspended_edited_and_resumed_during_restart_loses_nothing(cluster: UserNamespace) -> None:
    job = Training(cluster, "edited")
    done = job.trained()
    name = job.pod(1).metadata.name

    def interfere() -> None:
        cluster.core.delete_namespaced_pod(name, cluster.namespace)
        cluster.until(lambda: read_counts(job.status)["replaced"] == 1, "the lost pod is being replaced")
        job.patch(suspend=True)
        cluster.phase("edited", "Suspended")
        job.patch(suspend=False, ttlSecondsAfterFinished=3600)

    job.recovered(done, interfere, "suspended, edited and resumed during a restart")
    status = job.status
    assert read_counts(status)["counted"] == 0, status
    assert cluster.get("edited")["spec"]["ttlSecondsAfterFinished"] == 3600  # type: ignore[index]
    living = job.living()
    assert len(living) == 2, [pod.metadata.name for pod in living]


def test_removed_labels_are_restored_and_training_continues(cluster: UserNamespace) -> None:
    job = Training(cluster, "unlabelled")
    done = job.trained()
    pods = {pod.metadata.uid for pod in job.living()}
    for target in (f"pod/{job.pod(1).metadata.name}", f"job/{job.status['jobName']}"):
        taken = cluster.kubectl("label", target, "ddp-operator.dev/job-name-", "ddp-operator.dev/attempt-")
        assert taken.returncode == 0, taken.stderr
        look = ("get", target, "--output", r"jsonpath={.metadata.labels.ddp-operator\.dev/job-name}")
        cluster.until(lambda look=look: cluster.kubectl(*look).stdout == job.name, f"{target} has its label again")
    job.trained(since=done)
    assert {pod.metadata.uid for pod in job.living()} == pods
    status = job.status
    assert (status["phase"], read_counts(status)["total"]) == ("Running", 0), status


def test_pod_with_full_disk_is_evicted_and_reported(cluster: UserNamespace) -> None:
    job = adapt(DIGITS, "filler")
    container = job["spec"]["template"]["spec"]["containers"][0]
    script = "import time; open('/tmp/full', 'wb').write(bytes(120 << 20)); time.sleep(600)"
    container["command"] = ["python3", "-c", script]
    container["args"] = []
    container["resources"] = {"requests": {"cpu": "100m"}, "limits": {"ephemeral-storage": "50Mi"}}
    job["spec"] |= {"nodes": 1, "recovery": {"maxRestarts": 0}}
    assert cluster.apply(job).returncode == 0
    status = cluster.phase("filler", "Failed", "Succeeded")
    failure = status["lastFailure"]
    assert (status["phase"], failure["category"]) == ("Failed", "Unknown"), status
    assert failure["message"].startswith("Evicted: "), failure
    assert "ephemeral-storage" in failure["remedy"], failure
