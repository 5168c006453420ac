"""Profiles of hypothesis, by HYPOTHESIS_PROFILE: few fixed examples (same), few new ones (explore), or many new ones
(thorough, as in `make fuzz`). The first conftest loads one, so that it applies to tests of every folder.
"""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import HealthCheck, settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
FACTOR = 50
"""Multiple of examples in a thorough run."""
TALLIES: Counter[str] = Counter()
"""Number of inputs of each kind in this process."""


COMMON = {
    "deadline": None,  # other work on the machine makes single examples slow
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "max_examples": int(os.environ.get("HYPOTHESIS_EXAMPLES", "60")),
    "database": None,
}
settings.register_profile("same", derandomize=True, **COMMON)
settings.register_profile("explore", **COMMON)
settings.register_profile("thorough", **COMMON | {"max_examples": COMMON["max_examples"] * FACTOR, "print_blob": True})


def load_profile() -> None:
    """Apply the profile to all tests of this process."""
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def examples(count: int, **more: int) -> settings:
    """Return settings (a decorator) for this many examples in a quick run."""
    return settings(max_examples=count * FACTOR if THOROUGH else count, **more)


def tally(sort: str) -> None:
    """Count one input."""
    TALLIES[sort] += 1
