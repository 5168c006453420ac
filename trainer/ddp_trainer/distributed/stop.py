"""Stopping early: when any rank has a reason, all ranks stop after the same step."""

import enum
import math
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_trainer.distributed.world import World

# Polls without a message: at most this number, and at most this time.
_MAX_SILENT_POLLS = 16
_MAX_SILENT_SECONDS = 0.1


class Reason(enum.IntEnum):
    """Why to stop. If ranks differ, the greatest value counts: only NONE and SIGNAL leave a state that can be saved."""

    NONE = 0
    SIGNAL = 1
    NOT_FINITE = 2
    SUPERSEDED = 3


class StopSignal:
    """Records that SIGTERM or SIGINT was received; a second SIGINT raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        # A list, not the greatest value: a signal handler runs amid another request, and the checkpoint's thread beside
        # it. An append is one operation, and needs no lock, for which a handler would wait forever.
        self._reasons = [Reason.NONE]
        self._previous_handlers: dict[int, Any] = {}

    @property
    def reason(self) -> Reason:
        return max(self._reasons)

    def request(self, reason: Reason) -> None:
        """Request a stop, from any thread."""
        self._reasons.append(reason)

    def install(self) -> None:
        """Handle both signals. Python allows this in the main thread only; in others the program's handlers remain."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue  # a shell's background process
            self._previous_handlers[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restore the handlers from before :meth:`install`; a second call does nothing."""
        while self._previous_handlers:
            number, handler = self._previous_handlers.popitem()
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.request(Reason.SIGNAL)


class StopAgreement:
    """An all-reduce of stop reasons that completes one step later, while the ranks compute.

    Call :meth:`poll` once a step on every rank. It returns the same reason on all ranks after the same step. Not every
    short step sends a message: each message also carries the duration of the slowest rank's steps, and the polls of the
    following tenth of a second, 16 at most, send none.
    """

    def __init__(self, world: World, stop: StopSignal) -> None:
        self._world = world
        self._stop = stop
        self._pending: tuple[Any, Any] | None = None
        self._max_silent_polls = _MAX_SILENT_POLLS
        # Polls that still send no message.
        self._silent_polls = 0
        # The longest step since the last message, in seconds, and the time of the last poll.
        self._longest_step = math.inf
        self._last_poll = 0.0

    def begin(self, max_silent_polls: int = _MAX_SILENT_POLLS) -> None:
        """Start a phase whose steps may take longer, on every rank; with 0 each poll sends a message."""
        self.finish()  # its reason is not lost: the next message repeats it
        self._max_silent_polls = max_silent_polls
        self._silent_polls = 0
        self._longest_step = math.inf

    def poll(self) -> Reason:
        """Return the greatest reason that any rank had by the previous step; NONE means continue."""
        if not self._world.is_distributed:
            return self._stop.reason

        now = time.perf_counter()
        self._longest_step = max(self._longest_step, now - self._last_poll)
        self._last_poll = now
        # The message before is read first: all ranks take its reason and its number of silent polls in the same step,
        # so that they send the next message together.
        agreed = self.finish()
        if self._silent_polls:
            self._silent_polls -= 1
            return agreed

        message = torch.tensor([float(self._stop.reason), self._longest_step], dtype=torch.float64)
        self._pending = (message, dist.all_reduce(message, op=dist.ReduceOp.MAX, async_op=True))
        self._longest_step = 0.0
        return agreed

    def finish(self) -> Reason:
        """Wait for the pending message. Call it before leaving the loop, on every rank."""
        if self._pending is None:
            return Reason.NONE
        message, work = self._pending
        self._pending = None
        work.wait()
        reason, seconds = message.tolist()
        self._silent_polls = min(self._max_silent_polls, int(_MAX_SILENT_SECONDS / max(seconds, 1e-9)))
        return Reason(int(reason))
