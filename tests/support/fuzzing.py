"""How much is tried: a little and always the same in `make test`, much and ever new in `make fuzz`."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
FACTOR = 50
"""How many times more a thorough run tries."""
TALLIES: Counter[str] = Counter()
"""How many inputs of each sort have been tried in this process."""


def examples(count: int, **more: int) -> settings:
    """Return settings (a decorator) for so many examples in a quick run."""
    return settings(max_examples=count * FACTOR if THOROUGH else count, **more)


def tally(sort: str) -> None:
    """Count one input that was tried."""
    TALLIES[sort] += 1
