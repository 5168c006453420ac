"""Jobs in several clusters by MultiKueue: their Workload in the manager and in the worker cluster. Pure.

Kueue has no integration for DDPTrainingJobs, so the operators do its work. In the manager cluster the job has no pods:
the Workload waits in the queue until Kueue has found a worker cluster, and Kueue then copies the status from there. In
the worker cluster Kueue creates the job for a Workload that it has admitted; its pods run as long as that is so.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from ddp_operator.api import child_names
from ddp_operator.api.constants import ANNOTATION_SPEC, ANNOTATION_SUSPEND, KUEUE_ORIGIN_LABEL, KUEUE_QUEUE_LABEL
from ddp_operator.api.job import DDPTrainingJob, kueue_metadata
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, is_finished, summarize
from ddp_operator.decide.pace import drop_eta
from ddp_operator.decide.preparation import describe_before_start
from ddp_operator.decide.state import Observation, State
from ddp_operator.reading.workloads import explain_waiting, find_condition

MANAGER_CONDITIONS: Final = (c.ACCEPTED, c.SUSPENDED, c.SCHEDULED, c.SUCCEEDED, c.FAILED)
# Evictions after which Kueue requeues a Workload at once.
_REQUEUED: Final = ("Preempted", "NodeFailures")
_MAX_MESSAGE: Final = 1024
# A merge patch must remove them if the job no longer has them.
_OPTIONAL: Final = ("priorityClassRef", "priority")


def find_cluster(workload: Mapping[str, Any] | None) -> str:
    """Return the cluster in which a Workload runs; empty: Kueue has selected none, withdraws it, or it has ended."""
    if workload is None or any(find_condition(workload, kind).is_true for kind in ("Evicted", "Finished")):
        return ""
    return str((workload.get("status") or {}).get("clusterName") or "")


def build_edits(
    workload: Mapping[str, Any], *, suspend: bool, manifest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the merge patch that a Workload needs to follow its job; empty: none.

    ``manifest``: the Workload as the job's spec requires it. Kueue accepts another spec only while it holds no quota.
    """
    stored = workload["metadata"].get("annotations") or {}
    annotations: dict[str, str] = {}
    spec: dict[str, Any] = {}
    if stored.get(ANNOTATION_SUSPEND) != str(suspend).lower():  # Kueue may have deactivated it for another reason
        annotations[ANNOTATION_SUSPEND] = str(suspend).lower()
        spec["active"] = not suspend
    if manifest is not None and not find_condition(workload, "QuotaReserved").is_true:
        digest = manifest["metadata"]["annotations"][ANNOTATION_SPEC]
        if stored.get(ANNOTATION_SPEC) != digest:
            annotations[ANNOTATION_SPEC] = digest
            required = {name: value for name, value in manifest["spec"].items() if name != "active"}
            spec = {**dict.fromkeys(_OPTIONAL), **required, **spec}
    return {"metadata": {"annotations": annotations}, "spec": spec} if spec else {}


def describe_queueing(
    job: DDPTrainingJob, workload: Mapping[str, Any] | None, queue: Mapping[str, Any] | None, now: datetime
) -> Status:
    """Return the status of a job that runs in no worker cluster. The next one starts it from its checkpoint."""
    name = job.labels[KUEUE_QUEUE_LABEL]
    message = f"waiting for admission by queue {name}"
    reason = c.QUOTA_PENDING
    if job.spec.suspend:
        reason = c.WAITING_FOR_PODS
        message = "the job is suspended"
    elif workload is not None:
        problem = explain_waiting(workload, [workload], queue)
        clusters = (workload.get("status") or {}).get("nominatedClusterNames") or ()
        if clusters and find_condition(workload, "QuotaReserved").is_true:
            message = f"queue {name} has reserved quota; waiting for quota in cluster {' or '.join(clusters)}"
        elif problem is not None:
            reason = problem.reason
            message += f": {problem.message}"
    old = job.status
    status = Status(
        profile=old.profile,
        points=old.points,
        progress=drop_eta(old.progress),
        conditions=tuple(item for item in old.conditions if item.type in MANAGER_CONDITIONS),
    )
    fact = Fact(c.SCHEDULED, "False", reason, message)
    return summarize(describe_before_start(State(job, Observation(), now), status, fact), job.spec)


