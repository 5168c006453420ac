"""Resource claims (DRA): the number of GPUs that the training container gets by them. Pure.

A device is a GPU if its DeviceClass has a name that the vendors' drivers install for GPUs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.kubeobjects import GPU_DEVICE_CLASSES, count_gpus, find_trainer
from ddp_operator.api.spec import Spec

CLAIM_KIND: Final = "ResourceClaim"
CLAIM_TEMPLATE_KIND: Final = "ResourceClaimTemplate"
_SOURCES: Final = {"resourceClaimTemplateName": CLAIM_TEMPLATE_KIND, "resourceClaimName": CLAIM_KIND}
_NUMBER: Final = "set spec.procPerNode to a number"


@dataclass(frozen=True, slots=True)
class ClaimReference:
    """A claim or template that the pods' resourceClaims name and the training container uses."""

    path: str
    kind: str
    name: str
    requests: frozenset[str]
    """The requests of the claim that the container uses; empty: all."""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind} {self.name}"


def find_claims(spec: Spec) -> tuple[ClaimReference, ...]:
    """Return the claims of the training container. Malformed entries are skipped: the API server refuses them."""
    pod = _object(spec.template.spec)

    requests_by_claim: dict[str, set[str]] = {}
    for claim in _objects(_trainer_resources(pod).get("claims")):
        name = str(claim.get("name"))
        request = str(claim.get("request") or "")
        requests_by_claim.setdefault(name, set()).add(request)

    references = []
    for index, entry in enumerate(list_claim_entries(pod)):
        requests = requests_by_claim.get(str(entry.get("name")))
        if requests is None:
            continue
        selected = frozenset() if "" in requests else frozenset(requests)
        for field, kind in _SOURCES.items():
            if entry.get(field):
                path = f"spec.template.spec.resourceClaims[{index}].{field}"
                references.append(ClaimReference(path, kind, str(entry[field]), selected))
    return tuple(references)


def list_claim_entries(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return ``resourceClaims`` of a pod's spec without malformed entries."""
    return _objects(pod.get("resourceClaims"))


def digest_claims(spec: Spec, references: Sequence[ClaimReference]) -> str:
    """Return a digest of the fields of the spec that a count depends on. It does not cover the claims themselves."""
    basis = [[reference.path, reference.kind, reference.name, sorted(reference.requests)] for reference in references]
    return hashlib.sha256(json.dumps([spec.proc_per_node, basis]).encode()).hexdigest()[:16]


def is_counted(spec: Spec) -> bool:
    """Return whether procPerNode depends on the number of GPUs."""
    return spec.proc_per_node in ("auto", "gpu")


def assume_claimed(spec: Spec) -> int:
    """Return the number of GPUs that procPerNode needs, for claims that cannot be counted."""
    if isinstance(spec.proc_per_node, int):
        return spec.proc_per_node
    return int(is_counted(spec))


def count_claimed(spec: Spec, objects: Iterable[tuple[ClaimReference, Mapping[str, Any]]]) -> int:
    """Return the number of GPUs of the training container in each pod, from its claims and templates.

    Raises: InvalidManifest if procPerNode depends on the number, and the claims do not determine it.
    """
    gpus = 0
    unknown_classes: set[str] = set()
    for reference, raw in objects:
        for request in _requests(reference.kind, raw):
            name = str(request.get("name"))
            if reference.requests and name not in reference.requests:
                continue
            alternatives = _objects(request.get("firstAvailable")) or [_object(request.get("exactly")) or request]
            counts = {_count_gpus(device) for device in alternatives}
            if len(counts) > 1 or None in counts:
                if not is_counted(spec):
                    return assume_claimed(spec)
                if len(counts) > 1:
                    reason = "has alternatives with different numbers of GPUs"
                else:
                    reason = "requests All devices"
                message = (
                    f"the number of GPUs is unknown: request {name} of {reference.kind} {reference.name} {reason}; "
                    f"{_NUMBER}"
                )
                raise InvalidManifest([FieldError(reference.path, message)])
            gpus += counts.pop() or 0
            unknown_classes |= {str(device.get("deviceClassName")) for device in alternatives} - {*GPU_DEVICE_CLASSES}

    resources = _trainer_resources(spec.template.spec)
    if unknown_classes and not gpus and not count_gpus(resources) and is_counted(spec):
        message = (
            "no request names a DeviceClass that is known to be of GPUs (requested: "
            f"{', '.join(sorted(unknown_classes))}); {_NUMBER}"
        )
        raise InvalidManifest([FieldError("spec.procPerNode", message, spec.proc_per_node)])
    return gpus


def _count_gpus(device: Mapping[str, Any]) -> int | None:
    """Return the number of GPUs that a device request asks for, or None if it does not determine the number."""
    # Administrative access serves to monitor devices that other pods use.
    if device.get("deviceClassName") not in GPU_DEVICE_CLASSES or device.get("adminAccess"):
        return 0
    if device.get("allocationMode") == "All":
        return None
    count = device.get("count")
    return count if isinstance(count, int) else 1


def _requests(kind: str, raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the device requests of a claim or a template. Requests of v1beta1 have no field ``exactly``."""
    spec = _object(raw.get("spec"))
    spec = _object(spec.get("spec")) if kind == CLAIM_TEMPLATE_KIND else spec
    return _objects(_object(spec.get("devices")).get("requests"))


def _trainer_resources(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(find_trainer({"spec": {"containers": _objects(pod.get("containers"))}}).get("resources"))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
