"""The step from which a group of ranks continues, and its transfers: pure functions of the copies of all ranks.

A rank holds copies of the state of all ranks (of replicated state, by the first rank of each pod), its own shard, and
the shard of a rank of the previous pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .copies import REPLICATED, Header


class Held(NamedTuple):
    """A copy that a rank holds. ``origin``: the rank whose state it is; ``world``: the number of ranks then."""

    kind: int
    step: int
    origin: int
    world: int
    size: int

    @classmethod
    def from_header(cls, header: Header) -> Held:
        """Describe a copy."""
        return cls(header.kind, header.step, header.rank, header.world, header.size)


class Member(NamedTuple):
    """A rank and its copies. ``pod``: the index of its pod. ``at_least``: the oldest step that helps it."""

    rank: int
    pod: int
    local_rank: int
    at_least: int
    held: tuple[Held, ...]


class Transfer(NamedTuple):
    """A copy of step ``step`` of ``origin`` that one rank sends to another."""

    source: int
    target: int
    origin: int
    size: int


def choose_step(members: Sequence[Member], kind: int) -> int | None:
    """Return the newest step of which a complete copy exists; None if no copy helps any rank."""
    if kind == REPLICATED:
        steps = {held.step for member in members for held in member.held if held.kind == kind}
    else:
        world = len(members)
        holders: dict[int, set[int]] = {}
        for member in members:
            for held in member.held:
                if held.kind == kind and held.world == world:
                    holders.setdefault(held.step, set()).add(held.origin)
        steps = {step for step, origins in holders.items() if len(origins) == world}
    at_least = max(member.at_least for member in members)
    return max((step for step in steps if step >= at_least), default=None)


def find_changed_size(members: Sequence[Member], kind: int) -> int | None:
    """Return the number of ranks for which the copies were made, if it differs from the present one."""
    if kind == REPLICATED:
        return None
    sizes = [held.world for member in members for held in member.held if held.kind == kind]
    return next((size for size in sizes if size != len(members)), None)


def plan_transfers(members: Sequence[Member], kind: int, step: int) -> list[Transfer]:
    """Return the transfers of the copies of a step, in an order in which a chain of sends cannot block.

    Of replicated state the first rank of each pod needs a copy: the number of holders doubles in each round. Of
    sharded state each rank needs its own shard.
    """
    if kind == REPLICATED:
        return _plan_replicated(members, step)
    transfers = []
    for member in members:
        if _find_held(member, kind, step, member.rank) is not None:
            continue
        for peer in members:
            held = _find_held(peer, kind, step, member.rank)
            if held is not None:
                transfers.append(Transfer(peer.rank, member.rank, member.rank, held.size))
                break
    return transfers


def _plan_replicated(members: Sequence[Member], step: int) -> list[Transfer]:
    holders = []
    needing = []
    size = 0
    for member in members:
        if member.local_rank != 0:
            continue
        held = _find_held(member, REPLICATED, step, None)
        if held is None:
            needing.append(member.rank)
        else:
            holders.append(member.rank)
            size = held.size
    transfers = []
    while needing and holders:
        batch = needing[: len(holders)]
        needing = needing[len(batch) :]
        sources = holders[: len(batch)]
        transfers += [Transfer(sources[index], target, -1, size) for index, target in enumerate(batch)]
        holders = holders + batch
    return transfers


def _find_held(member: Member, kind: int, step: int, origin: int | None) -> Held | None:
    for held in member.held:
        if held.kind == kind and held.step == step and origin in (None, held.origin):
            return held
    return None


class RingNeighbours(NamedTuple):
    """With whom a rank exchanges shards. ``target``: keeps this rank's shard; ``source``: whose shard it keeps.

    ``position``: this rank's place in its ring of ``length`` ranks.
    """

    target: int
    source: int
    position: int
    length: int


def find_ring(members: Sequence[Member], rank: int) -> RingNeighbours | None:
    """Return the ranks with the same local rank in the next and in the previous pod; None in a single pod."""
    own = members[rank]
    column = sorted(member.rank for member in members if member.local_rank == own.local_rank)
    if len(column) < 2 or len({members[peer].pod for peer in column}) < len(column):
        return None
    index = column.index(rank)
    return RingNeighbours(column[(index + 1) % len(column)], column[index - 1], index, len(column))
