"""Position in a ClusterQueue, and when a Workload may start: a simulation of the queue with drawn ends. Pure.

The order of admission is known. Ends are not: training jobs report steps, and other Workloads end as those that have
ended in the queue. So the queue is simulated many times, and the quantiles of the starts are the estimate. Cohorts,
preemption and later Workloads of a higher priority are not simulated (docs/adr/0052).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import heapify, heappop, heappush
from math import exp, inf, log
from random import Random
from typing import Final, NamedTuple

from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import QueueStatus, Status
from ddp_operator.decide.pace import estimate_seconds_left
from ddp_operator.features.queue_estimate.cluster_queue import (
    Choices,
    QueueContents,
    QueuedWorkload,
    Quotas,
    Taken,
    assign,
)

_SAMPLES: Final = 120
_FEWEST_SAMPLES: Final = 40
_MAX_STEPS: Final = 40_000
"""Ends and arrivals of all samples, about 0.2 s: a long queue gets fewer samples."""
_FEWEST_LENGTHS: Final = 5
_MAX_LENGTHS: Final = 200
_FEWEST_REPORTING: Final = 0.9
"""Share of the running Workloads whose steps are known; with fewer, the estimate would be too inaccurate."""
_SPREAD: Final = 0.05
"""Smallest standard deviation of the logarithm of the time left that steps predict."""
_MOST_SPREAD: Final = 5.0
"""Largest one: a pod may report any steps, and their exponent must not overflow."""
_HORIZON: Final = 366 * 86400.0
"""Seconds after which no start is estimated. Jobs ahead may report any number of steps."""
_UPPER_QUANTILE: Final = 0.93
"""Of the simulated starts. It covers 90 % of the real ones: a simulation knows less than all that varies."""
_TAIL: Final = 2.0
"""Pareto exponent of the length of a Workload that runs longer than any that has ended."""


class Estimate(NamedTuple):
    """Seconds from now until a Workload has started with a probability of 50 and of 90 %."""

    p50: float
    p90: float


class QueueView(NamedTuple):
    """A ClusterQueue with the estimates of its pending Workloads, by UID."""

    contents: QueueContents
    quotas: Quotas
    estimates: Mapping[str, Estimate]

    def exceeds_quota(self, uid: str) -> str:
        """Return why a Workload never fits, in Kueue's words; empty: it may fit."""
        request = next((item.request for item in self.contents.workloads if item.uid == uid), {})
        lacking = self.quotas.find_lacking(request, self.quotas.limits)
        name = self.contents.name
        return f"insufficient quota in ClusterQueue {name}, request > maximum capacity ({lacking})" if lacking else ""

    def place(self, uid: str, before: QueueStatus | None) -> QueueStatus | None:
        """Return the place of a pending Workload; ``before`` if it has hardly changed; None: it is not pending."""
        pending = self.contents.list_pending()
        position = next((number for number, item in enumerate(pending, 1) if item.uid == uid), None)
        if position is None:
            return None
        now = self.contents.time
        free = self.contents.compute_free(self.quotas)
        request = pending[position - 1].request
        estimate = self.estimates.get(uid)
        place = QueueStatus(
            cluster_queue=self.contents.name,
            position=position,
            of=len(pending),
            waits_for="" if self.quotas.has_cohort else self.quotas.find_lacking(request, free),
            start_p50=truncate(now + timedelta(seconds=estimate.p50)) if estimate else None,
            start_p90=truncate(now + timedelta(seconds=estimate.p90)) if estimate else None,
        )
        return before if before is not None and _is_similar(before, place, now) else place


def _is_similar(before: QueueStatus, place: QueueStatus, now: datetime) -> bool:
    """Return whether position and times differ by less than a tenth."""
    if before.cluster_queue != place.cluster_queue or abs(before.position - place.position) > place.position / 10:
        return False
    for old, new in ((before.start_p50, place.start_p50), (before.start_p90, place.start_p90)):
        if old is None or new is None:
            if old is not new:
                return False
        elif abs(new - max(old, now)) > max(timedelta(minutes=1), (new - now) / 10):
            return False
    return True


