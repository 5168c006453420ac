"""Fixtures: one thread, and a GPU with simulated time."""

from __future__ import annotations

import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.threads import one_thread

__all__ = ["gpu", "one_thread"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU whose times a test sets."""
    return FakeGpu(monkeypatch)
