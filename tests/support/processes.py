"""Find the remaining processes of a test, also with another parent."""

from __future__ import annotations

import os
import time
import uuid
from types import TracebackType

import psutil

MARK = "DDP_TEST_GUARD"
# Helpers that Python starts once and keeps for the life of the interpreter.
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


class ProcessGuard:
    """Watch one block of code; afterwards ``leaked`` describes the processes that outlived it by ``grace`` seconds.

    A process belongs to the test if it descends from this one, or if it inherited the mark that the environment has
    meanwhile: an orphan has another parent by then.
    """

    def __init__(self, grace: float | None = None) -> None:
        self.grace = float(os.environ.get("DDP_TEST_GRACE", "30")) if grace is None else grace
        self.leaked: list[str] = []
        self._value = uuid.uuid4().hex

    def __enter__(self) -> ProcessGuard:
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}
        self._outer = os.environ.get(MARK)
        os.environ[MARK] = self._value
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = self._outer
        deadline = time.monotonic() + self.grace
        while (remaining := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in remaining:
            try:
                self.leaked.append(f"  {process.pid} (parent {process.ppid()}): {' '.join(process.cmdline())}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(remaining, timeout=self.grace)

    def _left(self) -> list[psutil.Process]:
        descendants = {process.pid for process in psutil.Process().children(recursive=True)} - self._before
        remaining = []
        for process in psutil.process_iter():
            try:
                mine = process.pid in descendants or process.environ().get(MARK) == self._value
                if not mine or process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if any(helper in argument for argument in process.cmdline() for helper in KEPT):
                    continue
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            remaining.append(process)
        return remaining
