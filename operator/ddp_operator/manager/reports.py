"""What the process reports of written statuses: metrics, a log line for each ended job, and nodes that fail several."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec

from ddp_operator.api.cluster import Event, Object
from ddp_operator.api.faults import contain
from ddp_operator.api.status import Status
from ddp_operator.decide.transitions import Ended, NodeFailed, Transition, describe_end, find_transitions

_ended_logger = logging.getLogger("ddp_operator.ended")

REPORT_PERIOD = timedelta(days=1)
MAX_REPORTED_NODES = 1024
# Remembered namespaces of one node.
MAX_NAMESPACES = 8


class _Line(dict[str, object]):
    """A log message with fields: a formatter for JSON writes the members, all others this text."""

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


class StatusReports:
    """Follows the written statuses of all jobs. ``on_transition``: takes the namespace and the transition."""

    def __init__(self, on_transition: Callable[[str, Transition], None]) -> None:
        self._on_transition = on_transition
        self._node_reports = NodeReports()

    def follow(self, resource: Object, old: Status, new: Status, now: datetime) -> list[tuple[Object, Event]]:
        """Count the transitions of a written status, and log the end of a job. Returns Events about nodes."""
        metadata = resource["metadata"]
        namespace = str(metadata["namespace"])
        transitions: tuple[Transition, ...] = ()
        with contain("transitions", f"{namespace}/{metadata['name']}"):
            transitions = find_transitions(old, new, now)
        for transition in transitions:
            with contain("metrics", f"{namespace}/{metadata['name']}"):
                self._on_transition(namespace, transition)
                if isinstance(transition, Ended):
                    _ended_logger.info(_Line(describe_end(metadata, old, new)))
        failed = [transition.node for transition in transitions if isinstance(transition, NodeFailed)]
        return [_build_event(node) for node in failed if self._node_reports.add(node, namespace, now)]


def _build_event(node: str) -> tuple[Object, Event]:
    """Return the Event about a node that jobs of two namespaces reported within a day."""
    text = (
        "jobs with GPUs in two namespaces failed on this node within a day, as reported by pods; "
        "verify its GPUs before you cordon it"
    )
    # `kubectl describe node` finds Events whose UID is the name of the node, like those of the kubelet.
    about = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "uid": node}}
    return about, Event("Warning", "FailsTrainingJobs", text)


class NodeReports:
    """The namespaces whose jobs reported a node as the cause of a failure within a day.

    Users control these reports, so they are bounded. A restart of the operator may lose them.
    """

    def __init__(self) -> None:
        self._namespaces: OrderedDict[str, dict[str, datetime]] = OrderedDict()
        """Time of the last report by node and namespace; the most recently reported node is last."""

    def __len__(self) -> int:
        """Return the number of remembered nodes."""
        return len(self._namespaces)

    def add(self, node: str, namespace: str, now: datetime) -> bool:
        """Add a report. Returns whether its namespace is the second one that reported this node."""
        self._drop_expired(now)
        reports = self._namespaces.pop(node, {})
        recent = {name: time for name, time in reports.items() if abs(now - time) < REPORT_PERIOD}
        is_second = len(recent) == 1 and namespace not in recent
        if namespace in recent or len(recent) < MAX_NAMESPACES:
            recent[namespace] = now
        self._namespaces[node] = recent
        while len(self._namespaces) > MAX_REPORTED_NODES:
            self._namespaces.popitem(last=False)
        return is_second

    def _drop_expired(self, now: datetime) -> None:
        """Drop nodes without a report within a day. A clock that was set back expires reports too."""
        while self._namespaces:
            node, namespaces = next(iter(self._namespaces.items()))
            if any(abs(now - time) < REPORT_PERIOD for time in namespaces.values()):
                return
            del self._namespaces[node]
