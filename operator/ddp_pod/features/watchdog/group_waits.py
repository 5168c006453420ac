"""Why ranks wait in init_process_group: from all processes of the job that have called it, and the ranks that have not.

The launchers share these through the rendezvous store; pod 0 compares them.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from ...contract.group_facts import WAITING, GroupFacts
from ...rank.groups import CONNECTING, JOINING, MEMBER

GROUP_WAIT_FILE: Final = "group-wait.json"  # this pod's ranks in a wait, which the agent shares with its peers
MOST_JOINERS = 64  # of one pod
_MOST_LISTED = 4
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[?::1\]?):")
_OF_ONE_POD = re.compile(rf"{_LOOPBACK.pattern}|file:")
_USE_ENVIRONMENT = "the launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: use them unchanged"


class Joiner(NamedTuple):
    """A process that waits for its default process group, or a rank that is the reason for such a wait.

    ``rank``: of the job; ``as_rank``, ``size``, ``store``: of its group; ``phase``: CONNECTING, JOINING, MEMBER of a
    smaller group, or empty if no process of the rank has called init_process_group; ``place``: of the call, where the
    rank is instead, or the last line of one that has ended; ``job_store``: the launcher's; ``other_host``: whether the
    store's host has another address.
    """

    rank: int
    pod: int
    phase: str = ""
    since: float = 0.0
    as_rank: int = 0
    size: int = 0
    store: str = ""
    place: str = ""
    assigned: str = ""
    from_environment: bool = False
    job_store: str = ""
    ended: bool = False
    other_host: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether it waits for another store than the job's. Names of one host may differ, but no port or address."""
        same_port = self.store.rpartition(":")[2] == self.job_store.rpartition(":")[2]
        is_own = bool(_LOOPBACK.match(self.store)) and not _LOOPBACK.match(self.job_store) and self.pod > 0
        return not same_port or is_own or self.other_host

    @property
    def is_waiting(self) -> bool:
        """Whether it is in init_process_group."""
        return self.phase in (CONNECTING, JOINING)


def decode_joiners(raw: Any) -> list[Joiner]:
    """Read the joiners of a pod; invalid ones are omitted."""
    defaults = Joiner(0, 0)
    joiners = []
    for values in raw[:MOST_JOINERS] if isinstance(raw, list) else ():
        if isinstance(values, list) and list(map(type, values)) == list(map(type, defaults)):
            joiners.append(Joiner(*values))
    return joiners


def explain_wait(joiners: Sequence[Joiner], world_size: int, *, is_local: bool) -> GroupFacts | None:
    """Return why the ranks wait; None if no rank waits. ``is_local``: whether the pods are on one machine."""
    waiting = sorted(joiner for joiner in joiners if joiner.is_waiting)
    if not waiting:
        return None
    absent = sorted(joiner for joiner in joiners if not joiner.phase)
    members = sorted(joiner for joiner in joiners if joiner.phase == MEMBER)
    is_complete = len({joiner.rank for joiner in waiting}) >= world_size
    wait = (
        _explain_other_store(waiting, is_complete=is_complete, is_local=is_local)
        or (_explain_size(waiting, world_size) if is_complete else None)
        or _explain_duplicates(waiting, world_size)
        or (_explain_smaller_group(waiting, members) if members else None)
        or (_explain_absence(waiting, absent) if absent else None)
        or _describe_wait(waiting, world_size)
    )
    return dataclasses.replace(wait, world_size=world_size, since=min(joiner.since for joiner in waiting))


def _build(cause: Joiner, message: str, remedy: str = "", *, is_mistake: bool = True) -> GroupFacts:
    return GroupFacts(WAITING, 0, message, remedy, rank=cause.rank, pod=cause.pod, is_mistake=is_mistake)


def _explain_other_store(waiting: Sequence[Joiner], *, is_complete: bool, is_local: bool) -> GroupFacts | None:
    """Explain a wait for a store that the ranks do not share, or that none of them serves."""
    has_peers = len({joiner.pod for joiner in waiting}) > 1 or not is_complete
    unshared = [joiner for joiner in waiting if has_peers and not is_local and _OF_ONE_POD.match(joiner.store)]
    unserved = [joiner for joiner in waiting if is_complete and joiner.phase == CONNECTING]
    cause = next((joiner for joiner in (*unserved, *unshared) if joiner.is_elsewhere), None)
    if cause is None:
        return None
    message = f"rank {cause.rank} waits for {cause.store}, which is not the job's store ({cause.job_store})"
    if cause.assigned:
        remedy = f"remove MASTER_ADDR and MASTER_PORT from {cause.assigned}: the launcher sets them"
    elif cause.from_environment:
        remedy = "do not set MASTER_ADDR and MASTER_PORT, in the script or a wrapper: the launcher sets them"
    else:
        remedy = f"omit init_method and store in {cause.place}: the launcher sets MASTER_ADDR and MASTER_PORT"
    wait = _build(cause, message, remedy)
    is_in_all = is_complete and all(joiner.is_elsewhere for joiner in waiting)
    # Of the ranks on this machine, which all wait, none serves it.
    is_unserved = all(joiner.phase == CONNECTING and _LOOPBACK.match(joiner.store) for joiner in waiting)
    is_final = is_in_all and is_local and is_unserved
    return dataclasses.replace(wait, rank=None, pod=None, is_final=is_final) if is_in_all else wait


