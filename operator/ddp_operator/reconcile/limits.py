"""Limits on what tenants' input may cost: CPU time of a step that checks it, and reports of pods per minute.

The steps run in the event loop (``turns``). Size limits and linear checks keep them short. The limit of a step holds
even if a check has a fault (ADR 0044).

A user controls the content of the reports, and through the restart counter when the operator reads them. The report of
pod 0 has its own interval and does not count.
"""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any, Final, ParamSpec, TypeVar

from ddp_operator.api.errors import FieldError
from ddp_operator.api.size import OversizeSpec
from ddp_operator.decide.views import PodView

STEP_SECONDS: Final = 0.5
"""CPU seconds of one step. The largest specs need about a fourth of that."""
_REPEAT_SECONDS: Final = 0.1
"""CPU seconds until a further interruption: a step may catch the first one."""

PERIOD: Final = 60.0
MAX_BYTES: Final = 16 << 20
"""Bytes per period."""
MAX_SECONDS: Final = 15.0
"""Seconds per period. The worker is not available to other jobs during that time."""
MAX_SECONDS_AT_ONCE: Final = 5.0
PAGES_AT_ONCE: Final = 16
MAX_PODS: Final = 16
"""Pods whose reports are read for a sample, pod 0 included."""
READ_INTERVAL: Final = 10.0
"""Seconds between two reads of the reports of pod 0's peers for one purpose."""
EARLY: Final = 0.9
"""Tolerance for timers that fire early."""

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


@dataclass(slots=True)
class PageBudget:
    """The remaining bytes and seconds of the current period."""

    since: datetime | None = None
    bytes_left: int = MAX_BYTES
    seconds_left: float = MAX_SECONDS

    def renew(self, now: datetime) -> None:
        """Start a new period if the current one is over. A clock that was set back ends it too."""
        if self.since is None or abs((now - self.since).total_seconds()) >= PERIOD:
            self.since = now
            self.bytes_left = MAX_BYTES
            self.seconds_left = MAX_SECONDS

    @property
    def spent(self) -> bool:
        """Whether the budget of this period is used up."""
        return self.bytes_left <= 0 or self.seconds_left <= 0


def sample_pods(pods: Sequence[PodView], most: int = MAX_PODS) -> tuple[PodView, ...]:
    """Return the running pods whose reports are read beside pod 0's: all, or an even spread of ``most`` - 1."""
    peers = [pod for pod in pods if pod.index != 0 and pod.phase == "Running" and not pod.deleting]
    if len(peers) < most:
        return tuple(peers)
    return tuple(peers[i * len(peers) // (most - 1)] for i in range(most - 1))


def seconds_since(last: datetime | None, now: datetime) -> float:
    """Return the seconds since ``last``, infinite for None. Absolute, so a clock set back does not postpone work."""
    return inf if last is None else abs((now - last).total_seconds())


def is_due(last: datetime | None, now: datetime, interval: float) -> bool:
    """Return whether what was done last at a time is due again after an interval of seconds."""
    return seconds_since(last, now) >= interval * EARLY
