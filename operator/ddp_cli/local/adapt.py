"""Adapt a manifest for `ddp run`: change, honour or refuse its fields; all others are ignored.

docs/local.md lists every field with its treatment.
"""

import copy
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddp_cli.local.machine import LOOPBACK_VARIABLES
from ddp_operator.api import constants
from ddp_operator.api.cluster import Object
from ddp_operator.api.code_source import CONFIG_MAP, IMAGE, split_source
from ddp_operator.api.job import JobSize
from ddp_operator.api.kubeobjects import find_trainer, is_gpu
from ddp_operator.api.resources import count_pod_gpus
from ddp_operator.api.spec import LOCAL_MAX_RESTARTS
from ddp_pod.contract.processes import read_cpu_quota


@dataclass(frozen=True, slots=True)
class Finding:
    """A field of a manifest that is refused with a reason, or ignored."""

    path: str
    refusal: str = ""


# Prefix of a path, with [] for every item of a list -> names of honoured fields.
HONOURED: Final = {
    "spec.": "containers volumes restartPolicy hostname subdomain terminationGracePeriodSeconds serviceAccountName "
    "serviceAccount hostNetwork hostIPC hostPID shareProcessNamespace enableServiceLinks automountServiceAccountToken",
    "spec.containers[].": "name command args env envFrom workingDir volumeMounts terminationMessagePath "
    "terminationMessagePolicy ports",
    "spec.containers[].env[].valueFrom.": "fieldRef configMapKeyRef secretKeyRef",
    "spec.containers[].volumeMounts[].": "name mountPath subPath readOnly recursiveReadOnly mountPropagation",
    "spec.volumes[].": "name configMap secret emptyDir hostPath persistentVolumeClaim",
}
_VOLUMES: Final = "spec.volumes[]."
_NO_DRIVER: Final = "needs a cluster's driver; use emptyDir, hostPath, configMap or persistentVolumeClaim"
REFUSED: Final = {
    "spec.resourceClaims": "there is no cluster device driver; request nvidia.com/gpu",
    "spec.containers[].volumeDevices": "block devices need a cluster's driver",
    "spec.containers[].env[].valueFrom.resourceFieldRef": "the pod has no limits here; write the value",
    "spec.containers[].env[].valueFrom.fileKeyRef": "there is no kubelet to read the file; write the value",
    "spec.containers[].volumeMounts[].subPathExpr": "write the path out in subPath",
    "spec.volumes[].downwardAPI": "use `fieldRef` in env",
    "spec.volumes[].projected": "mount its sources one by one",
    "spec.volumes[].image": "no image is pulled; use a hostPath",
}
_CHECK_STALL_SECONDS: Final = 10  # the ranks' stacks follow half a minute later
NODE_CACHE: Final = "node-cache"
"""The claim that replaces a node's cache of inputs: this machine is the only node."""
# Fields of the job that are ignored, each with its default; all others are honoured.
_JOB_FIELDS: Final = {
    "scheduling": {"gang": "None", "placement": "Any"},
    "networkPolicy": {},
    "history": {},
}


def check_job(spec: Object) -> list[Finding]:
    """Return the fields of a job's spec, without its template, that are ignored although they are not the default."""
    findings = []
    for name, default in _JOB_FIELDS.items():
        values = {key: value for key, value in (spec.get(name) or {}).items() if value not in (None, False, [])}
        if values and values != default:
            findings.append(Finding(f"spec.{name}"))
    return findings


def find_refusal(prefix: str, name: str) -> str | None:
    """Return why a field is refused, empty if it is ignored, None if it is honoured."""
    if name in HONOURED.get(prefix, "").split():
        return None
    return REFUSED.get(f"{prefix}{name}", _NO_DRIVER if prefix == _VOLUMES else "")


