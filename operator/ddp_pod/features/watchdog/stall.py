"""Whether this pod's ranks make progress, by heartbeats, steps or CPU, and the pods' joint decision on a stall."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...contract.names import STALLED_STATES
from ...contract.plan import WatchdogConfig
from ...contract.progress import RankProgress
from ...contract.records import choice, items, number, text
from ...contract.run_report import Stall, StalledRank
from .collectives import COLLECTIVE_LIMIT

FEATURE: Final = "watchdog"
STALL_REPORT_FILE: Final = "stall.json"  # the report on this pod, which the agent shares with its peers
ACTIVITY_LIMIT = 320  # characters
PLACE_LIMIT = 100
STALLED_RANKS_SHOWN = 8
_SECONDS_FOR_ROOT_CAUSE = 15.0  # two seconds of waiting for a page and five for stacks, twice at worst
MOST_WAITS = 4  # different collectives of a job's ranks that its pods share
_PAUSES_NEEDED = 3  # between steps, before the length of the next one can be judged
_PAUSE_FACTOR = 4.0  # by which a silence is longer than any pause before it
_IDLE_SHARE = 0.01  # of a CPU for each worker, below which it computes nothing


class RankStall(NamedTuple):
    """A stall: this pod's ranks have made no progress since ``since``, for longer than a budget.

    ``certain``: the ranks had sent heartbeats, which stopped. Otherwise the stall is inferred: ``known`` is whether
    the ranks have made steps, ``idle`` has the local ranks without CPU use for the watchdog's time.
    """

    since: float
    message: str
    certain: bool = True
    known: bool = True
    idle: frozenset[int] = frozenset()

    @property
    def evidence(self) -> tuple[bool, bool, frozenset[int]]:
        """The values that distinguish this stall from a later one, except its duration."""
        return self.certain, self.known, self.idle


@dataclass(frozen=True)
class RankActivity:
    """The activity of a rank of a stalled pod. ``state``: one of STALLED_STATES; ``what``: its description.

    A rank in the state ``IO`` sleeps, or waits for a socket, a file, a process or another thread.
    """

    rank: int = 0
    local_rank: int = 0
    state: str = choice(STALLED_STATES)
    what: str = text(ACTIVITY_LIMIT)

    @property
    def behind(self) -> bool:
        """Whether its peers wait for it."""
        return self.state in ("Stopped", "Behind", "IO")

    @property
    def hangs(self) -> bool:
        """Whether it is also the reason to kill its pod's workers."""
        return self.behind and self.state != "IO"


@dataclass(frozen=True)
class RankWait:
    """A rank, and the collective in which it waits: its operation, number, group and shape as text.

    ``place``: the line of the script that calls it; ``ranks``: how many ranks wait in the same one.
    """

    rank: int = 0
    collective: str = text(COLLECTIVE_LIMIT)
    place: str = text(PLACE_LIMIT)
    ranks: int = number(default=1)


@dataclass(frozen=True)
class StallReport:
    """The report of one pod to its peers; empty for a stall without evidence, or one that is over.

    ``known``: steps were made and have stopped. ``stuck``: no rank of the pod computes or is in I/O. ``idle``: no rank
    uses the CPU. ``cause``: a rank of the pod for which its peers wait. ``waits``: of the pod's ranks, one for each
    different collective. ``awaited``: what a rank does for which its peers may wait, in a pause that is no stall yet.
    """

    known: bool = False
    stuck: bool = False
    idle: bool = False
    cause: RankActivity | None = None
    waits: tuple[RankWait, ...] = items(MOST_WAITS)
    awaited: str = text(ACTIVITY_LIMIT)


