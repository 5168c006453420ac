"""The operator in a thread of the test's process, with real Kopf, real handlers and a separate event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import kopf

import ddp_operator.manager.handlers  # noqa: F401 - registers the handlers
from ddp_operator.features import FEATURES
from ddp_operator.manager.operator import Operator
from ddp_operator.manager.settings import Settings
from tests.support import PATIENCE
from tests.support.stoppable import Stoppable


class RunningOperator(Stoppable):
    """One life of the operator: ``start`` it, and ``stop`` it at the latest at the end of the ``with`` block."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lost = threading.Event()
        """Set when another operator has taken over; a separate process would end then."""
        self._memo = kopf.Memo(settings=settings, features=FEATURES, on_lost=self.lost.set)
        # Waiting for a threading.Event needs a thread, which outlives a failed start.
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    @property
    def operator(self) -> Operator:
        """The state of the handlers."""
        result: Operator = self._memo.operator
        return result

    @property
    def url(self) -> str:
        """The address of health and metrics."""
        return f"http://127.0.0.1:{self.operator.health.port}"

    def start(self) -> RunningOperator:
        """Start it and wait until Kopf reports that it has started."""
        self._thread.start()
        if not self._ready.wait(PATIENCE) or self._failure is not None:
            failure = self._failure
            self._failure = None
            self.stop()
            raise AssertionError("the operator did not start") from failure
        return self

    def stop(self) -> None:
        """Stop it as SIGTERM would. A second call does no harm."""
        if not self._stop.done():
            self._stop.set_result(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            raise AssertionError("the operator did not stop")
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise AssertionError("the operator failed") from failure

    def __enter__(self) -> RunningOperator:
        return self

    def _run(self) -> None:
        options: dict[str, Any] = {"clusterwide": True}
        if self.settings.namespaces:
            options = {"namespaces": self.settings.namespaces}
        try:
            asyncio.run(
                kopf.operator(standalone=True, memo=self._memo, stop_flag=self._stop, ready_flag=self._ready, **options)
            )
        except BaseException as exc:
            self._failure = exc
        finally:
            self._ready.set()


Start = Callable[..., RunningOperator]
"""Starts an operator with these settings: the fixture ``start``."""


async def in_thread(function: Callable[..., int], *args: Any) -> int:
    """Call a function in a daemon thread, so that a blocked call does not keep a failed test alive."""
    done: concurrent.futures.Future[int] = concurrent.futures.Future()

    def call() -> None:
        with suppress(concurrent.futures.InvalidStateError):  # the test has stopped waiting for it
            try:
                done.set_result(function(*args))
            except Exception as error:
                done.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(done)
