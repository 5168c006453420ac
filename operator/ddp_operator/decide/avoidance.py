"""Which nodes new pods of a job avoid: ``status.failed_nodes``, and which lost ones may be used again. Pure.

A node that was lost is avoided until it is ready again; one that the job has lost twice, or that was ready while it
was at fault (wrong results, errors of its hardware, a drain), for the rest of the job. ``operator_state.lost_nodes``
tells them apart. Without an entry, as after an update of the operator, a node is avoided for the rest of the job.
"""

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Status

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


def list_returned_nodes(status: Status) -> tuple[str, ...]:
    """Return the nodes that were lost, and that new pods may use again."""
    return tuple(name for name in status.operator_state.lost_nodes if name not in status.failed_nodes)


def _add_nodes(failed: tuple[str, ...], nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the failed nodes with more of them, the latest last; the oldest ones are dropped above the limit."""
    kept = list(failed)
    for node in nodes:
        if node:
            kept = [*(name for name in kept if name != node), node]
    return tuple(kept[-MOST_NODES:])
