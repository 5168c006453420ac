"""Whose a child is: this resource's own, one left by a deleted resource of the same name, or somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_operator import constants, names
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.cluster import ChildKind, controller_of
from ddp_operator.status.decision import Refusal


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
            "NameConflict",
            f"metadata.name: {kind} {name} was left behind by a job of this name that was deleted with "
            "--cascade=orphan; its pods may still be training. Delete what is left: "
            f"kubectl -n {job.namespace} delete job,service,configmap,networkpolicy "
            f"-l {constants.LABEL_JOB_NAME}={job.name}",
        )
    return Refusal(
        "NameConflict",
        f"metadata.name: a {kind} named {name} that does not belong to this job exists in namespace {job.namespace}; "
        "rename the job or delete that object",
    )
