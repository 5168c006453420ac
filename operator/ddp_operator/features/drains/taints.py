"""``recovery.drains``: taints by which components announce that they empty a node (ADR 0051)."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta

from ddp_operator.api.cluster import Object
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.decide.state import Trouble

DRAIN_TAINTS: Final[Mapping[str, str]] = {
    "ToBeDeletedByClusterAutoscaler": "Cluster Autoscaler",
    "karpenter.sh/disrupted": "Karpenter",
    "cloud.google.com/impending-node-termination": "GKE",
    "aws-node-termination-handler/asg-lifecycle-termination": "AWS Node Termination Handler",
    "aws-node-termination-handler/scheduled-maintenance": "AWS Node Termination Handler",
    "aws-node-termination-handler/spot-itn": "AWS Node Termination Handler",
    "medik8s.io/drain": "Node Maintenance Operator",
}
"""Components that drain a node with this taint. A cordon is no drain: many let the pods of a cordoned node end."""


class DrainFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in ``spec.recovery``."""

    drains: Annotated[
        Literal["Move", "Report"] | None,
        Meta(
            description="If a component such as Karpenter has tainted the node to drain it (docs/drains.md). "
            "Move: as Migrate of nodeHealth. Report: as Report. Unset: not read. Requests that name "
            "pods are always followed."
        ),
    ] = None


FIELDS: Final = OwnFields("drains", DrainFields, at="recovery")


def wants_nodes(job: DDPTrainingJob) -> bool:
    """Return whether the spec asks for these taints."""
    return FIELDS.read(job.spec).drains is not None


def judge_node(job: DDPTrainingJob, raw: Object | None) -> Trouble | None:
    """Return the components that drain a node; None: none does."""
    found = []
    for taint in ((raw or {}).get("spec") or {}).get("taints") or ():
        drainer = DRAIN_TAINTS.get(str(taint.get("key")))
        if drainer is not None:
            found.append(f"{drainer} drains it (taint {taint.get('key')}:{taint.get('effect')})")
    if not found:
        return None
    return Trouble(", ".join(found), planned=True, leaves=FIELDS.read(job.spec).drains == "Move")
