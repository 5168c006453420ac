"""Kubernetes' own PodGroup in the versions and with the feature gates of the API server.

The operator builds it as ``v1beta1`` has it (Kubernetes 1.37). For a field whose feature gate is off, the API server
stores nothing or the default, although its OpenAPI document lists the field. Only the response to a POST shows that.
"""

from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api.constants import SCHEDULING_GROUP
from ddp_operator.api.kubeobjects import is_native_pod_group

_GATES: Final = {
    "schedulingConstraints": ("gangTopology", "TopologyAwareWorkloadScheduling"),
    "disruptionMode": ("disruptionMode", "WorkloadAwarePreemption"),
    "resourceClaims": ("sharedClaims", "DRAWorkloadResourceClaims"),
}
"""Fields of a PodGroup: the field of ``spec.scheduling`` that sets it, and its feature gate."""
_FORMER_MODES: Final = {"all": "PodGroup", "single": "Pod"}


def list_versions(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the manifest in each API version that a supported Kubernetes may serve, the newest first."""
    if not is_native_pod_group(manifest):
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


def explain_missing_pod_group(api_version: str) -> str:
    """Return why an API server that does not serve PodGroups of this version cannot run a gang, and the remedy."""
    if not api_version.startswith(SCHEDULING_GROUP):
        problem = f"the cluster does not serve PodGroups of {api_version}"
        return f"spec.scheduling.gang: {problem}; install that scheduler or set gang: None"
    return (
        f"spec.scheduling.gang: the cluster does not serve PodGroups of {SCHEDULING_GROUP}; enable the feature gates "
        "GenericWorkload and GangScheduling and the API version of PodGroup (Kubernetes 1.36 or later), or set gang: "
        "None"
    )


def explain_dropped_fields(posted: Mapping[str, Any], created: Mapping[str, Any]) -> str:
    """Return which fields of a native PodGroup the API server dropped, and the remedy; empty if none."""
    if not is_native_pod_group(posted):
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