def _explain_size(waiting: Sequence[Joiner], world_size: int) -> GroupFacts | None:
    """Explain a group of more ranks than can come: all ranks of the job wait for it already."""
    cause = max(waiting, key=lambda joiner: joiner.size)
    if cause.size <= len(waiting):
        return None
    message = f"the group waits for {cause.size} ranks, the job has {world_size}"
    if len(waiting) != world_size:
        message += f", and {len(waiting)} processes have joined"
    remedy = (
        f"WORLD_SIZE counts the ranks of all pods: use it unchanged as world_size, and RANK as rank, in {cause.place}"
    )
    is_final = len(waiting) == world_size  # more processes may join later, or are not listed
    # It is in all ranks.
    return dataclasses.replace(_build(cause, message, remedy), rank=None, pod=None, is_final=is_final)


def _explain_duplicates(waiting: Sequence[Joiner], world_size: int) -> GroupFacts | None:
    """Explain a rank that several processes have taken."""
    counts = Counter((joiner.store, joiner.size, joiner.as_rank) for joiner in waiting)
    doubled = [joiner for joiner in waiting if counts[joiner.store, joiner.size, joiner.as_rank] > 1]
    if not doubled:
        return None
    cause = next((joiner for joiner in doubled if joiner.as_rank != joiner.rank), doubled[-1])
    same = [joiner for joiner in doubled if joiner.as_rank == cause.as_rank]
    taken = {joiner.as_rank for joiner in waiting}
    missing = sorted(set(range(min(cause.size, len(waiting)))) - taken)
    message = f"{len(same)} processes joined as rank {cause.as_rank} (ranks {_list(joiner.rank for joiner in same)})"
    message += f", none as rank {_list(missing)}" if missing else f" of a group of {cause.size}"
    remedy = (
        "use RANK as rank, not LOCAL_RANK, and WORLD_SIZE as world_size, unchanged as the launcher sets them, in "
        f"{cause.place} or a wrapper of it"
    )
    is_final = bool(missing) and len(waiting) == world_size  # else more processes may join
    return dataclasses.replace(_build(cause, message, remedy), is_final=is_final)


def _explain_smaller_group(waiting: Sequence[Joiner], members: Sequence[Joiner]) -> GroupFacts:
    cause = members[0]
    first = waiting[0]
    message = f"rank {cause.rank} has a group of only {cause.size} ({cause.place}), rank {first.rank} waits for one of "
    message += f"{first.size} ({first.place})"
    return _build(cause, message, f"use WORLD_SIZE, MASTER_ADDR and MASTER_PORT unchanged in {cause.place}")


def _explain_absence(waiting: Sequence[Joiner], absent: Sequence[Joiner]) -> GroupFacts:
    cause = absent[0]
    first = waiting[0]
    message = f"rank {cause.rank} has not called init_process_group, in which rank {first.rank} waits ({first.place})"
    if cause.ended:
        line = f" and the last line {cause.place!r}" if cause.place else ""
        message = f"rank {cause.rank} has ended with exit code 0{line}, without calling init_process_group, "
        message += f"in which rank {first.rank} waits"
    elif cause.place:
        message += f": it is in {cause.place}"
    more = len(absent) - 1
    message += f" ({more} more rank{'s' if more > 1 else ''} neither)" if more else ""
    remedy = "call init_process_group in every rank, before work that takes long, or raise its timeout"
    return dataclasses.replace(_build(cause, message, remedy), is_final=cause.ended)


def _describe_wait(waiting: Sequence[Joiner], world_size: int) -> GroupFacts:
    """Return a wait without a known mistake: for ranks that have not reported, or for the network."""
    first = waiting[0]
    message = f"rank {first.rank} waits in init_process_group ({first.place}) for a group of {first.size}"
    message += f": {len(waiting)} of {world_size} ranks have called it" if len(waiting) < world_size else ""
    return _build(first, message, _USE_ENVIRONMENT, is_mistake=False)


def _list(numbers: Iterable[int]) -> str:
    """Return numbers separated by commas, at most four of them."""
    listed = sorted(set(numbers))
    shown = ", ".join(map(str, listed[:_MOST_LISTED]))
    return f"{shown}, …" if len(listed) > _MOST_LISTED else shown
