"""How an API server takes a PodGroup: its versions, the feature gates of Kubernetes' own, and refusals with a remedy.

The operator builds it as ``v1beta1`` has it (Kubernetes 1.37). For a field whose feature gate is off, the API server
stores nothing or the default, although its OpenAPI document lists the field. Only the response to a POST shows that.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api.cluster import Object
from ddp_operator.api.posting import Posting

POD_GROUP: Final = "PodGroup"  # of Kubernetes, of Volcano and of the coscheduling plugin, each in its own API group
SCHEDULING_GROUP: Final = "scheduling.k8s.io"
"""API group of Kubernetes' own PodGroup."""
# The API server's message for schedulingGroup before Kubernetes 1.36.
_UNKNOWN: Final = re.compile(r'unknown field "spec\.template\.spec\.schedulingGroup')
_GATES: Final = {
    "schedulingConstraints": ("gangTopology", "TopologyAwareWorkloadScheduling"),
    "disruptionMode": ("disruptionMode", "WorkloadAwarePreemption"),
    "resourceClaims": ("sharedClaims", "DRAWorkloadResourceClaims"),
}
"""Fields of a PodGroup: the field of ``spec.scheduling`` that sets it, and its feature gate."""
_NO_GATE: Final = (
    f"spec.scheduling.gang: the cluster does not serve PodGroups of {SCHEDULING_GROUP}; enable the feature gates "
    "GenericWorkload and GangScheduling and the API version of PodGroup (Kubernetes 1.36 or later), or set gang: None"
)
_FORMER_MODES: Final = {"all": "PodGroup", "single": "Pod"}


def is_native(manifest: Object) -> bool:
    """Return whether a PodGroup is of Kubernetes' own scheduler."""
    return str(manifest["apiVersion"]).startswith(f"{SCHEDULING_GROUP}/")


def list_versions(manifest: Object) -> list[Object]:
    """Return a PodGroup in each API version that a supported Kubernetes may serve, the newest first."""
    if not is_native(manifest):
        return [manifest]
    spec = dict(manifest["spec"])
    mode = spec.get("disruptionMode")
    if mode:  # v1alpha2 has a string
        spec["disruptionMode"] = _FORMER_MODES[next(iter(mode))]
    return [
        manifest,
        {**manifest, "apiVersion": f"{SCHEDULING_GROUP}/v1alpha3"},
        {**manifest, "apiVersion": f"{SCHEDULING_GROUP}/v1alpha2", "spec": spec},
    ]


def explain_absence(manifest: Object) -> str:
    """Return why an API server that serves no version of a PodGroup cannot run a gang, and the remedy."""
    if is_native(manifest):
        return _NO_GATE
    problem = f"the cluster does not serve PodGroups of {manifest['apiVersion']}"
    return f"spec.scheduling.gang: {problem}; install that scheduler or set gang: None"


def explain_refusal(manifest: Object, message: str) -> str:
    """Return the API server's refusal of a child, with the remedy if gang scheduling is the reason."""
    if _UNKNOWN.search(message):
        return _NO_GATE
    if manifest["kind"] == POD_GROUP and "cannot create resource" in message:
        return f"{message}; add the gang scheduler to rbac.gangSchedulers of the chart"
    return message


def explain_loss(posted: Object, created: Object) -> str:
    """Return which fields of a native PodGroup the API server dropped, and the remedy; empty if none."""
    if not is_native(posted):
        return ""
    spec = posted["spec"]
    dropped = [
        names for name, names in _GATES.items() if name in spec and not _has(created["spec"].get(name), spec[name])
    ]
    return "; ".join(
        f"spec.scheduling.{field}: the API server ignores it; enable the feature gate {gate} in the API server and the "
        "scheduler (Kubernetes 1.36 or later), or remove this field"
        for field, gate in dropped
    )


def _has(stored: Any, posted: Any) -> bool:
    """Return whether a stored value has all parts of a posted one."""
    if isinstance(posted, Mapping):
        return isinstance(stored, Mapping) and all(_has(stored.get(name), part) for name, part in posted.items())
    if isinstance(posted, list):
        return isinstance(stored, list) and len(stored) == len(posted) and all(map(_has, stored, posted))
    return bool(stored == posted)


POSTING: Final = Posting(POD_GROUP, explain_absence, list_versions, explain_loss, explain_refusal)
