"""Build the pod that fetches a job's inputs before attempt 1, and the mounts of the inputs in training pods.

The pod has the image, user, variables and volumes of the training pods, so that a URL has the same meaning in both, but
requests no GPU. For a claim it runs on any node of the zone and the architecture that the template selects, because
nodes with GPUs may be expensive, occupied or not created yet. For a node cache one pod runs on each of as many nodes as
will train.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ddp_operator.api import child_names, constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import find_limits, find_requests, parse_quantity
from ddp_operator.api.spec import Input, Spec
from ddp_pod.contract.credentials import has_credentials

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_MOUNT_PATH: Final = "/opt/ddp-inputs"
_REQUESTS: Final = {"cpu": "250m", "memory": "256Mi"}
_LIMITED: Final = ("cpu", "memory", "ephemeral-storage")
_GRACE_SECONDS: Final = 5
_RETRIES: Final = 3
"""Failed pods that are replaced before the job fails. Each pod retries for minutes."""
# Fields of the template's pod that concern GPUs, peers or placement.
_NOT_KEPT: Final = (
    "affinity", "initContainers", "nodeName", "nodeSelector", "overhead", "resourceClaims", "resources",
    "runtimeClassName", "schedulingGates", "topologySpreadConstraints",
)  # fmt: skip
_NOT_KEPT_OF_CONTAINER: Final = ("args", "lifecycle", "livenessProbe", "ports", "readinessProbe", "startupProbe")
# A claim may be bound to the zone of its first pod, and the training pods must be able to run there too.
_KEPT_SELECTORS: Final = ("kubernetes.io/arch", "kubernetes.io/os", "topology.kubernetes.io/")


def build_fetch_pod(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: str, interpreter: str) -> dict[str, Any]:
    """Return the spec of the fetching pod, from the template's ``pod``. ``pod.py`` adds the fields of all pods."""
    inputs = job.spec.inputs or ()
    kept = build_small_pod(job, pod, trainer)
    if any(entry.node_cache for entry in inputs):
        _place_on_separate_nodes(kept, job, pod)
    else:
        keep_zone_selectors(kept, pod)

    [container] = kept["containers"]
    set_fetch_command(container, inputs, interpreter, find_limits(pod, container))
    kept["volumes"] = [*(kept.get("volumes") or []), *list_volumes(inputs)]
    return kept


