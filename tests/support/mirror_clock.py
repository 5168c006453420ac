"""A clock for the mirrors of checkpoints, which only advances when a test or a mirror's sleep advances it."""

from __future__ import annotations


class MirrorClock:
    """Replaces the module ``time`` in the mirror. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def time(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds
