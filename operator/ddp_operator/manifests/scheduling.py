"""Placement: the fields that ``spec.scheduling`` adds to the pods.

Kueue needs none of them: it queues the child Job by its labels and admits all pods at once. Only Kueue changes
``suspend``, ``parallelism`` and node selectors of a queued Job.
"""

from typing import Any, Final

from ddp_operator.api import child_names
from ddp_operator.api.job import DDPTrainingJob

_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
DEFAULT_TOPOLOGY_KEY: Final = "kubernetes.io/hostname"
_WEIGHT: Final = 100  # the maximum


def add_scheduling(pod: dict[str, Any], job: DDPTrainingJob, *, attempt: int) -> None:
    """Add the fields of ``spec.scheduling`` to a pod. Values of the user's template stay, before the added ones."""
    scheduling = job.spec.scheduling
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
