"""Which nodes new pods of a job avoid: ``status.failed_nodes``, and when a lost one may be used again. Pure.

A node that was lost is avoided until it is ready again; one that the job has lost twice, or that was ready while it
was at fault (wrong results, errors of its hardware, a drain), for the rest of the job. ``operator_state.lost_nodes``
tells them apart. Without an entry, as after an update of the operator, a node is avoided for the rest of the job.
"""

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide.state import State

MOST_NODES: Final = 10
"""Nodes that a job avoids at a time."""
_MOST_LOSSES: Final = 20


def avoid_nodes(status: Status, nodes: Iterable[str]) -> Status:
    """Return the status that avoids more nodes for the rest of the job: they are Ready although they are at fault."""
    names = tuple(nodes)
    lost = tuple(name for name in status.operator_state.lost_nodes if name not in names)
    return replace(status, failed_nodes=_add_nodes(status.failed_nodes, names)).remember(lost_nodes=lost)


def avoid_lost_nodes(status: Status, nodes: Iterable[str]) -> Status:
    """Return the status that avoids more nodes, which were lost, until they are ready again.

    A node that is avoided already has been lost only once, or has another fault, which remains.
    """
    names = tuple(nodes)
    new = [name for name in dict.fromkeys(names) if name and name not in status.failed_nodes]
    lost = (*status.operator_state.lost_nodes, *new)[-_MOST_LOSSES:]
    return replace(status, failed_nodes=_add_nodes(status.failed_nodes, names)).remember(lost_nodes=lost)


def list_awaited_nodes(status: Status) -> tuple[str, ...]:
    """Return the avoided nodes that pods may use once they are ready again: a node is lost, and comes back, once."""
    lost = status.operator_state.lost_nodes
    return tuple(name for name in status.failed_nodes if lost.count(name) == 1)


def list_returned_nodes(status: Status) -> tuple[str, ...]:
    """Return the nodes that were lost, and that new pods may use again."""
    return tuple(name for name in status.operator_state.lost_nodes if name not in status.failed_nodes)


def readmit_returned_nodes(state: State, status: Status) -> Status:
    """Return the status that no longer avoids the lost nodes that are ready again. Nothing restarts for that.

    While a pod is on such a node, or remains of it, what follows its loss depends on the node.
    """
    occupied = {pod.node_name for pod in (*state.observation.pods, *state.observation.orphans)}
    returned = state.observation.returned_nodes.intersection(list_awaited_nodes(status)) - occupied
    if not returned:
        return status
    return replace(status, failed_nodes=tuple(name for name in status.failed_nodes if name not in returned))


def _add_nodes(failed: tuple[str, ...], nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the failed nodes with more of them, the latest last; the oldest ones are dropped above the limit."""
    kept = list(failed)
    for node in nodes:
        if node:
            kept = [*(name for name in kept if name != node), node]
    return tuple(kept[-MOST_NODES:])