def list_flavors(workload: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the ResourceFlavors that Kueue has assigned to an admitted Workload."""
    admission = ((workload or {}).get("status") or {}).get("admission") or {}
    assigned = (item.get("flavors") or {} for item in admission.get("podSetAssignments") or ())
    return tuple(sorted({name for flavors in assigned for name in flavors.values()}))


def explain_foreign_workload(job: DDPTrainingJob, workload: Mapping[str, Any]) -> str:
    """Return why a Workload is not the copy that MultiKueue created for a job; empty: it is.

    Labels of the job select it, and a user may write these: the Workload must state the same. Its name has the UID of
    the job in the manager cluster.
    """
    meta = workload["metadata"]
    labels = meta.get("labels") or {}
    name = meta["name"]
    origin = labels.get(KUEUE_ORIGIN_LABEL)
    if not origin or origin != job.labels.get(KUEUE_ORIGIN_LABEL):
        return f"Workload {name} is no copy of MultiKueue"
    is_named = re.fullmatch(rf"{re.escape(job.name)}-[0-9a-f]{{8}}", name) is not None
    if not is_named or not child_names.child_labels(job.name).items() <= labels.items():
        return f"Workload {name} belongs to another job"
    return ""


def follow_admission(
    job: DDPTrainingJob,
    name: str,
    workload: Mapping[str, Any] | None,
    flavors: Iterable[Mapping[str, Any]],
    problem: str = "",
) -> DDPTrainingJob:
    """Return the copy of a job as its Workload permits it: suspended, or with the nodes of its flavors.

    The child Jobs have no queue, because the Workload has the quota of all attempts. The job is deleted with that of
    the manager cluster, so its own time to live does not count. ``name``: of the Workload; ``problem``: why it does not
    cover the job's pods.
    """
    kueue = kueue_metadata(job)
    spec = replace(job.spec, ttl_seconds_after_finished=None)
    held = problem or _explain_hold(name, workload)
    if held:
        spec = replace(spec, suspend=True)
    else:
        spec = replace(spec, template=replace(spec.template, spec=_place_pods(spec.template.spec or {}, flavors)))
    return dataclasses.replace(
        job,
        spec=spec,
        labels={key: value for key, value in job.labels.items() if key not in kueue["labels"]},
        annotations={key: value for key, value in job.annotations.items() if key not in kueue["annotations"]},
        held=held if not job.spec.suspend else "",
    )


def _explain_hold(name: str, workload: Mapping[str, Any] | None) -> str:
    """Return why the pods of a Workload must not run; empty: Kueue has admitted it."""
    if workload is None:
        return f"Workload {name} of the manager cluster does not exist"
    evicted = find_condition(workload, "Evicted")
    if evicted.is_true:
        return f"Kueue has evicted Workload {name} ({evicted.reason}): {evicted.message}"
    is_ended = find_condition(workload, "Finished").is_true  # a failed job of another operator's version
    if find_condition(workload, "Admitted").is_true and not is_ended:
        return ""
    return f"Kueue has not admitted Workload {name}"


def _place_pods(pod: Mapping[str, Any], flavors: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a pod's spec with the node labels and tolerations of flavors."""
    selector = dict(pod.get("nodeSelector") or {})
    tolerations = list(pod.get("tolerations") or ())
    for flavor in flavors:
        spec = flavor.get("spec") or {}
        selector |= spec.get("nodeLabels") or {}
        tolerations += [item for item in spec.get("tolerations") or () if item not in tolerations]
    placed = {"nodeSelector": selector, "tolerations": tolerations}
    return {**pod, **{name: value for name, value in placed.items() if value}}


def build_report(workload: Mapping[str, Any], status: Status, now: datetime, *, is_over: bool) -> dict[str, Any]:
    """Return the merge patch that reports to Kueue that the pods have started, or the job's end; empty: nothing new.

    Kueue deletes an ended job at once. ``is_over``: it may; ``status``: the one just written.
    """
    facts = []
    if (
        status.phase == "Running"
        and status.is_true(c.RENDEZVOUSED)
        and not find_condition(workload, "PodsReady").is_true
    ):
        facts.append(Fact("PodsReady", "True", "Started", "all pods have joined the rendezvous"))
    if is_over and is_finished(status) and not find_condition(workload, "Finished").is_true:
        end = status.condition(c.FAILED if status.phase == "Failed" else c.SUCCEEDED)
        message = end.message if end is not None else ""
        facts.append(Fact("Finished", "True", status.phase or "Failed", message or f"phase {status.phase}"))
    return _build_status(workload, facts, now) if facts else {}


def build_release(workload: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the merge patch that returns the quota of an evicted Workload without pods; empty: nothing to return."""
    evicted = find_condition(workload, "Evicted")
    if not (evicted.is_true and find_condition(workload, "QuotaReserved").is_true):
        return {}
    facts = [
        Fact("QuotaReserved", "False", "Pending", evicted.message),
        Fact("Admitted", "False", "NoReservation", "The workload has no reservation"),
        Fact("Requeued", "True" if evicted.reason in _REQUEUED else "False", evicted.reason, evicted.message),
    ]
    patch = _build_status(workload, facts, now)
    patch["status"]["admission"] = None
    return patch


def _build_status(workload: Mapping[str, Any], facts: Sequence[Fact], now: datetime) -> dict[str, Any]:
    """Return a merge patch with all conditions of a Workload: such a patch replaces the list."""
    conditions = {item["type"]: item for item in (workload.get("status") or {}).get("conditions") or ()}
    for fact in facts:
        known = conditions.get(fact.type) or {}
        time = known["lastTransitionTime"] if known.get("status") == fact.status else format_time(now)
        conditions[fact.type] = {
            "type": fact.type,
            "status": fact.status,
            "reason": fact.reason,
            "message": fact.message[:_MAX_MESSAGE],
            "lastTransitionTime": time,
            "observedGeneration": workload["metadata"].get("generation", 0),
        }
    return {"status": {"conditions": list(conditions.values())}}
