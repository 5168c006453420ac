"""What is remembered of one resource between passes. A restart of the operator loses it, and nothing depends on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import inf

from ddp_operator.progress import RateMeter, StalledRank
from ddp_operator.status.observation import Problem
from ddp_operator.status.stragglers import Ranks


@dataclass(slots=True)
class Memory:
    """The times of what is not done in every pass, and the answers of then."""

    page_read: datetime | None = None
    meter: RateMeter = field(default_factory=RateMeter)
    ranks_compared: tuple[datetime, int, Ranks] | None = None
    """When, in which attempt, and what the ranks had done by then."""
    stalled: dict[int, StalledRank] = field(default_factory=dict)
    events_read: tuple[datetime, Mapping[str, Problem]] | None = None
    checked: tuple[str, int] | None = None
    """UID and generation of the spec of which it is known that children can be built from it."""
    unseen_since: datetime | None = None
    """Since when children of the current attempt may be there that no watch shows."""
    labels_restored: datetime | None = None
    """When those were last looked for."""
    orphaned_since: datetime | None = None
    """Since when there have been pods whose Job is gone and that nobody deletes."""
    failing_since: datetime | None = None
    """Since when the API server has failed to create a child."""
    status_written: datetime | None = None


def seconds_since(last: datetime | None, now: datetime) -> float:
    """Return how long ago it was; without a sign, for a clock that was set back must not put off what is due."""
    return inf if last is None else abs((now - last).total_seconds())
