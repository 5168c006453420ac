"""The scale subresource: another view of the same object."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from .resources import Kind
from .storage import Object


def to_scale(kind: Kind, obj: Object) -> Object:
    """Return the Scale of a custom resource."""
    assert kind.scale_paths is not None
    spec, status, selector = kind.scale_paths
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: obj["metadata"][name] for name in kept},
        "spec": {"replicas": _get(obj, spec) or 0},
        "status": {"replicas": _get(obj, status) or 0, "selector": _get(obj, selector) or ""},
    }


def from_scale(kind: Kind, obj: Object, scale: Object) -> Object:
    """Return the custom resource with the Scale's number of replicas."""
    assert kind.scale_paths is not None
    after = deepcopy(obj)
    *parents, last = kind.scale_paths[0].lstrip(".").split(".")
    node = after
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = scale["spec"].get("replicas", 0)
    version = scale["metadata"].get("resourceVersion")
    if version:
        after["metadata"]["resourceVersion"] = version
    return after


def _get(obj: Object, path: str) -> Any:
    value: Any = obj
    for part in path.lstrip(".").split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
