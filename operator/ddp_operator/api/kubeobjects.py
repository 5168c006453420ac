"""Conventions of the Kubernetes API: times, quantities, GPU resources, and the container that trains."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, Final

from ddp_operator.api.constants import (
    CONTROLLER_NAME,
    TRAINER_CONTAINER,
)

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""Replaces an unknown time where times are sorted."""
_LAST_TIME: Final = datetime(2200, 1, 1, tzinfo=UTC)


def utc_now() -> datetime:
    """Return the current time, aware and in UTC."""
    return datetime.now(UTC)


def truncate(moment: datetime) -> datetime:
    """Return a time in UTC with the precision that Kubernetes keeps, so that it equals the stored value."""
    return moment.astimezone(UTC).replace(microsecond=0)


def format_time(moment: datetime) -> str:
    """Return a time as Kubernetes writes it, such as ``2026-11-20T12:00:00Z``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(value: Any) -> datetime | None:
    """Return an RFC 3339 time as an aware datetime; None where the value is missing, or is no time of this age.

    Go writes an unset time as the year 1. Sums of times near the first or the last year would overflow.
    """
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    moment = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    return moment if EPOCH <= moment < _LAST_TIME else None


_SUFFIX = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1), "k": Decimal("1e3"),
    "M": Decimal("1e6"), "G": Decimal("1e9"), "T": Decimal("1e12"), "P": Decimal("1e15"), "E": Decimal("1e18"),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,2}))?")
_MAX_GPUS: Final = 100_000  # of one container
_MAX_QUANTITY: Final = 64  # characters; Python converts at most 4,300 digits
GPU_RESOURCES: Final = (
    *("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-?*"),
    *("amd.com/gpu", "amd.com/?px_nps?"),
    *("gpu.intel.com/i915", "gpu.intel.com/xe"),
)
"""Resource names of device plugins for GPUs and their partitions; one worker process for each. AMD names partitions
``<compute>_<memory>``, such as ``cpx_nps4``."""


def find_trainer(pod: Mapping[str, Any]) -> Any:
    """Return the training container of a pod or a pod template: the one named ``trainer``, else the first."""
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    return next((item for item in containers if item.get("name") == TRAINER_CONTAINER), containers[0])


def parse_quantity(value: Any) -> Decimal | None:
    """Return a quantity as a number, or None where it is not one."""
    text = str(value) if isinstance(value, str | int | float) else ""
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_QUANTITY else None
    if match is None:
        return None
    return Decimal(match[1]) * _SUFFIX[match[2] or ""] * Decimal(10) ** int(match[3] or 0)


def count_gpus(resources: Mapping[str, Any]) -> int:
    """Return how many GPUs a container's ``resources`` request (limits; requests if there are no limits)."""
    requested = {**_mapping(resources.get("requests")), **_mapping(resources.get("limits"))}
    gpus = 0
    for name, value in requested.items():
        if is_gpu(str(name)):
            gpus += max(0, int(parse_quantity(value) or 0))
    return min(gpus, _MAX_GPUS)


def scheduling_gates(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the scheduling gates of a pod or a template; a scheduler places a pod once all are removed."""
    return tuple(str(gate.get("name")) for gate in (pod.get("spec") or {}).get("schedulingGates") or ())


def is_gpu(resource: str) -> bool:
    """Return whether a resource name, such as ``nvidia.com/gpu``, is that of a device plugin for GPUs."""
    return any(fnmatchcase(resource, pattern) for pattern in GPU_RESOURCES)


def find_limits(pod_spec: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of a container, and those of its pod (``spec.resources``, Kubernetes 1.34) that it lacks."""
    return _find_amounts(pod_spec, container, "limits")


def find_requests(pod_spec: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of the requests. Kubernetes takes a limit without a request for the request."""
    return find_limits(pod_spec, container) | _find_amounts(pod_spec, container, "requests")


def _find_amounts(pod_spec: Mapping[str, Any], container: Mapping[str, Any], part: str) -> dict[str, Any]:
    resources = (_mapping(owner.get("resources")) for owner in (pod_spec, container))
    return {name: amount for own in resources for name, amount in _mapping(own.get(part)).items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def find_foreign_manager(resource: Mapping[str, Any]) -> str | None:
    """Return the controller that spec.managedBy names, or None for a job of this operator."""
    manager = (resource.get("spec") or {}).get("managedBy")
    return None if manager in (None, CONTROLLER_NAME) else str(manager)
