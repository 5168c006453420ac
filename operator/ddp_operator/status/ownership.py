"""Whose things are: a child this resource's own, a former namesake's or somebody else's; a claim the first job's."""

from collections.abc import Iterable, Mapping
from typing import Any

from ddp_operator import constants, names
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.cluster import ChildKind, controller_of, name_claim, owner_uids
from ddp_operator.status import conditions as c
from ddp_operator.status.decision import Refusal
from ddp_operator.status.observation import Children


def explain_launcher_conflict(manifest: Mapping[str, Any], existing: Mapping[str, Any]) -> Refusal | None:
    """Return a refusal where what jobs share has a name that something else has, or a copy that nobody deletes."""
    found, meta = existing["metadata"], manifest["metadata"]
    same = all(existing.get(part) == manifest.get(part) for part in ("data", "binaryData", "immutable"))
    ours = meta["labels"].items() <= (found.get("labels") or {}).items()
    if same and ours and (owner_uids(existing) or meta["name"] == constants.LAUNCHER_USERS):
        return None
    return Refusal(
        c.NAME_CONFLICT,
        f"the ConfigMap {meta['name']} in namespace {meta['namespace']} is not as this operator makes it; delete it, "
        f"and the operator makes its own: kubectl -n {meta['namespace']} delete configmap {meta['name']}",
    )


def is_owned(job: DDPTrainingJob, raw: Mapping[str, Any]) -> bool:
    """Tell whether an object is a child of this very resource."""
    return controller_of(raw).get("uid") == job.uid


def explain_conflict(job: DDPTrainingJob, raw: Mapping[str, Any]) -> Refusal | None:
    """Return a refusal where an object is neither ours nor left by a deleted resource of the same name."""
    owner = controller_of(raw)
    group = str(owner.get("apiVersion")).partition("/")[0]
    same_name = (group, owner.get("kind"), owner.get("name")) == (constants.GROUP, constants.KIND, job.name)
    if same_name or is_owned(job, raw):
        return None
    kind: ChildKind = raw.get("kind") or "Service"
    meta = raw.get("metadata") or {}
    name, labels = meta.get("name"), meta.get("labels") or {}
    if not owner and names.child_labels(job.name).items() <= labels.items():
        return Refusal(
            c.NAME_CONFLICT,
            f"metadata.name: {kind} {name} was left behind by a job of this name that was deleted with "
            "--cascade=orphan; its pods may still be training. Delete what is left: "
            f"kubectl -n {job.namespace} delete job,service,configmap,networkpolicy "
            f"-l {constants.LABEL_JOB_NAME}={job.name}",
        )
    return Refusal(
        c.NAME_CONFLICT,
        f"metadata.name: a {kind} named {name} that does not belong to this job exists in namespace {job.namespace}; "
        "rename the job or delete that object",
    )


def exclusive_claim(job: DDPTrainingJob) -> str | None:
    """Return the claim or the URL of the job's checkpoints, unless other jobs may write there as well."""
    checkpoint = job.spec.checkpoint
    return None if checkpoint is None or checkpoint.shared else checkpoint.claim_name or checkpoint.url


def explain_use(claim: str) -> tuple[str, str]:
    """Return the field that names a claim or URL which another job uses, and what to do where neither shall wait."""
    if "://" in claim:
        return "spec.checkpoint.url", "To run both at once, give each a folder of its own"
    return "spec.checkpoint.claimName", "Where each writes files of its own, set spec.checkpoint.shared: true"


def refuse_second(job: DDPTrainingJob, claim: str, others: Iterable[Mapping[str, Any]]) -> Refusal | None:
    """Refuse a job that has not started where one of ``others``, which name the same claim, came first."""
    for other in others:
        metadata, status = other["metadata"], other.get("status") or {}
        phase, started = status.get("phase") or "Pending", bool(status.get("attempt"))
        # Of those that have not started yet the oldest is first.
        older = (str(metadata.get("creationTimestamp") or ""), str(metadata["uid"])) < (job.created, job.uid)
        if metadata["uid"] != job.uid and phase not in ENDED_PHASES and (started or older):
            field, remedy = explain_use(claim)
            return Refusal(
                c.CLAIM_IN_USE,
                f"{field}: job {metadata['name']} ({phase}) writes its checkpoints to {name_claim(claim)}; "
                f"this job starts when that one has ended. {remedy}",
            )
    return None


def may_have_lost_labels(job: DDPTrainingJob, children: Children) -> bool:
    """Tell whether the current attempt may have children that are not among these.

    Its Job counts more pods than are seen, or pods are seen whose Job is not. Mostly the news is only late.
    """
    name = job.status.job_name
    current = next((view for view in children.jobs if view.name == name), None)
    if current is None:
        left = (pod for pod in children.orphans if pod.alive and not pod.deleting)
        return any(controller_of(pod.raw).get("name") == name for pod in left)
    # A pod that has failed is still counted as active until it is replaced, after the Job controller's back-off.
    own = [pod for pod in children.pods if controller_of(pod.raw).get("uid") == current.uid]
    seen = sum(
        pod.alive or constants.JOB_TRACKING_FINALIZER in (pod.raw["metadata"].get("finalizers") or ()) for pod in own
    )
    return int((current.raw.get("status") or {}).get("active") or 0) > seen
