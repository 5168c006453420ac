"""Times as Kubernetes writes them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from ddp_operator.kubeobjects.timestamps import format_time, parse_time, truncate
from tests.support.builders import NOW


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-20T12:00:00Z", NOW),
        ("2026-11-20T13:00:00+01:00", NOW),
        ("2026-11-20T12:00:00", NOW),
        ("2026-11-20T12:00:00.5Z", NOW + timedelta(seconds=0.5)),
        ("yesterday", None),
        ("", None),
        (None, None),
        (3, None),
    ],
)
def test_rfc3339_time_is_parsed(text: Any, moment: datetime | None) -> None:
    assert parse_time(text) == moment


def test_time_is_formatted_in_utc_and_whole_seconds() -> None:
    assert format_time(NOW + timedelta(seconds=0.9)) == "2026-11-20T12:00:00Z"


def test_truncated_time_is_what_is_read_back() -> None:
    moment = NOW + timedelta(seconds=0.9)

    assert truncate(moment) == parse_time(format_time(moment)) == NOW
