"""What Events report: why the kubelet killed a container. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from ddp_operator.api import constants
from ddp_operator.decide.kueue import line
from ddp_operator.decide.views import Pods, PodView, is_taken_away
from ddp_pod.contract.failure_table import OOM

PROBE_REMEDY: Final = (
    "correct or remove {field} of container {container} in spec.template: the kubelet kills the container when it fails"
)
SCHEDULER_EVENT: Final = "FailedScheduling"
EXPLAINING_EVENTS: Final = (
    *("FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", SCHEDULER_EVENT),
)
"""Reasons of the warnings that explain why an object does not start."""
_MAX_INSPECTED: Final = 3
_CONTAINER: Final = re.compile(r"spec\.(?:initC|c)ontainers\{(.+)\}")
# The kubelet kills no container for a readiness probe.
_FAILED_PROBE: Final = re.compile(r"(Liveness|Startup) probe failed: (.*)", re.DOTALL)


class ContainerKill(NamedTuple):
    """The kubelet killed a container. ``field``: the probe or hook that failed, as in the container's spec."""

    container: str
    field: str
    message: str = ""


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
