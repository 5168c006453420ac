"""The processes of a pod's ranks: their exit codes, their end, and those that a fork server starts for torchrun."""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.utils import macros  # type: ignore[attr-defined]

from ..base.files import log, read_json
from ..base.runtime_files import FINISHED
from ..contract.processes import STOP_SIGNALS, STOPPED_STATES, kill, process_state
from ..contract.signal_handlers import catches
from ..failures.text import is_native_crash
from .fork_server import RankForker

_POLL_SECONDS = 0.02
_SECONDS_TO_DIE = 5.0  # after SIGKILL; a process in an uninterruptible system call does not die


def kill_group(pid: int, number: int) -> None:
    """Send a signal to the process group that a process leads; ignore one that has ended."""
    try:
        os.killpg(pid, number)
    except OSError:
        pass


class RankProcesses:
    """The ranks of a pod by local rank. ``failed_at``: when this process first observed the failure, in Unix seconds.

    It reads exit codes without reaping the processes, as torchrun reaps those that it has started.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = pids
        self.exit_codes: dict[int, int] = {}
        self.failed_at: dict[int, float] = {}

    def poll(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended, negative for a signal."""
        for local_rank, pid in self.pids.items():
            if local_rank in self.exit_codes:
                continue
            code = _read_exit_code(pid)
            if code is None:
                continue
            code = self._judge(local_rank, pid, code)
            self.exit_codes[local_rank] = code
            if code != 0:
                self.failed_at[local_rank] = time.time()
        return self.exit_codes

    def _judge(self, local_rank: int, pid: int, code: int) -> int:
        """Return the exit code that counts. torchrun reads those of the ranks that it has started itself."""
        return code

    def close(self) -> None:
        """Release what belongs to ranks that have ended. torchrun does so for those that it has started."""

    def list_running(self) -> list[int]:
        """Return the local ranks that have not ended."""
        ended = self.poll()
        return [local_rank for local_rank in self.pids if local_rank not in ended]

    def kill(self, local_ranks: Iterable[int]) -> None:
        """Kill ranks."""
        for local_rank in local_ranks:
            kill_group(self.pids[local_rank], signal.SIGKILL)

    def stop(
        self, number: int, grace: float, *, saves: bool, trainers: Mapping[int, Collection[int]] | None = None
    ) -> None:
        """Send a signal to the running ranks, wait up to ``grace`` seconds for their end, and kill the remaining ones.

        A stopped rank does not react to a signal. It is resumed if it ``saves`` a checkpoint, and is killed otherwise.
        ``trainers``: the processes of a rank that train. If the rank handles the signal, only they get it: workers of a
        DataLoader would end, and with them the rank, before it can save.
        """
        trainers = trainers or {}
        for local_rank in self.list_running():
            pid = self.pids[local_rank]
            if process_state(pid) in STOPPED_STATES:
                kill(pid, signal.SIGCONT if saves else signal.SIGKILL)
            members = [member for member in trainers.get(local_rank, ()) if _is_in_group(member, pid)]
            if members and catches(pid, number):
                for member in members:
                    kill(member, number)
            else:
                kill_group(pid, number)
        self._wait(grace)
        self.kill(self.list_running())
        self._wait(_SECONDS_TO_DIE)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.list_running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _is_in_group(pid: int, leader: int) -> bool:
    """Return whether a process still belongs to a rank: its number may have been used again."""
    try:
        return os.getpgid(pid) == leader
    except OSError:
        return False


def _read_exit_code(pid: int) -> int | None:
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # it was reaped already, after its exit code was read
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