@dataclass(frozen=True)
class JobStall:
    """The reports of all pods: how many know steps, are stuck and are idle, of how many, and one root cause.

    ``waits``: one rank for each different collective, at most MOST_WAITS; ``awaited``: as in the first of the reports.
    """

    known: int = 0
    stuck: int = 0
    idle: int = 0
    pods: int = 0
    cause: RankActivity | None = None
    waits: tuple[RankWait, ...] = items(MOST_WAITS)
    awaited: str = text(ACTIVITY_LIMIT)

    @property
    def is_stuck(self) -> bool:
        """Whether no rank of any pod computes, and some pod has seen steps."""
        return self.known > 0 and self.stuck >= self.pods

    @property
    def has_mismatch(self) -> bool:
        """Whether all ranks wait for each other, in different collectives."""
        return self.pods > 0 and self.stuck >= self.pods and self.cause is None and len(self.waits) > 1

    def is_odd(self, wait: RankWait) -> bool:
        """Return whether a rank's collective is that of the fewest ranks; of two equal sides, that of the lowest rank.

        Most ranks are where all belong, and what only some ranks do is usually left to rank 0.
        """
        return bool(self.waits) and min(self.waits, key=_order_waits).collective == wait.collective


def combine_reports(reports: Sequence[StallReport], pods: int) -> JobStall:
    """Return the reports of a job with ``pods`` pods as one."""
    causes = [report.cause for report in reports if report.cause is not None and report.cause.state]
    return JobStall(
        known=sum(report.known for report in reports),
        stuck=sum(report.stuck for report in reports),
        idle=sum(report.idle for report in reports),
        pods=pods,
        cause=min(causes, key=lambda cause: not cause.hangs, default=None),
        waits=group_waits([wait for report in reports for wait in report.waits]),
        awaited=next((report.awaited for report in reports if report.awaited), ""),
    )


def sum_up_pod(report: StallReport) -> JobStall:
    """Return the reports of a job with one pod, without a remote root cause."""
    return JobStall(int(report.known), int(report.stuck), int(report.idle), 1, None, report.waits)


def group_waits(waits: Sequence[RankWait]) -> tuple[RankWait, ...]:
    """Return one wait for each different collective, the one of the fewest ranks first: at most MOST_WAITS."""
    groups: dict[str, RankWait] = {}
    for wait in waits:
        first = groups.get(wait.collective)
        if first is None and wait.collective:
            groups[wait.collective] = wait
        elif first is not None:
            groups[wait.collective] = replace(min(first, wait, key=_find_rank), ranks=first.ranks + wait.ranks)
    return tuple(sorted(groups.values(), key=_order_waits)[:MOST_WAITS])


def _find_rank(wait: RankWait) -> int:
    return wait.rank


def _order_waits(wait: RankWait) -> tuple[int, int]:
    return wait.ranks, wait.rank


def describe_waits(waits: Sequence[RankWait]) -> str:
    """Return which rank waits in which collective: one rank for each different collective."""
    texts = []
    for wait in group_waits(waits):
        place = f" at {wait.place}" if wait.place else ""
        texts.append(f"rank {wait.rank} waits{place} in {wait.collective}")
    return "; ".join(texts)


def report_stall(stall: RankStall, ranks: Sequence[RankActivity], waits: Sequence[RankWait] = ()) -> StallReport:
    """Return a pod's report on its own stall. ``waits``: of its ranks."""
    busy = any(rank.state in ("Busy", "IO") for rank in ranks)
    idle = all(rank.local_rank in stall.idle or rank.state == "Stopped" for rank in ranks)
    behind = [rank for rank in ranks if rank.behind and rank.hangs is not busy]
    cause = behind[0] if behind else None
    return StallReport(stall.known, not busy, idle, cause, group_waits(waits))


def should_kill_workers(report: StallReport, job_stall: JobStall | None, *, certain: bool) -> bool:
    """Return whether this pod must kill its workers. ``job_stall``: None if the other pods' reports are unknown.

    A rank for which its peers wait ends its own pod, so that the job's failure names it. An uncertain stall counts only
    if some pod has seen steps and no rank of any pod computes: it may be a long validation.
    """
    if certain and report.cause and report.cause.hangs:
        return True
    if not report.stuck or job_stall is None or not job_stall.is_stuck:
        return False
    if report.cause:
        return True
    return not job_stall.cause and (certain or job_stall.idle >= job_stall.pods)


