"""What `ddp run` does with every field of a pod: the one table that the checks and docs/local.md both come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from ddp_operator.kubeobjects.quantities import is_gpu

Object = Mapping[str, Any]


class Support(Enum):
    """What happens to a field."""

    HONOURED = "honoured"
    WARNED = "warned about"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """One row: a path below the pod template (``[]`` stands for every item) and what becomes of it."""

    path: str
    support: Support
    note: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A field of a given pod that is not honoured."""

    path: str
    field: Field


def _rows(support: Support, prefix: str, rows: Mapping[str, str]) -> Iterator[Field]:
    for names, note in rows.items():
        for name in names.split():
            yield Field(prefix + name, support, note)


_H, _W, _R = Support.HONOURED, Support.WARNED, Support.REFUSED
_ONE_MACHINE: Final = "there is one machine and no scheduler"
_NO_CONTAINER: Final = "a pod is a process of this user on this machine, not a container"
_NO_DRIVER: Final = "needs a cluster's driver; use emptyDir, hostPath, configMap or persistentVolumeClaim"

FIELDS: Final[tuple[Field, ...]] = (
    *_rows(
        _H,
        "metadata.",
        {"labels": "kept; `fieldRef` reads them", "annotations": "kept; `fieldRef` reads them"},
    ),
    *_rows(
        _H,
        "spec.",
        {
            "containers": "the container `trainer` (or the only one) is the pod's process",
            "volumes": "folders, by kind of volume, below",
            "restartPolicy": "`Never`, as the operator sets it",
            "hostname subdomain": "the names of pods become addresses of this machine in command, args and env",
            "terminationGracePeriodSeconds": "time between SIGTERM and SIGKILL",
            "serviceAccountName serviceAccount": "only visible to `fieldRef`",
            "hostNetwork hostIPC hostPID shareProcessNamespace": "always the case: pods share this machine",
            "enableServiceLinks automountServiceAccountToken": "there are no service variables and no tokens",
        },
    ),
    *_rows(
        _W,
        "spec.",
        {
            "initContainers": "not run: their commands are written for the file system of their image; do by hand what "
            "they do",
            "affinity nodeName nodeSelector preemptionPolicy priority priorityClassName schedulerName schedulingGates "
            "schedulingGroup tolerations topologySpreadConstraints workloadRef overhead": _ONE_MACHINE,
            "securityContext hostUsers runtimeClassName os": _NO_CONTAINER,
            "dnsConfig dnsPolicy hostAliases setHostnameAsFQDN hostnameOverride": "this machine's own resolver is used",
            "imagePullSecrets": "no image is pulled",
            "readinessGates": "a running pod is ready",
            "activeDeadlineSeconds": "not watched; use the job's spec.activeDeadlineSeconds",
            "resources": "CPU and memory are not limited",
        },
    ),
    *_rows(_R, "spec.", {"resourceClaims": "there is no cluster device driver; request nvidia.com/gpu"}),
    *_rows(
        _H,
        "spec.containers[].",
        {
            "name": "shown in status",
            "command args": "run without a shell, `$(NAME)` expanded as Kubernetes does, volume paths rewritten; "
            "`python` and `python3` are the interpreter of `ddp run`",
            "env envFrom": "added to the environment of `ddp run`; `$(NAME)` expanded, volume paths rewritten",
            "workingDir": "a path in a volume or of this machine; without it the folder in which `ddp run` was typed",
            "volumeMounts": "paths rewritten to the volume's folder",
            "terminationMessagePath": "a file in the run folder",
            "terminationMessagePolicy": "the file, else the end of the log where it says FallbackToLogsOnError",
            "ports": "the metrics port is a free one for each pod (`--metrics-port` sets it); others are not mapped",
            "resources.limits[nvidia.com/gpu] resources.requests[nvidia.com/gpu]": "as many GPUs in "
            "CUDA_VISIBLE_DEVICES, no two pods share one; the same for GPUs of other vendors",
        },
    ),
    *_rows(
        _W,
        "spec.containers[].",
        {
            "image imagePullPolicy": "the Python of `ddp run` and what is installed in it are used",
            "resources.limits resources.requests resources.claims resizePolicy": "CPU and memory are not limited",
            "livenessProbe readinessProbe startupProbe": "not run; a running pod is ready",
            "lifecycle": "not run",
            "securityContext": _NO_CONTAINER,
            "stdin stdinOnce tty": "a pod has no input",
            "restartPolicy restartPolicyRules": "a pod's process is never restarted; the operator replaces the pod",
        },
    ),
    *_rows(_R, "spec.containers[].", {"volumeDevices": "block devices need a cluster's driver"}),
    *_rows(
        _H,
        "spec.containers[].env[].valueFrom.",
        {
            "fieldRef": "metadata.*, spec.nodeName (`local`), spec.serviceAccountName, status.podIP (127.0.0.1), …",
            "configMapKeyRef": "a ConfigMap that is in the same file",
            "secretKeyRef": "a Secret that is in the same file, else refused",
        },
    ),
    *_rows(
        _R,
        "spec.containers[].env[].valueFrom.",
        {"resourceFieldRef fileKeyRef": "the pod has no limits here; write the value"},
    ),
    *_rows(
        _H,
        "spec.containers[].volumeMounts[].",
        {
            "name mountPath subPath": "names the folder",
            "readOnly recursiveReadOnly mountPropagation": "ignored: nothing is mounted",
        },
    ),
    *_rows(_R, "spec.containers[].volumeMounts[].", {"subPathExpr": "write the path out in subPath"}),
    *_rows(
        _H,
        "spec.volumes[].",
        {
            "name": "names the folder",
            "configMap": "a folder with the files of a ConfigMap that is in the same file",
            "secret": "a folder with the files of a Secret that is in the same file, else refused",
            "emptyDir": "a folder of the pod in the run folder, also with medium Memory; sizeLimit is not enforced; "
            "/dev/shm is this machine's own",
            "hostPath": "the path itself",
            "persistentVolumeClaim": "`<runs folder>/claims/<claim>`, which outlives the run",
        },
    ),
    *_rows(
        _R,
        "spec.volumes[].",
        {
            "awsElasticBlockStore azureDisk azureFile cephfs cinder csi ephemeral fc flexVolume flocker "
            "gcePersistentDisk gitRepo glusterfs iscsi nfs photonPersistentDisk portworxVolume quobyte rbd scaleIO "
            "storageos vsphereVolume": _NO_DRIVER,
            "downwardAPI": "use `fieldRef` in env",
            "projected": "mount its sources one by one",
            "image": "no image is pulled; use a hostPath",
        },
    ),
)

