"""The share of effective training time of a job, simulated from failure rates and times of recovery.

Failures are independent and exponential in time, also while the job recovers: a failure then begins another recovery.
Each failure repeats the training since the newest state that was kept.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RecoveryPolicy:
    """How a job recovers. All times in seconds.

    ``recovery``: from a failure of a class until the ranks train. ``with_spare``: the same if a spare is free; for
    classes that take a pod. ``refill``: from the use of a spare until the next one is free. ``kept_every``: training
    between two states that outlive a failure. ``overhead``: share of the training that these states cost.
    """

    recovery: Mapping[str, float]
    with_spare: Mapping[str, float] = field(default_factory=dict)
    spares: int = 0
    refill: float = 0.0
    kept_every: float = 1800.0
    overhead: float = 0.0


@dataclass
class TimeSpent:
    """The seconds of a job. ``down`` and ``repeated``: by class of failure."""

    effective: float = 0.0
    overhead: float = 0.0
    down: dict[str, float] = field(default_factory=dict)
    repeated: dict[str, float] = field(default_factory=dict)
    failures: int = 0

    @property
    def total(self) -> float:
        return self.effective + self.overhead + sum(self.down.values()) + sum(self.repeated.values())

    @property
    def effective_share(self) -> float:
        return self.effective / self.total

    def lost(self, name: str) -> float:
        """Return what a class of failures cost."""
        return self.down.get(name, 0.0) + self.repeated.get(name, 0.0)


class _Spares:
    """The spare pods of a job. ``ready``: when each is free."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._refill = policy.refill
        self._ready = [0.0] * policy.spares

    def take(self, now: float) -> bool:
        """Use a free spare; returns False if there is none."""
        for index, ready in enumerate(self._ready):
            if ready <= now:
                self._ready[index] = now + self._refill
                return True
        return False


class _Job:
    """A job through time. ``now``: seconds since its start; ``end``: when the simulation ends."""

    def __init__(
        self, rates: Mapping[str, float], policy: RecoveryPolicy, end: float, generator: random.Random
    ) -> None:
        self.spent = TimeSpent(down=dict.fromkeys(rates, 0.0), repeated=dict.fromkeys(rates, 0.0))
        self.now = 0.0
        self.end = end
        self._names = list(rates)
        self._weights = list(rates.values())
        self._rate = sum(self._weights)
        self._policy = policy
        self._spares = _Spares(policy)
        self._generator = generator

    def train(self) -> str:
        """Train until a failure, and return its class; empty at the end."""
        failure = self._draw_failure()
        trained = min(failure, self.end) - self.now
        self.now += trained
        name = "" if failure >= self.end else self._draw_class()
        repeated = trained % self._policy.kept_every if name else 0.0
        overhead = (trained - repeated) * self._policy.overhead
        self.spent.overhead += overhead
        self.spent.effective += trained - repeated - overhead
        if name:
            self.spent.repeated[name] += repeated
        return name

    def recover(self, name: str) -> None:
        """Spend the time until the ranks train, with further failures in between."""
        while name:
            self.spent.failures += 1
            trains_at = self.now + self._find_recovery(name)
            failure = self._draw_failure()
            until = min(trains_at, failure, self.end)
            self.spent.down[name] += until - self.now
            self.now = until
            name = self._draw_class() if until == failure else ""

    def _find_recovery(self, name: str) -> float:
        if name in self._policy.with_spare and self._spares.take(self.now):
            return self._policy.with_spare[name]
        return self._policy.recovery[name]

    def _draw_failure(self) -> float:
        return self.now + (self._generator.expovariate(self._rate) if self._rate else math.inf)

    def _draw_class(self) -> str:
        return self._generator.choices(self._names, self._weights)[0]


def simulate(rates: Mapping[str, float], policy: RecoveryPolicy, seconds: float, generator: random.Random) -> TimeSpent:
    """Return how a job spends ``seconds``. ``rates``: failures per second of the whole job, by class."""
    job = _Job(rates, policy, seconds, generator)
    while job.now < seconds:
        job.recover(job.train())
    return job.spent


def compute_share(rate: float, recovery: float, kept_every: float) -> float:
    """Return the expected share for one class of failures: the closed form to which the simulation converges.

    Between two failures k states are kept with k = floor(X / C), X exponential: C / (exp(rate C) - 1) seconds on
    average. A recovery of R seconds that failures interrupt takes (exp(rate R) - 1) / rate.
    """
    if not rate:
        return 1.0
    return math.exp(-rate * recovery) * rate * kept_every / math.expm1(rate * kept_every)
