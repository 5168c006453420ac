"""Measuring a step without disturbing it: where its time goes, and numbers that are fetched while the device works."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


class AsyncScalars:
    """Scalars that are being copied from the device, beside its work."""

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
        """Whether reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """The numbers, waiting for them if need be."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = [] if self._host is None else self._host.tolist()
        return values


class Timeline:
    """Moments in the order of the device's work: on a GPU events in its stream, else the host's clock.

    The host runs ahead of a GPU. By its own clock steps take as long as it takes to ask for them, and what the device
    has still to do when the last one has been asked for counts as somebody else's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self, *, recorded: bool = False) -> Any:
        """The moment when all that has been asked for so far is done; does not wait for it.

        With ``recorded`` in a step that is being recorded: at every replay it is another moment.
        """
        if not self._cuda:
            return time.perf_counter()
        again = {"external": True} if recorded else {}
        event = torch.cuda.Event(enable_timing=True, **again)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def reached(self, moment: Any) -> bool:
        """Whether ``moment`` is past."""
        return not self._cuda or bool(moment.query())

    def wait(self) -> None:
        """Let the host wait until all that has been asked for so far is done."""
        if self._cuda:
            self.now().synchronize()

    def seconds(self, start: Any, end: Any, pauses: Sequence[tuple[Any, Any]] = ()) -> float:
        """Seconds between two moments, without the ``pauses`` between them; waits for the second."""
        if not self._cuda:
            seconds = float(end - start)
        else:
            end.synchronize()
            seconds = float(start.elapsed_time(end)) / 1000.0
        return seconds - sum(self.seconds(*pause) for pause in pauses)


class Stopwatch:
    """Measures laps of training, with pauses (validation, checkpoints) left out."""

    def __init__(self, device: torch.device) -> None:
        self._timeline = Timeline(device)
        self.restart()

    def restart(self) -> None:
        """Begin a lap now."""
        self._start: Any = self._timeline.now()
        self._pauses: list[tuple[Any, Any]] = []

    def pause(self, start: Any, end: Any) -> None:
        """Leave out what was between two moments of this device's timeline."""
        self._pauses.append((start, end))

    def lap(self) -> Callable[[], float]:
        """End the lap, and begin the next one. Does not wait for the device.

        Returns a function that does, and gives the seconds of the lap without its pauses.
        """
        start, pauses = self._start, self._pauses
        self.restart()
        return partial(self._timeline.seconds, start, self._start, pauses)


# Replays of a recorded step between two at which the host waits for the device, to know how long it computes.
_LOOK_EVERY = 32


class ComputeClock:
    """Time from the start of forward to the gradient that backward reaches last, before the wait for other ranks.

    DDP starts an all-reduce when a bucket of gradients is ready and waits for all of them at backward's end. The first
    parameter's gradient is the last to be ready, so what follows it is waiting. A straggler computes long and waits
    little; the others compute as ever and wait for it, though all steps take equally long.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._timeline = Timeline(device)
        self._start: Any = None
        self._end: Any = None
        # Pairs of moments whose time is not known yet; bounded, because the device is at most a few steps behind.
        self._moments: deque[tuple[Any, Any]] = deque(maxlen=64)
        # Of a recorded step: whether it is being recorded, its two moments, and how long it took when last looked at.
        self._recording = False
        self._recorded: tuple[Any, Any] | None = None
        self._replays, self._typical = 0, 0.0
        # Every event that the graph records into, for as long as the graph lives.
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
        """Release the events of a recorded step. Call it when the graph is gone, and not before."""
        self._recorded = None
        self._recorded_events.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within it a step is recorded."""
        self._recording = True
        try:
            yield
            self._recorded = None if self._end is None else (self._start, self._end)
        finally:
            self._recording = False
            self._start = None
            # The next step's own: these two are the graph's.
            self._end = None

    def replayed(self) -> None:
        """Call before each replay of the recorded step. Now and then it waits for the one before, to see how long."""
        if self._recorded is not None and self._replays % _LOOK_EVERY == 1:
            self._timeline.wait()
            try:
                self._typical = self._timeline.seconds(*self._recorded)
            except RuntimeError:  # a figure that can't be had is no reason to end a run
                self._recorded = None  # their events stay: the graph records into them
        self._replays += 1
        self._start = None

    def begin(self) -> None:
        """Call before a step's first forward pass."""
        self._end = None
        self._start = self._now()

    def seconds(self) -> float:
        """Compute time that has become known since the last call: the step's own on a CPU, earlier steps' on a GPU.

        A replay counts as long as the one that was last looked at.
        """
        if self._start is None or self._end is None:
            return self._typical
        self._moments.append((self._start, self._end))
        total = 0.0
        while self._moments and self._timeline.reached(self._moments[0][1]):
            total += self._timeline.seconds(*self._moments.popleft())
        return total
