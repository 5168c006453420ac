"""Placement and gang scheduling: the fields that ``spec.scheduling`` adds to the pods, and the PodGroup.

Kueue needs none of them: it queues the child Job by its labels and admits all pods at once. Only Kueue changes
``suspend``, ``parallelism`` and node selectors of a queued Job.
"""

from dataclasses import dataclass
from typing import Any, Final

from ddp_operator.api import child_names, constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import list_claim_entries

_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
DEFAULT_TOPOLOGY_KEY: Final = "kubernetes.io/hostname"
_WEIGHT: Final = 100  # the maximum


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang scheduler: the API version of its PodGroup, and the label or annotation that names a pod's group.

    Pods of Kubernetes' own scheduler name their group in ``schedulingGroup`` instead.
    """

    api_version: str
    scheduler: str = ""
    label: str = ""
    annotation: str = ""


GANGS: Final[dict[str, Gang]] = {
    constants.NATIVE_GANG: Gang(f"{constants.SCHEDULING_GROUP}/v1beta1"),
    "Coscheduling": Gang(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler", label="scheduling.x-k8s.io/pod-group"
    ),
    "Volcano": Gang("scheduling.volcano.sh/v1beta1", "volcano", annotation="scheduling.k8s.io/group-name"),
}


def build_pod_group(job: DDPTrainingJob, *, attempt: int, nodes: int) -> dict[str, Any] | None:
    """Return the PodGroup of an attempt, or None without gang scheduling."""
    scheduling = job.spec.scheduling
    gang = GANGS.get(scheduling.gang)
    if gang is None:
        return None
    # An elastic job can start with minNodes. Spares count, because the pods that are scheduled first may lack pod 0.
    min_member = job.spec.elastic.min_nodes if job.spec.elastic else job.size_with(nodes).pods
    if scheduling.gang == constants.NATIVE_GANG:
        return {"apiVersion": gang.api_version, "kind": constants.POD_GROUP, "spec": _build_native(job, min_member)}
    spec: dict[str, Any] = {"minMember": min_member}
    if scheduling.gang == "Coscheduling":
        spec["scheduleTimeoutSeconds"] = job.spec.rendezvous.join_timeout_seconds
    if scheduling.queue is not None:
        spec["queue"] = scheduling.queue
    if scheduling.gang == "Volcano" and scheduling.priority_class_name is not None:
        spec["priorityClassName"] = scheduling.priority_class_name
    return {"apiVersion": gang.api_version, "kind": constants.POD_GROUP, "spec": spec}


def _build_native(job: DDPTrainingJob, min_member: int) -> dict[str, Any]:
    """Return the spec of Kubernetes' own PodGroup. Its priority replaces that of the pods in preemptions."""
    scheduling = job.spec.scheduling
    pod = job.spec.template.spec
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": min_member}}}
    priority_class = scheduling.priority_class_name or pod.get("priorityClassName")
    if priority_class:
        spec["priorityClassName"] = priority_class
    if scheduling.gang_topology is not None:
        spec["schedulingConstraints"] = {"topology": [{"key": scheduling.gang_topology}]}
    if scheduling.disruption_mode is not None:
        spec["disruptionMode"] = {scheduling.disruption_mode.lower(): {}}
    if scheduling.shared_claims:
        # A pod shares a claim of its group if both entries are equal.
        entries = list_claim_entries(pod)
        spec["resourceClaims"] = [entry for entry in entries if entry.get("name") in scheduling.shared_claims]
    return spec


def add_scheduling(metadata: dict[str, Any], pod: dict[str, Any], job: DDPTrainingJob, *, attempt: int) -> None:
    """Add the fields of ``spec.scheduling`` to a pod. Values of the user's template stay, before the added ones."""
    scheduling = job.spec.scheduling
    gang = GANGS.get(scheduling.gang)
    if gang is not None:
        group = child_names.job_name(job.name, attempt)
        if gang.label:
            metadata["labels"][gang.label] = group
        if gang.annotation:
            metadata["annotations"][gang.annotation] = group
        if scheduling.gang == constants.NATIVE_GANG:
            pod["schedulingGroup"] = {"podGroupName": group}
    scheduler_name = scheduling.scheduler_name or (gang.scheduler if gang is not None else "")
    if scheduler_name:
        pod.setdefault("schedulerName", scheduler_name)
    if scheduling.priority_class_name is not None:
        pod["priorityClassName"] = scheduling.priority_class_name

    key = scheduling.topology_key or DEFAULT_TOPOLOGY_KEY
    # Only pods of this attempt: pods of the previous one must not influence the placement.
    selector = {"matchLabels": child_names.child_labels(job.name, attempt)}
    if scheduling.placement == "Pack":
        affinity = dict(pod.get("affinity") or {})
        pod_affinity = dict(affinity.get("podAffinity") or {})
        term = {"weight": _WEIGHT, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
        pod_affinity[_PREFERRED] = [*(pod_affinity.get(_PREFERRED) or []), term]
        pod["affinity"] = affinity | {"podAffinity": pod_affinity}
    elif scheduling.placement == "Spread":
        constraint = {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": selector,
        }
        pod["topologySpreadConstraints"] = [*(pod.get("topologySpreadConstraints") or []), constraint]
