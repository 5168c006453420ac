"""How much a job may have read of its pods' metrics pages: bytes and seconds a minute, for all pods together.

A job chooses when its pods' pages are read, by its restart counter, and what is on them. Pod 0's page has an interval
and is not counted.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from ddp_operator.progress import PageParser

PERIOD: Final = 60.0
MAX_BYTES: Final = 16 << 20
"""In a period: 127 pods with 16 ranks each, whose pages are some 64 KiB, can be read once."""
MAX_SECONDS: Final = 15.0
"""In a period. As long does a worker wait that other jobs wait for."""
MAX_SECONDS_AT_ONCE: Final = 5.0
PAGES_AT_ONCE: Final = 16


class PageTooLong(ValueError):
    """The budget of bytes is spent."""


@dataclass(slots=True)
class PageBudget:
    """What is left in the current period."""

    since: datetime | None = None
    bytes_left: int = MAX_BYTES
    seconds_left: float = MAX_SECONDS

    def renew(self, now: datetime) -> None:
        """Start a period where the last one is over; a clock that was set back ends it too."""
        if self.since is None or abs((now - self.since).total_seconds()) >= PERIOD:
            self.since = now
            self.bytes_left = MAX_BYTES
            self.seconds_left = MAX_SECONDS

    @property
    def spent(self) -> bool:
        """Whether no page is read any more in this period."""
        return self.bytes_left <= 0 or self.seconds_left <= 0

    def use_seconds(self, seconds: float) -> None:
        """Count time that was spent on pages."""
        self.seconds_left -= seconds


class CountedParser(PageParser):
    """A parser whose page is counted against a budget."""

    def __init__(self, budget: PageBudget) -> None:
        super().__init__()
        self._budget = budget

    def feed(self, piece: bytes) -> None:
        """Read the lines that this piece completes. Raises: PageTooLong."""
        self._budget.bytes_left -= len(piece)
        if self._budget.bytes_left < 0:
            raise PageTooLong
        super().feed(piece)
