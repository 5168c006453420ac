"""What generated inputs add to the report of tiers, and to a thorough run."""

from collections.abc import Iterator

import pytest

from tests.support.fuzzing import TALLIES, THOROUGH


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
