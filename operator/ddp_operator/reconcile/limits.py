"""Limits on the reports that are read of a job's pods per minute, and when something is due again.

A user controls the content of the reports, and through the restart counter when the operator reads them. The report of
pod 0 has its own interval and does not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Final

from ddp_operator.decide.views import PodView

PERIOD: Final = 60.0
MAX_BYTES: Final = 16 << 20
"""Bytes per period."""
MAX_SECONDS: Final = 15.0
"""Seconds per period. The worker is not available to other jobs during that time."""
MAX_SECONDS_AT_ONCE: Final = 5.0
PAGES_AT_ONCE: Final = 16
MAX_PODS: Final = 16
"""Pods whose reports are read for a sample, pod 0 included."""
READ_INTERVAL: Final = 10.0
"""Seconds between two reads of the reports of pod 0's peers for one purpose."""
EARLY: Final = 0.9
"""Tolerance for timers that fire early."""


@dataclass(slots=True)
class PageBudget:
    """The remaining bytes and seconds of the current period."""

    since: datetime | None = None
    bytes_left: int = MAX_BYTES
    seconds_left: float = MAX_SECONDS

    def renew(self, now: datetime) -> None:
        """Start a new period if the current one is over. A clock that was set back ends it too."""
        if self.since is None or abs((now - self.since).total_seconds()) >= PERIOD:
            self.since = now
            self.bytes_left = MAX_BYTES
            self.seconds_left = MAX_SECONDS

    @property
    def spent(self) -> bool:
        """Whether the budget of this period is used up."""
        return self.bytes_left <= 0 or self.seconds_left <= 0


def sample_pods(pods: Sequence[PodView], most: int = MAX_PODS) -> tuple[PodView, ...]:
    """Return the running pods whose reports are read beside pod 0's: all, or an even spread of ``most`` - 1."""
    peers = [pod for pod in pods if pod.index != 0 and pod.phase == "Running" and not pod.deleting]
    if len(peers) < most:
        return tuple(peers)
    return tuple(peers[i * len(peers) // (most - 1)] for i in range(most - 1))


def seconds_since(last: datetime | None, now: datetime) -> float:
    """Return the seconds since ``last``, infinite for None. Absolute, so a clock set back does not postpone work."""
    return inf if last is None else abs((now - last).total_seconds())


def is_due(last: datetime | None, now: datetime, interval: float) -> bool:
    """Return whether what was done last at a time is due again after an interval of seconds."""
    return seconds_since(last, now) >= interval * EARLY
