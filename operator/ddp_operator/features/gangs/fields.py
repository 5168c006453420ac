"""The fields of ``spec.scheduling`` for gangs: their rules and checks, the PodGroup, and what names it in the pods."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from ddp_operator.api import child_names, constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import CheckedTemplate, ChildBody, OwnChild, PodAddition
from ddp_operator.api.rule_builders import require, require_label_key, require_object_name
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.features.gangs.pod_groups import POD_GROUP, SCHEDULING_GROUP

NATIVE: Final = "Native"
"""Value of spec.scheduling.gang for Kubernetes' own gang scheduling."""


class GangFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    gang: Annotated[
        Literal["None", "Native", "Coscheduling", "Volcano"],
        Meta(
            description="Start all pods of an attempt or none (docs/scaling.md). Native: by Kubernetes 1.36 or "
            "later. Coscheduling: by that scheduler's PodGroup. Volcano: the same. None: one by one; "
            "Kueue still admits them together."
        ),
    ] = "None"
    queue: Annotated[str | None, Meta(description="Queue of Volcano. Unset: its default queue.")] = None
    gang_topology: Annotated[
        str | None,
        Meta(description="Node label: all pods of a native gang run in one of its domains, such as a rack."),
    ] = None
    disruption_mode: Annotated[
        Literal["All", "Single"] | None,
        Meta(
            description="What a preemption takes of a native gang. All: all pods or none. Single: single pods. "
            "Unset: Single."
        ),
    ] = None
    shared_claims: Annotated[
        tuple[str, ...],
        Meta(description="Up to 4 names of template.spec.resourceClaims: all pods of a native gang share one claim."),
    ] = ()


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang scheduler: the API version of its PodGroup, and the label or annotation that names a pod's group.

    Pods of Kubernetes' own scheduler name their group in ``schedulingGroup`` instead.
    """

    api_version: str
    scheduler: str = ""
    label: str = ""
    annotation: str = ""


GANGS: Final[Mapping[str, Gang]] = {
    NATIVE: Gang(f"{SCHEDULING_GROUP}/v1beta1"),
    "Coscheduling": Gang(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler", label="scheduling.x-k8s.io/pod-group"
    ),
    "Volcano": Gang("scheduling.volcano.sh/v1beta1", "volcano", annotation="scheduling.k8s.io/group-name"),
}


PERMISSIONS: Final = {
    name.lower(): {f"{POD_GROUP}.{gang.api_version.partition('/')[0]}": ("get", "create", "delete")}
    for name, gang in GANGS.items()
}
"""What the operator may do in addition in a cluster with such a scheduler, by its name in the chart's values. It is not
checked at the start: without it only jobs that use the scheduler are refused."""


def _check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check that one scheduler decides about the pods, and that they have the claims which they share."""
    own = FIELDS.read(job.spec)
    if own.gang == "Volcano" and constants.KUEUE_QUEUE_LABEL in job.labels:
        label = constants.KUEUE_QUEUE_LABEL
        message = f"must be None or Coscheduling if Kueue queues the job; change it or remove the label {label}"
        yield FieldError("spec.scheduling.gang", message, own.gang)
    if own.gang == NATIVE and pod.get("schedulingGroup"):
        message = (
            "names the operator's PodGroup, but spec.template.spec.schedulingGroup names another; remove one of the two"
        )
        yield FieldError("spec.scheduling.gang", message, own.gang)
    claims = [entry.get("name") for entry in list_claim_entries(pod)]
    for index, name in enumerate(own.shared_claims):
        if name not in claims:
            message = "names no entry of spec.template.spec.resourceClaims; add it there or remove it here"
            yield FieldError(f"spec.scheduling.sharedClaims[{index}]", message, name)


def _add_to_pod(job: DDPTrainingJob, template: CheckedTemplate, attempt: int) -> PodAddition:
    """Return what names the PodGroup of an attempt, and the gang's scheduler unless the job names one."""
    own = FIELDS.read(job.spec)
    gang = GANGS.get(own.gang)
    if gang is None:
        return PodAddition()
    group = child_names.job_name(job.name, attempt)
    fields: dict[str, Any] = {}
    if own.gang == NATIVE:
        fields["schedulingGroup"] = {"podGroupName": group}
    if gang.scheduler:
        fields["schedulerName"] = gang.scheduler
    return PodAddition(
        labels={gang.label: group} if gang.label else {},
        annotations={gang.annotation: group} if gang.annotation else {},
        fields=fields,
    )


def _is_gang(job: DDPTrainingJob) -> bool:
    return FIELDS.read(job.spec).gang in GANGS


def build_pod_group(job: DDPTrainingJob, nodes: int) -> ChildBody:
    """Return the PodGroup of an attempt."""
    own = FIELDS.read(job.spec)
    api_version = GANGS[own.gang].api_version
    priority_class = job.spec.template.spec.get("priorityClassName")
    # An elastic job can start with minNodes. Spares count, because the pods that are scheduled first may lack pod 0.
    min_member = job.spec.elastic.min_nodes if job.spec.elastic else job.size_with(nodes).pods
    if own.gang == NATIVE:
        return ChildBody(api_version, _build_native(job, own, min_member))
    spec: dict[str, Any] = {"minMember": min_member}
    if own.gang == "Coscheduling":
        spec["scheduleTimeoutSeconds"] = job.spec.rendezvous.join_timeout_seconds
    if own.queue is not None:
        spec["queue"] = own.queue
    if own.gang == "Volcano" and priority_class:
        spec["priorityClassName"] = priority_class
    return ChildBody(api_version, spec)


def _build_native(job: DDPTrainingJob, own: GangFields, min_member: int) -> dict[str, Any]:
    """Return the spec of Kubernetes' own PodGroup. Its priority replaces that of the pods in preemptions."""
    pod = job.spec.template.spec
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": min_member}}}
    priority_class = pod.get("priorityClassName")
    if priority_class:
        spec["priorityClassName"] = priority_class
    if own.gang_topology is not None:
        spec["schedulingConstraints"] = {"topology": [{"key": own.gang_topology}]}
    if own.disruption_mode is not None:
        spec["disruptionMode"] = {own.disruption_mode.lower(): {}}
    if own.shared_claims:
        # A pod shares a claim of its group if both entries are equal.
        entries = list_claim_entries(pod)
        spec["resourceClaims"] = [entry for entry in entries if entry.get("name") in own.shared_claims]
    return spec


FIELDS: Final = OwnFields(
    "gangs",
    GangFields,
    at="scheduling",
    rules=(
        require(
            "scheduling.queue",
            "(has(self.scheduling.gang) && self.scheduling.gang == 'Volcano')",
            "needs scheduling.gang: Volcano; set that, or remove this field and set the label "
            "kueue.x-k8s.io/queue-name for Kueue",
        ),
        require_object_name("spec.scheduling.queue"),
        require_label_key("spec.scheduling.gangTopology"),
        *(
            require(
                f"scheduling.{name}",
                f"{empty}(has(self.scheduling.gang) && self.scheduling.gang == 'Native')",
                "needs scheduling.gang: Native; set that or remove this field",
            )
            for name, empty in (
                ("gangTopology", ""),
                ("disruptionMode", ""),
                ("sharedClaims", "size(self.scheduling.sharedClaims) == 0 || "),
            )
        ),
    ),
    check=_check,
    pod=_add_to_pod,
    children=(OwnChild(POD_GROUP, _is_gang, build_pod_group),),
)


def list_claim_entries(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return ``resourceClaims`` of a pod's spec without malformed entries, which the API server refuses."""
    entries = pod.get("resourceClaims")
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
