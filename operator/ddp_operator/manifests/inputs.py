"""The pod that fetches a job's inputs before attempt 1, and the mounts by which training pods find them.

It has the training pods' image, user, variables and volumes, so that a URL means the same in both, but asks for no GPU.
For a claim it goes to any node of the zone and the architecture that the template selects, as nodes with GPUs may be
dear, taken or not made yet; for a node cache to as many nodes as train, one pod on each.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ddp_operator import constants, names
from ddp_operator.api.errors import FieldError
from ddp_operator.api.inputs import Input
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.profile import find_locked_part
from ddp_operator.api.spec import Spec
from ddp_operator.launcher.storage import has_credentials

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_MOUNT_PATH: Final = "/opt/ddp-inputs"
_RESOURCES: Final = {"requests": {"cpu": "250m", "memory": "256Mi"}}
_GRACE_SECONDS: Final = 5
_RETRIES: Final = 3
"""Pods after the first one, each of which has tried for minutes, before the job fails."""
# Of a pod of the template: what is about GPUs, about its peers, or about its place. What a profile locks is kept.
_NOT_KEPT: Final = (
    "affinity", "initContainers", "nodeName", "nodeSelector", "overhead", "resourceClaims", "resources",
    "runtimeClassName", "schedulingGates", "topologySpreadConstraints",
)  # fmt: skip
_KEPT_WHERE_LOCKED: Final = tuple(name for name in _NOT_KEPT if name not in ("resourceClaims", "resources"))
_NOT_KEPT_OF_CONTAINER: Final = ("args", "lifecycle", "livenessProbe", "ports", "readinessProbe", "startupProbe")
# A claim may be bound to where its first pod runs: the others must be able to run there too.
_KEPT_SELECTORS: Final = ("kubernetes.io/arch", "kubernetes.io/os", "topology.kubernetes.io/")


def build_fetch_pod(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: str, interpreter: str) -> dict[str, Any]:
    """Return the pod that fetches, of the template's ``pod``, but for what all pods of a job have."""
    inputs = job.spec.inputs or ()
    kept: dict[str, Any] = {name: copy.deepcopy(value) for name, value in pod.items() if name not in _NOT_KEPT}
    for name in _KEPT_WHERE_LOCKED:
        part = find_locked_part(pod, name, job.locked)
        if part is not None:
            kept[name] = copy.deepcopy(part)
    kept["containers"] = [one for one in kept["containers"] if one["name"] == trainer]
    if any(one.node_cache for one in inputs):
        kept |= {name: copy.deepcopy(pod[name]) for name in ("affinity", "nodeSelector") if pod.get(name)}
        peers = {"labelSelector": {"matchLabels": names.child_labels(job.name, 0)}}
        apart = [{**peers, "topologyKey": "kubernetes.io/hostname"}]
        affinity = dict(kept.get("affinity") or {})
        repelled = dict(affinity.get("podAntiAffinity") or {})
        repelled[_REQUIRED] = [*(repelled.get(_REQUIRED) or []), *apart]
        kept["affinity"] = {**affinity, "podAntiAffinity": repelled}
    elif selected := {k: v for k, v in (pod.get("nodeSelector") or {}).items() if k.startswith(_KEPT_SELECTORS)}:
        kept["nodeSelector"] = {**(kept.get("nodeSelector") or {}), **selected}
    if job.spec.scheduling.priority_class_name:
        kept["priorityClassName"] = job.spec.scheduling.priority_class_name
    kept["terminationGracePeriodSeconds"] = _GRACE_SECONDS
    [container] = kept["containers"]
    for name in _NOT_KEPT_OF_CONTAINER:
        container.pop(name, None)
    let_fetch(container, inputs, interpreter)
    kept["volumes"] = [*(kept.get("volumes") or []), *list_volumes(inputs)]
    return kept


def build_cache_check(trainer: Mapping[str, Any], inputs: Sequence[Input], interpreter: str) -> dict[str, Any]:
    """Return the init container that fetches what is not in the node caches of a training pod's own node."""
    kept = ("image", "imagePullPolicy", "securityContext", "env", "envFrom", "volumeMounts")
    container = {
        "name": constants.INPUTS_VOLUME,
        **{name: copy.deepcopy(trainer[name]) for name in kept if name in trainer},
    }
    let_fetch(container, [one for one in inputs if one.node_cache], interpreter)
    return container


