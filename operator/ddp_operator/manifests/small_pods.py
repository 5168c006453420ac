"""Build pods without ranks: they have the image, user, variables and volumes of the training pods, and no GPU."""

import copy
from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import parse_quantity
from ddp_operator.manifests.children import omit_devices
from ddp_operator.manifests.pod import (
    build_launcher_mount,
    build_launcher_volume,
    build_pod_metadata,
    find_termination_path,
    finish_pod,
)

_GRACE_SECONDS: Final = 5
_RETRIES: Final = 3
"""Failed pods that are replaced before the Job fails. Each pod retries for minutes."""
# Fields of the template's pod that concern GPUs, peers or placement.
_NOT_KEPT: Final = (
    "affinity", "initContainers", "nodeName", "nodeSelector", "overhead", "resourceClaims", "resources",
    "runtimeClassName", "schedulingGates", "topologySpreadConstraints",
)  # fmt: skip
_NOT_KEPT_OF_CONTAINER: Final = ("args", "lifecycle", "livenessProbe", "ports", "readinessProbe", "startupProbe")
# A claim may be bound to the zone of its first pod, and the training pods must be able to run there too.
_KEPT_SELECTORS: Final = ("kubernetes.io/arch", "kubernetes.io/os", "topology.kubernetes.io/")


def build_small_pod(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """Return a pod with the training container alone, without fields that concern GPUs, peers or placement."""
    kept: dict[str, Any] = {name: copy.deepcopy(value) for name, value in pod.items() if name not in _NOT_KEPT}
    kept["containers"] = [container for container in kept["containers"] if container["name"] == trainer]
    kept["terminationGracePeriodSeconds"] = _GRACE_SECONDS
    for name in _NOT_KEPT_OF_CONTAINER:
        kept["containers"][0].pop(name, None)
    return kept


def keep_zone_selectors(fetch_pod: dict[str, Any], pod: Mapping[str, Any]) -> None:
    """Keep the template's selectors of architecture, operating system and zone."""
    selector = pod.get("nodeSelector") or {}
    selected = {label: value for label, value in selector.items() if label.startswith(_KEPT_SELECTORS)}
    if selected:
        fetch_pod["nodeSelector"] = {**(fetch_pod.get("nodeSelector") or {}), **selected}


def build_small_resources(limits: Mapping[str, Any], requests: Mapping[str, str]) -> dict[str, Any]:
    """Return these requests, and the training container's limits without devices, because a quota may demand limits."""
    limits = omit_devices(limits)
    lower = {
        name: min(value, limits.get(name, value), key=lambda text: parse_quantity(text) or 0)
        for name, value in requests.items()
    }
    return {"requests": lower} | ({"limits": limits} if limits else {})


def build_small_job_spec(template: Mapping[str, Any], pods: int) -> dict[str, Any]:
    """Return ``Job.spec`` of a Job whose pods have no ranks."""
    name = template["spec"]["containers"][0]["name"]
    stopped = {"containerName": name, "operator": "In", "values": [constants.EXIT_PREEMPTED]}
    final = {"containerName": name, "operator": "In", "values": [constants.EXIT_USER_ERROR]}
    return {
        "completions": pods,
        "parallelism": pods,
        "completionMode": "Indexed",
        "backoffLimit": _RETRIES,
        "podReplacementPolicy": "Failed",
        "suspend": False,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": stopped},
                {"action": "FailJob", "onExitCodes": final},
            ]
        },
        "template": dict(template),
    }


def finish_small_pod(pod: dict[str, Any], job: DDPTrainingJob, launcher_digest: str) -> dict[str, Any]:
    """Return the template of a pod without ranks, which starts the launcher."""
    [container] = pod["containers"]
    path = find_termination_path(container)
    container["env"] = [*(container.get("env") or ()), {"name": constants.ENV_TERMINATION_LOG, "value": path}]
    container["volumeMounts"].append(build_launcher_mount())
    pod["volumes"].append(build_launcher_volume(launcher_digest))
    finish_pod(pod, job)
    return {"metadata": build_pod_metadata(job, 0, job.spec.template.metadata or {}), "spec": pod}
