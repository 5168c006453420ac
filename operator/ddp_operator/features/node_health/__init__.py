"""``recovery.nodeHealth``: conditions and taints by which detectors report that a node is unhealthy.

GPU operators, NVSentinel and node-problem-detector write them. The field names the relevant ones, or shell patterns.
"""

import re
from fnmatch import translate
from functools import lru_cache
from typing import Any, Final

from ddp_operator.api.cluster import Object
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.decide.hooks import Feature, NodeHook
from ddp_operator.decide.state import Trouble


def wants_nodes(job: DDPTrainingJob) -> bool:
    """Return whether the spec names conditions or taints."""
    return job.spec.recovery.node_health is not None


def judge_node(job: DDPTrainingJob, raw: Object | None) -> Trouble | None:
    """Return the named conditions and taints of a node, such as ``XidCriticalError (XID 79)``; None: it has none."""
    health = job.spec.recovery.node_health
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


FEATURE: Final = Feature("node-health", maturity="beta", page="drains.md", nodes=NodeHook(wants_nodes, judge_node))