def let_fetch(container: dict[str, Any], inputs: Sequence[Input], interpreter: str) -> None:
    """Let a container fetch these inputs to their volumes, which it mounts as a whole."""
    container["command"] = [interpreter, f"{constants.LAUNCHER_MOUNT_PATH}/{constants.LAUNCHER_FILE}", "fetch"]
    container["resources"] = copy.deepcopy(_RESOURCES)
    todo, sources = [], list(container.get("envFrom") or [])
    for number, one in enumerate(inputs):
        prefix = f"{constants.ENV_INPUTS}_{number}_" if one.secret_ref else ""
        if one.secret_ref:
            sources.append({"prefix": prefix, "secretRef": {"name": one.secret_ref.name}})
        item = {"name": one.label, "url": one.url, "root": f"{_MOUNT_PATH}/{_volume_name(one)}", "key": one.key}
        todo.append(item | {"checksum": one.checksum or "", "secret": prefix})
    if sources:
        container["envFrom"] = sources
    # Kubernetes reads $(NAME) and $$ in a variable's value.
    ours = {"name": constants.ENV_INPUTS, "value": json.dumps(todo).replace("$", "$$")}
    container["env"] = [*(container.get("env") or []), ours]
    found = [{"name": name, "mountPath": f"{_MOUNT_PATH}/{name}"} for name in dict.fromkeys(map(_volume_name, inputs))]
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), *found]


def list_volumes(inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """Return the volumes in which inputs are kept, each once."""
    return list({_volume_name(one): {"name": _volume_name(one), **_source(one)} for one in inputs}.values())


def list_mounts(inputs: Sequence[Input]) -> list[dict[str, Any]]:
    """Return the mounts of the inputs in a training container."""
    return [
        {
            "name": _volume_name(one),
            "mountPath": one.mount_path,
            "subPath": f"{constants.INPUTS_FOLDER}/{one.key}/data",
            "readOnly": True,
        }
        for one in inputs
    ]


def _source(one: Input) -> dict[str, Any]:
    if one.node_cache:
        return {"hostPath": {"path": one.node_cache.path, "type": "DirectoryOrCreate"}}
    return {"persistentVolumeClaim": {"claimName": one.claim_name}}


def _volume_name(one: Input) -> str:
    text = one.node_cache.path if one.node_cache else f"claim {one.claim_name}"
    return f"{constants.INPUTS_VOLUME}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def build_fetch_job_spec(job: DDPTrainingJob, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``Job.spec``: one pod, or for node caches one for each that trains."""
    cached = any(one.node_cache for one in job.spec.inputs or ())
    pods = job.size.pods if cached else 1
    name = template["spec"]["containers"][0]["name"]
    stopped, final = (
        {"containerName": name, "operator": "In", "values": [code]}
        for code in (constants.EXIT_PREEMPTED, constants.EXIT_USER_ERROR)
    )
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
    """Check what the schema cannot see of spec.inputs."""
    inputs = spec.inputs or ()
    taken = {str(mount.get("mountPath")).rstrip("/"): "a volumeMount" for mount in trainer.get("volumeMounts") or ()}
    taken |= {constants.LAUNCHER_MOUNT_PATH: "the operator", "/dev/shm": "shared memory"}
    if spec.checkpoint:
        taken[spec.checkpoint.path.rstrip("/")] = "spec.checkpoint.path"
    if spec.code:
        taken[spec.code.folder.rstrip("/")] = "spec.code"
    labels: set[str] = set()
    for index, one in enumerate(inputs):
        here = f"spec.inputs[{index}]"
        path = one.mount_path.rstrip("/")
        if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://.+", one.url):
            yield FieldError(f"{here}.url", "must be a URL, such as https://host/file or s3://bucket/prefix", one.url)
        elif has_credentials(one.url):
            key = "HTTP_AUTHORIZATION" if one.url.startswith("http") else "the plug-in's variables"
            yield FieldError(f"{here}.url", f"must not hold a password; put {key} into a Secret: secretRef")
        if not path.startswith("/") or "/../" in f"{path}/":
            yield FieldError(
                f"{here}.mountPath", "must be an absolute path other than /, such as /data", one.mount_path
            )
        elif path in taken:
            yield FieldError(f"{here}.mountPath", f"is that of {taken[path]}; choose another", one.mount_path)
        taken[path] = f"{here}.mountPath"
        if (one.claim_name is None) == (one.node_cache is None):
            yield FieldError(here, "needs either claimName or nodeCache, where it is kept; set one of the two")
        if one.node_cache and not re.fullmatch(r"/[^:]*[^/:]", one.node_cache.path):
            words = "must be an absolute path of the nodes, such as /var/cache/ddp"
            yield FieldError(f"{here}.nodeCache.path", words, one.node_cache.path)
        if one.checksum is not None and not re.fullmatch("sha256:[0-9a-f]{64}", one.checksum):
            words = "must be sha256: and 64 hexadecimal digits in lower case, as sha256sum prints them"
            yield FieldError(f"{here}.checksum", words, one.checksum)
        if one.label in labels:
            yield FieldError(f"{here}.name", "is another input's; give each a name of its own", one.label)
        labels.add(one.label)
