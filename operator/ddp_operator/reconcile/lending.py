"""Lend the worker of a call of the work queue while the call waits for something that is not the API server."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class Lender(Protocol):
    """What starts the calls: the work queue."""

    def lend_worker(self) -> bool:
        """Allow a further call. Returns whether one is allowed; if so, call ``take_back_worker`` later."""

    def take_back_worker(self) -> None:
        """Allow one call fewer."""


@dataclass
class _Call:
    lender: Lender
    waits: int = 0
    """Number of things for which the call waits."""
    has_lent: bool = False


_call: ContextVar[_Call] = ContextVar("call")
"""The current call."""


def begin_call(lender: Lender) -> None:
    """Let the current task lend its worker."""
    _call.set(_Call(lender))


@contextmanager
def lend_worker() -> Iterator[None]:
    """Let another key be processed while the current one waits for something that is not the API server."""
    call = _call.get(None)
    if call is None:
        yield
        return
    if not call.waits:
        call.has_lent = call.lender.lend_worker()
    call.waits += 1
    try:
        yield
    finally:
        call.waits -= 1
        if not call.waits and call.has_lent:
            call.lender.take_back_worker()
