"""A limit on the CPU time of the steps of a pass that check tenants' input.

These steps run in the event loop, which also renews the Lease and serves /healthz. Size limits and linear checks keep
them short. This limit holds even if a check has a fault (ADR 0044).
"""

import signal
import threading
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from ddp_operator.api.errors import FieldError
from ddp_operator.api.size import OversizeSpec

MAX_SECONDS: Final = 2.0
"""CPU seconds of one step. The largest specs need about a tenth."""
_REPEAT_SECONDS: Final = 0.5
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
    signal.signal(signal.SIGPROF, _interrupt)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS, _REPEAT_SECONDS)
    try:
        try:
            return step(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except StepTooLong:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the interruption may precede the call above
        raise


def _interrupt(*_: Any) -> None:
    message = f"a check took more than {MAX_SECONDS:g} s of CPU time; shorten spec.template, and report its YAML"
    raise StepTooLong([FieldError("spec", message)])
