"""``spec.scheduling``: the scheduler of the pods, their priority, and whether they prefer to share a domain.

Kueue needs none of these fields: it queues the child Job by its labels and admits all pods at once. Only Kueue changes
``suspend``, ``parallelism`` and node selectors of a queued Job.
"""

from typing import Any, Final

from ddp_operator.api import child_names
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import CheckedTemplate, PodAddition
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import Scheduling, Spec, SpecFields
from ddp_operator.decide.hooks import Feature

_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"
DEFAULT_TOPOLOGY_KEY: Final = "kubernetes.io/hostname"
_WEIGHT: Final = 100  # the maximum


class PlacementFields(SpecFields, frozen=True, kw_only=True):
    """The kernel has the members of ``spec.scheduling``, which gangs read too."""


class PlacementPart(OwnFields[PlacementFields]):
    """What this feature does for those members: it has none of its own."""

    def has_defaults(self, spec: Spec) -> bool:
        """Return whether a job asks for nothing. Another one waits after a fault: it may not use another scheduler."""
        default = Scheduling()
        return all(getattr(spec.scheduling, name) == getattr(default, name) for name in Scheduling.__struct_fields__)


def build_addition(job: DDPTrainingJob, template: CheckedTemplate, attempt: int) -> PodAddition:
    """Return the fields that ``spec.scheduling`` adds to a pod, after the values of the user's template."""
    scheduling = job.spec.scheduling
    fields: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    if scheduling.scheduler_name is not None:
        fields["schedulerName"] = scheduling.scheduler_name
    if scheduling.priority_class_name is not None:
        replaced["priorityClassName"] = scheduling.priority_class_name

    key = scheduling.topology_key or DEFAULT_TOPOLOGY_KEY
    # Only pods of this attempt: pods of the previous one must not influence the placement.
    selector = {"matchLabels": child_names.child_labels(job.name, attempt)}
    if scheduling.placement == "Pack":
        affinity = dict(template.pod.get("affinity") or {})
        pod_affinity = dict(affinity.get("podAffinity") or {})
        term = {"weight": _WEIGHT, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
        pod_affinity[_PREFERRED] = [*(pod_affinity.get(_PREFERRED) or []), term]
        replaced["affinity"] = affinity | {"podAffinity": pod_affinity}
    elif scheduling.placement == "Spread":
        constraint = {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": selector,
        }
        written = template.pod.get("topologySpreadConstraints") or []
        replaced["topologySpreadConstraints"] = [*written, constraint]
    return PodAddition(fields=fields, replaced=replaced)


FIELDS: Final = PlacementPart("placement", PlacementFields, pod=build_addition)
FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="scaling.md", fields=FIELDS)
