"""The number of examples: few fixed ones in `make test`, many new ones in `make fuzz`."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
FACTOR = 50
"""Multiple of examples in a thorough run."""
TALLIES: Counter[str] = Counter()
"""Number of inputs of each kind in this process."""


def examples(count: int, **more: int) -> settings:
    """Return settings (a decorator) for this many examples in a quick run."""
    return settings(max_examples=count * FACTOR if THOROUGH else count, **more)


def tally(sort: str) -> None:
    """Count one input."""
    TALLIES[sort] += 1
