"""Which fields of a pod `ddp run` honours and which it refuses. All others it ignores, and names them once.

docs/local.md says of every field how or why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddp_operator.kubeobjects.containers import is_gpu

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A field of a given pod that is not honoured: refused with a reason, or else ignored."""

    path: str
    refusal: str = ""


# What stands before a name, with [] for every item of a list -> names.
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
    "spec.containers[].env[].valueFrom.fileKeyRef": "the pod has no limits here; write the value",
    "spec.containers[].volumeMounts[].subPathExpr": "write the path out in subPath",
    "spec.volumes[].downwardAPI": "use `fieldRef` in env",
    "spec.volumes[].projected": "mount its sources one by one",
    "spec.volumes[].image": "no image is pulled; use a hostPath",
}
# Fields of the job itself that are ignored, and their values that ask for nothing; all others are honoured.
_JOB_FIELDS: Final = {"scheduling": {"gang": "None", "placement": "Any"}, "networkPolicy": {}}


def check_job(spec: Object) -> list[Finding]:
    """Return what of a job's spec, its template apart, is ignored where it asks for more than the default."""
    findings = []
    for name, nothing in _JOB_FIELDS.items():
        asked = {key: value for key, value in (spec.get(name) or {}).items() if value not in (None, False, [])}
        if asked and asked != nothing:
            findings.append(Finding(f"spec.{name}"))
    return findings


def find_refusal(prefix: str, name: str) -> str | None:
    """Return why a field is refused, empty where it is only ignored; None: it is honoured."""
    if name in HONOURED.get(prefix, "").split():
        return None
    return REFUSED.get(f"{prefix}{name}", _NO_DRIVER if prefix == _VOLUMES else "")


def check_template(template: Object, trainer: str | None = None) -> list[Finding]:
    """Return what of this pod template is ignored or refused, in the order of the template.

    ``trainer`` names the container that runs; the others are each reported as a whole.
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
        where, path = f"spec.containers[{number}]", "spec.containers[]."
        if trainer is not None and container.get("name") != trainer:
            findings.append(Finding(where))
            continue
        visit(f"{where}.", path, {name: value for name, value in container.items() if name != "resources"})
        for part, amounts in (container.get("resources") or {}).items():
            if not all(map(is_gpu, amounts)):
                findings.append(Finding(f"{where}.resources.{part}"))
        for index, variable in enumerate(container.get("env") or ()):
            visit(f"{where}.env[{index}].valueFrom.", f"{path}env[].valueFrom.", variable.get("valueFrom") or {})
        for index, mount in enumerate(container.get("volumeMounts") or ()):
            visit(f"{where}.volumeMounts[{index}].", f"{path}volumeMounts[].", mount)
    for number, volume in enumerate(spec.get("volumes") or ()):
        visit(f"spec.volumes[{number}].", _VOLUMES, volume)
    return findings
