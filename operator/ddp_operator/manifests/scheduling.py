"""Where the pods of a job go, and that they go together: what ``spec.scheduling`` adds to the pods, and the PodGroup.

Kueue needs nothing of this: it queues the child Job by its labels, admits all pods at once, and is alone in changing
``suspend``, ``parallelism`` and node selectors of what it has queued.
"""

from dataclasses import dataclass
from typing import Any, Final

from ddp_operator import constants, names
from ddp_operator.api.job import DDPTrainingJob

DEFAULT_TOPOLOGY_KEY: Final = "kubernetes.io/hostname"
_WEIGHT: Final = 100  # the highest


@dataclass(frozen=True, slots=True)
class Gang:
    """A scheduler that starts all pods of a group or none: its group's kind, and how a pod says which group is its."""

    api_version: str
    scheduler: str
    label: str = ""
    annotation: str = ""


GANGS: Final[dict[str, Gang]] = {
    "Coscheduling": Gang(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler", label="scheduling.x-k8s.io/pod-group"
    ),
    "Volcano": Gang("scheduling.volcano.sh/v1beta1", "volcano", annotation="scheduling.k8s.io/group-name"),
}


def build_pod_group(job: DDPTrainingJob, *, attempt: int, nodes: int) -> dict[str, Any] | None:
    """Return the PodGroup of one attempt, or None where no gang is asked for."""
    asked = job.spec.scheduling
    gang = GANGS.get(asked.gang)
    if gang is None:
        return None
    # An elastic job can begin with its least number; of a job with spares those that are placed first may lack pod 0.
    least = job.spec.elastic.min_nodes if job.spec.elastic else job.size_with(nodes).pods
    spec: dict[str, Any] = {"minMember": least}
    if asked.gang == "Coscheduling":
        spec["scheduleTimeoutSeconds"] = job.spec.rendezvous.join_timeout_seconds
    if asked.queue is not None:
        spec["queue"] = asked.queue
    if asked.gang == "Volcano" and asked.priority_class_name is not None:
        spec["priorityClassName"] = asked.priority_class_name
    return {"apiVersion": gang.api_version, "kind": constants.POD_GROUP, "spec": spec}


def add_scheduling(metadata: dict[str, Any], pod: dict[str, Any], job: DDPTrainingJob, *, attempt: int) -> None:
    """Add to a pod what ``spec.scheduling`` asks for. What the user's template says stays, and comes first."""
    asked = job.spec.scheduling
    gang = GANGS.get(asked.gang)
    if gang is not None:
        group = names.job_name(job.name, attempt)
        if gang.label:
            metadata["labels"][gang.label] = group
        if gang.annotation:
            metadata["annotations"][gang.annotation] = group
        pod.setdefault("schedulerName", asked.scheduler_name or gang.scheduler)
    elif asked.scheduler_name is not None:
        pod["schedulerName"] = asked.scheduler_name
    if asked.priority_class_name is not None:
        pod["priorityClassName"] = asked.priority_class_name
    key = asked.topology_key or DEFAULT_TOPOLOGY_KEY
    # The attempt's own pods: those of a former one must neither attract nor repel.
    selector = {"matchLabels": names.child_labels(job.name, attempt)}
    if asked.placement == "Pack":
        affinity = dict(pod.get("affinity") or {})
        together = dict(affinity.get("podAffinity") or {})
        wish = "preferredDuringSchedulingIgnoredDuringExecution"
        term = {"weight": _WEIGHT, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
        together[wish] = [*(together.get(wish) or []), term]
        pod["affinity"] = affinity | {"podAffinity": together}
    elif asked.placement == "Spread":
        even = {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": selector}
        pod["topologySpreadConstraints"] = [*(pod.get("topologySpreadConstraints") or []), even]