class ForkedRanks(RankProcesses):
    """Ranks that the fork server has started. ``logs``: their files, which ``--tee`` copies to the pod's output.

    ``outputs``: the folder in which ranks leave records beside their output.
    """

    def __init__(self, pids: Mapping[int, int], logs: Any, role: str, outputs: str) -> None:
        super().__init__(pids)
        self._outputs = outputs
        self._error_files = logs.error_files
        self._tails = [TailLog(role, logs.tee_stdouts, sys.stdout), TailLog(role, logs.tee_stderrs, sys.stderr)]
        for tail in self._tails:
            tail.start()

    def _judge(self, local_rank: int, pid: int, code: int) -> int:
        """Return 0 for a rank that crashed while its interpreter ended, after its program and exit handlers."""
        if not is_native_crash(code):
            return code
        finished = read_json(os.path.join(self._outputs, f"{local_rank}.{FINISHED}"))
        if finished.get("pid") != pid:
            return code
        name = signal.Signals(-code).name
        log(
            f"local rank {local_rank} received {name} while its interpreter ended: its program had succeeded, and its "
            "exit handlers had run, so that it counts as successful"
        )
        return 0

    def build_result(self, workers: Sequence[Worker]) -> RunResult:
        """Return the state of the ranks as torchrun does for those that it has started."""
        exit_codes = self.poll()
        failures = {
            workers[rank].global_rank: ProcessFailure(rank, self.pids[rank], code, self._error_files[rank])
            for rank, code in exit_codes.items()
            if code != 0
        }
        if failures:
            return RunResult(WorkerState.FAILED, failures=failures)
        if len(exit_codes) < len(self.pids):
            return RunResult(WorkerState.HEALTHY)
        self.close()
        return RunResult(WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in workers})

    def close(self) -> None:
        """Reap the ranks, which have ended, and copy the rest of their output."""
        for pid in self.pids.values():
            with suppress(ChildProcessError):  # it was reaped before
                os.waitpid(pid, os.WNOHANG)
        for tail in self._tails:
            tail.stop()


class RanksForked(Exception):
    """The ranks run already, so torchrun must not start them."""

    def __init__(self, ranks: ForkedRanks) -> None:
        super().__init__("the fork server has started the ranks")
        self.ranks = ranks


class ForkingLogs:
    """A ``LogsSpecs`` that has the fork server start the ranks, with ``command``, in place of torchrun.

    torchrun computes the environments of the ranks in ``_start_workers``, and passes them to ``reify`` right before it
    starts interpreters. ``inner``: the LogsSpecs that torchrun has chosen; ``outputs``: see ``ForkedRanks``.
    """

    def __init__(self, inner: Any, forker: RankForker, command: Sequence[str], role: str, outputs: str) -> None:
        self._inner = inner
        self._forker = forker
        self._command = list(command)
        self._role = role
        self._outputs = outputs

    @property
    def root_log_dir(self) -> Any:
        """The folder of all logs."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Return the log files if the fork server has ended, so that torchrun starts the ranks. Raises: RanksForked."""
        logs = self._inner.reify(envs)
        pids: dict[int, int] = {}
        for local_rank, environment in envs.items():
            pid = self._fork(local_rank, environment, (logs.stdouts[local_rank], logs.stderrs[local_rank]))
            if pid is None:
                RankProcesses(pids).stop(signal.SIGKILL, 0.0, saves=False)
                return logs
            pids[local_rank] = pid
        raise RanksForked(ForkedRanks(pids, logs, self._role, self._outputs))

    def _fork(self, local_rank: int, environment: Mapping[str, str], paths: Sequence[str]) -> int | None:
        command = macros.substitute(self._command, str(local_rank))
        with ExitStack() as files:
            output = [files.enter_context(open(path, "w")) if path else None for path in paths]
            return self._forker.fork(command, {**os.environ, **environment}, output)


def handle_stop_signals(handler: Callable[[int, Any], None] | None = None) -> None:
    """Handle signals that end the agent; by default raise torchrun's exception."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler or _raise_signal)


@contextmanager
def hold_stop_signals() -> Iterator[None]:
    """Hold signals back while ranks start: each must be known before it can be stopped with its grace period.

    Ranks that torchrun itself starts have no such protection, as it then handles the signals itself.
    Raises: SignalException at the end, for a signal that was received meanwhile.
    """
    held: list[int] = []
    handle_stop_signals(lambda number, frame: held.append(number))
    try:
        yield
    finally:
        handle_stop_signals()
    if held:
        _raise_signal(held[0], None)


def _raise_signal(number: int, frame: Any) -> None:
    received = signal.Signals(number)
    raise SignalException(f"the agent received {received.name}", received)
