"""A GPU's asynchronous execution: the host queues work and continues; no work is executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class FakeGpu:
    """``host`` and ``device`` are the seconds at which each has finished all work so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        gpu = self

        class FakeEvent:
            """A stand-in for ``torch.cuda.Event``."""

            def __init__(self, **_: Any) -> None:
                self._at: float | None = None

            def record(self) -> None:
                self._at = gpu.device = max(gpu.device, gpu.host)

            def query(self) -> bool:
                assert self._at is not None
                return gpu.host >= self._at

            def synchronize(self) -> None:
                assert self._at is not None
                gpu.host = max(gpu.host, self._at)

            def elapsed_time(self, other: FakeEvent) -> float:
                assert self._at is not None
                assert other.query(), "asked for before the device was there"
                assert other._at is not None
                return 1000.0 * (other._at - self._at)

        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr("time.perf_counter", lambda: self.host)

    def work(self, seconds: float, host: float = 0.0) -> None:
        """Queue ``seconds`` of work for the device, which takes the host ``host`` seconds."""
        self.host += host
        self.device = max(self.device, self.host) + seconds

    def wait(self) -> None:
        """Wait until the device has finished."""
        self.host = max(self.host, self.device)
