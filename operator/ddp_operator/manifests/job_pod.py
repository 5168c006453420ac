"""Build the pod of a completion index from its Job, as the Job controller does."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from ddp_operator.api.constants import ANNOTATION_COMPLETION_INDEX, ENV_COMPLETION_INDEX, JOB_TRACKING_FINALIZER

LABEL_JOB_NAME: Final = "batch.kubernetes.io/job-name"
LABEL_CONTROLLER_UID: Final = "batch.kubernetes.io/controller-uid"
LABEL_COMPLETION_INDEX: Final = ANNOTATION_COMPLETION_INDEX


def build_pod(job: Mapping[str, Any], index: int, *, suffix: str) -> dict[str, Any]:
    """Return the pod of a completion index, equal to that of the Job controller. ``suffix``: the end of its name."""
    name = job["metadata"]["name"]
    uid = job["metadata"]["uid"]
    template = deepcopy(dict(job["spec"]["template"]))
    metadata = dict(template.get("metadata") or {})
    labels = {**metadata.get("labels", {}), LABEL_JOB_NAME: name, "job-name": name}
    labels |= {LABEL_CONTROLLER_UID: uid, "controller-uid": uid, LABEL_COMPLETION_INDEX: str(index)}
    spec: dict[str, Any] = template["spec"]
    spec.setdefault("hostname", f"{name}-{index}")
    source = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{LABEL_COMPLETION_INDEX}']"}}
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        env = container.setdefault("env", [])
        if all(variable["name"] != ENV_COMPLETION_INDEX for variable in env):
            env.append({"name": ENV_COMPLETION_INDEX, "valueFrom": source})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "generateName": f"{name}-{index}-",
            "name": f"{name}-{index}-{suffix}",
            "namespace": job["metadata"]["namespace"],
            "labels": labels,
            "annotations": {**metadata.get("annotations", {}), ANNOTATION_COMPLETION_INDEX: str(index)},
            "finalizers": [JOB_TRACKING_FINALIZER],
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": spec,
        "status": {"phase": "Pending"},
    }
