"""Nodes that jobs report as the cause of their failures. Pods and specs of jobs can report anything."""

from collections import OrderedDict
from datetime import datetime, timedelta
from typing import Final

PERIOD: Final = timedelta(days=1)
MAX_NODES: Final = 1024
MAX_NAMESPACES: Final = 8
"""Of one node; two are enough."""


class NodeReports:
    """Remembers which namespaces have reported a node within a day; a restart of the operator may forget it."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[str, dict[str, datetime]] = OrderedDict()
        """By node, the node that was reported last at the end."""

    def __len__(self) -> int:
        """Return the number of remembered nodes."""
        return len(self._namespaces)

    def add(self, node: str, namespace: str, now: datetime) -> bool:
        """Take in a report. Returns whether it makes jobs of a second namespace report this node."""
        self._forget_old(now)
        known = self._namespaces.pop(node, {})
        recent = {name: time for name, time in known.items() if abs(now - time) < PERIOD}
        second = len(recent) == 1 and namespace not in recent
        if namespace in recent or len(recent) < MAX_NAMESPACES:
            recent[namespace] = now
        self._namespaces[node] = recent
        while len(self._namespaces) > MAX_NODES:
            self._namespaces.popitem(last=False)
        return second

    def _forget_old(self, now: datetime) -> None:
        """Forget the nodes that nobody has reported within a day; a clock that was set back ends it too."""
        while self._namespaces:
            node, namespaces = next(iter(self._namespaces.items()))
            if any(abs(now - time) < PERIOD for time in namespaces.values()):
                return
            del self._namespaces[node]
