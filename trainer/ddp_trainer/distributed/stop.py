"""Stopping early: whichever rank has a reason to, all ranks stop after the same step."""

import enum
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_trainer.distributed.world import World


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

    def request(self, reason: Reason) -> None:
        """Ask for a stop, from any thread."""
        self.reason = max(self.reason, reason)

    def install(self) -> None:
        """Take over both signals. Only the main thread may."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.request(Reason.SIGNAL)


class StopAgreement:
    """Every step the ranks compare notes, one step late: so the message travels while they compute.

    Call :meth:`poll` once a step on every rank. It returns the same reason on all ranks after the same step.
    """

    def __init__(self, world: World, stop: StopSignal) -> None:
        self._world = world
        self._stop = stop
        self._pending: tuple[Any, Any] | None = None

    def poll(self) -> Reason:
        """The greatest reason that any rank had by the step before; NONE to go on."""
        if not self._world.is_distributed:
            return self._stop.reason

        agreed = self.finish()
        flag = torch.tensor([int(self._stop.reason)], dtype=torch.int32)
        self._pending = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True))
        return agreed

    def finish(self) -> Reason:
        """Wait for the message still under way. Call it before leaving the loop, on every rank."""
        if self._pending is None:
            return Reason.NONE
        flag, work = self._pending
        self._pending = None
        work.wait()
        return Reason(int(flag.item()))
