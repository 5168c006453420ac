"""The calls to an API server."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_cli.client.api import _is_about


@pytest.mark.parametrize(
    ("thing", "ours"),
    [
        ({"kind": "DDPTrainingJob", "name": "x", "uid": "u"}, True),
        ({"kind": "DDPTrainingJob", "name": "x", "uid": "former"}, False),
        ({"kind": "Job", "name": "x-1"}, True),
        ({"kind": "Pod", "name": "x-12-3-abcde"}, True),
        ({"kind": "Pod", "name": "x-other-1-0-abcde"}, False),
        ({"kind": "Service", "name": "x"}, False),
    ],
)
def test_events_of_other_jobs_are_excluded(thing: dict[str, Any], ours: bool) -> None:
    assert _is_about(thing, "x", "u") is ours
