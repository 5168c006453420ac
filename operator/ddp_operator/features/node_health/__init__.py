"""``recovery.nodeHealth``: conditions and taints by which detectors report that a node is unhealthy.

GPU operators, NVSentinel and node-problem-detector write them. The field names the relevant ones, or shell patterns.
"""

import re
from fnmatch import translate
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.cluster import Object
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.rule_builders import read_or_default, require
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.decide.hooks import Feature, NodeHook
from ddp_operator.decide.state import Trouble

# The API server estimates the cost of a rule from the bounds of what it reads.
_Pattern = Annotated[str, Meta(extra_json_schema={"maxLength": 316})]


class NodeHealth(SpecFields, frozen=True, kw_only=True):
    """Node conditions and taints that mark a pod's node as unhealthy. Names may be shell patterns, such as Xid*."""

    conditions: Annotated[
        tuple[_Pattern, ...],
        Meta(
            description="Types of node conditions. A node is unhealthy while the status of one of them is True.",
            extra_json_schema={"maxItems": 32},
        ),
    ] = ()
    taints: Annotated[
        tuple[_Pattern, ...],
        Meta(
            description="Keys of taints. A node is unhealthy while it has one of them, with any effect.",
            extra_json_schema={"maxItems": 32},
        ),
    ] = ()
    action: Annotated[
        Literal["Migrate", "Report"] | None,
        Meta(
            description="Migrate: the pods save a checkpoint and stop, and a new, uncounted attempt avoids the "
            "node. Report: set the condition NodesHealthy to False. Unset: Report."
        ),
    ] = None


class NodeHealthFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in ``spec.recovery``."""

    node_health: Annotated[
        NodeHealth | None,
        Meta(description="Unset: the operator reads a node only while a pod on it does not terminate."),
    ] = None


_CONDITIONS: Final = read_or_default("recovery.nodeHealth.conditions", [])
_TAINTS: Final = read_or_default("recovery.nodeHealth.taints", [])
FIELDS: Final = OwnFields(
    "node-health",
    NodeHealthFields,
    at="recovery",
    rules=(
        require(
            "recovery.nodeHealth",
            f"size({_CONDITIONS}) + size({_TAINTS}) > 0",
            "needs conditions or taints, such as conditions: [Xid*]; add one or remove nodeHealth",
        ),
        *(
            CelRule(
                f"spec.recovery.nodeHealth.{name}",
                "size(self) <= 32 && self.all(n, size(n) >= 1 && size(n) <= 316 && !n.matches('([*][^*]*){9}'))",
                "must have at most 32 names of 1 to 316 characters with at most 8 stars (*); change them",
            )
            for name in ("conditions", "taints")
        ),
    ),
)


def wants_nodes(job: DDPTrainingJob) -> bool:
    """Return whether the spec names conditions or taints."""
    return FIELDS.read(job.spec).node_health is not None


def judge_node(job: DDPTrainingJob, raw: Object | None) -> Trouble | None:
    """Return the named conditions and taints of a node, such as ``XidCriticalError (XID 79)``; None: it has none."""
    health = FIELDS.read(job.spec).node_health
    if health is None or raw is None:
        return None
    troubles = []
    for condition in (raw.get("status") or {}).get("conditions") or ():
        if condition.get("status") == "True" and _is_named(condition.get("type"), health.conditions):
            detail = condition.get("message") or condition.get("reason") or "no message"
            troubles.append(f"{condition.get('type')} ({detail})")
    for taint in (raw.get("spec") or {}).get("taints") or ():
        if _is_named(taint.get("key"), health.taints):
            troubles.append(f"taint {taint.get('key')}:{taint.get('effect')}")
    if not troubles:
        return None
    return Trouble(", ".join(troubles), planned=False, leaves=health.action == "Migrate")


def _is_named(name: Any, patterns: tuple[str, ...]) -> bool:
    return any(_compile(pattern).match(str(name)) for pattern in patterns)


@lru_cache(maxsize=1024)  # fnmatch keeps 32,768 expressions, which tenants could fill with long ones
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


FEATURE: Final = Feature(
    FIELDS.feature, maturity="beta", page="drains.md", fields=FIELDS, nodes=NodeHook(wants_nodes, judge_node)
)
