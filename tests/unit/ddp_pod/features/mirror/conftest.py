"""Fixtures of several test modules of the launcher."""

from __future__ import annotations

import pytest

from ddp_pod.features.mirror import process as mirror
from tests.support.mirror_clock import MirrorClock


@pytest.fixture
def mirror_clock(monkeypatch: pytest.MonkeyPatch) -> MirrorClock:
    """Replace the time of the mirrors by a clock that the test sets."""
    clock = MirrorClock()
    monkeypatch.setattr(mirror, "time", clock)
    return clock
