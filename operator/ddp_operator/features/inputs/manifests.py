"""Build the pod that fetches a job's inputs before attempt 1, and the mounts of the inputs in training pods.

The pod has the image, user, variables and volumes of the training pods, so that a URL has the same meaning in both, but
requests no GPU. For a claim it runs on any node of the zone and the architecture that the template selects, because
nodes with GPUs may be expensive, occupied or not created yet. For a node cache one pod runs on each of as many nodes as
will train.
"""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ddp_operator.api import child_names, constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import find_limits, find_requests
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.features.inputs.fields import Input
from ddp_operator.manifests.children import omit_devices
from ddp_operator.manifests.small_pods import (
    build_small_job_spec,
    build_small_pod,
    build_small_resources,
    finish_small_pod,
    keep_zone_selectors,
)

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_MOUNT_PATH: Final = "/opt/ddp-inputs"
_VOLUME: Final = "ddp-inputs"
"""Prefix of the names of inputs' volumes, and name of the init container."""
_REQUESTS: Final = {"cpu": "250m", "memory": "256Mi"}


def build_fetch_job_spec(
    job: DDPTrainingJob, inputs: Sequence[Input], template: CheckedTemplate, launcher_digest: str
) -> dict[str, Any]:
    """Return ``Job.spec`` of the fetching Job: one pod, or for node caches one pod per training pod.

    It bypasses Kueue, because it requests no scarce resources.
    """
    pod = _build_fetch_pod(job, inputs, template)
    pod["containers"][0]["env"].append({"name": constants.ENV_METRICS_PORT, "value": str(job.spec.metrics.port)})
    has_node_cache = any(entry.node_path for entry in inputs)
    return build_small_job_spec(finish_small_pod(pod, job, launcher_digest), job.size.pods if has_node_cache else 1)


def build_addition(inputs: Sequence[Input], template: CheckedTemplate) -> PodAddition:
    """Return the mounts of the inputs in training pods, and a check of their nodes' caches."""
    has_node_cache = any(entry.node_path for entry in inputs)
    return PodAddition(
        volumes=_list_volumes(inputs),
        mounts=_list_mounts(inputs),
        init_containers=[_build_cache_check(template, inputs)] if has_node_cache else [],
    )


def _build_fetch_pod(job: DDPTrainingJob, inputs: Sequence[Input], template: CheckedTemplate) -> dict[str, Any]:
    """Return the spec of the fetching pod, without the fields of all pods."""
    pod = template.pod
    kept = build_small_pod(job, pod, template.trainer["name"])
    if any(entry.node_path for entry in inputs):
        _place_on_separate_nodes(kept, job, pod)
    else:
        keep_zone_selectors(kept, pod)

    [container] = kept["containers"]
    _set_fetch_command(container, inputs, template.interpreter, find_limits(pod, container))
    kept["volumes"] = [*(kept.get("volumes") or []), *_list_volumes(inputs)]
    return kept


def _place_on_separate_nodes(fetch_pod: dict[str, Any], job: DDPTrainingJob, pod: Mapping[str, Any]) -> None:
    """Place the fetching pods on the nodes that training pods can use, one pod on each node."""
    for name in ("affinity", "nodeSelector"):
        if pod.get(name):
            fetch_pod[name] = copy.deepcopy(pod[name])
    selector = {"matchLabels": child_names.child_labels(job.name, 0)}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    affinity = dict(fetch_pod.get("affinity") or {})
    anti_affinity = dict(affinity.get("podAntiAffinity") or {})
    anti_affinity[_REQUIRED] = [*(anti_affinity.get(_REQUIRED) or []), term]
    fetch_pod["affinity"] = {**affinity, "podAntiAffinity": anti_affinity}


def _build_cache_check(template: CheckedTemplate, inputs: Sequence[Input]) -> dict[str, Any]:
    """Return the init container that fetches inputs which the cache of a training pod's node lacks."""
    trainer = template.trainer
    kept = ("image", "imagePullPolicy", "securityContext", "env", "envFrom", "volumeMounts", "resources")
    container = {
        "name": _VOLUME,
        **{name: copy.deepcopy(trainer[name]) for name in kept if name in trainer},
    }
    cached = [entry for entry in inputs if entry.node_path]
    _set_fetch_command(container, cached, template.interpreter, template.limits)
    # Of init containers and containers only the larger request counts, and a LimitRange allows that of the template.
    container["resources"]["requests"] |= omit_devices(find_requests(template.pod, trainer))
    return container


def _set_fetch_command(
    container: dict[str, Any], inputs: Sequence[Input], interpreter: str, limits: Mapping[str, Any]
) -> None:
    """Make a container fetch these inputs to their volumes, which it mounts completely.

    ``limits``: of the training container.
    """
    container["command"] = [interpreter, f"{constants.LAUNCHER_MOUNT_PATH}/{constants.LAUNCHER_FILE}", "fetch"]
    container["resources"] = build_small_resources(limits, _REQUESTS)

    orders = []
    sources = list(container.get("envFrom") or [])
    for number, entry in enumerate(inputs):
        prefix = f"{constants.ENV_INPUTS}_{number}_" if entry.secret_ref else ""
        if entry.secret_ref:
            sources.append({"prefix": prefix, "secretRef": {"name": entry.secret_ref.name}})
        orders.append(
            {
                "name": entry.label,
                "url": entry.url,
                "root": f"{_MOUNT_PATH}/{_volume_name(entry)}",
                "key": entry.key,
                "checksum": entry.checksum or "",
                "secret": prefix,
            }
        )
    if sources:
        container["envFrom"] = sources

    # Kubernetes expands $(NAME) and $$ in a variable's value.
    variable = {"name": constants.ENV_INPUTS, "value": json.dumps(orders).replace("$", "$$")}
    container["env"] = [*(container.get("env") or []), variable]
    volume_names = dict.fromkeys(map(_volume_name, inputs))
    mounts = [{"name": name, "mountPath": f"{_MOUNT_PATH}/{name}"} for name in volume_names]
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), *mounts]


def _list_volumes(inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """Return the volumes that store inputs, each once."""
    volumes = {}
    for entry in inputs:
        name = _volume_name(entry)
        volumes[name] = {"name": name, **_build_volume_source(entry)}
    return list(volumes.values())


def _list_mounts(inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """Return the mounts of the inputs in a training container."""
    return [
        {
            "name": _volume_name(entry),
            "mountPath": entry.mount_path,
            "subPath": f"{constants.INPUTS_FOLDER}/{entry.key}/data",
            "readOnly": True,
        }
        for entry in inputs
    ]


def _build_volume_source(entry: Input) -> dict[str, Any]:
    if entry.node_path:
        return {"hostPath": {"path": entry.node_path, "type": "DirectoryOrCreate"}}
    return {"persistentVolumeClaim": {"claimName": entry.claim_name}}


def _volume_name(entry: Input) -> str:
    text = entry.node_path or f"claim {entry.claim_name}"
    return f"{_VOLUME}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
