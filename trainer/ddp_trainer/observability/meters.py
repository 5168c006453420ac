"""Measurements that do not make the host wait for the device: times, and scalars copied while the device computes."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


class AsyncScalars:
    """Scalars that are copied from the device while it computes."""

    def __init__(self, scalars: list[Tensor]) -> None:
        self._event: Any = None
        self._host: Tensor | None = None
        if scalars:
            self._host = torch.stack([scalar.detach().float().reshape(()) for scalar in scalars])
            if self._host.is_cuda:
                self._host = self._host.to("cpu", non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()

    def ready(self) -> bool:
        """Return whether the copy is complete, so that :meth:`read` does not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """Return the numbers; wait for the copy if necessary."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = [] if self._host is None else self._host.tolist()
        return values


class Timeline:
    """Moments in the device's work: events in the stream of a GPU, times of the host's clock on a CPU.

    The host runs ahead of a GPU. Its clock would measure the launches of a step, and attribute the pending work after
    the last step to whatever follows.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self, *, recorded: bool = False) -> Any:
        """Return the moment at which all work launched so far is done; does not wait for it.

        Use ``recorded`` within a step that is being recorded: every replay then sets the moment again.
        """
        if not self._cuda:
            return time.perf_counter()
        options = {"external": True} if recorded else {}
        event = torch.cuda.Event(enable_timing=True, **options)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def reached(self, moment: Any) -> bool:
        """Return whether the device has reached ``moment``."""
        return not self._cuda or bool(moment.query())

    def wait(self) -> None:
        """Block the host until all work launched so far is done."""
        if self._cuda:
            self.now().synchronize()

    def seconds(self, start: Any, end: Any, pauses: Sequence[tuple[Any, Any]] = ()) -> float:
        """Return the seconds between two moments, without the ``pauses`` between them; waits for the second moment."""
        if not self._cuda:
            seconds = float(end - start)
        else:
            end.synchronize()
            seconds = float(start.elapsed_time(end)) / 1000.0
        return seconds - sum(self.seconds(*pause) for pause in pauses)


class Stopwatch:
    """Measures laps of training, without pauses for validation and checkpoints."""

    def __init__(self, device: torch.device) -> None:
        self._timeline = Timeline(device)
        self.restart()

    def restart(self) -> None:
        """Start a lap now."""
        self._start: Any = self._timeline.now()
        self._pauses: list[tuple[Any, Any]] = []

    def pause(self, start: Any, end: Any) -> None:
        """Exclude the time between two moments of this device's timeline."""
        self._pauses.append((start, end))

    def lap(self) -> Callable[[], float]:
        """End the lap and start the next one, without waiting for the device.

        Returns a function that waits, and returns the seconds of the lap without its pauses.
        """
        start = self._start
        pauses = self._pauses
        self.restart()
        return partial(self._timeline.seconds, start, self._start, pauses)


# The host waits for the device, to measure its compute time, once in so many replays of a recorded step.
_MEASURE_EVERY = 32


class ComputeClock:
    """Measures the time from the start of forward to the last gradient of backward, before the wait for other ranks.

    DDP starts an all-reduce when a bucket of gradients is ready, and waits for all of them at the end of backward. The
    first parameter's gradient is ready last; the time after it is spent waiting. All ranks have equal step times, but a
    straggler computes longer and waits less than its peers.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._timeline = Timeline(device)
        self._start: Any = None
        self._end: Any = None
        # Pairs of moments that the device may not have reached; bounded, because it is at most a few steps behind.
        self._moments: deque[tuple[Any, Any]] = deque(maxlen=64)
        # A recorded step: whether it is being recorded, its two moments, its replays, and its last measured time.
        self._recording = False
        self._recorded: tuple[Any, Any] | None = None
        self._replays = 0
        self._measured_seconds = 0.0
        # The events of the graph, which must live as long as the graph.
        self._recorded_events: list[Any] = []
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._mark_end)  # type: ignore[no-untyped-call]

    def _mark_end(self, _: Tensor) -> None:
        self._end = self._now()

    def _now(self) -> Any:
        moment = self._timeline.now(recorded=self._recording)
        if self._recording:
            self._recorded_events.append(moment)
        return moment

    def forget_recording(self) -> None:
        """Release the events of a recorded step; call it after the graph is deleted."""
        self._recorded = None
        self._recorded_events.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Return the context in which a step is recorded."""
        self._recording = True
        try:
            yield
            self._recorded = None if self._end is None else (self._start, self._end)
        finally:
            self._recording = False
            # These two moments belong to the graph; the next step needs its own.
            self._start = None
            self._end = None

    def replayed(self) -> None:
        """Call before each replay of the recorded step; occasionally waits for the previous replay to measure it."""
        if self._recorded is not None and self._replays % _MEASURE_EVERY == 1:
            self._timeline.wait()
            try:
                self._measured_seconds = self._timeline.seconds(*self._recorded)
            except RuntimeError:  # a missing measurement must not stop the run
                self._recorded = None  # the events are kept: the graph still uses them
        self._replays += 1
        self._start = None

    def begin(self) -> None:
        """Call before a step's first forward pass."""
        self._end = None
        self._start = self._now()

    def seconds(self) -> float:
        """Return the compute time measured since the last call: of this step on a CPU, of earlier steps on a GPU.

        For a replay it is the time of the last measured replay.
        """
        if self._start is None or self._end is None:
            return self._measured_seconds
        self._moments.append((self._start, self._end))
        total = 0.0
        while self._moments and self._timeline.reached(self._moments[0][1]):
            total += self._timeline.seconds(*self._moments.popleft())
        return total
