"""Drain requests as NVSentinel and Kubernetes 1.37 publish them, for tests."""

from __future__ import annotations

from typing import Any

from ddp_operator.features.drains.requests import EVICTION_RESPONDER

SOURCE = "nvsentinel/drainrequests.v1alpha1.nvsentinel.nvidia.com"
LIFECYCLE = "lifecycle.k8s.io/v1alpha1"
EVICTOR = "imperative-eviction.k8s.io/evictor"

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_CONDITION = {
    "type": "object",
    "required": ["lastTransitionTime", "message", "reason", "status", "type"],
    "properties": {
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "message": {"type": "string", "maxLength": 32768},
        "observedGeneration": {"type": "integer", "minimum": 0},
        "reason": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "type": {"type": "string", "maxLength": 316},
    },
}  # fmt: skip
_SPEC = {
    "type": "object",
    "required": ["nodeName"],
    "properties": {
        "checkName": _TEXT,
        "entitiesImpacted": {"type": "array", "items": {"type": "object", "additionalProperties": _TEXT}},
        "errorCode": _TEXTS,
        "healthEventID": _TEXT,
        "metadata": {"type": "object", "additionalProperties": _TEXT},
        "nodeName": _TEXT,
        "podsToDrain": {"type": "object", "additionalProperties": _TEXTS},
        "reason": _TEXT,
        "recommendedAction": _TEXT,
    },
}
_STATUS = {"type": "object", "properties": {"conditions": {"type": "array", "items": _CONDITION}}}
_HEAD = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": {"type": "object"}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": _HEAD | {"spec": _SPEC, "status": _STATUS}}


def build_crd() -> dict[str, Any]:
    """Return the definition of NVSentinel's DrainRequest, with the constraints of the published one."""
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": SCHEMA},
        "subresources": {"status": {}},
    }
    names = {
        "kind": "DrainRequest",
        "listKind": "DrainRequestList",
        "plural": "drainrequests",
        "singular": "drainrequest",
    }
    spec = {"group": "nvsentinel.nvidia.com", "names": names, "scope": "Namespaced", "versions": [version]}
    metadata = {"name": "drainrequests.nvsentinel.nvidia.com"}
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return definition | {"metadata": metadata, "spec": spec}  # fmt: skip


def build_drain_request(*pods: str, namespace: str = "default", node: str = "node-a", **spec: Any) -> dict[str, Any]:
    """Return a request that names pods, as node-drainer creates it."""
    return {
        "apiVersion": "nvsentinel.nvidia.com/v1alpha1",
        "kind": "DrainRequest",
        "metadata": {"name": "drain-node-a-42", "namespace": "nvsentinel", "resourceVersion": "7"},
        "spec": {"nodeName": node, "reason": "GPU 3: XID 79", "podsToDrain": {namespace: list(pods)}} | spec,
    }


def build_eviction(pod: str, uid: str, state: str = "Active", **status: Any) -> dict[str, Any]:
    """Return an Eviction of a pod, whose responders Kubernetes has initialized."""
    return {
        "apiVersion": LIFECYCLE,
        "kind": "Eviction",
        "metadata": {
            "name": f"{pod}-1",
            "namespace": "default",
            "resourceVersion": "8",
            "labels": {EVICTION_RESPONDER: "responder"},
        },
        "spec": {"target": {"pod": {"name": pod, "uid": uid}}},
        "status": {
            "requesters": [{"name": "node-maintenance.example.com/drain", "intent": "Eviction"}],
            "targetResponders": [
                {"name": EVICTION_RESPONDER, "priority": 10000, "state": state},
                {"name": EVICTOR, "priority": 100, "state": "Inactive"},
            ],
            "responders": [{"name": EVICTION_RESPONDER, "startTime": "2026-11-20T11:59:00Z"}, {"name": EVICTOR}],
        }
        | status,
    }
