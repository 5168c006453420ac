"""Turns of the steps that read tenants' input (parse, check, build, decide) in the operator's event loop.

Such a step blocks the loop, which also renews the Lease and serves /healthz. Therefore one long step runs at a time,
and the loop handles whatever is ready before the next one starts. What a step takes beyond an ordinary one is charged
to its namespace: one that has used its share waits, and those that owe least go first.

Size limits and linear checks keep the steps short. The limit of a step holds even if a check has a fault (ADR 0044).
"""

import asyncio
import logging
import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, ParamSpec, TypeVar

from ddp_operator.api.errors import FieldError
from ddp_operator.api.size import OversizeSpec
from ddp_operator.reconcile.lending import lend_worker
from ddp_operator.reconcile.turns import Payer, Turns

logger = logging.getLogger(__name__)

ORDINARY: Final = 0.02
"""CPU seconds of a step that are not charged. The steps of an ordinary job take a few milliseconds."""
ORDINARY_PER_POD: Final = 0.0001
"""Additional seconds for each pod that the step reads: a pod needs quota."""
SHARE: Final = 0.1
"""CPU seconds per second that a namespace may be charged."""
BURST: Final = 2.0
"""CPU seconds that a namespace may be charged at once."""
_PATIENCE: Final = 0.1
"""Seconds for which a call that waits for its turn keeps its worker."""

STEP_SECONDS: Final = 0.5
"""CPU seconds of one step. The largest specs need about a fourth of that."""
_REPEAT_SECONDS: Final = 0.1
"""CPU seconds until a further interruption: a step may catch the first one."""

P = ParamSpec("P")
T = TypeVar("T")


class StepTooLong(OversizeSpec):
    """A step used more CPU time than allowed."""


def run_limited(step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a step. Raises: StepTooLong.

    A signal interrupts Python code and regular expressions. Only the main thread gets signals: in other threads, which
    tests use, the step has no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        return step(*args, **kwargs)
    ends = time.thread_time() + STEP_SECONDS

    def interrupt(*_: Any) -> None:
        if time.thread_time() >= ends:  # the timer also counts the time of other threads
            problem = f"a check took more than {STEP_SECONDS:g} s of CPU time"
            raise StepTooLong([FieldError("spec", f"{problem}; shorten spec.template, and report its YAML")])

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS, _REPEAT_SECONDS)
    try:
        try:
            return step(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except StepTooLong:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the interruption may precede the call above
        raise


class Debts:
    """The CPU seconds that each namespace was charged and has not yet paid off, at SHARE per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_at: dict[str, float] = {}
        """The time at which a namespace has paid off, for those that owe."""

    def charge(self, namespace: str, seconds: float) -> None:
        """Add to the debt of a namespace."""
        now = self._clock()
        was_waiting = self.delay(namespace) > 0
        self._paid_at = {name: paid_at for name, paid_at in self._paid_at.items() if paid_at > now}
        self._paid_at[namespace] = self._paid_at.get(namespace, now) + seconds / SHARE
        if not was_waiting and self.delay(namespace) > 0:
            logger.warning(
                "namespace %s: the checks of its jobs took %.1f s of CPU time, so they wait, and other namespaces go "
                "first; shorten the largest spec.template",
                namespace,
                BURST,
            )

    def owed(self, namespace: str) -> float:
        """Return the seconds until a namespace has paid off."""
        return max(0.0, self._paid_at.get(namespace, 0.0) - self._clock())

    def delay(self, namespace: str) -> float:
        """Return the seconds until a namespace may run a further step; 0: it may now."""
        return max(0.0, self.owed(namespace) - BURST / SHARE)


class FairTurns(Turns):
    """Runs the steps of all namespaces. Use it in one event loop. ``cpu`` returns the CPU seconds of the thread."""

    def __init__(self, debts: Debts | None = None, cpu: Callable[[], float] = time.thread_time) -> None:
        self._debts = debts or Debts()
        self._cpu = cpu
        self._is_taken = False
        """Whether a step has its turn, or the loop has its own."""
        self._since_turn = 0.0
        """CPU seconds of steps since the loop had a turn."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By namespace, the one that waits for longest first."""
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, payer: Payer, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a step once it is its turn. Raises: StepTooLong, or what the step raises."""
        if self._is_taken or self._waiting or self._debts.delay(payer.namespace):
            await self._wait(payer.namespace)
        began = self._cpu()
        try:
            return run_limited(step, *args, **kwargs)
        finally:
            self._end_step(payer, self._cpu() - began)

    def lend_worker(self) -> AbstractContextManager[None]:
        """Let another key be processed meanwhile."""
        return lend_worker()

    def _end_step(self, payer: Payer, seconds: float) -> None:
        excess = seconds - ORDINARY - ORDINARY_PER_POD * payer.pods
        if excess > 0:
            self._debts.charge(payer.namespace, excess)
        self._since_turn += seconds
        self._is_taken = self._since_turn >= ORDINARY
        if self._is_taken:
            # The loop polls its connections before it calls this.
            asyncio.get_running_loop().call_soon(self._end_turn_of_loop)
        else:
            self._start_next()

    def _end_turn_of_loop(self) -> None:
        self._since_turn = 0.0
        self._is_taken = False
        self._start_next()

    async def _wait(self, namespace: str) -> None:
        """Wait for the turn of a step. The worker is lent to another key if that takes long."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        self._start_next()
        try:
            await asyncio.wait([turn], timeout=_PATIENCE)
            if not turn.done():
                with lend_worker():
                    await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._is_taken = False
                self._start_next()
            turn.cancel()
            raise

    def _start_next(self) -> None:
        """Give the turn to the namespace that owes least, and put it last."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_taken:
            return
        self._drop_cancelled()
        if not self._waiting:
            return
        namespace = min(self._waiting, key=self._debts.owed)
        delay = self._debts.delay(namespace)
        if delay > 0:
            self._timer = asyncio.get_running_loop().call_later(delay, self._start_next)
            return
        self._is_taken = True
        turns = self._waiting.pop(namespace)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[namespace] = turns

    def _drop_cancelled(self) -> None:
        for namespace, turns in list(self._waiting.items()):
            while turns and turns[0].done():
                turns.popleft()
            if not turns:
                del self._waiting[namespace]