def view_queue(contents: QueueContents, quotas: Quotas) -> QueueView:
    """Return a ClusterQueue with estimates. This needs some tenths of a second."""
    draw = Random(0)  # nosec B311: not for security
    running = [
        _Running.observe(item, contents.training.get(item.uid), contents.time)
        for item in contents.workloads
        if item.admitted is not None and item.finished is None
    ]
    reporting = [item for item in running if item.spread]
    ended = sorted((item.finished, item.admitted) for item in contents.workloads if item.finished and item.admitted)
    lengths = [((finished - admitted).total_seconds(), True) for finished, admitted in ended[-_MAX_LENGTHS:]]
    lengths += [(item.elapsed + item.seconds_left, True) for item in reporting]
    if len(lengths) < _FEWEST_LENGTHS or len(reporting) < _FEWEST_REPORTING * len(running) or quotas.has_cohort:
        return QueueView(contents, quotas, {})
    lengths += [(item.elapsed, False) for item in running if not item.spread]
    tails = list(_list_tails(contents)) or [0.0]
    delays = list(_list_delays(contents)) or [0.0]

    pending = []
    for item in contents.list_pending():
        if not quotas.find_lacking(item.request, quotas.nominal):
            pending.append(item)
        elif quotas.is_strict:
            break  # it blocks all that are behind it
    requests = [quotas.list_choices(item.request) for item in pending]
    limits = [item.seconds_limit for item in pending]
    recent = sorted(contents.workloads, key=lambda item: item.created)[-_MAX_LENGTHS:]
    interval = max(1.0, (contents.time - recent[0].created).total_seconds()) / len(recent)
    arrivals = _Arrivals(interval, [quotas.list_choices(item.request) for item in recent], draw)

    steps = _MAX_STEPS
    samples: list[list[float]] = []
    while pending and steps > 0 and len(samples) < _SAMPLES:
        # A bootstrap sample: few observations make a wide estimate.
        sampled = _Lengths(draw.choices(lengths, k=len(lengths)), draw)
        simulation = _Simulation(quotas, requests, limits, sampled, lambda: draw.choice(delays))
        for run in running:
            simulation.occupy(run.draw_end(sampled, tails, draw), run.usage)
        steps -= simulation.run(None if quotas.is_strict else arrivals)
        samples.append(simulation.starts)
    if len(samples) < _FEWEST_SAMPLES:
        return QueueView(contents, quotas, {})
    estimates = {item.uid: _find_quantiles(starts) for item, *starts in zip(pending, *samples, strict=True)}
    return QueueView(contents, quotas, {uid: item for uid, item in estimates.items() if item.p90 < _HORIZON})


def _list_tails(contents: QueueContents) -> Iterator[float]:
    """Yield the seconds from the last step of ended training jobs, such as for a last checkpoint, to free quota."""
    for item in contents.workloads:
        status = contents.training.get(item.uid)
        progress = status.progress if status is not None else None
        if item.finished and progress is not None and progress.last_step_time is not None:
            yield max(0.0, (item.finished - progress.last_step_time).total_seconds())


def _list_delays(contents: QueueContents) -> Iterator[float]:
    """Yield the seconds from the end of a Workload to the admission of one that waited for its quota."""
    ends = sorted(item.finished for item in contents.workloads if item.finished)
    for item in contents.workloads:
        number = bisect_right(ends, item.admitted) if item.admitted else 0
        if item.admitted and number and ends[number - 1] > item.created:
            yield (item.admitted - ends[number - 1]).total_seconds()


