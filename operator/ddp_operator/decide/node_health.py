"""Nodes that report a problem while pods run on them: recovery.nodeHealth. Pure.

Detectors (GPU operators, NVSentinel, node-problem-detector) write conditions and taints. The spec selects the relevant
ones by names or shell patterns.
"""

import re
from collections.abc import Mapping
from fnmatch import translate
from functools import lru_cache
from typing import Any

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.observation import Children, State

LOOK_SECONDS = 30.0
"""Seconds between two readings of the nodes."""
MOST_NODES = 32
"""Nodes read in one pass; of a larger job the next ones are read in the next pass."""


def list_nodes_in_use(job: DDPTrainingJob, children: Children) -> tuple[str, ...]:
    """Return the nodes of the current attempt's pods; empty without recovery.nodeHealth."""
    if job.spec.recovery.node_health is None or job.spec.suspend:
        return ()
    pods = children.pods_of(job.status.attempt)
    return tuple(sorted({pod.node_name for pod in pods if pod.alive and pod.node_name}))


def find_trouble(job: DDPTrainingJob, raw: Mapping[str, Any] | None) -> str:
    """Return the selected conditions and taints of a node, such as ``XidCriticalError (XID 79)``; empty: none."""
    health = job.spec.recovery.node_health
    if health is None or raw is None:
        return ""
    troubles = []
    for condition in (raw.get("status") or {}).get("conditions") or ():
        if condition.get("status") == "True" and _is_named(condition.get("type"), health.conditions):
            detail = condition.get("message") or condition.get("reason") or "no message"
            troubles.append(f"{condition.get('type')} ({detail})")
    for taint in (raw.get("spec") or {}).get("taints") or ():
        if _is_named(taint.get("key"), health.taints):
            troubles.append(f"taint {taint.get('key')}:{taint.get('effect')}")
    return ", ".join(troubles)[:512]


def list_nodes_to_leave(state: State) -> tuple[str, ...]:
    """Return the nodes that a new attempt has to leave now.

    Nodes that are avoided already are omitted, and all of them if no other nodes had room.
    """
    health = state.spec.recovery.node_health
    if health is None or health.action != "Migrate" or state.spec.suspend or not state.spec.recovery.avoid_failed_nodes:
        return ()
    restart = state.status.last_restart
    if restart is not None and restart.cause == c.NODES_READMITTED and restart.attempt == state.status.attempt:
        return ()
    used = list_nodes_in_use(state.job, state.observation)
    return tuple(name for name in state.observation.troubles if name in used and name not in state.status.failed_nodes)


def describe_nodes(state: State) -> Fact | None:
    """Return the condition NodesHealthy; None without recovery.nodeHealth."""
    if state.spec.recovery.node_health is None:
        return None
    used = list_nodes_in_use(state.job, state.observation)
    troubles = [f"{name}: {trouble}" for name, trouble in state.observation.troubles.items() if name in used]
    if troubles:
        return Fact(c.NODES_HEALTHY, "False", c.NODE_UNHEALTHY, "; ".join(troubles)[:1024])
    return Fact(c.NODES_HEALTHY, "True", c.NO_TROUBLE)


def _is_named(name: Any, patterns: tuple[str, ...]) -> bool:
    return any(_compile(pattern).match(str(name)) for pattern in patterns)


@lru_cache(maxsize=1024)  # fnmatch keeps 32,768 expressions, which tenants could fill with long ones
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))
