"""A job during outages and refusals of the cluster: the control plane, policies, quotas, capacity of nodes.

As in ``test_recovery``: no saved step is lost, and the job continues automatically once the cause is removed. Until
then its status names what it waits for. The length of an outage is part of the test; no assertion depends on time.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiException

from tests.support.counts import read_counts

from .conftest import UserNamespace
from .outside_faults import drain_all_nodes
from .test_recovery import TRAIN, Training, condition

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

OUTAGE = 60.0
"""Seconds that a part of the control plane is stopped."""
# Rank 1 fails once, within the outage, which starts after some steps.
FAILS_LATER = TRAIN.replace(
    "    step += 1\n",
    "    step += 1\n    if step == 150 and rank == 1 and os.environ['DDP_ATTEMPT'] == '1': os._exit(3)\n",
)
PROBE = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "probe"},
    "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "probe", "image": "probe"}]}}},
}


@pytest.fixture
def freeze() -> Iterator[Callable[[str], Callable[[], None]]]:
    """Return a function that stops a part of the control plane and returns another one that resumes it."""
    stop = os.environ.get("DDP_E2E_FREEZE")
    go_on = os.environ.get("DDP_E2E_THAW")
    if not stop or not go_on:
        pytest.skip("DDP_E2E_FREEZE and DDP_E2E_THAW say no way to let the control plane stand still")

    def run(command: str, part: str) -> None:
        subprocess.run([*shlex.split(command), part], check=True, timeout=60, stdin=subprocess.DEVNULL)

    with ExitStack() as stack:

        def begin(part: str) -> Callable[[], None]:
            thaw = partial(run, go_on, part)
            stack.callback(thaw)  # a second call does no harm
            run(stop, part)
            return thaw

        yield begin


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd", "kube-controller-manager"])
def test_failure_during_control_plane_outage_is_handled_after_it(
    cluster: UserNamespace, freeze: Callable[[str], Callable[[], None]], part: str
) -> None:
    job = Training(cluster, "frozen", script=FAILS_LATER, recovery={"inPlaceRestarts": 0})
    done = job.trained()

    def outage() -> None:
        thaw = freeze(part)
        time.sleep(OUTAGE)
        if part == "kube-controller-manager":
            status = job.status  # the operator has observed the failure, and can do no more
            assert (status["phase"], status["attempt"]) == ("Restarting", 2), status
            assert condition(status, "Scheduled")["status"] == "False", status
        thaw()

    job.recovered(done, outage, f"{part} stood still for {OUTAGE:.0f} s, and rank 1 failed meanwhile")
    status = job.status
    assert (status["attempt"], read_counts(status)["counted"], read_counts(status)["free"]) == (2, 1, 0), status
    failure = status["lastFailure"]
    assert (failure["attempt"], failure["rank"], failure["exitCode"]) == (1, 1, 3), failure
    assert len(job.living()) == 2


def a_quota(cluster: UserNamespace) -> Callable[[], object]:
    """Limit the namespace to one pod by a quota. Return the function that removes the quota."""
    quota = cluster.kubectl("create", "quota", "team", "--hard=pods=1")
    assert quota.returncode == 0, quota.stderr
    cluster.until(
        lambda: cluster.core.read_namespaced_resource_quota("team", cluster.namespace).status.used, "the quota counts"
    )
    return partial(cluster.kubectl, "delete", "quota", "team")


def a_policy(cluster: UserNamespace) -> Callable[[], object]:
    """Deny Jobs in the namespace by an admission policy. Return the function that removes it."""
    name = cluster.namespace
    policy = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}
            ]
        },
        "validations": [{"expression": "false", "message": "no Jobs tonight"}],
    }
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}},
    }
    kinds = {"ValidatingAdmissionPolicy": policy, "ValidatingAdmissionPolicyBinding": binding}
    return _admission(cluster, {kind: {"spec": spec} for kind, spec in kinds.items()}, "no Jobs tonight")


def a_webhook(cluster: UserNamespace) -> Callable[[], object]:
    """Register a webhook without a server for the namespace's Jobs. Return the function that removes it."""
    hook = {
        "name": "audit.example.com",
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "timeoutSeconds": 2,
        "admissionReviewVersions": ["v1"],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}},
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}],
    }
    return _admission(cluster, {"ValidatingWebhookConfiguration": {"webhooks": [hook]}}, "audit.example.com")


def _admission(cluster: UserNamespace, objects: dict[str, dict[str, Any]], words: str) -> Callable[[], object]:
    name = cluster.namespace

    def remove() -> None:
        for kind in objects:
            cluster.kubectl("delete", kind.lower(), name, "--ignore-not-found")

    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    for kind, body in objects.items():
        applied = cluster.apply({**head, "kind": kind, **body})
        if applied.returncode:
            remove()
            raise AssertionError(applied.stderr)

    def refused() -> bool:
        tried = cluster.kubectl("create", "--dry-run=server", "-f", "-", text=yaml.safe_dump(PROBE))
        return words in tried.stderr

    try:
        cluster.until(refused, f"{', '.join(objects)} in force")
    except BaseException:
        remove()
        raise
    return remove


