"""The most used fields of a pod, for refusals that suggest the intended field.

A test compares this table with the schemas of Kubernetes.
"""

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator.api.errors import FieldError

POD: Final = "spec.template.spec"
_CONTAINER: Final = (
    "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy "
    "resources restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath "
    "terminationMessagePolicy tty volumeDevices volumeMounts workingDir"
)
_MEMBERS_OF_CONTAINER: Final = {
    "": _CONTAINER,
    ".env[]": "name value valueFrom",
    ".env[].valueFrom": "configMapKeyRef fieldRef fileKeyRef resourceFieldRef secretKeyRef",
    ".envFrom[]": "configMapRef prefix secretRef",
    ".ports[]": "containerPort hostIP hostPort name protocol",
    ".resources": "claims limits requests",
    ".securityContext": "allowPrivilegeEscalation appArmorProfile capabilities privileged procMount "
    "readOnlyRootFilesystem runAsGroup runAsNonRoot runAsUser seLinuxOptions seccompProfile windowsOptions",
    ".volumeMounts[]": "bindMountOptions mountPath mountPropagation name readOnly recursiveReadOnly subPath "
    "subPathExpr",
}
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    path: tuple(names.split())
    for path, names in {
        POD: "activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy "
        "enableServiceLinks ephemeralContainers evictionResponders hostAliases hostIPC hostNetwork hostPID hostUsers "
        "hostname hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead "
        "preemptionPolicy priority priorityClassName readinessGates resourceClaims resources restartPolicy "
        "runtimeClassName schedulerName schedulingGates schedulingGroup securityContext serviceAccount "
        "serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds "
        "tolerations topologySpreadConstraints volumes",
        f"{POD}.securityContext": "appArmorProfile fsGroup fsGroupChangePolicy runAsGroup runAsNonRoot runAsUser "
        "seLinuxChangePolicy seLinuxOptions seccompProfile supplementalGroups supplementalGroupsPolicy sysctls "
        "windowsOptions",
        f"{POD}.resources": "claims limits requests",
        f"{POD}.tolerations[]": "effect key operator tolerationSeconds value",
        f"{POD}.volumes[]": "awsElasticBlockStore azureDisk azureFile cephfs cinder configMap csi downwardAPI "
        "emptyDir ephemeral fc flexVolume flocker gcePersistentDisk gitRepo glusterfs hostPath image iscsi name nfs "
        "persistentVolumeClaim photonPersistentDisk portworxVolume projected quobyte rbd scaleIO secret storageos "
        "vsphereVolume",
        f"{POD}.volumes[].emptyDir": "medium mode sizeLimit",
        f"{POD}.volumes[].persistentVolumeClaim": "claimName readOnly",
        **{
            f"{POD}.{kind}[]{path}": names
            for kind in ("containers", "initContainers")
            for path, names in _MEMBERS_OF_CONTAINER.items()
        },
    }.items()
}
"""The path of an object, with ``[]`` for the items of a list -> its fields."""
_CONTAINERS: Final = re.escape(POD) + r"\.(initC|c)ontainers\[\]"
_REPORTED: Final = 10
_NAME_LIMIT: Final = 64  # no similar field is searched for a longer name


def unknown_field(path: str) -> FieldError:
    """Return the refusal of a field that Kubernetes does not know. It suggests the field that was probably meant."""
    parent, _, name = path.rpartition(".")
    return FieldError("", f'unknown field "{path}"; {_find_remedy(_without_indices(parent), name)}')


def _find_remedy(parent: str, name: str) -> str:
    similar = _find_similar(name, FIELDS.get(parent, ()))
    if similar:
        return f"did you mean {similar}?"
    if parent == POD and name in _CONTAINER.split():
        return f"it belongs to the container, in {POD}.containers"
    if re.fullmatch(_CONTAINERS, parent) and name in FIELDS[POD]:
        return f"it belongs below {POD}"
    return "remove it or correct its name"


def _find_similar(name: str, known: tuple[str, ...]) -> str:
    """Return the field with a similar spelling, or a prefix of ``name`` (env for environment); empty if none."""
    if len(name) > _NAME_LIMIT:
        return ""
    nearly_equal = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    short = [field for field in known if name.startswith(field)]
    return next(iter([*nearly_equal, *short, *difflib.get_close_matches(name, known, n=1)]), "")


def find_unknown_fields(pod: Any) -> list[FieldError]:
    """Return refusals of the first fields of a pod's spec that Kubernetes does not know."""
    return [unknown_field(path) for path in itertools.islice(_walk(pod, POD), _REPORTED)]


def _walk(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of unknown fields."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]")
        return
    known = FIELDS.get(_without_indices(path))
    if known is None or not isinstance(value, Mapping):
        return
    for name, member in value.items():
        if name in known:
            yield from _walk(member, f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def _without_indices(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)


def explain_unknown_fields(message: str) -> str:
    """Return an API server's message about a child. Messages about unknown fields become those of offline checks."""
    unknown = re.findall(r'unknown field "([^"]+)"', message)
    return "\n".join(str(unknown_field(path)) for path in unknown[:_REPORTED]) or message
