"""Resource claims (DRA): how many GPUs the training container gets by them. Pure.

Devices are told to be GPUs by the name of their DeviceClass, as the vendors' drivers install it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.spec import Spec
from ddp_operator.kubeobjects import GPU_DEVICE_CLASSES, count_gpus, find_trainer

CLAIM_KIND: Final = "ResourceClaim"
CLAIM_TEMPLATE_KIND: Final = "ResourceClaimTemplate"
_SOURCES: Final = {"resourceClaimTemplateName": CLAIM_TEMPLATE_KIND, "resourceClaimName": CLAIM_KIND}
_NUMBER: Final = "set spec.procPerNode to a number"


@dataclass(frozen=True, slots=True)
class ClaimReference:
    """An object that the pods' resourceClaims name and the training container uses."""

    path: str
    kind: str
    name: str
    requests: frozenset[str]
    """Which of its requests the container gets; empty: all."""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind} {self.name}"


def find_claims(spec: Spec) -> tuple[ClaimReference, ...]:
    """Return what the training container claims. What has not the shape of a pod's claims is not there yet."""
    pod = _object(spec.template.spec)
    wanted: dict[Any, set[Any]] = {}
    for one in _objects(_trainer_resources(pod).get("claims")):
        wanted.setdefault(str(one.get("name")), set()).add(str(one.get("request") or ""))
    found = []
    for index, entry in enumerate(_objects(pod.get("resourceClaims"))):
        requests = wanted.get(str(entry.get("name")))
        for field, kind in _SOURCES.items():
            if requests is not None and entry.get(field):
                path = f"spec.template.spec.resourceClaims[{index}].{field}"
                some = frozenset() if "" in requests else frozenset(requests)
                found.append(ClaimReference(path, kind, str(entry[field]), some))
    return tuple(found)


def digest_claims(spec: Spec, references: Sequence[ClaimReference]) -> str:
    """Return a digest of all on which a count rests, but for the objects that are named."""
    basis = [[one.path, one.kind, one.name, sorted(one.requests)] for one in references]
    return hashlib.sha256(json.dumps([spec.proc_per_node, basis]).encode()).hexdigest()[:16]


def is_counted(spec: Spec) -> bool:
    """Tell whether procPerNode follows from the number of GPUs."""
    return spec.proc_per_node in ("auto", "gpu")


def assume_claimed(spec: Spec) -> int:
    """Return as many GPUs as procPerNode needs, where they cannot be counted."""
    asked = spec.proc_per_node
    return asked if isinstance(asked, int) else int(is_counted(spec))


def count_claimed(spec: Spec, objects: Iterable[tuple[ClaimReference, Mapping[str, Any]]]) -> int:
    """Return how many GPUs these objects give the training container of each pod.

    Raises: InvalidManifest where procPerNode follows from a number that they do not tell.
    """
    gpus, others = 0, set[str]()
    for reference, raw in objects:
        for request in _requests(reference.kind, raw):
            name = str(request.get("name"))
            if reference.requests and name not in reference.requests:
                continue
            alternatives = _objects(request.get("firstAvailable")) or [_object(request.get("exactly")) or request]
            counts = {_count(device) for device in alternatives}
            if len(counts) > 1 or None in counts:
                if not is_counted(spec):
                    return assume_claimed(spec)
                why = "has alternatives with different numbers of GPUs" if len(counts) > 1 else "asks for All devices"
                words = f"cannot be counted: request {name} of {reference.kind} {reference.name} {why}; {_NUMBER}"
                raise InvalidManifest([FieldError(reference.path, words)])
            gpus += counts.pop() or 0
            others |= {str(device.get("deviceClassName")) for device in alternatives} - {*GPU_DEVICE_CLASSES}
    resources = _trainer_resources(spec.template.spec)
    if others and not gpus and not count_gpus(resources) and is_counted(spec):
        words = f"no GPU is asked for by a DeviceClass that is known as one (asked for: {', '.join(sorted(others))})"
        raise InvalidManifest([FieldError("spec.procPerNode", f"{words}; {_NUMBER}", spec.proc_per_node)])
    return gpus


def _count(device: Mapping[str, Any]) -> int | None:
    """Return how many GPUs a device request asks for; None: it does not say."""
    # Administrative access is for looking at devices that others use.
    if device.get("deviceClassName") not in GPU_DEVICE_CLASSES or device.get("adminAccess"):
        return 0
    number = device.get("count")
    return None if device.get("allocationMode") == "All" else number if isinstance(number, int) else 1


def _requests(kind: str, raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the device requests of a claim or a template; v1beta1 has no ``exactly`` around what is exact."""
    spec = _object(raw.get("spec"))
    spec = _object(spec.get("spec")) if kind == CLAIM_TEMPLATE_KIND else spec
    return _objects(_object(spec.get("devices")).get("requests"))


def _trainer_resources(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(find_trainer({"spec": {"containers": _objects(pod.get("containers"))}}).get("resources"))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
