"""What Events report about Jobs, pods and claims that wait. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ddp_operator.decide import conditions as c
from ddp_operator.decide.kueue import line
from ddp_operator.decide.state import Problem
from ddp_operator.reading.events import EXPLAINING_EVENTS, read_event_time

_VOLUME: Final = re.compile(r'for volume "([^"]+)"|unmounted volumes=\[([^\]\s]+)')


# The label of each volume source, and its member with the object's name.
_SOURCES: Final = {
    "configMap": ("ConfigMap", "name"),
    "secret": ("Secret", "secretName"),
    "persistentVolumeClaim": ("claim", "claimName"),
    "nfs": ("NFS server", "server"),
    "hostPath": ("hostPath", "path"),
    "csi": ("CSI driver", "driver"),
    "image": ("image", "reference"),
}


_UNBOUND: Final = ("FailedBinding", "ExternalProvisioning")
"""Reasons of Events about a claim that are no warnings, and yet explain why it is not bound."""


def find_latest_warning(events: Iterable[Mapping[str, Any]]) -> Problem | None:
    """Return the latest warning that explains why an object does not start."""
    warnings = [
        event for event in events if event.get("type") == "Warning" and event.get("reason") in EXPLAINING_EVENTS
    ]
    if not warnings:
        return None
    latest = max(warnings, key=read_event_time)
    return Problem(str(latest["reason"]), line(latest.get("message")))


def name_volume(problem: Problem, pod: Mapping[str, Any]) -> Problem:
    """Return a kubelet's problem with the object behind the volume that it names. ``pod``: the pod's spec."""
    match = _VOLUME.search(problem.message)
    name = match and (match[1] or match[2])
    for volume in pod.get("volumes") or ():
        if volume.get("name") == name:
            return problem._replace(message=f"{problem.message} (volume {name} is {_describe_source(volume)})")
    return problem


def _describe_source(volume: Mapping[str, Any]) -> str:
    kind = next((kind for kind in volume if kind != "name"), "emptyDir")
    label, member = _SOURCES.get(kind, (kind, ""))
    return f"{label} {(volume.get(kind) or {}).get(member, '')}".rstrip()


def list_claims(pod: Mapping[str, Any]) -> list[str]:
    """Return the claims that a pod mounts. ``pod``: its spec."""
    sources = (volume.get("persistentVolumeClaim") or {} for volume in pod.get("volumes") or ())
    return list(dict.fromkeys(source["claimName"] for source in sources if source.get("claimName")))


def find_claim_problem(claim: str, events: Iterable[Mapping[str, Any]]) -> Problem | None:
    """Return why a claim is not bound, by the latest Event about it that explains it; None: no Event does."""
    telling = [item for item in events if item.get("type") == "Warning" or item.get("reason") in _UNBOUND]
    if not telling:
        return None
    latest = max(telling, key=lambda item: (item.get("type") == "Warning", read_event_time(item)))
    return Problem(c.VOLUME_NOT_READY, f"claim {claim}: {latest.get('reason')}: {line(latest.get('message'))}")
