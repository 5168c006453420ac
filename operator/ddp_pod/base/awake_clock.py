"""A clock that does not count the time in which this process was frozen."""


class AwakeClock:
    """Seconds that this process has observed; a pause in which it was frozen counts at most ``most``.

    A suspended machine, ``docker pause`` or a machine without a free CPU freezes the watched processes too, and nothing
    checks them meanwhile: such a pause must not use up their time limits. Times are of a monotonic clock.
    """

    def __init__(self, most: float, now: float) -> None:
        self._most = most
        self._last = now
        self._seen = 0.0

    def tick(self, now: float) -> float:
        """Record a check, and return its time."""
        self._seen = self.read(now)
        self._last = now
        return self._seen

    def read(self, now: float) -> float:
        """Return the time between two checks."""
        return self._seen + min(max(0.0, now - self._last), self._most)
