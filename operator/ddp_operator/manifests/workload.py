"""Build the Workload of a job that MultiKueue runs in another cluster: what Kueue needs to know of its pods for quota.

Kueue copies it to the worker clusters, so it has neither environment variables nor commands.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api import child_names, constants
from ddp_operator.api.job import DDPTrainingJob, inherited_labels, owner_reference
from ddp_operator.manifests.children import build_children

_CONTAINER_FIELDS: Final = ("name", "image", "resources", "restartPolicy")
_POD_FIELDS: Final = (
    *("nodeSelector", "tolerations", "affinity", "runtimeClassName", "overhead"),
    *("resources", "resourceClaims", "restartPolicy"),
)


def build_workload(job: DDPTrainingJob, priority: int | None) -> dict[str, Any]:
    """Return the Workload. ``priority``: of the class that the job names. Raises: InvalidManifest."""
    child = build_children(job, attempt=1, nodes=job.spec.nodes)[-1]["spec"]
    spec: dict[str, Any] = {
        "queueName": job.labels[constants.KUEUE_QUEUE_LABEL],
        "podSets": [{"name": "main", "count": child["parallelism"], "template": _reduce_template(child["template"])}],
    }
    if priority is not None:
        name = job.labels[constants.KUEUE_PRIORITY_LABEL]
        spec["priorityClassRef"] = {"group": constants.KUEUE_DOMAIN, "kind": "WorkloadPriorityClass", "name": name}
        spec["priority"] = priority
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": f"{constants.KUEUE_DOMAIN}/v1beta2",
        "kind": constants.WORKLOAD_KIND,
        "metadata": {
            "name": child_names.workload_name(job.name, job.uid),
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


def _reduce_template(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pod template that determine its quota and its flavors."""
    pod = template["spec"]
    reduced = {name: pod[name] for name in _POD_FIELDS if name in pod}
    for part in ("initContainers", "containers"):
        if pod.get(part):
            reduced[part] = [{name: item[name] for name in _CONTAINER_FIELDS if name in item} for item in pod[part]]
    return {"spec": reduced}
