"""When a lost node may be used again: it is Ready, and its kubelet has renewed its Lease, for a while.

``Ready`` alone proves nothing: it stays True for 40 s after the last sign of life of a kubelet. Each node is read once
for all jobs that avoid it, a limited number at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from ddp_operator.features.lost_nodes.leases import LeaseReading
from ddp_operator.features.lost_nodes.nodes import NodeReading

STABLE: Final = timedelta(seconds=60)
"""For how long all readings of a node must have been good."""
MOST_READ: Final = 32
"""Nodes that are read at a time."""

ReadLease = Callable[[str], Awaitable[LeaseReading]]
ReadNode = Callable[[str], Awaitable[NodeReading]]


class _Good(NamedTuple):
    """The first and the last reading of a node, between which none was bad."""

    first: datetime
    last: datetime


@dataclass(eq=False)
class Readmission:
    """The lost nodes that jobs wait for."""

    read_node: ReadNode
    read_lease: ReadLease
    clock: Callable[[], datetime]
    _good: dict[str, _Good] = field(default_factory=dict)
    _turn: int = 0

    async def look(self, awaited: Collection[str]) -> frozenset[str]:
        """Read some of the awaited nodes, all in turn. Returns those that have become ready by this."""
        before = self.list_ready()
        names = sorted(awaited)
        self._good = {name: good for name, good in self._good.items() if name in awaited}
        start = self._turn % max(1, len(names))
        self._turn = start + MOST_READ
        await asyncio.gather(*map(self._read, (names[start:] + names[:start])[:MOST_READ]))
        return self.list_ready() - before

    def list_ready(self) -> frozenset[str]:
        """Return the nodes that may be used again."""
        return frozenset(name for name, good in self._good.items() if good.last - good.first >= STABLE)

    def forget(self, node: str) -> None:
        """Note that a node is lost now, whatever was read before."""
        self._good.pop(node, None)

    async def _read(self, name: str) -> None:
        node, lease = await asyncio.gather(self.read_node(name), self.read_lease(name))
        now = self.clock()
        if node.is_ready and lease.age is not None and not lease.age.is_late:
            former = self._good.get(name)
            self._good[name] = _Good(former.first if former is not None else now, now)
        else:
            self.forget(name)
