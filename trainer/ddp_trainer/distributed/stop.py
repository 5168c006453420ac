"""Stopping early: whichever rank has a reason to, all ranks stop after the same step."""

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

_MOST_QUIET, _QUIET_SECONDS = 16, 0.1


class Reason(enum.IntEnum):
    """Why to stop. Where ranks have different reasons the greatest counts: only NONE and SIGNAL leave a good state."""

    NONE = 0
    SIGNAL = 1
    NOT_FINITE = 2
    SUPERSEDED = 3


class StopSignal:
    """Remembers that SIGTERM or SIGINT came; a second SIGINT interrupts at once, as anyone at a keyboard expects."""

    def __init__(self) -> None:
        self.reason = Reason.NONE
        self._before: dict[int, Any] = {}

    def request(self, reason: Reason) -> None:
        """Ask for a stop, from any thread."""
        self.reason = max(self.reason, reason)

    def install(self) -> None:
        """Take over both signals, which only the main thread may: in another the program keeps them."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore(self) -> None:
        """Restore the handlers from before :meth:`install`. Twice is once."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.request(Reason.SIGNAL)


class StopAgreement:
    """The ranks compare notes, one step late: so the message travels while they compute.

    Call :meth:`poll` once a step on every rank. It returns the same reason on all ranks after the same step. Quick
    steps are not worth a message each: one says as well how long they take on the slowest rank, and for a tenth of a
    second, 16 steps at most, there is no other.
    """

    def __init__(self, world: World, stop: StopSignal) -> None:
        self._world = world
        self._stop = stop
        self._pending: tuple[Any, Any] | None = None
        # Polls without a message that are left, the longest step since the last one, and when the last poll was.
        self._quiet, self._longest, self._polled = 0, math.inf, 0.0
        self._most_quiet = _MOST_QUIET

    def begin(self, most_quiet: int = _MOST_QUIET) -> None:
        """Say on every rank that other work begins, whose steps may take longer; 0: with a message each."""
        self.finish()  # what it says is said again: a reason stays
        self._most_quiet, self._quiet, self._longest = most_quiet, 0, math.inf

    def poll(self) -> Reason:
        """The greatest reason that any rank had by the step before; NONE to go on."""
        if not self._world.is_distributed:
            return self._stop.reason

        now = time.perf_counter()
        self._longest, self._polled = max(self._longest, now - self._polled), now
        agreed = self.finish()
        if self._quiet:
            self._quiet -= 1
            return agreed
        note = torch.tensor([float(self._stop.reason), self._longest], dtype=torch.float64)
        self._pending, self._longest = (note, dist.all_reduce(note, op=dist.ReduceOp.MAX, async_op=True)), 0.0
        return agreed

    def finish(self) -> Reason:
        """Wait for the message still under way. Call it before leaving the loop, on every rank."""
        if self._pending is None:
            return Reason.NONE
        note, work = self._pending
        self._pending = None
        work.wait()
        reason, seconds = note.tolist()
        self._quiet = min(self._most_quiet, int(_QUIET_SECONDS / max(seconds, 1e-9)))
        return Reason(int(reason))
