"""Planted failures: the right cause, rank, line and remedy, and no useless restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failures.planted import OPEN, PLANTED
from tests.failures.running import Answer, judge, run_planted

pytestmark = pytest.mark.process


@pytest.mark.parametrize("name", PLANTED)
def test_planted_failure_has_its_answer(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in OPEN:
        request.applymarker(pytest.mark.xfail(reason=OPEN[name], strict=False))
    status = run_planted(PLANTED[name], tmp_path)
    found = status.get("lastFailure")
    assert judge(PLANTED[name], status) == Answer(cause=True, place=True, remedy=True, useless=0), found
