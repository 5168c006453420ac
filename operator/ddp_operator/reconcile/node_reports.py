"""Nodes that jobs report as the cause of failures. Users control these reports, so they are bounded."""

from collections import OrderedDict
from datetime import datetime, timedelta
from typing import Final

PERIOD: Final = timedelta(days=1)
MAX_NODES: Final = 1024
MAX_NAMESPACES: Final = 8
"""Remembered namespaces of one node."""


class NodeReports:
    """The namespaces that reported a node within a day. A restart of the operator may lose them."""

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
        recent = {name: time for name, time in reports.items() if abs(now - time) < PERIOD}
        is_second = len(recent) == 1 and namespace not in recent
        if namespace in recent or len(recent) < MAX_NAMESPACES:
            recent[namespace] = now
        self._namespaces[node] = recent
        while len(self._namespaces) > MAX_NODES:
            self._namespaces.popitem(last=False)
        return is_second

    def _drop_expired(self, now: datetime) -> None:
        """Drop nodes without a report within a day. A clock that was set back expires reports too."""
        while self._namespaces:
            node, namespaces = next(iter(self._namespaces.items()))
            if any(abs(now - time) < PERIOD for time in namespaces.values()):
                return
            del self._namespaces[node]
