"""The state of torch during the capture of a CUDA graph: open pools, references to them, and recorded generators."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

Pool = tuple[int, int]
DEVICE = torch.device("cuda", 0)
_Generator = torch.Generator


class FakeCapture:
    """Replaces the names of torch that a capture uses.

    ``closes`` is whether capture_end() closes the pool before it throws, as torch does from 2.12 on; ``heals`` whether
    closing it afterwards has an effect.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, closes: bool, heals: bool = True) -> None:
        self.closes = closes
        self.heals = heals
        self.open: set[Pool] = set()
        self.references = 0
        self.state = _Generator()
        self.in_recording: list[torch.Generator] = []
        self.stream_captures = False
        patches = {
            "torch.cuda.CUDAGraph": lambda: _Graph(self),
            "torch.cuda.graph": _GraphCapture,
            "torch.cuda.graph_pool_handle": lambda: (0, 1),
            "torch.cuda.current_stream": lambda: types.SimpleNamespace(device=DEVICE),
            "torch.cuda.is_current_stream_capturing": lambda: self.stream_captures,
            "torch.cuda.synchronize": lambda *_: None,
            "torch.cuda.empty_cache": self.use,
            "torch.cuda.default_generators": (_DeviceGenerator(self),),
            "torch.Generator": _FreshGenerator,
            "torch.rand": self.use,
            "torch.Tensor.pin_memory": self.use,
            "torch._C._cuda_endAllocateToPool": self.end,
            "torch._C._cuda_releasePool": self.release,
        }
        for name, stand_in in patches.items():
            monkeypatch.setattr(name, stand_in)

    def end(self, device: int, pool: Pool) -> None:
        if pool not in self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        if self.heals:
            self.open.discard(pool)

    def release(self, device: int, pool: Pool) -> None:
        self.references -= 1

    def use(self, *_: Any, **__: Any) -> None:
        """Fail as torch's assertions do while a recording is open."""
        if self.open:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        if any(state is self.state for state in self.in_recording):
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class _Graph:
    def __init__(self, capture: FakeCapture) -> None:
        self.capture = capture
        self.ended = False

    def reset(self) -> None:
        if self.ended:
            self.capture.references -= 1
            self.ended = False

    def replay(self) -> None:
        """Do nothing."""


class _GraphCapture:
    def __init__(self, graph: _Graph, *, pool: Pool, **_: Any) -> None:
        self.graph = graph
        self.pool = pool

    def __enter__(self) -> None:
        capture = self.graph.capture
        capture.open.add(self.pool)
        capture.references += 1
        capture.in_recording.append(capture.state)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        capture = self.graph.capture
        if not isinstance(error, torch.AcceleratorError):
            capture.open.discard(self.pool)
            capture.in_recording.clear()
            self.graph.ended = True
            return
        if capture.closes:
            capture.open.discard(self.pool)
            self.graph.ended = True
        raise torch.AcceleratorError("operation failed due to a previous error during capture")


class _DeviceGenerator:
    def __init__(self, capture: FakeCapture) -> None:
        self.capture = capture

    def initial_seed(self) -> int:
        return self.capture.state.initial_seed()

    def manual_seed(self, seed: int) -> None:
        self.capture.state.manual_seed(seed)

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.capture.state = state


class _FreshGenerator:
    def __init__(self, device: torch.device) -> None:
        self._state = _Generator()

    def manual_seed(self, seed: int) -> None:
        self._state.manual_seed(seed)

    def graphsafe_get_state(self) -> torch.Generator:
        return self._state
