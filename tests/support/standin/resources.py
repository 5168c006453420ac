"""The kinds that the stand-in serves, and how discovery names them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Kind:
    """One kind: its path in the API and its features."""

    group: str
    version: str
    kind: str
    plural: str
    singular: str = ""
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    schema: dict[str, Any] | None = field(default=None, hash=False, compare=False)
    """The OpenAPI v3 schema of a custom resource."""
    scale_paths: tuple[str, str, str] | None = None
    """Paths of spec replicas, status replicas and selector, if there is a scale subresource."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The name of its objects in refusals: ``jobs.batch``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def named(self) -> str:
        """Its name in errors of an object's fields: ``Job.batch``."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    def discovery(self) -> list[dict[str, Any]]:
        """Return the entries of /apis/<group>/<version> for this kind."""
        main = {
            "name": self.plural,
            "singularName": self.singular or self.kind.lower(),
            "namespaced": self.namespaced,
            "kind": self.kind,
            "verbs": VERBS,
            "shortNames": list(self.short_names),
        }
        entries = [main]
        for name in self.subresources:
            entry = {
                "name": f"{self.plural}/{name}",
                "singularName": "",
                "namespaced": self.namespaced,
                "kind": self.kind,
                "verbs": ["get", "patch", "update"],
            }
            if name == "scale":
                entry |= {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            entries.append(entry)
        return entries


BUILTIN = (
    Kind("", "v1", "Namespace", "namespaces", namespaced=False, short_names=("ns",)),
    Kind("", "v1", "Node", "nodes", namespaced=False, short_names=("no",), subresources=("status",)),
    Kind("", "v1", "Pod", "pods", short_names=("po",), subresources=("status", "binding", "log")),
    Kind("", "v1", "Service", "services", short_names=("svc",)),
    Kind("", "v1", "ConfigMap", "configmaps", short_names=("cm",)),
    Kind("", "v1", "Secret", "secrets"),
    Kind("", "v1", "Event", "events", short_names=("ev",)),
    Kind("batch", "v1", "Job", "jobs", subresources=("status",)),
    Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", short_names=("netpol",)),
    Kind("coordination.k8s.io", "v1", "Lease", "leases"),
    Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False),
)


def custom_kind(crd: dict[str, Any]) -> Kind:
    """Return the kind that a CustomResourceDefinition defines (its only version)."""
    spec = crd["spec"]
    (version,) = spec["versions"]
    subresources = version.get("subresources", {})
    scale = subresources.get("scale")
    return Kind(
        spec["group"],
        version["name"],
        spec["names"]["kind"],
        spec["names"]["plural"],
        spec["names"].get("singular", ""),
        namespaced=spec["scope"] == "Namespaced",
        short_names=tuple(spec["names"].get("shortNames", ())),
        subresources=tuple(sorted(subresources)),
        schema=version["schema"]["openAPIV3Schema"],
        scale_paths=scale and (scale["specReplicasPath"], scale["statusReplicasPath"], scale["labelSelectorPath"]),
    )
