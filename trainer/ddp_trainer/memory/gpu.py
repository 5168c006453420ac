"""Copies of GPU memory into the memory of the host, on separate streams and without stopping the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GpuCopy(NamedTuple):
    """A copy. ``target``: uint8 on the host; ``source``: on a GPU, one dimension, as many bytes."""

    target: Tensor
    source: Tensor


class _Running(NamedTuple):
    """The copies of one device. ``finished``: an event after the last of them."""

    device: torch.device
    finished: Any


class GpuCopies:
    """The copies of one state. Without a GPU all methods do nothing."""

    def __init__(self) -> None:
        self._running: list[_Running] = []
        self._reached: list[Any] = []
        self._streams: dict[torch.device, Any] = {}

    def start(self, copies: Sequence[GpuCopy]) -> None:
        """Start copies that read what the current streams have computed so far."""
        self._running = []
        self._reached = []
        for device in {copy.source.device for copy in copies}:
            # torch has 32 streams per device, handed out in turn: a new one per copy would be the training's own.
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy in copies:
                    if copy.source.device == device:
                        copy.target.copy_(copy.source.view(torch.uint8), non_blocking=True)
                        copy.source.record_stream(stream)
                finished = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                finished.record(stream)
            self._running.append(_Running(device, finished))

    def fence(self) -> None:
        """Make the current streams wait for the copies: the sources may change after that."""
        if not self._running or torch.cuda.is_current_stream_capturing():
            return
        if not self._reached:
            self._reached = [_record(running.device) for running in self._running]
        for running in self._running:
            torch.cuda.current_stream(running.device).wait_event(running.finished)

    def synchronize(self) -> None:
        """Wait for the end of the copies on the host, in a thread beside the training."""
        for running in self._running:
            running.finished.synchronize()

    def measure_stall(self) -> float:
        """Return for how many seconds the streams waited at the fence; 0 if that is not known yet."""
        stalls = [0.0]
        for running, reached in zip(self._running, self._reached):  # noqa: B905
            if reached.query() and running.finished.query():
                stalls.append(float(reached.elapsed_time(running.finished)) / 1000)
        return max(stalls)


def _record(device: torch.device) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
