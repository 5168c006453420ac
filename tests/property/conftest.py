"""Profiles of hypothesis, by HYPOTHESIS_PROFILE: few fixed examples (quick), few new ones (explore), or
many new ones (thorough, as in `make fuzz`). The report of tiers has the number of examples.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.fuzzing import FACTOR, TALLIES, THOROUGH

COMMON = {
    "deadline": None,  # other work on the machine makes single examples slow
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "max_examples": int(os.environ.get("HYPOTHESIS_EXAMPLES", "60")),
    "database": None,
}
settings.register_profile("same", derandomize=True, **COMMON)
settings.register_profile("explore", **COMMON)
settings.register_profile("thorough", **COMMON | {"max_examples": COMMON["max_examples"] * FACTOR, "print_blob": True})
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def tell_what_was_tried(request: pytest.FixtureRequest) -> Iterator[None]:
    """Record the number of examples of a test, for the report of tiers."""
    before = TALLIES.copy()
    yield
    request.node.user_properties.append(("tried", dict(TALLIES - before)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure of a thorough run at once: the run takes most of an hour, and may not find the example again."""
    if THOROUGH and report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
