"""API group, version and path of each kind."""

from collections.abc import Mapping
from typing import Any, Final

from ddp_operator.api.constants import GROUP, KIND, PLURAL, VERSION
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND, CRD_KIND, PROFILE_KIND

POSTED_EVENT: Final = "Event.events.k8s.io"
"""An Event as the operator posts it. Reads use ``v1``, which has the Events of both API groups."""

_PLACES: Final[dict[str, tuple[str, str, str]]] = {
    KIND: (GROUP, VERSION, PLURAL),
    CLUSTER_PROFILE_KIND: (GROUP, VERSION, "clusterddptrainingprofiles"),
    PROFILE_KIND: (GROUP, VERSION, "ddptrainingprofiles"),
    "Job": ("batch", "v1", "jobs"),
    "Pod": ("", "v1", "pods"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
    "Secret": ("", "v1", "secrets"),
    "Event": ("", "v1", "events"),
    POSTED_EVENT: ("events.k8s.io", "v1", "events"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
    "PodGroup.scheduling.k8s.io": ("scheduling.k8s.io", "v1beta1", "podgroups"),
    "PodGroup.scheduling.k8s.io.v1alpha3": ("scheduling.k8s.io", "v1alpha3", "podgroups"),
    "PodGroup.scheduling.k8s.io.v1alpha2": ("scheduling.k8s.io", "v1alpha2", "podgroups"),
    "PodGroup.scheduling.volcano.sh": ("scheduling.volcano.sh", "v1beta1", "podgroups"),
    "PodGroup.scheduling.x-k8s.io": ("scheduling.x-k8s.io", "v1alpha1", "podgroups"),
    "Lease": ("coordination.k8s.io", "v1", "leases"),
    "Node": ("", "v1", "nodes"),
    "Eviction": ("lifecycle.k8s.io", "v1alpha1", "evictions"),
    CRD_KIND: ("apiextensions.k8s.io", "v1", "customresourcedefinitions"),
    "Workload": ("kueue.x-k8s.io", "v1beta1", "workloads"),
    "Workload.v1beta2": ("kueue.x-k8s.io", "v1beta2", "workloads"),
    "LocalQueue": ("kueue.x-k8s.io", "v1beta1", "localqueues"),
    "LocalQueue.v1beta2": ("kueue.x-k8s.io", "v1beta2", "localqueues"),
    "ClusterQueue": ("kueue.x-k8s.io", "v1beta1", "clusterqueues"),
    "ClusterQueue.v1beta2": ("kueue.x-k8s.io", "v1beta2", "clusterqueues"),
    "ResourceFlavor": ("kueue.x-k8s.io", "v1beta1", "resourceflavors"),
    "ResourceFlavor.v1beta2": ("kueue.x-k8s.io", "v1beta2", "resourceflavors"),
    "WorkloadPriorityClass": ("kueue.x-k8s.io", "v1beta1", "workloadpriorityclasses"),
    "WorkloadPriorityClass.v1beta2": ("kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses"),
}


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Return the key of an object's kind in this module, with its group or version if the module has several."""
    kind = str(manifest["kind"])
    api_group, _, version = str(manifest["apiVersion"]).partition("/")
    keys = (f"{kind}.{api_group}.{version}", f"{kind}.{api_group}", f"{kind}.{version}")
    return next((key for key in keys if key in _PLACES), kind)


def _find_place(kind: str) -> tuple[str, str, str]:
    """Return group, version and plural of a kind. One that an administrator names is RESOURCE.VERSION.GROUP."""
    if kind in _PLACES:
        return _PLACES[kind]
    resource, version, in_group = kind.split(".", 2)
    return in_group, version, resource


def plural(kind: str) -> str:
    """Return a kind's name in paths, permissions and metrics: ``pods`` for ``Pod``."""
    return _find_place(kind)[2]


def group(kind: str) -> str:
    """Return a kind's API group, empty for the core group."""
    return _PLACES[kind][0]


def type_of(kind: str) -> dict[str, str]:
    """Return apiVersion and kind of a key of this module. Items of a list do not have them."""
    in_group, version, _ = _PLACES[kind]
    return {"apiVersion": f"{in_group}/{version}" if in_group else version, "kind": kind.partition(".")[0]}


def path(kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    """Return the path of an object, or of a list in one namespace or in all (None)."""
    in_group, version, name_in_path = _find_place(kind)
    parts = ["/apis", in_group, version] if in_group else ["/api", version]
    if namespace is not None:
        parts += ["namespaces", namespace]
    parts.append(name_in_path)
    parts += [part for part in (name, subresource) if part is not None]
    return "/".join(parts)
