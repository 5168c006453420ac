"""The number of steps between two copies, chosen so that they cost at most one percent of the training's time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

_SHARE = 0.01
_LONGEST = 1000
_FILES = 2  # of a writer: the first save to each allocates its memory
_FIRST_DECISIONS = (_FILES + 1, 8, 32)
_SAVES_PER_DECISION = 64
_MEASUREMENTS = 16


class Interval:
    """Chooses the interval. ``fixed``: the user's choice; ``agree``: returns the greatest number of all ranks."""

    def __init__(self, fixed: int | None, agree: Callable[[int], int]) -> None:
        self.steps = fixed or 1
        self._is_fixed = fixed is not None
        self._agree = agree
        self._saves = 0
        self._costs: list[float] = []
        self._durations: list[float] = []
        self._budget = 0.0  # seconds: one percent of the steps' time, less what all saves took

    def is_due(self, step: int) -> bool:
        """Return whether to copy the state after ``step``; the same on all ranks."""
        return step % self.steps == 0

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step without the stall."""
        self._durations = [*self._durations[1 - _MEASUREMENTS :], seconds]
        self._budget += _SHARE * min(seconds, statistics.median(self._durations))  # a validation is no step

    def compute_wait(self) -> float:
        """Return for how many seconds a save may wait for the end of its copy: what its cost leaves of one percent.

        One percent of the steps of an interval, and of all steps so far in sum.
        """
        if self._is_fixed:
            return math.inf
        if not self._durations:
            return 0.0
        allowed = _SHARE * self.steps * statistics.median(self._durations)
        return max(0.0, min(allowed, self._budget) - statistics.median(self._costs or [0.0]))

    def record_save(self, stalled: float, waited: float, contended: float = 0.0) -> None:
        """Record for how many seconds a save stopped the training, and occasionally choose another interval.

        ``stalled``: without ``waited``, the seconds for which it waited for the end of the copy. ``contended``: for how
        many the copying thread took a CPU that the training could have used, which lengthens the steps.
        """
        self._saves += 1
        if self._saves > _FILES:
            self._budget -= stalled + waited + contended
            self._costs = [*self._costs[1 - _MEASUREMENTS :], stalled + contended]
        is_time = self._saves in _FIRST_DECISIONS or self._saves % _SAVES_PER_DECISION == 0
        if is_time and not self._is_fixed:
            self.steps = self._agree(compute_interval(self._costs, self._durations))


def compute_interval(costs: list[float], durations: list[float]) -> int:
    """Return the smallest interval at which the median cost is at most one percent of the median steps' time."""
    if not costs or not durations:
        return 1
    allowed = _SHARE * statistics.median(durations)
    if allowed <= 0:
        return _LONGEST
    return max(1, min(_LONGEST, math.ceil(statistics.median(costs) / allowed)))