_BY_PATH: Final = {field.path: field for field in FIELDS}


JOB_FIELDS: Final[tuple[Field, ...]] = (
    Field("spec.scheduling", Support.WARNED, _ONE_MACHINE),
    Field("spec.networkPolicy", Support.WARNED, "processes of one machine are not isolated"),
)
"""What happens to fields of the job itself; all others are honoured."""
_WITHOUT_EFFECT: Final = {"spec.scheduling": {"gang": "None", "placement": "Any"}, "spec.networkPolicy": {}}


def check_job(spec: Object) -> list[Finding]:
    """Return what of a job's spec, its template apart, is warned about where it asks for more than the default."""
    findings = []
    for field in JOB_FIELDS:
        members = spec.get(field.path.removeprefix("spec.")) or {}
        asked = {name: value for name, value in members.items() if value not in (None, False, [])}
        if asked and asked != _WITHOUT_EFFECT[field.path]:
            findings.append(Finding(field.path, field))
    return findings


def check_template(template: Object, trainer: str | None = None) -> list[Finding]:
    """Return what of this pod template is warned about or refused, in the order of the template.

    ``trainer`` names the container that runs; the others are each reported as a whole.
    """
    findings: list[Finding] = []

    def visit(where: str, path: str, members: Object) -> None:
        for name, value in members.items():
            field = _BY_PATH.get(f"{path}{name}")
            if field is None:
                field = Field(f"{path}{name}", Support.WARNED, "unknown to `ddp run`")
            if field.support is not Support.HONOURED and value not in (None, [], {}):
                findings.append(Finding(f"{where}{name}", field))

    spec = template.get("spec") or {}
    visit("spec.", "spec.", spec)
    containers = spec.get("containers") or ()
    for number, container in enumerate(containers):
        where = f"spec.containers[{number}]"
        if trainer is not None and container.get("name") != trainer:
            note = "not run: only the training container runs here"
            findings.append(Finding(where, Field("spec.containers[]", Support.WARNED, note)))
            continue
        path = "spec.containers[]."
        visit(f"{where}.", path, {name: value for name, value in container.items() if name != "resources"})
        for part, amounts in (container.get("resources") or {}).items():
            rest = {name: amount for name, amount in amounts.items() if not is_gpu(name)}
            visit(f"{where}.resources.", f"{path}resources.", {part: rest} if rest else {})
        for index, variable in enumerate(container.get("env") or ()):
            visit(f"{where}.env[{index}].valueFrom.", f"{path}env[].valueFrom.", variable.get("valueFrom") or {})
        for index, mount in enumerate(container.get("volumeMounts") or ()):
            visit(f"{where}.volumeMounts[{index}].", f"{path}volumeMounts[].", mount)
    for number, volume in enumerate(spec.get("volumes") or ()):
        visit(f"spec.volumes[{number}].", "spec.volumes[].", volume)
    return findings


def markdown_table(fields: Sequence[Field] = FIELDS) -> str:
    """Return a table for docs/local.md."""
    lines = ["| field | here | how or why |", "|---|---|---|"]
    lines += [f"| `{field.path}` | {field.support.value} | {field.note} |" for field in fields]
    return "\n".join(lines) + "\n"