def stall_grace_seconds(nodes: int, interval: float, *, has_cause: bool) -> float:
    """Return how long a stall is tolerated after its detection. ``interval``: seconds between two checks.

    The other pods need time to detect it too and to log their stacks, before this pod's end interrupts the wait there.
    A pod whose ranks all wait for another pod's tolerates it longer, so that the pod with the root cause ends first.
    That one needs its next check, which a rank without response delays, the stacks, and two more checks.
    """
    if nodes == 1:
        return 0.0
    return 2 * interval + (0.0 if has_cause else 3 * interval + _SECONDS_FOR_ROOT_CAUSE)


def describe_stall(stall: RankStall, ranks: Sequence[RankActivity], now: float) -> Stall:
    """Return what a pod reports about a stall; nothing if a rank may just compute while its peers wait."""
    report = report_stall(stall, ranks)
    if not (report.known or report.cause or (report.stuck and report.idle)):
        return Stall()
    ordered = sorted(ranks, key=lambda rank: (STALLED_STATES.index(rank.state), rank.rank))
    shown = tuple(StalledRank(rank.rank, rank.state, rank.what) for rank in ordered[:STALLED_RANKS_SHOWN])
    return Stall(seconds=max(0.0, now - stall.since), ranks=shown)


class _RankBeats:
    """The last counters of a rank's process, and the time of their last change."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.since = now
        self.counts = (0.0, 0.0)
        self.begun = False
        self.saving = False

    def update(self, counts: tuple[float, float], saving: bool, now: float) -> None:
        """Record the counters of a rank."""
        if counts == self.counts and saving == self.saving:
            return
        self.since = now
        self.counts = counts
        self.saving = saving
        self.begun = self.begun or any(counts)


class HeartbeatWatchdog:
    """Detect missing heartbeats of this pod's ranks. Times are arguments, in seconds of any one clock.

    A heartbeat is a change of a rank's counters of steps and heartbeats. The ranks of one job step together, so the pod
    is stalled when none of its ranks had one within the budget of its phase. ``known``: whether a rank has shown such
    counters. Without any, progress is unknown.
    """

    def __init__(self, plan: WatchdogConfig) -> None:
        self.known = False
        self._plan = plan
        self._ranks: dict[int, _RankBeats] = {}

    def observe(self, pids: Mapping[int, int], ranks: Mapping[int, RankProgress], now: float) -> None:
        """Record the process ids of the running workers and their progress, both by local rank."""
        for rank in set(self._ranks) - set(pids):
            del self._ranks[rank]
        for rank, pid in pids.items():
            beats = self._ranks.get(rank)
            if beats is None or beats.pid != pid:
                beats = _RankBeats(pid, now)
                self._ranks[rank] = beats
            progress = ranks.get(rank, RankProgress())
            if (progress.steps, progress.heartbeats, progress.saving) != (None, None, None):
                self.known = True
                counts = (progress.steps or 0.0, progress.heartbeats or 0.0)
                beats.update(counts, (progress.saving or 0.0) > 0, now)

    def age(self, now: float) -> float | None:
        """Return the time since the last heartbeat of any rank, or the workers' start; None without a worker."""
        if not self._ranks or not self.known:
            return None
        return now - max(beats.since for beats in self._ranks.values())

    def find_stall(self, now: float) -> RankStall | None:
        """Return the current stall."""
        age = self.age(now)
        if age is None:
            return None
        if not any(beats.begun for beats in self._ranks.values()):
            problem = "no step since the start"
            field = "startSeconds"
            budget = self._plan.start_seconds
        elif any(beats.saving for beats in self._ranks.values()):
            problem = "the checkpoint is not done"
            field = "checkpointSeconds"
            budget = self._plan.checkpoint_seconds
        else:
            problem = "no step"
            field = "stallSeconds"
            budget = self._plan.stall_seconds
        if age < budget:
            return None
        return RankStall(now - age, f"{problem} for {age:.0f} s (spec.watchdog.{field} is {budget:g})")