def _find_quantiles(starts: Iterable[float]) -> Estimate:
    ordered = sorted(starts)
    return Estimate(ordered[len(ordered) // 2], ordered[int(len(ordered) * _UPPER_QUANTILE)])


class _Lengths:
    """How long Workloads run: those with a known end, and those that have run so long and still run."""

    def __init__(self, observed: Iterable[tuple[float, bool]], draw: Random) -> None:
        self._observed = sorted(observed)
        self._random = draw

    def draw(self, elapsed: float = 0.0) -> float:
        """Return the length of a Workload that has run for some seconds."""
        while True:
            first = bisect_right(self._observed, (elapsed, True))
            if first == len(self._observed):
                return elapsed * self._random.paretovariate(_TAIL)
            elapsed, is_known = self._observed[self._random.randrange(first, len(self._observed))]
            if is_known:
                return elapsed  # otherwise it ends as a longer one does (Efron's estimator)


class _Running(NamedTuple):
    """A Workload with quota. ``spread``: standard deviation of the logarithm of the time left; 0: that is unknown."""

    elapsed: float
    seconds_left: float
    spread: float
    seconds_limit: float
    usage: Taken

    @classmethod
    def observe(cls, workload: QueuedWorkload, status: Status | None, now: datetime) -> "_Running":
        """Return a Workload with the time left by its steps. ``status``: of its training job."""
        elapsed = max(1.0, (now - (workload.admitted or now)).total_seconds())
        progress = status.progress if status is not None else None
        left = spread = 0.0
        at_last_step = estimate_seconds_left(progress) if progress is not None else None
        if progress is not None and at_last_step is not None and progress.step and progress.total_steps:
            left = max(1.0, at_last_step - (now - (progress.last_step_time or now)).total_seconds())
            made = max(1, progress.step - ((status and status.operator_state.start_step) or 0))
            by_mean_rate = elapsed * max(1, progress.total_steps - progress.step) / made
            spread = min(_MOST_SPREAD, max(_SPREAD, abs(log(by_mean_rate / left)) / 2))
        return cls(elapsed, left, spread, workload.seconds_limit, workload.usage)

    def draw_end(self, lengths: _Lengths, tails: Sequence[float], draw: Random) -> float:
        """Return the seconds until its quota is free, in one sample."""
        left = self.seconds_left * exp(draw.gauss(0.0, self.spread)) + draw.choice(tails)
        if not self.spread:
            left = lengths.draw(self.elapsed) - self.elapsed
        return min(left, max(0.0, self.seconds_limit - self.elapsed))


class _Arrivals(NamedTuple):
    """Workloads that may be created later, as recent ones were: a small one may overtake a large one."""

    interval: float
    requests: Sequence[Choices]
    draw: Random

    def next(self, now: float) -> tuple[float, Choices]:
        """Return when the next one is created, and what it requests."""
        return now + self.draw.expovariate(1.0 / self.interval), self.draw.choice(self.requests)


class _Simulation:
    """One sample: Workloads end, and waiting ones are admitted in order. Times are seconds from now."""

    def __init__(
        self,
        quotas: Quotas,
        requests: Sequence[Choices],
        limits: Sequence[float],
        lengths: _Lengths,
        draw_delay: Callable[[], float],
    ) -> None:
        self.starts = [inf] * len(requests)
        self._requests = list(requests)
        self._limits = limits
        self._lengths = lengths
        self._draw_delay = draw_delay
        self._free = dict(quotas.nominal)
        self._ends: list[tuple[float, int, Taken]] = []
        self._waiting: dict[Choices | None, deque[int]] = {}
        """Indexes by request: if the first one does not fit, no other does. A strict queue has one group, None."""
        for index, request in enumerate(requests):
            self._waiting.setdefault(None if quotas.is_strict else request, deque()).append(index)

    def occupy(self, end: float, taken: Taken) -> None:
        """Take quota until Kueue gives it to another Workload, some time after ``end``."""
        heappush(self._ends, (end + self._draw_delay(), len(self._ends), taken))
        for key, amount in taken:
            self._free[key] = self._free.get(key, 0.0) - amount

    def run(self, arrivals: _Arrivals | None) -> int:
        """Run until all pending Workloads have started, for a limited number of steps. Returns their number."""
        unstarted = len(self.starts) - self._admit(0.0, self._waiting)
        arrival, newcomer = arrivals.next(0.0) if arrivals else (inf, ())
        steps = len(self._ends)
        while unstarted and self._ends and steps < _MAX_STEPS // _FEWEST_SAMPLES:
            steps += 1
            if arrivals and arrival < self._ends[0][0]:
                queue = self._waiting.setdefault(newcomer, deque())
                queue.append(len(self._requests))
                self._requests.append(newcomer)
                if len(queue) == 1:
                    self._admit(arrival, [newcomer])
                arrival, newcomer = arrivals.next(arrival)
                continue
            now, _, taken = heappop(self._ends)
            for key, amount in taken:
                self._free[key] += amount
            unstarted -= self._admit(now, self._waiting)
        return steps

    def _admit(self, now: float, groups: Iterable[Choices | None]) -> int:
        """Admit what fits. Returns how many of the pending Workloads have started."""
        started = 0
        heads = [(self._waiting[group][0], group) for group in groups if self._waiting[group]]
        heapify(heads)
        while heads:
            index, group = heappop(heads)
            taken = assign(self._requests[index], self._free)
            if taken is None:
                continue
            length = self._lengths.draw()
            if index < len(self.starts):
                self.starts[index] = now
                started += 1
                length = min(length, self._limits[index])
            self.occupy(now + length, taken)
            queue = self._waiting[group]
            queue.popleft()
            if queue:
                heappush(heads, (queue[0], group))
        return started
