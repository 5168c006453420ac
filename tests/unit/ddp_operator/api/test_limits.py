"""The limits in docs/api.md are the effective ones."""

import re
from typing import Any

import pytest

from ddp_operator.api.crd import build_resource_schema
from ddp_operator.api.job import CRASH_LOOP_FAILURES
from ddp_operator.api.status import LastFailure, Restarts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import find_limit
from docs.pages.api import write_page
from docs.pages.limits import LIMITS, Limit
from tests.support.builders import job

CAUSE = LastFailure(attempt=1, category="UserError")


def field(path: str) -> dict[str, Any]:
    spec = build_resource_schema()["properties"]["spec"]
    for name in path.split(".")[1:]:
        spec = spec["properties"][name]
    return dict(spec)


@pytest.mark.parametrize("limit", [item for item in LIMITS if re.fullmatch(r"spec\.[\w.]+", item.change)])
def test_limit_that_is_field_has_fields_default(limit: Limit) -> None:
    default = field(limit.change).get("default")
    if isinstance(default, list):
        assert limit.value == ", ".join(map(str, default))
    elif default is not None:
        assert limit.value == default
    rows = [line for line in write_page().splitlines() if line.endswith(f"| `{limit.change}` |")]
    assert [f"| {limit.value} |" in row for row in rows] == [True]


def test_crash_loop_ends_at_documented_failure() -> None:
    before = Restarts(used=1, without_progress=CRASH_LOOP_FAILURES - 1)
    assert find_limit(job(), CAUSE, before) is None
    ended = find_limit(job(), CAUSE, Restarts(used=1, without_progress=CRASH_LOOP_FAILURES))
    assert ended is not None
    assert ended[0] == c.CRASH_LOOP
    assert ended[1].startswith(f"failed {CRASH_LOOP_FAILURES} times in a row without progress")


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_budget_ends_at_failure_after_max_restarts(limit: int) -> None:
    spec = job(recovery={"maxRestarts": limit})
    assert find_limit(spec, CAUSE, Restarts(used=limit)) is None
    ended = find_limit(spec, CAUSE, Restarts(used=limit + 1, counted=limit + 1))
    assert ended is not None
    assert ended[0] == c.RESTART_BUDGET_EXHAUSTED


@pytest.mark.parametrize(
    ("recovery", "ledger", "allowed"),
    [
        ({"maxRestarts": 5}, Restarts(), 5),
        ({"maxRestarts": 5}, Restarts(used=2, counted=9), 3),
        ({"maxRestarts": 1}, Restarts(used=2), 0),
        ({"maxRestarts": 5}, Restarts(used=2, without_progress=CRASH_LOOP_FAILURES - 2), 3),
        ({"maxRestarts": 5}, Restarts(used=2, without_progress=CRASH_LOOP_FAILURES - 1), 0),
        ({"maxRestarts": 0, "inPlaceRestarts": 2}, Restarts(used=2, without_progress=2), 2),
    ],
)
def test_launchers_get_remaining_restarts_of_attempt(recovery: dict[str, int], ledger: Restarts, allowed: int) -> None:
    assert job(recovery=recovery, status=Status(restarts=ledger)).in_place_restarts == allowed
