"""Fixtures: one thread, and a GPU with simulated time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.fake_gpu import FakeGpu


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Compute on one thread: more threads do not help networks this small, and wait long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU whose times a test sets."""
    return FakeGpu(monkeypatch)
