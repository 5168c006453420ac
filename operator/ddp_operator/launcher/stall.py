"""Whether this pod's ranks make progress, by pages, log or CPU, and what all pods of the job make of a stall."""

import json
import math
import re
from typing import Any, NamedTuple, Optional, Sequence

from .contract import (
    METRIC_HEARTBEATS,
    METRIC_SAVING,
    METRIC_STALLED,
    METRIC_STALLED_RANK,
    METRIC_STEPS,
    STALLED_STATES,
)
from .files import read_json
from .metrics import is_number
from .pod import WatchdogConfig
from .rendezvous import query_store

WHAT_LIMIT = 200
_STALLED_RANKS_SHOWN = 8
_SECONDS_FOR_ROOT_CAUSE = 15.0  # two seconds of waiting for a page and five for stacks, twice at worst
_BEATS = re.compile(rf"^({METRIC_STEPS}|{METRIC_HEARTBEATS}|{METRIC_SAVING})(?:\{{[^\n]*\}})?[ \t]+(\S+)", re.MULTILINE)
_PAUSES_KNOWN = 3  # with fewer between lines of a log, nothing is known of the next one
_LONGER_PAUSE = 4.0
_IDLE_SHARE = 0.01  # of a CPU for each worker: below it nothing is computed


class SharedStallState:
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

    def exchange(self, store: Any, pods: int, now: float) -> Optional[dict[str, Any]]:
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


class RankStall(NamedTuple):
    """A budget that is used up, since ``since``.

    ``certain``: heartbeats were promised and do not come. Otherwise it is inferred from outside: ``known`` tells
    whether steps have shown in the log, ``idle`` which local ranks have used no CPU for the watchdog's time.
    """

    since: float
    message: str
    certain: bool = True
    known: bool = True
    idle: frozenset[int] = frozenset()


class RankActivity(NamedTuple):
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
    cause: Optional[dict[str, Any]]


def report_stall(stall: RankStall, ranks: Sequence[RankActivity]) -> StallReport:
    """Return a pod's report on its own stall."""
    busy = any(one.state == "Busy" for one in ranks)
    idle = all(one.local_rank in stall.idle or one.state == "Stopped" for one in ranks)
    cause = None if busy else next((one._asdict() for one in ranks if one.behind), None)
    return StallReport(stall.known, not busy, idle, cause)


def read_board(board: dict[str, Any]) -> dict[str, Any]:
    """Return the board without a cause that is none: every rank can write into the store."""
    cause = board.get("cause")
    valid = isinstance(cause, dict) and set(cause) == set(RankActivity._fields) and cause["state"] in STALLED_STATES
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


def build_stall_rows(stall: RankStall, ranks: Sequence[RankActivity], now: float) -> list[str]:
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


class _RankState:
    """What was last seen of a rank's process."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid, self.since, self.counts = pid, now, (0.0, 0.0)
        self.begun = self.saving = False


class HeartbeatWatchdog:
    """Whether this pod's ranks make progress. Times are arguments, in seconds of any one clock.

    A heartbeat is a change of a rank's counters of steps and heartbeats. The ranks of one job step together, so the pod
    is stalled when none of its ranks has had one within the budget of its phase. ``known`` is false as long as no rank
    has shown such counters: then nothing is known.
    """

    def __init__(self, plan: WatchdogConfig) -> None:
        self.known = False
        self._plan = plan
        self._ranks: dict[int, _RankState] = {}

    def observe(self, pids: dict[int, int], pages: dict[int, str], now: float) -> None:
        """Take in which local ranks run (their process ids) and their pages."""
        for rank in set(self._ranks) - set(pids):
            del self._ranks[rank]
        for rank, pid in pids.items():
            state = self._ranks.get(rank)
            if state is None or state.pid != pid:
                state = self._ranks[rank] = _RankState(pid, now)
            found = {name: float(text) for name, text in _BEATS.findall(pages.get(rank, "")) if is_number(text)}
            if not found:
                continue
            self.known = True
            counts = (found.get(METRIC_STEPS, 0.0), found.get(METRIC_HEARTBEATS, 0.0))
            saving = found.get(METRIC_SAVING, 0.0) > 0
            if counts != state.counts or saving != state.saving:
                state.since, state.counts, state.saving = now, counts, saving
                state.begun = state.begun or any(counts)

    def age(self, now: float) -> Optional[float]:
        """Return the time since the last heartbeat of any rank, or since the workers' start; None where none runs."""
        return now - max(state.since for state in self._ranks.values()) if self._ranks and self.known else None

    def find_stall(self, now: float) -> Optional[RankStall]:
        """Return the stall, if there is one now."""
        age, states = self.age(now), self._ranks.values()
        if age is None:
            return None
        if not any(state.begun for state in states):
            what, field, budget = "no step since the start", "startSeconds", self._plan.start_seconds
        elif any(state.saving for state in states):
            what, field, budget = "the checkpoint is not done", "checkpointSeconds", self._plan.checkpoint_seconds
        else:
            what, field, budget = "no step", "stallSeconds", self._plan.stall_seconds
        if age < budget:
            return None
        return RankStall(now - age, f"{what} for {age:.0f} s (spec.watchdog.{field} is {budget:g})")


class LogSteps:
    """When a step last showed in the log of a script that reports none itself.

    No script promises a line every so many seconds, so a silence only counts where it is both longer than the
    watchdog's time and much longer than any before it; and even then it is only reported.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._since: Optional[float] = None
        self._checked: Optional[float] = None
        self._pauses = 0.0
        self._longest = 0.0

    def observe(self, steps: dict[int, float], now: float) -> None:
        """Take in how many steps each rank's log has shown so far; none where no worker runs."""
        if not steps:
            self._since = None
        elif steps != self._steps:
            made = sum(steps.values()) - sum(self._steps.values())
            if self._since is not None:
                self._pauses, self._longest = self._pauses + max(1.0, made), max(self._longest, now - self._since)
            elif self._checked is not None and made > 1:  # all of them since the last check
                self._pauses, self._longest = self._pauses + made - 1, max(self._longest, now - self._checked)
            self._since = now
        self._steps, self._checked = steps, now

    def age(self, now: float) -> float:
        """Return the time since a step has shown; infinite where none has."""
        return math.inf if self._since is None else now - self._since

    def silence(self, stall: float, now: float) -> Optional[float]:
        """Return for how long no step has shown, where that is too long; ``stall`` is the watchdog's time."""
        if self._since is None or self._pauses < _PAUSES_KNOWN:
            return None
        age = now - self._since
        return age if age >= max(stall, _LONGER_PAUSE * self._longest) else None


class Idleness:
    """How long each worker has used next to no CPU: all there is to see of a script that reports nothing."""

    def __init__(self) -> None:
        self._workers: dict[int, tuple[float, float, float]] = {}  # since, time of the last check, CPU seconds then

    def observe(self, cpu: dict[int, float], now: float) -> dict[int, float]:
        """Take in the CPU seconds of each worker so far. Returns for how long each has been idle."""
        for rank in set(self._workers) - set(cpu):
            del self._workers[rank]
        for rank, seconds in cpu.items():
            since, last, before = self._workers.get(rank, (now, now, seconds))
            busy = abs(seconds - before) > _IDLE_SHARE * (now - last)
            self._workers[rank] = (now if busy else since, now, seconds)
        return {rank: now - since for rank, (since, _, _) in self._workers.items()}


def count_steps(page: str) -> Optional[float]:
    """Return the first count of steps or heartbeats on a rank's page."""
    found = _BEATS.search(page)
    return float(found[2]) if found and is_number(found[2]) else None
