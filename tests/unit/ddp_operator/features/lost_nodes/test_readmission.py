"""How many lost nodes are read at a time: the rounds are limited, and each node has its turn."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddp_operator.features.lost_nodes.evidence import LeaseAge
from ddp_operator.features.lost_nodes.leases import LeaseReading
from ddp_operator.features.lost_nodes.nodes import NodeReading
from ddp_operator.features.lost_nodes.readmission import MOST_READ, STABLE, Readmission
from tests.support.builders import NOW


async def test_many_nodes_are_read_in_turn_and_none_counts_after_one_reading() -> None:
    names = [f"node-{index:02}" for index in range(MOST_READ + 8)]
    read: list[str] = []
    now = NOW

    async def read_node(name: str) -> NodeReading:
        read.append(name)
        return NodeReading("boot", is_ready=True)

    async def read_lease(name: str) -> LeaseReading:
        return LeaseReading(LeaseAge(1.0, 10.0))

    def clock() -> datetime:
        return now

    readmission = Readmission(read_node, read_lease, clock)
    assert await readmission.look(names) == frozenset()
    assert sorted(read) == names[:MOST_READ]
    now += STABLE + timedelta(seconds=1)
    assert readmission.list_ready() == frozenset(), "a node that nobody has looked at since is not known to be ready"
    returned = await readmission.look(names)
    assert sorted(read[MOST_READ:]) == sorted(names[MOST_READ:] + names[: MOST_READ - 8])
    assert returned == readmission.list_ready() == set(names[: MOST_READ - 8])
    assert await readmission.look([]) == frozenset()
    assert readmission.list_ready() == frozenset()
