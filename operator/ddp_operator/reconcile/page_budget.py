"""Limit for reading the reports of a job's pods: bytes and seconds per minute, for all pods together.

A user controls the content of these reports, and through the restart counter when the operator reads them. The report
of pod 0 has its own interval and does not count.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

PERIOD: Final = 60.0
MAX_BYTES: Final = 16 << 20
"""Bytes per period."""
MAX_SECONDS: Final = 15.0
"""Seconds per period. The worker is not available to other jobs during that time."""
MAX_SECONDS_AT_ONCE: Final = 5.0
PAGES_AT_ONCE: Final = 16


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
