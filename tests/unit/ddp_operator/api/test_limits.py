"""The limits in docs/api.md are the effective ones."""

import re
from typing import Any

import pytest

from ddp_operator.api.crd import build_resource_schema
from ddp_operator.api.job import CRASH_LOOP_FAILURES
from ddp_operator.api.status import RestartCounts, Status
from ddp_operator.features import SCHEMA
from docs.pages.api import write_page
from docs.pages.limits import LIMITS, Limit
from tests.support.builders import job


def field(path: str) -> dict[str, Any]:
    spec = build_resource_schema(SCHEMA)["properties"]["spec"]
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
    entries = [line for line in write_page().splitlines() if line.endswith(f"(`{limit.change}`)")]
    assert [f": {limit.value};" in entry for entry in entries] == [True]


@pytest.mark.parametrize(
    ("recovery", "counts", "allowed"),
    [
        ({"maxRestarts": 5}, RestartCounts(), 5),
        ({"maxRestarts": 5}, RestartCounts(used=2, counted=9), 3),
        ({"maxRestarts": 1}, RestartCounts(used=2), 0),
        ({"maxRestarts": 5}, RestartCounts(used=2, without_progress=CRASH_LOOP_FAILURES - 2), 3),
        ({"maxRestarts": 5}, RestartCounts(used=2, without_progress=CRASH_LOOP_FAILURES - 1), 0),
        ({"maxRestarts": 0, "inPlaceRestarts": 2}, RestartCounts(used=2, without_progress=2), 2),
    ],
)
def test_launchers_get_remaining_restarts_of_attempt(
    recovery: dict[str, int], counts: RestartCounts, allowed: int
) -> None:
    assert job(recovery=recovery, status=Status().remember(restarts=counts)).in_place_restarts == allowed
