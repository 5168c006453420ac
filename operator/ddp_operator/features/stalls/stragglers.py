"""Stragglers: ranks that take longer for a step than their peers. docs/metrics.md has the formulas. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from statistics import median_low
from typing import Final, NamedTuple

from ddp_operator.api.status import Straggler, StragglerCause
from ddp_pod.contract.progress import MachineTime, RankProgress

Ranks = Mapping[int, RankProgress]

WINDOW = 60.0
"""Seconds between two readings of all ranks, the time over which they are compared."""
FIRST_WINDOW = 15.0
"""The same for the first two readings of an attempt, if they are _FIRST_STEPS apart."""
STRAGGLER_RATIO: Final = 1.3
"""Own time per step relative to the median rank's, from which on a rank is a straggler."""
_FIRST_STEPS: Final = 10
_COUNTED_CAUSES: Final[Mapping[str, StragglerCause]] = {
    "throttled_seconds": "throttled",
    "memory_seconds": "memory",
    "storage_seconds": "storage",
}
_ASLEEP: Final = 0.3
"""The share of its step for which a process uses a CPU, below which it sleeps for most of it."""
_MAX_STRAGGLERS = 8


class Comparison(NamedTuple):
    """A reading of all ranks with which the next one is compared. ``is_first``: of an attempt."""

    time: datetime
    attempt: int
    ranks: Ranks
    is_first: bool

    def is_due(self, now: datetime) -> bool:
        """Return whether it is time for the next reading."""
        return (now - self.time).total_seconds() >= (FIRST_WINDOW if self.is_first else WINDOW)

    def find_stragglers(self, attempt: int, ranks: Ranks) -> tuple[Straggler, ...] | None:
        """Return the stragglers by the next reading; None if it is of another attempt."""
        if attempt != self.attempt:
            return None
        return find_stragglers(self.ranks, ranks, least_steps=_FIRST_STEPS if self.is_first else 1)


class _RankTime(NamedTuple):
    """The mean step of one rank, in seconds. ``machine``: what the machine gave and took in it."""

    compute: float
    data: float
    machine: MachineTime

    @property
    def own(self) -> float:
        """The time that it does not wait for other ranks."""
        return self.compute + self.data

    @property
    def with_cpu(self) -> float:
        """The same without the time for which it waited for a CPU."""
        # Not their sum: the main thread may wait for a CPU while others do.
        return self.own - max(self.machine.cpu_wait_seconds or 0.0, self.machine.child_cpu_wait_seconds or 0.0)


def find_stragglers(before: Ranks, now: Ranks, *, least_steps: int = 1) -> tuple[Straggler, ...]:
    """Return the ranks that take longer for a step than their peers, between two readings of all ranks.

    Ranks that have made fewer than ``least_steps`` are left out.
    """
    times: dict[int, _RankTime] = {}
    for rank in before.keys() & now.keys():
        time = _measure_step(before[rank], now[rank], least_steps)
        if time is not None:
            times[rank] = time
    # The lower median: between two ranks, the mean of both would make any slow one at most twice as slow.
    usual = median_low(time.own for time in times.values()) if len(times) > 1 else 0.0
    if not usual > 0:
        return ()
    slow = sorted((-time.own / usual, rank) for rank, time in times.items() if time.own / usual >= STRAGGLER_RATIO)
    others = [time for time in times.values() if time.own / usual < STRAGGLER_RATIO]
    return tuple(
        Straggler(rank=rank, ratio=f"{min(-ratio, 1e6):.1f}", cause=_find_cause(times[rank], usual, others))
        for ratio, rank in slow[:_MAX_STRAGGLERS]
    )


def _measure_step(before: RankProgress, now: RankProgress, least_steps: int) -> _RankTime | None:
    """Return the time of a rank's steps between two readings; None: it made too few, or its process restarted."""
    steps = (now.steps or 0.0) - (before.steps or 0.0)
    compute = (now.compute_seconds or 0.0) - (before.compute_seconds or 0.0)
    data_wait = (now.data_seconds or 0.0) - (before.data_seconds or 0.0)
    if steps < least_steps or compute < 0 or data_wait < 0:
        return None
    return _RankTime(compute / steps, data_wait / steps, _measure_machine(before.machine, now.machine, steps))


def _measure_machine(before: MachineTime, now: MachineTime, steps: float) -> MachineTime:
    """Return the machine's seconds of a step; None where one reading lacks them, or a process has ended."""
    means: dict[str, float | None] = {}
    for name in (item.name for item in fields(MachineTime)):
        first, last = getattr(before, name), getattr(now, name)
        means[name] = None if first is None or last is None or last < first else (last - first) / steps
    return MachineTime(**means)


def _find_cause(slow: _RankTime, usual: float, others: Sequence[_RankTime]) -> StragglerCause:
    """Return why a rank is slow: a wait that explains half of the excess and no other rank has, or its own work.

    Waits for a CPU are the cause only if the rank would not be slow without them.
    """

    def explains(name: str) -> bool:
        lost = getattr(slow.machine, name)
        most = max((getattr(time.machine, name) or 0.0 for time in others), default=0.0)
        return lost is not None and lost - most >= (slow.own - usual) / 2

    for name, cause in _COUNTED_CAUSES.items():
        if explains(name):
            return cause
    # On a busy node a rank waits for as long as it computes: one that computes more is slow without the waits too.
    machine = slow.machine
    if slow.with_cpu < median_low(time.with_cpu for time in others) * STRAGGLER_RATIO:
        return "cpu"
    if slow.data > slow.compute:
        return "data"
    if machine.cpu_seconds is None:
        return "compute"
    is_asleep = machine.cpu_seconds + (machine.cpu_wait_seconds or 0.0) < slow.own * _ASLEEP
    if not is_asleep:
        return "compute"
    return "data" if explains("child_cpu_seconds") else "sleep"
