"""The launchers that a holder starts: one on standby, and the one of the present run."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ...base.files import BOOTSTRAP, log, read_json
from ...base.pod import Pod
from ...contract.names import (
    ENV_PORT_FILE,
    ENV_RENDEZVOUS_SECRET,
    ENV_RUN_FD,
    ENV_RUN_ID,
    ENV_RUNTIME_DIR,
    ENV_TERMINATION_LOG,
    EXIT_RETRYABLE,
)
from ...contract.pod_end import PodEnd
from ...contract.pod_start import PodServer, PodStart
from ...contract.processes import kill, list_children
from ...contract.records import read_record
from ...failures.termination import build_end
from .standby import RunStart, encode_start

_SECONDS_TO_END: Final = 5.0
_PAUSE: Final = 0.01


@dataclass(frozen=True)
class RunEnd:
    """How a pod's part of a run ended. ``code``: of the launcher."""

    code: int
    end: PodEnd


class ForkedLauncher:
    """The process of a launcher that a server has forked: a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        return await asyncio.to_thread(lambda: os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


class Launcher:
    """One launcher and its folder. It waits on standby until ``begin``."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedLauncher, start: int, folder: str) -> None:
        self._process = process
        self._start = start
        self.folder = folder

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def port(self) -> int | None:
        """The port of its report; None: it does not listen yet."""
        try:
            with open(_port_file(self.folder), encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def begin(self, start: RunStart) -> None:
        """Let it run."""
        try:
            with open(self._start, "wb") as pipe:
                pipe.write(encode_start(start))
        except BrokenPipeError:
            log("the launcher on standby has ended")  # as its end will show

    def signal(self, number: int) -> None:
        """Send it a signal."""
        kill(self.pid, number)

    async def wait(self, pod: Pod) -> RunEnd:
        """Wait for its end, remove its folder and its processes, and return the end."""
        code = await self._process.wait()
        if code < 0:
            code = 128 - code
        raw = read_json(_end_file(self.folder))
        end = read_record(PodEnd, raw) if raw else _build_unexplained_end(pod, code)
        shutil.rmtree(self.folder, ignore_errors=True)
        return RunEnd(code, end)

    async def discard(self) -> None:
        """End it while it waits."""
        os.close(self._start)
        self.signal(signal.SIGKILL)
        await self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_server(pod: Pod) -> PodServer | None:
    """Start the server of the pod's launchers; None if each has to import PyTorch itself.

    It would import packages that a run installs from another place, or not at all.
    """
    if not pod.warm_start or pod.program or (pod.code is not None and pod.code.requirements):
        return None
    return PodServer((sys.executable, BOOTSTRAP), dict(os.environ))


async def start_launcher(pod: Pod, number: int, command: list[str], server: PodServer | None) -> Launcher:
    """Start a launcher on standby for the run ``number``. ``command``: of the job; ``server``: to fork it from."""
    folder = os.path.join(pod.runtime, f"run-{number}")
    start, end = os.pipe()
    arguments = ["run", "--", *command]
    environment = {
        **os.environ,
        ENV_RUNTIME_DIR: folder,
        ENV_TERMINATION_LOG: _end_file(folder),
        ENV_PORT_FILE: _port_file(folder),
        ENV_RENDEZVOUS_SECRET: pod.secret,
        ENV_RUN_ID: pod.run_id if number == 1 else f"{pod.run_id}.{number}",
    }
    try:
        if server is not None:
            order = PodStart(arguments, environment, os.getcwd(), ENV_RUN_FD)
            pid = await asyncio.to_thread(server.fork, order, (1, 2, start))
            if pid is not None:
                return Launcher(ForkedLauncher(pid), end, folder)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            BOOTSTRAP,
            *arguments,
            env={**environment, ENV_RUN_FD: str(start)},
            pass_fds=[start],
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return Launcher(process, end, folder)
    finally:
        os.close(start)


async def end_processes(list_kept: Callable[[], set[int]]) -> None:
    """End the processes that a run has left. ``list_kept``: those that stay, which may change meanwhile."""
    deadline = asyncio.get_running_loop().time() + _SECONDS_TO_END
    while (remaining := list_children() - list_kept()) and asyncio.get_running_loop().time() < deadline:
        for pid in remaining:
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait
        await asyncio.sleep(_PAUSE)


def _end_file(folder: str) -> str:
    return os.path.join(folder, "end")


def _port_file(folder: str) -> str:
    return os.path.join(folder, "port")


def _build_unexplained_end(pod: Pod, code: int) -> PodEnd:
    """Return the end of a launcher that left no message, because it was killed."""
    message = f"the launcher of the run ended with exit code {code} and without a message"
    return replace(build_end(pod.node, EXIT_RETRYABLE, message), exit_code=code)