def build_small_pod(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """Return a pod with the training container alone, without fields that concern GPUs, peers or placement."""
    kept: dict[str, Any] = {name: copy.deepcopy(value) for name, value in pod.items() if name not in _NOT_KEPT}
    kept["containers"] = [container for container in kept["containers"] if container["name"] == trainer]
    if job.spec.scheduling.priority_class_name:
        kept["priorityClassName"] = job.spec.scheduling.priority_class_name
    kept["terminationGracePeriodSeconds"] = _GRACE_SECONDS
    for name in _NOT_KEPT_OF_CONTAINER:
        kept["containers"][0].pop(name, None)
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


def keep_zone_selectors(fetch_pod: dict[str, Any], pod: Mapping[str, Any]) -> None:
    """Keep the template's selectors of architecture, operating system and zone."""
    selector = pod.get("nodeSelector") or {}
    selected = {label: value for label, value in selector.items() if label.startswith(_KEPT_SELECTORS)}
    if selected:
        fetch_pod["nodeSelector"] = {**(fetch_pod.get("nodeSelector") or {}), **selected}


def build_cache_check(
    pod: Mapping[str, Any], trainer: Mapping[str, Any], inputs: Sequence[Input], interpreter: str
) -> dict[str, Any]:
    """Return the init container that fetches inputs which the cache of a training pod's node lacks."""
    kept = ("image", "imagePullPolicy", "securityContext", "env", "envFrom", "volumeMounts", "resources")
    container = {
        "name": constants.INPUTS_VOLUME,
        **{name: copy.deepcopy(trainer[name]) for name in kept if name in trainer},
    }
    cached = [entry for entry in inputs if entry.node_cache]
    set_fetch_command(container, cached, interpreter, find_limits(pod, trainer))
    # Of init containers and containers only the larger request counts, and a LimitRange allows that of the template.
    container["resources"]["requests"] |= _omit_devices(find_requests(pod, trainer))
    return container


def set_fetch_command(
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


def build_small_resources(limits: Mapping[str, Any], requests: Mapping[str, str]) -> dict[str, Any]:
    """Return these requests, and the training container's limits without devices, because a quota may demand limits."""
    limits = _omit_devices(limits)
    lower = {
        name: min(value, limits.get(name, value), key=lambda text: parse_quantity(text) or 0)
        for name, value in requests.items()
    }
    return {"requests": lower} | ({"limits": limits} if limits else {})


def raise_requests(small: Mapping[str, Any], pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a small pod with the requests of the training container, which a LimitRange may demand."""
    raised = copy.deepcopy(dict(small))
    [container] = raised["containers"]
    container["resources"]["requests"] = _omit_devices(find_requests(pod, trainer))
    return raised


def _omit_devices(amounts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in amounts.items() if name in _LIMITED}


def list_volumes(inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """Return the volumes that store inputs, each once."""
    volumes = {}
    for entry in inputs:
        name = _volume_name(entry)
        volumes[name] = {"name": name, **_build_volume_source(entry)}
    return list(volumes.values())


def list_mounts(inputs: Sequence[Input]) -> list[dict[str, Any]]:
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
    if entry.node_cache:
        return {"hostPath": {"path": entry.node_cache.path, "type": "DirectoryOrCreate"}}
    return {"persistentVolumeClaim": {"claimName": entry.claim_name}}


def _volume_name(entry: Input) -> str:
    text = entry.node_cache.path if entry.node_cache else f"claim {entry.claim_name}"
    return f"{constants.INPUTS_VOLUME}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def build_fetch_job_spec(job: DDPTrainingJob, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``Job.spec`` of the fetching Job: one pod, or for node caches one pod per training pod."""
    has_node_cache = any(entry.node_cache for entry in job.spec.inputs or ())
    return build_small_job_spec(template, job.size.pods if has_node_cache else 1)


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


def check_inputs(spec: Spec, trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check the rules for spec.inputs that are not in the CRD."""
    used_paths = _list_used_paths(spec, trainer)
    labels: set[str] = set()
    for index, entry in enumerate(spec.inputs or ()):
        here = f"spec.inputs[{index}]"
        yield from _check_input(entry, here)
        path = entry.mount_path.rstrip("/")
        if not path.startswith("/") or "/../" in f"{path}/":
            yield FieldError(
                f"{here}.mountPath", "must be an absolute path other than /, such as /data", entry.mount_path
            )
        elif path in used_paths:
            message = f"is already used by {used_paths[path]}; choose another path"
            yield FieldError(f"{here}.mountPath", message, entry.mount_path)
        used_paths[path] = f"{here}.mountPath"
        if entry.label in labels:
            yield FieldError(f"{here}.name", "is the name of another input; set a unique name", entry.label)
        labels.add(entry.label)


def _list_used_paths(spec: Spec, trainer: Mapping[str, Any]) -> dict[str, str]:
    """Return the mount paths of the training container, each with the field or component that uses it."""
    paths = {str(mount.get("mountPath")).rstrip("/"): "a volumeMount" for mount in trainer.get("volumeMounts") or ()}
    paths |= {constants.LAUNCHER_MOUNT_PATH: "the operator", "/dev/shm": "shared memory"}
    if spec.checkpoint:
        paths[spec.checkpoint.path.rstrip("/")] = "spec.checkpoint.path"
    if spec.code:
        paths[spec.code.folder.rstrip("/")] = "spec.code"
    return paths


def _check_input(entry: Input, here: str) -> Iterator[FieldError]:
    """Check the fields of one input, except those that depend on other fields of the spec."""
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://.+", entry.url):
        yield FieldError(f"{here}.url", "must be a URL, such as https://host/file or s3://bucket/prefix", entry.url)
    elif has_credentials(entry.url):
        key = "HTTP_AUTHORIZATION" if entry.url.startswith("http") else "the plug-in's variables"
        yield FieldError(f"{here}.url", f"must not contain a password; put {key} into a Secret and set secretRef")
    if (entry.claim_name is None) == (entry.node_cache is None):
        yield FieldError(here, "needs either claimName or nodeCache to store it; set one of the two")
    if entry.node_cache and not re.fullmatch(r"/[^:]*[^/:]", entry.node_cache.path):
        message = "must be an absolute path on the nodes, such as /var/cache/ddp"
        yield FieldError(f"{here}.nodeCache.path", message, entry.node_cache.path)
    if entry.checksum is not None and not re.fullmatch("sha256:[0-9a-f]{64}", entry.checksum):
        message = "must be sha256: and 64 hexadecimal digits in lower case, as sha256sum prints them"
        yield FieldError(f"{here}.checksum", message, entry.checksum)
