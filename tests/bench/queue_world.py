"""A simulated ClusterQueue: arrivals, runs and reports of jobs, with a clock of its own. It shares no code with the
estimate that `tests.bench.queue_estimate` measures on it.

The jobs' lengths are lognormal, their steps have a rate that drifts, some fail, some report no steps.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """Times in seconds. ``load``: mean of the requested GPU time over that of the quota."""

    seed: int = 1
    jobs: int = 200
    gpus: int = 64
    strict: bool = False
    sizes: tuple[tuple[int, float], ...] = ((1, 0.3), (2, 0.2), (4, 0.25), (8, 0.2), (16, 0.05))
    median: float = 2400.0
    sigma: float = 1.0
    load: float = 1.0
    swing: float = 0.6
    later: int = 60
    every: int = 1
    failing: float = 0.08
    reporting: float = 1.0
    drift: float = 0.1
    startup: float = 90.0
    tail: float = 40.0
    """Median from the last step until the quota is free."""


@dataclass(slots=True)
class SimulatedJob:
    """A job and, when the world has run, its times."""

    number: int
    gpus: int
    created: float
    length: float
    """Seconds from admission to the end."""
    planned: float
    """Seconds from admission to the end if it does not fail."""
    startup: float
    tail: float
    reports: bool
    rate_seed: int
    drift: float
    admitted: float = math.inf
    ended: float = math.inf
    _rates: list[float] = field(default_factory=list)

    def share(self, elapsed: float) -> float:
        """Return the completed share of all steps, ``elapsed`` seconds after the admission."""
        work = self.planned - self.startup - self.tail
        done = max(0.0, min(work, elapsed - self.startup)) / work
        return self._cumulate(done)

    def rate(self, elapsed: float) -> float:
        """Return the completed share per second by the last minutes, as a meter of the steps has it."""
        window = min(120.0, max(1.0, (elapsed - self.startup) / 2))
        return max(0.0, self.share(elapsed) - self.share(elapsed - window)) / window

    @property
    def last_step(self) -> float:
        """Seconds from admission to the last step."""
        return min(self.length, self.planned - self.tail)

    def _cumulate(self, done: float) -> float:
        """Return the share of steps after a share of time: the rate drifts in 20 phases."""
        if not self._rates:
            draw = random.Random(self.rate_seed)
            level = 0.0
            for _ in range(20):
                level = 0.7 * level + draw.gauss(0.0, self.drift)
                self._rates.append(math.exp(level))
            total = sum(self._rates)
            self._rates = [rate / total for rate in self._rates]
        phase = min(19, int(done * 20))
        return sum(self._rates[:phase]) + self._rates[phase] * (done * 20 - phase)


def build_jobs(options: WorldOptions) -> list[SimulatedJob]:
    """Return the jobs of a world in the order of their creation."""
    draw = random.Random(options.seed)
    sizes = [size for size, _ in options.sizes]
    weights = [weight for _, weight in options.sizes]
    mean_length = options.median * math.exp(options.sigma**2 / 2)
    mean_size = sum(size * weight for size, weight in options.sizes) / sum(weights)
    interval = mean_length * mean_size / options.gpus / options.load
    jobs = []
    time = 0.0
    for number in range(options.jobs + options.later):
        day = 1.0 + options.swing * math.sin(2 * math.pi * time / 86400)
        time += draw.expovariate(day / interval)
        planned = options.startup + options.median * math.exp(draw.gauss(0.0, options.sigma))
        startup = options.startup * math.exp(draw.gauss(0.0, 0.3))
        tail = options.tail * math.exp(draw.gauss(0.0, 0.5))
        length = planned * draw.random() if draw.random() < options.failing else planned
        job = SimulatedJob(
            number,
            draw.choices(sizes, weights)[0],
            time,
            length,
            planned,
            min(startup, planned / 3),
            min(tail, planned / 3),
            draw.random() < options.reporting,
            draw.randrange(1 << 30),
            options.drift,
        )
        jobs.append(job)
    return jobs


def run_queue(jobs: Sequence[SimulatedJob], gpus: int, *, strict: bool) -> None:
    """Admit the jobs as Kueue does: in order, and beside a job that does not fit unless ``strict``."""
    free = gpus
    events: list[tuple[float, int, SimulatedJob]] = [(job.created, 1, job) for job in jobs]
    events = [(time, kind * 1_000_000 + job.number, job) for time, kind, job in events]
    heapq.heapify(events)
    waiting: list[SimulatedJob] = []
    while events:
        time, code, job = heapq.heappop(events)
        if code >= 1_000_000:
            waiting.append(job)
        else:
            free += job.gpus
        remaining = []
        blocked = False
        for candidate in waiting:
            if candidate.gpus > free or (blocked and strict):
                blocked = True
                remaining.append(candidate)
                continue
            free -= candidate.gpus
            candidate.admitted = time
            candidate.ended = time + candidate.length
            heapq.heappush(events, (candidate.ended, candidate.number, candidate))
        waiting = remaining
