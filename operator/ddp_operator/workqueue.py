"""A keyed work queue: what is to be reconciled, by whom, and when again.

A key waits at most once, is worked on by at most one worker, and is worked on again after a change that came in
meanwhile. That is all the ordering a level-triggered reconcile needs: it reads what is, so it may miss any number of
intermediate states, but never the last one.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from ddp_operator.cluster import ClusterError

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF = 0.1
LAST_BACKOFF = 60.0


def backoff(failures: int) -> float:
    """Return the seconds to wait after the ``failures``-th failure in a row (1 is the first), without jitter."""
    # The exponent is bounded as well: after a night of failures 2.0 ** failures would overflow.
    return min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures - 1, 16))


class WorkQueue(Generic[K]):
    """Calls ``work(key)`` for every added key, on up to ``workers`` tasks.

    ``work`` returns in how many seconds it wants to be called again even if nothing happens (None: only on ``add``).
    The latest answer counts: a run caused by an event replaces the time that an earlier run had asked for. When it
    raises, the key comes back after an exponential delay of its own, so that a broken key never slows another one.

    After a call a key rests for ``pause(key)`` seconds, unless it wants to be called at once: a Job and its pods make
    news several times within a moment, and one look at all of it is enough.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        workers: int,
        pause: Callable[[K], float] = lambda _: 0.0,
        on_result: Callable[[float, BaseException | None], None] | None = None,
    ) -> None:
        self._work = work
        self._workers = workers
        self._pause = pause
        self._on_result = on_result
        self._ready: deque[K] = deque()
        self._queued: set[K] = set()  # in _ready
        self._active: set[K] = set()
        self._again: set[K] = set()  # added while active
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._wakeup = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        """Return how many keys wait for a worker (the ones being worked on and the ones with a timer not counted)."""
        return len(self._ready)

    @property
    def active(self) -> int:
        """How many keys are being worked on, or rest."""
        return len(self._active)

    @property
    def alive(self) -> bool:
        """Whether every worker that was started still runs."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def add(self, key: K) -> None:
        """Ask for one call of ``work(key)`` as soon as a worker is free."""
        if key in self._active:
            self._again.add(key)
        elif key not in self._queued:
            self._cancel_timer(key)
            self._queued.add(key)
            self._ready.append(key)
            self._wakeup.release()

    def add_after(self, key: K, seconds: float) -> None:
        """Ask for one call of ``work(key)`` in so many seconds; replaces an earlier wish of this kind."""
        self._cancel_timer(key)
        if seconds <= 0:
            self.add(key)
            return
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._on_timer, key)

    def start(self) -> None:
        """Start the workers. Keys may have been added before."""
        for number in range(self._workers):
            self._tasks.append(asyncio.create_task(self._run(), name=f"reconcile worker {number}"))

    async def stop(self) -> None:
        """Cancel the workers in the midst of their work and forget all timers.

        Nothing is lost by that: a later process finds the same state of the cluster and goes on from there.
        """
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _on_timer(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def _run(self) -> None:
        while True:
            await self._wakeup.acquire()
            key = self._ready.popleft()
            self._queued.discard(key)
            self._active.add(key)
            try:
                delay = await self._attempt(key)
            except BaseException:
                self._active.discard(key)
                raise
            self._cancel_timer(key)
            pause = self._pause(key)
            if not pause or delay == 0 or key in self._failures:
                self._release(key, delay)
            else:
                rest = asyncio.get_running_loop().call_later(pause, self._release, key, delay, pause)
                self._timers[key] = rest

    def _release(self, key: K, delay: float | None, rested: float = 0.0) -> None:
        """Let a key be worked on again: now if something changed meanwhile, or when it wanted to be."""
        self._timers.pop(key, None)
        self._active.discard(key)
        again = key in self._again
        self._again.discard(key)
        if again and key not in self._failures:
            self.add(key)
        elif delay is not None:  # a failure waits even if something changed meanwhile: that may be its own echo
            self.add_after(key, delay - rested)

    async def _attempt(self, key: K) -> float | None:
        """Call ``work`` once; turn what it raises into a delay."""
        started = time.monotonic()
        error: BaseException | None = None
        try:
            delay = await self._work(key)
        except Exception as exc:
            error = exc
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = backoff(failures) * random.uniform(0.8, 1.2)
            if isinstance(exc, ClusterError):
                # The network, a full or restarting API server, a lost race: expected, and nothing for a traceback.
                level = logging.WARNING if failures > 3 else logging.DEBUG
                logger.log(level, "%s: %s; trying again in %.1f s", key, str(exc) or type(exc).__name__, delay)
            else:
                logger.exception("%s: the reconcile failed; trying again in %.1f s", key, delay)
        else:
            self._failures.pop(key, None)
        if self._on_result is not None:
            self._on_result(time.monotonic() - started, error)
        return delay