def check_template(template: Object, trainer: str | None = None) -> list[Finding]:
    """Return the fields of a pod template that are ignored or refused, in the order of the template.

    ``trainer`` names the only container that runs; each other container is one finding.
    """
    findings: list[Finding] = []

    def visit(where: str, prefix: str, members: Object) -> None:
        for name, value in members.items():
            refusal = find_refusal(prefix, name)
            if refusal is not None and value not in (None, [], {}):
                findings.append(Finding(f"{where}{name}", refusal))

    spec = template.get("spec") or {}
    visit("spec.", "spec.", spec)
    for number, container in enumerate(spec.get("containers") or ()):
        where = f"spec.containers[{number}]"
        path = "spec.containers[]."
        if trainer is not None and container.get("name") != trainer:
            findings.append(Finding(where))
            continue
        visit(f"{where}.", path, {name: value for name, value in container.items() if name != "resources"})
        for part in ("requests", "limits"):  # its claims are refused with spec.resourceClaims
            if not all(map(is_gpu, (container.get("resources") or {}).get(part) or ())):
                findings.append(Finding(f"{where}.resources.{part}"))
        for index, variable in enumerate(container.get("env") or ()):
            visit(f"{where}.env[{index}].valueFrom.", f"{path}env[].valueFrom.", variable.get("valueFrom") or {})
            if variable.get("name") in LOOPBACK_VARIABLES:
                findings.append(Finding(f"{where}.env[{variable['name']}]"))
        for index, mount in enumerate(container.get("volumeMounts") or ()):
            visit(f"{where}.volumeMounts[{index}].", f"{path}volumeMounts[].", mount)
    for number, volume in enumerate(spec.get("volumes") or ()):
        visit(f"spec.volumes[{number}].", _VOLUMES, volume)
    return findings


@dataclass(frozen=True, slots=True)
class Changes:
    """The options of `ddp run` that change the manifest."""

    nodes: int | None = None
    procs: int | None = None
    cpu: bool = False
    extra_args: Sequence[str] = ()
    max_restarts: int | None = None


class Unsuitable(ValueError):
    """The manifest cannot run on this machine; each line names the field and the remedy."""


def _drop_fields_of_clusters(spec: dict[str, Any]) -> None:
    spec.pop("profileRef", None)  # the spec already contains the profile's fields
    spec.pop("managedBy", None)  # the user runs the job here
    spec.pop("history", None)  # the run's folder has all of it
    preflight = spec.get("preflight") or {}
    for name in ("require", "transports", "minPairMegabytesPerSecond"):
        preflight.pop(name, None)  # for the nodes of a network


def adapt_resource(
    resource: Object, changes: Changes, rendezvous_port: int, recovery: Object | None = None
) -> dict[str, Any]:
    """Return the resource as it will run on this machine. ``resource`` has passed all checks and is not changed.

    ``recovery``: spec.recovery of the file. Without maxRestarts in the file, nothing is restarted.
    """
    adapted: dict[str, Any] = copy.deepcopy(dict(resource))
    spec = adapted["spec"]
    _drop_fields_of_clusters(spec)
    if changes.nodes is not None:
        spec["nodes"] = changes.nodes
    template = spec["template"]
    trainer: dict[str, Any] = find_trainer(template)
    gpus = count_pod_gpus(template["spec"])
    if changes.cpu and gpus:
        _set_gpus(trainer, 0)
        if spec.get("procPerNode", "auto") in ("auto", "gpu"):
            spec["procPerNode"] = 1
        gpus = 0
    if changes.procs is not None:
        spec["procPerNode"] = changes.procs
        if gpus:
            _set_gpus(trainer, changes.procs)
    if changes.extra_args:
        trainer["args"] = [*(trainer.get("args") or ()), *changes.extra_args]
    spec["recovery"] = dict(spec.get("recovery") or {})
    if (recovery or {}).get("maxRestarts") is None:
        spec["recovery"]["maxRestarts"] = LOCAL_MAX_RESTARTS
    if changes.max_restarts is not None:
        spec["recovery"]["maxRestarts"] = changes.max_restarts
    if spec.get("idle"):
        spec["idle"] = {**spec["idle"], "action": "Report"}  # no client would resume a suspended run
    for fetched in spec.get("inputs") or ():
        if fetched.pop("nodePath", None):
            fetched["claimName"] = NODE_CACHE
    # Several runs may share this machine and its ports.
    spec["rendezvous"] = {**spec.get("rendezvous", {}), "port": rendezvous_port}
    return adapted


def use_own_credentials(resource: Object, others: Sequence[Object]) -> dict[str, Any]:
    """Return the resource without references to Secrets missing in the file: the user's environment replaces them."""
    adapted: dict[str, Any] = copy.deepcopy(dict(resource))
    secrets = {item["metadata"]["name"] for item in others if item.get("kind") == "Secret"}
    spec = adapted["spec"]
    for part in (*(spec.get("inputs") or ()), spec.get("checkpoint") or {}):
        if (part.get("secretRef") or {}).get("name") not in secrets:
            part.pop("secretRef", None)
    return adapted


