"""The process that reads the ranks' output, and what it has written for the launcher."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from ..base.exceptions import describe
from ..base.files import log, read_json
from ..base.pod import Pod
from ..base.runtime_files import STEP_HINT_FILE
from ..contract.processes import STOP_SIGNALS, set_parent_death_signal
from ..rank.counters import CounterMemory

_SECONDS_TO_DRAIN: Final = 30.0  # to copy the rest after the workers have ended


class CopyOutput(Protocol):
    """Copies the ranks' output until it is told to end: see ``log_reader.keep_reading``."""

    def __call__(
        self, pod: Pod, sources: Mapping[int, int], done: int, *, marked: bool, counters: CounterMemory | None
    ) -> None:
        """``sources``: pipes by local rank; ``done``: closed at the end."""


class OutputReader:
    """The process that copies the ranks' output: a slow pattern delays the log, not the launcher."""

    def __init__(self, pod: Pod, copy: CopyOutput, *, marked: bool, counters: CounterMemory | None) -> None:
        self._pod = pod
        self._copy = copy
        self._marked = marked
        self._counters = counters
        self.pid = 0
        self.guard: int | None = None  # the process ends when it is closed

    def start(self) -> None:
        """Create a pipe for each local rank, and fork the process that reads them."""
        sources: dict[int, int] = {}
        for local_rank in range(self._pod.nproc_per_node):
            path = os.path.join(self._pod.runtime, "output", str(local_rank))
            os.mkfifo(path, 0o600)
            sources[local_rank] = os.open(path, os.O_RDWR)  # no end of file when a writer closes it
        done, self.guard = os.pipe()
        launcher = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self._read_and_exit(sources, done, self.guard, launcher)
        for descriptor in (*sources.values(), done):
            os.close(descriptor)

    def _read_and_exit(self, sources: Mapping[int, int], done: int, guard: int, launcher: int) -> None:
        """Read in the forked process."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (*STOP_SIGNALS, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            os.close(guard)
            set_parent_death_signal(launcher)
            self._copy(self._pod, sources, done, marked=self._marked, counters=self._counters)
        except BaseException as error:
            log(describe(error)["traceback"])
        finally:
            os._exit(0)

    def finish(self, reap: Callable[[], None]) -> None:
        """Wait until the process has copied the rest. ``reap`` reaps ended children of the launcher."""
        if self.guard is None:
            return
        os.close(self.guard)
        self.guard = None
        deadline = time.monotonic() + _SECONDS_TO_DRAIN
        while self.pid and time.monotonic() < deadline:
            reap()
            time.sleep(0.005)


def read_step_hint(runtime: str) -> str:
    """Return the hint that the log reader has written; empty without one."""
    hint = read_json(os.path.join(runtime, STEP_HINT_FILE)).get("hint")
    return hint if isinstance(hint, str) else ""
