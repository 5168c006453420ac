"""Nodes that report trouble while pods run well on them: recovery.nodeHealth. Pure.

Detectors (GPU operators, NVSentinel, node-problem-detector) write conditions and taints; which of them count is said in
the spec, as names or shell patterns.
"""

from collections.abc import Mapping
from typing import Any

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.kubeobjects import match_glob
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact
from ddp_operator.status.observation import Children, State

LOOK_SECONDS = 30.0
MOST_NODES = 32
"""How many nodes are asked after in one look; of a larger job the next ones in the next."""


def nodes_in_use(job: DDPTrainingJob, children: Children) -> tuple[str, ...]:
    """Return the nodes of the current attempt's pods, where the spec wants their health to be watched."""
    if job.spec.recovery.node_health is None or job.spec.suspend:
        return ()
    pods = children.pods_of(job.status.attempt)
    return tuple(sorted({pod.node_name for pod in pods if pod.alive and pod.node_name}))


def find_trouble(job: DDPTrainingJob, raw: Mapping[str, Any] | None) -> str:
    """Return what a node reports of what the spec names, such as ``XidCriticalError (XID 79)``; empty: nothing."""
    health = job.spec.recovery.node_health
    if health is None or raw is None:
        return ""
    found = [
        f"{one.get('type')} ({one.get('message') or one.get('reason') or 'no message'})"
        for one in (raw.get("status") or {}).get("conditions") or ()
        if one.get("status") == "True" and _is_named(one.get("type"), health.conditions)
    ]
    found += [
        f"taint {one.get('key')}:{one.get('effect')}"
        for one in (raw.get("spec") or {}).get("taints") or ()
        if _is_named(one.get("key"), health.taints)
    ]
    return ", ".join(found)[:512]


def nodes_to_leave(state: State) -> tuple[str, ...]:
    """Return the nodes because of which a new attempt begins now.

    None of those that are avoided already; and none where they were needed, as no others had room.
    """
    health, restart = state.spec.recovery.node_health, state.status.last_restart
    if health is None or health.action != "Migrate" or state.spec.suspend or not state.spec.recovery.avoid_failed_nodes:
        return ()
    if restart is not None and restart.cause == c.NODES_READMITTED and restart.attempt == state.status.attempt:
        return ()
    used = nodes_in_use(state.job, state.observation)
    return tuple(name for name in state.observation.troubles if name in used and name not in state.status.failed_nodes)


def describe_nodes(state: State) -> Fact | None:
    """Return NodesHealthy; None where the spec does not ask for it."""
    if state.spec.recovery.node_health is None:
        return None
    used = nodes_in_use(state.job, state.observation)
    found = [f"{name}: {what}" for name, what in state.observation.troubles.items() if name in used]
    if found:
        return Fact(c.NODES_HEALTHY, "False", c.NODE_UNHEALTHY, "; ".join(found)[:1024])
    return Fact(c.NODES_HEALTHY, "True", c.NO_TROUBLE)


def _is_named(name: Any, patterns: tuple[str, ...]) -> bool:
    return any(match_glob(str(name), pattern) for pattern in patterns)