@pytest.mark.parametrize(
    ("obstacle", "where", "words"),
    [
        (a_quota, ("Scheduled", "False", "PodsForbidden"), "exceeded quota: team"),
        (a_policy, ("Accepted", "False", "Forbidden"), "no Jobs tonight"),
        (a_webhook, ("Accepted", "Unknown", "ServerError"), 'failed calling webhook "audit.example.com"'),
    ],
)
def test_refused_attempt_reports_refusal_and_starts_once_allowed(
    cluster: UserNamespace,
    obstacle: Callable[[UserNamespace], Callable[[], object]],
    where: tuple[str, str, str],
    words: str,
) -> None:
    job = Training(
        cluster, "refused", recovery={"inPlaceRestarts": 0}
    )  # otherwise the lost pod would be replaced in its Job
    done = job.trained()
    name = job.pod(1).metadata.name

    def told() -> bool:
        result = condition(job.status, where[0])
        return (result["status"], result["reason"]) == where[1:] and words in result.get("message", "")

    with ExitStack() as stack:
        remove = obstacle(cluster)
        stack.callback(remove)
        cluster.core.delete_namespaced_pod(name, cluster.namespace)
        cluster.until(told, f"{where} with {words!r}")
        events = cluster.kubectl("get", "events", "--field-selector", "involvedObject.kind=DDPTrainingJob").stdout
        assert words in events, events
        assert (job.status["phase"], job.status["attempt"]) == ("Restarting", 2)
        job.recovered(done, remove, f"{obstacle.__name__[2:]} refused the next attempt and was removed")
    restarts = read_counts(job.status)
    assert (restarts["total"], restarts["counted"]) == (1, 0), restarts
    assert condition(job.status, "Accepted")["status"] == "True"


def test_drained_nodes_are_avoided_until_uncordoned(cluster: UserNamespace) -> None:
    job = Training(cluster, "drained")
    done = job.trained()
    with ExitStack() as drained:
        drained.enter_context(drain_all_nodes(cluster, job.name))
        waiting = cluster.until(
            lambda: (result := condition(job.status, "Scheduled"))["reason"] == "Unschedulable" and result,
            "the new pods find no room",
        )
        assert "unschedulable" in waiting["message"], waiting
        failure = job.status["lastFailure"]
        assert (failure["category"], "EvictionByEvictionAPI" in failure["message"]) == ("Preempted", True), failure
        job.recovered(done, drained.close, "all nodes were drained, and uncordoned")
    restarts = read_counts(job.status)
    assert (restarts["counted"], restarts["total"], restarts["replaced"]) == (0, 0, 1), restarts


def test_foreign_changes_of_children_are_reverted(cluster: UserNamespace) -> None:
    job = Training(cluster, "meddled")
    labelled = f"ddp-operator.dev/job-name in ({job.name},)"  # and the objects shared by all jobs
    for what, deed in (
        ("the Service, the launcher's ConfigMap and a pod were deleted", ("delete", "service,configmap,pod")),
        ("the Job's parallelism was set to 0", ("patch", "job", "--patch", '{"spec": {"parallelism": 0}}')),
        ("the Job was deleted", ("delete", "job", "--wait=false")),
    ):
        done = job.trained()
        before = job.status["jobName"]

        def meddle(deed: tuple[str, ...] = deed, before: str = before) -> None:
            target = [before] if deed[1] == "job" else ["--selector", labelled]
            done = cluster.kubectl(*deed[:2], *target, *deed[2:])
            assert done.returncode == 0, done.stderr

        job.recovered(done, meddle, what)
    done = job.trained()
    before = job.status["jobName"]

    def suspend(value: str) -> None:
        patched = cluster.kubectl("patch", "job", before, "--patch", f'{{"spec": {{"suspend": {value}}}}}')
        assert patched.returncode == 0, patched.stderr

    suspend("true")  # as a queue does: only the owner of a suspension resumes the Job
    cluster.until(lambda: "suspended by another client" in condition(job.status, "Scheduled")["message"], "it waits")
    job.recovered(done, lambda: suspend("false"), "the Job was suspended by hand, and resumed")
    restarts = read_counts(job.status)
    assert restarts["counted"] == 0, restarts
    assert (len(job.living()), job.status["jobName"]) == (2, before)
    names = {item.metadata.name for item in cluster.core.list_namespaced_service(cluster.namespace).items}
    assert names == {job.name}


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_deleted_job_leaves_no_trace(cluster: UserNamespace, cascade: str) -> None:
    job = Training(cluster, "leaving")
    job.trained()
    deleted = cluster.kubectl("delete", "ddp", job.name, f"--cascade={cascade}", "--timeout=100s")
    assert deleted.returncode == 0, deleted.stderr
    selector = f"ddp-operator.dev/job-name={job.name}"
    cluster.until(
        lambda: not cluster.kubectl("get", "job,pods,services,configmaps", "-l", selector, "-o", "name").stdout,
        "nothing is left",
    )


def test_deleted_namespace_deletes_running_jobs(cluster: UserNamespace) -> None:
    job = Training(cluster, "moving")
    job.trained()
    cluster.core.delete_namespace(cluster.namespace)

    def gone() -> bool:
        try:
            cluster.core.read_namespace(cluster.namespace)
        except ApiException as error:
            return bool(error.status == 404)
        return False

    cluster.until(gone, "the namespace is gone")
