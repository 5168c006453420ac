"""Measuring a step without disturbing it: where its time goes, and losses that stay on the device until asked for."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor


class LossWindow:
    """The losses of consecutive steps since the last reading. Keeping them costs the device nothing."""

    # As many are kept apart at most; each is a small allocation on the device.
    LIMIT = 4096

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Add the loss of a step; does not wait for it."""
        self._losses.append(loss)
        if len(self._losses) > self.LIMIT:
            del self._losses[0]

    def take(self, *others: Tensor) -> OnTheWay:
        """Begin to fetch the losses, oldest first, and ``others`` (scalars) after them; begins anew."""
        losses, self._losses = self._losses, []
        return OnTheWay([*losses, *others])


class OnTheWay:
    """Scalars that are being copied from the device, beside its work."""

    def __init__(self, scalars: list[Tensor]) -> None:
        self._event: Any = None
        self._host: Tensor | None = None
        if scalars:
            self._host = torch.stack([scalar.detach().float() for scalar in scalars])
            if self._host.is_cuda:
                self._host = self._host.to("cpu", non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """The numbers, waiting for them if need be."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = [] if self._host is None else self._host.tolist()
        return values


class ComputeClock:
    """Time from the start of forward to the gradient that backward reaches last, before the wait for other ranks.

    DDP starts an all-reduce when a bucket of gradients is ready and waits for all of them at backward's end. The first
    parameter's gradient is the last to be ready, so what follows it is waiting. A straggler computes long and waits
    little; the others compute as ever and wait for it, though all steps take equally long.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start: Any = None
        self._end: Any = None
        # Pairs of events whose time is not known yet; bounded, because the device is at most a few steps behind.
        self._events: deque[tuple[Any, Any]] = deque(maxlen=64)
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._mark_end)  # type: ignore[no-untyped-call]

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _mark_end(self, _: Tensor) -> None:
        self._end = self._mark()

    def begin(self) -> None:
        """Call before a step's first forward pass."""
        self._end = None
        self._start = self._mark()

    def seconds(self) -> float:
        """Compute time that has become known since the last call: the step's own on a CPU, earlier steps' on a GPU."""
        if self._start is None or self._end is None:
            return 0.0
        if not self._cuda:
            return float(self._end - self._start)
        self._events.append((self._start, self._end))
        total = 0.0
        while self._events and self._events[0][1].query():
            start, end = self._events.popleft()
            total += start.elapsed_time(end) / 1000.0
        return total


class Rate:
    """Samples a second between readings, with pauses (validation, checkpoints) left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin to measure now."""
        self._start = time.perf_counter()
        self._samples = 0
        self._paused = 0.0

    def add(self, samples: int) -> None:
        """Count the samples of a step."""
        self._samples += samples

    def pause(self, seconds: float) -> None:
        """Leave out ``seconds`` that did not go into training steps."""
        self._paused += seconds

    def read(self) -> float:
        """Samples a second since the last reading; begins anew."""
        elapsed = time.perf_counter() - self._start - self._paused
        rate = self._samples / elapsed if elapsed > 0 else 0.0
        self.restart()
        return rate
