"""A clock that leaves out the time in which this process was frozen."""

from __future__ import annotations


class AwakeClock:
    """Seconds that this process has been there to see; of a pause in which it was frozen no more than ``most`` count.

    A budget that is used up by such a pause (a suspended laptop, `docker pause`, a machine without a free CPU) says
    nothing about those who are watched: they may have been frozen as well, and nothing has checked meanwhile. Times are
    of a monotonic clock.
    """

    def __init__(self, most: float, now: float) -> None:
        self._most, self._last, self._seen = most, now, 0.0

    def tick(self, now: float) -> float:
        """Note a check, and return the time of it."""
        self._seen, self._last = self.read(now), now
        return self._seen

    def read(self, now: float) -> float:
        """Return the time between two checks."""
        return self._seen + min(max(0.0, now - self._last), self._most)
