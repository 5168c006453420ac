"""Whether the ranks of this pod make progress: by their pages, their log or their use of the CPU."""

from __future__ import annotations

import math
import re

from .config import WatchdogConfig
from .contract import METRIC_HEARTBEATS, METRIC_SAVING, METRIC_STEPS
from .prometheus import is_number
from .stall import Stall

_BEATS = re.compile(rf"^({METRIC_STEPS}|{METRIC_HEARTBEATS}|{METRIC_SAVING})(?:\{{[^\n]*\}})?[ \t]+(\S+)", re.MULTILINE)
_PAUSES_KNOWN = 3  # with fewer between lines of a log, nothing is known of the next one
_LONGER_PAUSE = 4.0
_IDLE_SHARE = 0.01  # of a CPU for each worker: below it nothing is computed


class _RankState:
    """What was last seen of a rank's process."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid, self.since, self.counts = pid, now, (0.0, 0.0)
        self.begun = self.saving = False


class Watchdog:
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

    def age(self, now: float) -> float | None:
        """Return the time since the last heartbeat of any rank, or since the workers' start; None where none runs."""
        return now - max(state.since for state in self._ranks.values()) if self._ranks and self.known else None

    def find_stall(self, now: float) -> Stall | None:
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
        return Stall(now - age, f"{what} for {age:.0f} s (spec.watchdog.{field} is {budget:g})")


class LogSteps:
    """When a step last showed in the log of a script that reports none itself.

    No script promises a line every so many seconds, so a silence only counts where it is both longer than the
    watchdog's time and much longer than any before it; and even then it is only reported.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._since: float | None = None
        self._checked: float | None = None
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

    def silence(self, stall: float, now: float) -> float | None:
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


def count_steps(page: str) -> float | None:
    """Return the first count of steps or heartbeats on a rank's page."""
    found = _BEATS.search(page)
    return float(found[2]) if found and is_number(found[2]) else None