class StepMark(NamedTuple):
    """The steps that a rank's process has made. ``longest``: the longest time between two of them; None: unknown."""

    pid: int
    steps: float
    longest: float | None = None


class StepPulse:
    """The time since the last step of a pod without heartbeats, by the ranks' counters or logs.

    Validations and checkpoints are no steps. So a pause counts only if it is longer than the watchdog's time and much
    longer than any pause before it (``longest``), which ranks measure themselves or two checks limit. The time between
    the steps of two processes, such as a hang that ended the first one, is no such pause.
    """

    def __init__(self, now: float) -> None:
        """``now``: before any rank has started, so that the steps before the first check have a bound as well."""
        self._marks: Mapping[int, StepMark] = {}
        self._since: float | None = None  # the last step
        self._checked = now
        self._pauses = 0.0
        self.longest = 0.0

    def observe(self, marks: Mapping[int, StepMark], now: float) -> None:
        """Record the marks of the ranks that have made a step, by local rank; empty without workers."""
        made = _count_new_steps(self._marks, marks)
        if not marks or made is None:
            self._since = None
            self._pauses = 0.0
            made = sum(mark.steps for mark in marks.values())  # of new processes
        if made:
            self._record_steps(made, now, is_measured=all(mark.longest is not None for mark in marks.values()))
        self.longest = max([self.longest, *(mark.longest or 0.0 for mark in marks.values())])
        self._marks = marks
        self._checked = now

    def _record_steps(self, made: float, now: float, *, is_measured: bool) -> None:
        """Record steps after the last one, or the first ones. ``is_measured``: whether the ranks measure pauses."""
        pauses = made - 1 if self._since is None else max(1.0, made)
        self._pauses += pauses
        if pauses and not is_measured:
            self.longest = max(self.longest, now - (self._checked if self._since is None else self._since))
        self._since = now

    def age(self, now: float) -> float:
        """Return the time since the last step; infinite if none was made."""
        return math.inf if self._since is None else now - self._since

    def measure_silence(self, now: float, least: float = 0.0) -> float | None:
        """Return the time since the last step if it exceeds all pauses before by far, and is at least ``least``."""
        if self._since is None or self._pauses < _PAUSES_NEEDED:
            return None
        age = now - self._since
        return age if age >= max(least, _PAUSE_FACTOR * self.longest) else None


def _count_new_steps(before: Mapping[int, StepMark], now: Mapping[int, StepMark]) -> float | None:
    """Return the steps made between two observations; None if a rank has a new process."""
    processes = {rank: mark.pid for rank, mark in before.items()}
    if any(processes.get(rank, mark.pid) != mark.pid for rank, mark in now.items()):
        return None
    return sum(mark.steps - (before[rank].steps if rank in before else 0) for rank, mark in now.items())


class Idleness:
    """How long each worker has used almost no CPU: the only evidence for a script without reports."""

    def __init__(self) -> None:
        self._workers: dict[int, tuple[float, float, float]] = {}  # idle since, last check, CPU seconds then

    def observe(self, cpu: Mapping[int, float], now: float) -> dict[int, float]:
        """Record the CPU seconds of each worker. Returns for how long each has been idle."""
        for rank in set(self._workers) - set(cpu):
            del self._workers[rank]
        for rank, seconds in cpu.items():
            since, last, before = self._workers.get(rank, (now, now, seconds))
            busy = abs(seconds - before) > _IDLE_SHARE * (now - last)
            self._workers[rank] = (now if busy else since, now, seconds)
        return {rank: now - since for rank, (since, _, _) in self._workers.items()}
