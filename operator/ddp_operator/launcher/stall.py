"""A stall as one pod sees it, and what all pods of the job make of it together."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, Sequence

from .contract import METRIC_STALLED, METRIC_STALLED_RANK, STALLED_STATES
from .files import read_json
from .rendezvous_store import query_store

WHAT_LIMIT = 200
_STALLED_RANKS_SHOWN = 8
_SECONDS_FOR_ROOT_CAUSE = 15.0  # two seconds of waiting for a page and five for stacks, twice at worst


class StallBoard:
    """What the pods of a job know of a stall, in the store of their round: how many have seen what, and one root cause.

    The launcher leaves its own report in a file; see ``StallReport``. Without a stall the store is not queried.
    """

    _KEY = "ddp/stall/"

    def __init__(self, path: str, every: float) -> None:
        self._path, self._every = path, every
        self._last = -math.inf
        self._store: Any = None
        self._posted: dict[str, Any] = {}
        self._pending: list[bool] = []  # a store that does not respond gets no second query

    def exchange(self, store: Any, pods: int, now: float) -> dict[str, Any] | None:
        """Post this pod's report and return the board; None where there is nothing to post, or no response."""
        if now - self._last < self._every:
            return None
        self._last = now
        mine = read_json(self._path)
        if store is not self._store:
            self._store, self._posted, self._pending = store, {}, []
        if store is None or self._pending or not (mine or self._posted):
            return None
        pending = self._pending

        def exchange() -> dict[str, Any]:
            pending.append(True)
            board = self._post(store, mine)
            pending.clear()
            return board

        found = query_store(exchange)
        return {**found[0], "pods": pods} if found else None

    def _post(self, store: Any, mine: dict[str, Any]) -> dict[str, Any]:
        board: dict[str, Any] = {}
        for name in ("known", "stuck", "idle"):
            before, wanted = bool(self._posted.get(name)), bool(mine.get(name))
            board[name] = int(store.add(self._KEY + name, wanted - before))
            self._posted = {**self._posted, name: wanted}
        key, own = f"{self._KEY}cause", mine.get("cause")
        found = json.loads(store.get(key)) if store.check([key]) else None
        if own != found and found in (None, self._posted.get("cause")):
            store.set(key, json.dumps(own))
            found = own
        self._posted = {**self._posted, "cause": own} if mine else {}
        return {**board, "cause": found}


class Stall(NamedTuple):
    """A budget that is used up, since ``since``.

    ``certain``: heartbeats were promised and do not come. Otherwise it is inferred from outside: ``known`` tells
    whether steps have shown in the log, ``idle`` which local ranks have used no CPU for the watchdog's time.
    """

    since: float
    message: str
    certain: bool = True
    known: bool = True
    idle: frozenset[int] = frozenset()


class StalledRank(NamedTuple):
    """What a rank of a stalled pod does. ``state`` is one of STALLED_STATES; the first two keep the others waiting."""

    rank: int
    local_rank: int
    state: str
    what: str

    @property
    def behind(self) -> bool:
        """Whether the other ranks wait for it."""
        return self.state in ("Stopped", "Behind")


class StallReport(NamedTuple):
    """What one pod posts for the others. ``known``: steps were made and have stopped. ``stuck``: no rank of the pod
    computes. ``idle``: none of them uses the CPU. ``cause``: a rank here that keeps the others waiting."""

    known: bool
    stuck: bool
    idle: bool
    cause: dict[str, Any] | None


def report_stall(stall: Stall, ranks: Sequence[StalledRank]) -> StallReport:
    """Return a pod's report on its own stall."""
    busy = any(one.state == "Busy" for one in ranks)
    idle = all(one.local_rank in stall.idle or one.state == "Stopped" for one in ranks)
    cause = None if busy else next((one._asdict() for one in ranks if one.behind), None)
    return StallReport(stall.known, not busy, idle, cause)


def read_board(board: dict[str, Any]) -> dict[str, Any]:
    """Return the board without a cause that is none: every rank can write into the store."""
    cause = board.get("cause")
    valid = isinstance(cause, dict) and set(cause) == set(StalledRank._fields) and cause["state"] in STALLED_STATES
    return {**board, "cause": cause if valid else None}


def should_kill_workers(mine: StallReport, board: dict[str, Any], *, certain: bool) -> bool:
    """Tell whether this pod is to end its workers, by what all pods have found; ``board`` is empty where it is unknown.

    A rank that does not come ends its own pod, so that the job's failure names it. A stall that is not certain counts
    only where steps were seen by some pod, and no rank of any pod computes: else a long validation would be ended.
    """
    if certain and mine.cause:
        return True
    if not (mine.stuck and are_all_stuck(board)):
        return False
    return bool(mine.cause) or (not board.get("cause") and (certain or board["idle"] >= board["pods"]))


def are_all_stuck(board: dict[str, Any]) -> bool:
    """Tell whether no rank of any pod computes, where some pod has seen steps."""
    return bool(board.get("known")) and board["stuck"] >= board["pods"]


def stall_grace_seconds(nodes: int, interval: float, *, has_cause: bool) -> float:
    """Return how many seconds a stall is tolerated after it was found; ``interval``: seconds between two checks.

    The other pods shall see it too, and show their stacks, before this one's end ends the wait there. Where all ranks
    of this pod wait for another pod's, that one knows more and goes first, however small the budget is: it needs its
    next check, which a rank that does not respond holds up, the stacks, and the two checks for which it tolerates it.
    """
    if nodes == 1:
        return 0.0
    return 2 * interval + (0.0 if has_cause else 3 * interval + _SECONDS_FOR_ROOT_CAUSE)


def build_stall_rows(stall: Stall, ranks: Sequence[StalledRank], now: float) -> list[str]:
    """Return a stall's series; none of one that may as well be a rank that computes while others wait for it."""
    report = report_stall(stall, ranks)
    if not (report.known or (report.stuck and (report.idle or report.cause))):
        return []
    rows = [f"# HELP {METRIC_STALLED} For how long this pod's ranks have made no step; only while they make none."]
    rows += [f"# TYPE {METRIC_STALLED} gauge", f"{METRIC_STALLED} {max(0.0, now - stall.since):.3f}"]
    rows.append(f"# HELP {METRIC_STALLED_RANK} What a rank of a stalled pod does; those that are waited for first.")
    rows.append(f"# TYPE {METRIC_STALLED_RANK} gauge")
    for one in sorted(ranks, key=lambda one: (STALLED_STATES.index(one.state), one.rank))[:_STALLED_RANKS_SHOWN]:
        what = one.what.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        rows.append(f'{METRIC_STALLED_RANK}{{rank="{one.rank}",state="{one.state}",what="{what}"}} 1')
    return rows
