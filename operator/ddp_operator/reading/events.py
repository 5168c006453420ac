"""What Events report about Jobs, pods and claims: why they wait, and why the kubelet killed a container. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.decide import conditions as c
from ddp_operator.decide.kueue import line
from ddp_operator.decide.scheduling import EXPLAINING_EVENTS
from ddp_operator.decide.state import Problem
from ddp_operator.decide.views import Pods, PodView, is_taken_away
from ddp_operator.reading.terminations import ContainerKill
from ddp_pod.contract.failure_table import OOM

_MAX_INSPECTED: Final = 3
_CONTAINER: Final = re.compile(r"spec\.(?:initC|c)ontainers\{(.+)\}")
# The kubelet kills no container for a readiness probe.
_FAILED_PROBE: Final = re.compile(r"(Liveness|Startup) probe failed: (.*)", re.DOTALL)
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


def read_event_time(event: Mapping[str, Any]) -> str:
    """Return when an Event occurred last, as RFC 3339, or an empty string."""
    series = event.get("series") or {}
    metadata = event.get("metadata") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        metadata.get("creationTimestamp"),
    )
    return max((str(time) for time in times if time), default="")


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


def list_killed_pods(pods: Pods) -> list[PodView]:
    """Return the pods whose training container was ended by a signal, although nobody took the pod away.

    They are the first that ended, and few: the root cause is among them.
    """
    killed = [pod for pod in pods if pod.trained and _has_got_signal(pod) and not is_taken_away(pod.raw)]
    return sorted(killed, key=lambda pod: (pod.termination and pod.termination.time) or 0.0)[:_MAX_INSPECTED]


def _has_got_signal(pod: PodView) -> bool:
    end = pod.termination
    return end is not None and end.container_exit_code in constants.REPLACED_EXIT_CODES and end.category != OOM.name


def find_kill(events: Iterable[Mapping[str, Any]], container: str) -> ContainerKill | None:
    """Return why the kubelet killed a container, by the Events about its pod; None: they do not report it."""
    own = sorted((event for event in events if read_container(event) == container), key=read_event_time)
    reasons = {event.get("reason") for event in own}
    if "FailedPostStartHook" in reasons:
        return ContainerKill(container, "lifecycle.postStart")
    if "Killing" not in reasons:
        return None
    # The message of Killing names the probe only if the container is restarted.
    for event in reversed(own):
        failed = _FAILED_PROBE.match(str(event.get("message"))) if event.get("reason") == "Unhealthy" else None
        if failed is not None:
            return ContainerKill(container, f"{failed[1].lower()}Probe", line(failed[2]))
    return None


def read_container(event: Mapping[str, Any]) -> str:
    """Return the container that an Event about a pod concerns; empty: it concerns the pod."""
    match = _CONTAINER.fullmatch(str((event.get("involvedObject") or {}).get("fieldPath")))
    return match[1] if match else ""
