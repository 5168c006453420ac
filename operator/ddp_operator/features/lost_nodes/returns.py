"""The return of lost nodes: only then is it known whether one has restarted, or had no network."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status
from ddp_operator.decide.state import State

if TYPE_CHECKING:  # of the operator's process, which `ddp run` does not have
    from ddp_operator.features.lost_nodes.leases import LeaseReading

DELETED: Final = "deleted"
"""In place of a boot: the node does not exist any more."""
LONGEST_ABSENCE: Final = timedelta(minutes=15)
"""After which nobody looks for a lost node."""
_SECONDS_TO_REPORT: Final = 15.0
"""Within which the kubelet of a restarted node has renewed its Lease and reported the new boot, in any order."""


@dataclass(eq=False)
class LostPod:
    """A pod that was declared lost. ``boot``: of its node before, empty if unknown; ``back``: when the node was.

    ``is_frozen``: whether its machine accepted connections meanwhile.
    """

    node: str
    boot: str
    declared: datetime
    back: datetime | None = None
    is_frozen: bool = False


def describe_return(lost: LostPod, boot: str, lease: "LeaseReading", now: datetime) -> str:
    """Return what has become of a lost node; empty: it is not known yet. ``boot``: of the node now."""
    if boot == DELETED:
        return f"node {lost.node} was deleted"
    has_restarted = bool(boot and lost.boot) and boot != lost.boot
    if lease.age is not None and lease.age.seconds < (now - lost.declared).total_seconds():
        lost.back = lost.back or now - timedelta(seconds=lease.age.seconds)
    if has_restarted:
        return f"node {lost.node} has restarted"
    if lost.back is None or not boot or (now - lost.back).total_seconds() < _SECONDS_TO_REPORT:
        return ""
    why = "its processes had stood still" if lost.is_frozen else "it had no network, or stood still"
    return f"node {lost.node} was back at {format_time(lost.back)} without a restart: {why}"


def list_awaited_nodes(status: Status) -> tuple[str, ...]:
    """Return the avoided nodes that pods may use once they are ready again: a node is lost, and comes back, once."""
    lost = status.operator_state.lost_nodes
    return tuple(name for name in status.failed_nodes if lost.count(name) == 1)


def readmit_returned_nodes(state: State, status: Status) -> Status:
    """Return the status that no longer avoids the lost nodes that are ready again. Nothing restarts for that.

    While a pod is on such a node, or remains of it, what follows its loss depends on the node.
    """
    occupied = {pod.node_name for pod in (*state.observation.pods, *state.observation.orphans)}
    returned = state.observation.returned_nodes.intersection(list_awaited_nodes(status)) - occupied
    if not returned:
        return status
    return replace(status, failed_nodes=tuple(name for name in status.failed_nodes if name not in returned))


def record_returns(state: State, status: Status) -> Status:
    """Return the status with the nodes that are ready again, and what has become of the node of the last failure."""
    status = readmit_returned_nodes(state, status)
    failure = status.last_failure
    found = None if failure is None else state.observation.suspicions.get(failure.pod)
    if failure is None or found is None or found.message in failure.message:
        return status
    return replace(status, last_failure=replace(failure, message=f"{failure.message}; {found.message}"))
