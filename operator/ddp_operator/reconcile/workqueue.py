"""A keyed work queue with retries, back-off and requeue times.

A key waits at most once, at most one worker processes it, and it is processed again after a change during its
processing. A level-triggered reconcile needs no further ordering: it may miss intermediate states, but not the last.

Groups of keys (namespaces) take turns, so that many or slow keys of one do not delay the others.
"""

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.reconcile.lending import begin_call

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF = 0.1
LAST_BACKOFF = 60.0
MAX_WAITING = 8
"""Maximum calls at once, per worker: those with a worker, and those that wait without one."""


def backoff(failures: int) -> float:
    """Return the seconds to wait after consecutive failures (1 is the first), without jitter."""
    # The exponent is bounded too, because 2.0 ** failures overflows after a night of failures.
    return min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures - 1, 16))


class WorkQueue(Generic[K]):
    """Calls ``work(key)`` for every added key, up to ``workers`` calls at once.

    ``work`` returns the seconds until its next call if the key is not added before (None: only on ``add``). The latest
    result counts. If ``work`` raises, the key is retried after an exponential back-off per key, so a failing key does
    not delay others.

    Groups of ``group(key)`` take turns. A group has at most ``workers`` calls at a time, including those that wait
    without a worker (``lend_worker``), and fewer if many groups have calls, so that one more finds a worker.

    After a call a key pauses for ``pause(key)`` seconds, unless ``work`` returned 0: a Job and its pods cause several
    events within a moment, and one call handles all of them.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        workers: int,
        pause: Callable[[K], float] = lambda _: 0.0,
        group: Callable[[K], Hashable] = lambda _: None,
        on_result: Callable[[float, BaseException | None], None] | None = None,
    ) -> None:
        self._work = work
        self._workers = workers
        self._pause = pause
        self._group = group
        self._on_result = on_result
        self._ready: OrderedDict[Hashable, deque[K]] = OrderedDict()  # by group, the next one first
        self._busy: Counter[Hashable] = Counter()  # calls of each group
        self._free = workers  # further calls that may start; negative while lent workers are still in use
        self._queued: set[K] = set()  # in _ready
        self._active: set[K] = set()
        self._again: set[K] = set()  # added while active
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self.alive = False
        """Whether keys are processed: from ``start`` to ``stop``, unless a call ended the process."""

    def __len__(self) -> int:
        """Return the number of keys that wait for a worker, without active keys and keys with a timer."""
        return len(self._queued)

    @property
    def active(self) -> int:
        """The number of keys that are processed or pause."""
        return len(self._active)

    def add(self, key: K) -> None:
        """Request a call of ``work(key)`` as soon as a worker is free."""
        if key in self._active:
            self._again.add(key)
        elif key not in self._queued:
            self._cancel_timer(key)
            self._queued.add(key)
            self._ready.setdefault(self._group(key), deque()).append(key)
            self._start_calls()

    def add_after(self, key: K, seconds: float) -> None:
        """Request a call of ``work(key)`` after some seconds. This replaces an earlier such request."""
        self._cancel_timer(key)
        if seconds <= 0:
            self.add(key)
            return
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._on_timer, key)

    def start(self) -> None:
        """Start to process keys. Keys may have been added before."""
        self.alive = True
        self._start_calls()

    def lend_worker(self) -> bool:
        """Allow a further call. Returns whether one is allowed; if so, call ``take_back_worker`` later."""
        if len(self._calls) >= MAX_WAITING * self._workers:
            return False
        self._free += 1
        self._start_calls()
        return True

    def take_back_worker(self) -> None:
        """Allow one call fewer. Calls that have started continue."""
        self._free -= 1

    async def stop(self) -> None:
        """Cancel all calls and timers.

        An interrupted call is safe: a later process continues from the state of the cluster.
        """
        self.alive = False
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _cancel_timer(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _on_timer(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _start_calls(self) -> None:
        """Start calls for the next keys while workers are free."""
        while self.alive and self._free > 0:
            key = self._take()
            if key is None:
                return
            self._free -= 1
            self._active.add(key)
            self._busy[self._group(key)] += 1
            call = asyncio.create_task(self._process(key), name=f"reconcile {key}")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _process(self, key: K) -> None:
        begin_call(self)
        group = self._group(key)
        try:
            delay = await self._attempt(key)
        except BaseException:
            self.alive = False  # the process ends
            raise
        finally:
            self._free += 1
            self._busy[group] -= 1
            if not self._busy[group] and group not in self._ready:
                del self._busy[group]

        self._cancel_timer(key)
        pause = self._pause(key)
        if not pause or delay == 0 or key in self._failures:
            self._release(key, delay)
        else:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(pause, self._release, key, delay, pause)
        self._start_calls()

    def _take(self) -> K | None:
        """Remove the next key of the first group with a free call, and put that group last. None: there is none."""
        share = MAX_WAITING * self._workers // (len(self._busy) + 1)
        for group, keys in self._ready.items():
            if self._busy[group] >= max(1, min(self._workers, share)):
                continue
            key = keys.popleft()
            self._queued.discard(key)
            self._ready.move_to_end(group)
            if not keys:
                del self._ready[group]
            return key
        return None

    def _release(self, key: K, delay: float | None, paused: float = 0.0) -> None:
        """End the processing of a key. Queue it now if it was added meanwhile, otherwise after its delay."""
        self._timers.pop(key, None)
        self._active.discard(key)
        again = key in self._again
        self._again.discard(key)
        if again and key not in self._failures:
            self.add(key)
        elif delay is not None:  # a failed key waits even if it was added: its own writes may have caused that
            self.add_after(key, delay - paused)

    async def _attempt(self, key: K) -> float | None:
        """Call ``work`` once and return the delay until the next call, also if it raises."""
        started = time.monotonic()
        error: BaseException | None = None
        try:
            delay = await self._work(key)
        except Exception as exc:
            error = exc
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = backoff(failures) * random.uniform(0.8, 1.2)
            if isinstance(exc, ClusterError):
                # Errors of the network or the API server, and lost races, are expected and need no traceback.
                level = logging.WARNING if failures > 3 else logging.DEBUG
                logger.log(level, "%s: %s; retrying in %.1f s", key, str(exc) or type(exc).__name__, delay)
            else:
                logger.exception("%s: internal error in the reconcile; retrying in %.1f s", key, delay)
        else:
            self._failures.pop(key, None)
        if self._on_result is not None:
            self._on_result(time.monotonic() - started, error)
        return delay
