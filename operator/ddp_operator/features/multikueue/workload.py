"""Build the Workload of a job that MultiKueue runs in another cluster: what Kueue needs to know of its pods for quota.

Kueue copies it to the worker clusters, so it has neither environment variables nor commands.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api import child_names, constants, other_kinds
from ddp_operator.api.job import DDPTrainingJob, inherited_labels, owner_reference
from ddp_operator.api.kubeobjects import parse_quantity
from ddp_operator.api.status import Status
from ddp_operator.manifests.children import build_children

_AMOUNTS: Final = ("requests", "limits", "overhead")
_EMPTY: Final[tuple[Any, ...]] = (None, "", {}, [])
_CONTAINER_FIELDS: Final = ("name", "image", "resources", "restartPolicy")
_POD_FIELDS: Final = (
    *("nodeSelector", "tolerations", "affinity", "runtimeClassName", "overhead"),
    *("resources", "resourceClaims", "restartPolicy"),
)


def build_workload(job: DDPTrainingJob, priority: int | None) -> dict[str, Any]:
    """Return the Workload. ``priority``: of the class that the job names. Raises: InvalidManifest."""
    spec: dict[str, Any] = {"queueName": job.labels[constants.KUEUE_QUEUE_LABEL], "podSets": [build_pod_set(job)]}
    if priority is not None:
        name = job.labels[other_kinds.KUEUE_PRIORITY_LABEL]
        spec["priorityClassRef"] = {"group": constants.KUEUE_DOMAIN, "kind": "WorkloadPriorityClass", "name": name}
        spec["priority"] = priority
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": f"{constants.KUEUE_DOMAIN}/v1beta2",
        "kind": other_kinds.WORKLOAD_KIND,
        "metadata": {
            "name": workload_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": inherited_labels(job) | child_names.child_labels(job.name),
            "annotations": {
                constants.ANNOTATION_SPEC: digest,
                constants.ANNOTATION_SUSPEND: str(job.spec.suspend).lower(),
            },
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {"active": not job.spec.suspend, **spec},
    }


def build_pod_set(job: DDPTrainingJob) -> dict[str, Any]:
    """Return the pods of an attempt as a pod set. Raises: InvalidManifest."""
    child = build_children(job, attempt=1, nodes=job.spec.nodes)[-1]["spec"]
    return {"name": "main", "count": child["parallelism"], "template": _reduce_template(child["template"])}


def explain_other_pods(job: DDPTrainingJob, workload: Mapping[str, Any]) -> str:
    """Return how the pods of a Workload differ from those of a job, for which it has the quota; empty: they are equal.

    Raises: InvalidManifest.
    """
    # The nodes that a failed attempt avoids are no part of the Workload.
    started = Status(profile=job.status.profile)
    own = build_pod_set(dataclasses.replace(job, status=started))
    pod_sets: list[dict[str, Any]] = (workload.get("spec") or {}).get("podSets") or []
    if len(pod_sets) != 1 or pod_sets[0].get("minCount"):
        return "it has not one set of pods, which all start together"
    [stored] = pod_sets
    if stored.get("count") != own["count"]:
        return f"it has {stored.get('count')} pods, and the job {own['count']}"
    if _normalize(_reduce_template(stored["template"])) != _normalize(own["template"]):
        return "its pods request other resources or other nodes than those of the job"
    return ""


def _normalize(value: Any, name: str = "") -> Any:
    """Return a part of a pod template as another client may have stored it: without empty parts, and with numbers."""
    if isinstance(value, Mapping):
        is_amount = name in _AMOUNTS
        members = {key: parse_quantity(part) if is_amount else _normalize(part, key) for key, part in value.items()}
        return {key: part for key, part in members.items() if part not in _EMPTY}
    if isinstance(value, list | tuple):
        return [_normalize(part) for part in value]
    return value


def _reduce_template(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pod template that determine its quota and its flavors."""
    pod = template["spec"]
    reduced = {name: pod[name] for name in _POD_FIELDS if name in pod}
    for part in ("initContainers", "containers"):
        if pod.get(part):
            reduced[part] = [{name: item[name] for name in _CONTAINER_FIELDS if name in item} for item in pod[part]]
    return {"spec": reduced}


def workload_name(name: str, uid: str) -> str:
    """Return the name of the Workload of a job that MultiKueue runs. Worker clusters use it as the value of a label."""
    return f"{name}-{uid[:8]}"
