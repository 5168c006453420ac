"""Measurements that do not make the host wait for the device: times, and scalars copied while the device computes."""

import time
from collections import deque
from collections.abc import Sequence
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

    def now(self) -> Any:
        """Return the moment at which all work launched so far is done; does not wait for it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._mark_end)  # type: ignore[no-untyped-call]

    def _mark_end(self, _: Tensor) -> None:
        self._end = self._timeline.now()

    def begin(self) -> None:
        """Call before a step's first forward pass."""
        self._end = None
        self._start = self._timeline.now()

    def seconds(self) -> float:
        """Return the compute time measured since the last call: of this step on a CPU, of earlier steps on a GPU."""
        if self._start is None or self._end is None:
            return 0.0
        self._moments.append((self._start, self._end))
        total = 0.0
        while self._moments and self._timeline.reached(self._moments[0][1]):
            total += self._timeline.seconds(*self._moments.popleft())
        return total