def shorten_watchdog(resource: dict[str, Any]) -> None:
    """Have the launchers report a hang soon, without acting on it: `ddp check` ends the run, and shows the report."""
    watchdog = resource["spec"].get("watchdog") or {}
    resource["spec"]["watchdog"] = {**watchdog, "stallSeconds": _CHECK_STALL_SECONDS, "action": "Report"}


def request_recorder(resource: dict[str, Any], records: str) -> None:
    """Have the ranks record their steps in a folder. The launcher of other jobs has no recorder."""
    trainer: dict[str, Any] = find_trainer(resource["spec"]["template"])
    variables = [variable for variable in trainer.get("env") or () if variable.get("name") != constants.CHECK_VARIABLE]
    trainer["env"] = [*variables, {"name": constants.CHECK_VARIABLE, "value": records}]


def share_cpus(resource: Object, procs: int, cpus: int) -> dict[str, Any]:
    """Set OMP_NUM_THREADS to each worker's share of this machine's ``cpus``, unless the manifest sets it.

    The limits of the manifest are for other machines, and more threads than CPUs are many times slower.
    """
    adapted: dict[str, Any] = copy.deepcopy(dict(resource))
    trainer: dict[str, Any] = find_trainer(adapted["spec"]["template"])
    environment = trainer.get("env") or []
    if any(variable.get("name") == constants.ENV_OMP_NUM_THREADS for variable in environment):
        return adapted
    workers = adapted["spec"].get("nodes", 1) * procs
    threads = max(1, cpus // workers)
    trainer["env"] = [*environment, {"name": constants.ENV_OMP_NUM_THREADS, "value": str(threads)}]
    return adapted


def check_suitable(resource: Object, gpu_ids: Sequence[str] | None) -> list[Finding]:
    """Return the fields of the pods that are ignored. ``gpu_ids``: this machine's GPUs, None if none are requested.

    Raises: Unsuitable.
    """
    spec = resource["spec"]
    if spec.get("suspend"):
        raise Unsuitable("spec.suspend: a suspended job starts no pods; set it to false or remove it")
    template = spec["template"]
    findings = check_template(template, find_trainer(template)["name"])
    refused = [
        f"spec.template.{finding.path}: not supported on this machine: {finding.refusal}"
        for finding in findings
        if finding.refusal
    ]
    if refused:
        raise Unsuitable("\n".join(refused))
    gpus = count_pod_gpus(template["spec"])
    pods = JobSize(spec.get("nodes", 1), spec.get("spares") or 0).pods
    if gpus and gpu_ids is not None and gpus * pods > len(gpu_ids):
        raise Unsuitable(
            f"spec.template.spec.containers: the job needs {pods * gpus} GPUs ({pods} pods x {gpus}), but this machine "
            f"has {len(gpu_ids)}; use --cpu, or reduce --nodes or --procs"
        )
    return findings


def check_code(resource: Object, others: Sequence[Object]) -> None:
    """Check that the code of the job is a claim or in the file. Raises: Unsuitable."""
    kind, name, _ = split_source((resource["spec"].get("code") or {}).get("source", ""))
    config_maps = [item["metadata"]["name"] for item in others if item.get("kind") == "ConfigMap"]
    if kind == IMAGE or (kind == CONFIG_MAP and name not in config_maps):
        problem = "no image is pulled on this machine" if kind == IMAGE else "not in the file"
        raise Unsuitable(f"spec.code.source: {name}: {problem}; name the folder with --workdir")


def check_ports(base: int, nodes: int) -> None:
    """Check that pod 0 can listen on ``base``, pod 1 on the next, and so on. Raises: Unsuitable."""
    for index in range(nodes):
        port = base + index
        if port > 65535:
            raise Unsuitable(
                f"--metrics-port: {nodes} pods need ports up to {base + nodes - 1}, beyond 65535; choose a lower base"
            )
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            cause = os.strerror(error.errno or 0)
            raise Unsuitable(
                f"--metrics-port: pod {index} cannot listen on port {port} ({cause}); choose another base, or leave "
                "the option out to use free ports"
            ) from None


def count_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, read_cpu_quota() or cpus)))


def _set_gpus(trainer: dict[str, Any], count: int) -> None:
    for part in ("limits", "requests"):
        amounts = (trainer.get("resources") or {}).get(part) or {}
        for name in filter(is_gpu, list(amounts)):
            if count:
                amounts[name] = str(count)
            else:
                del amounts[name]
