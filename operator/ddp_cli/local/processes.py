"""Start, watch and end the process of a pod. All its processes are cleaned up, however `ddp run` ends.

A pod's process leads its own session: Ctrl-C in the terminal reaches only `ddp run`, which terminates pods gracefully.
On Linux the kernel kills the process when `ddp run` dies (PR_SET_PDEATHSIG), then torchrun and its workers by the same
mechanism. On other systems the launcher detects the end of a pipe. As in a container, all processes of a pod are killed
when its first process ends.
"""

import asyncio
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from ddp_cli.local.pod_servers import PodServers
from ddp_operator.api.constants import ENV_LIFELINE_FD, ENV_LOCAL_POD
from ddp_pod.contract.processes import kill, load_libc, set_parent_death_signal

_SECONDS_TO_DIE: Final = 15.0
_servers: PodServers | None = None


def use_servers(servers: PodServers) -> None:
    """Have this process fork its pods from servers where they can."""
    global _servers
    _servers = servers


class Child(Protocol):
    """A child of this process: a `subprocess.Popen`, or one that a pod server has forked."""

    pid: int
    returncode: int | None

    def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        ...


class PodProcess:
    """The running process of a pod."""

    def __init__(self, child: Child, mark: str) -> None:
        self._child = child
        self._mark = mark
        self.pid = child.pid

    # Only ``wait`` reaps the process, so its number stays valid until ``wait`` has returned.

    def terminate(self) -> None:
        """Send SIGTERM to the first process, as the kubelet does."""
        if self._child.returncode is None:
            kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the pod."""
        if self._child.returncode is None:
            _kill_group(self.pid)
        _kill_marked(self._mark)

    async def wait(self) -> int:
        """Wait for the exit and kill the remaining processes; return the exit code of a container (128 + signal)."""
        await _wait_for_exit(self.pid)
        # The leader is dead but not reaped, so its group's number cannot belong to another process.
        _kill_group(self.pid)
        code = self._child.wait()
        await _end_marked(self._mark)
        return code if code >= 0 else 128 - code


class Lifeline:
    """A pipe that closes when this process ends, for launchers that the kernel does not kill then."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        self.close = weakref.finalize(self, lambda *ends: [*map(os.close, ends)], self.read_end, write_end)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    *,
    log: Path,
    mark: str,
    lifeline: Lifeline,
) -> PodProcess:
    """Start a pod's process; its output is appended to ``log``. Call from the main thread.

    Raises: OSError, if the program or the folder does not exist or is not permitted.
    """
    environment = {**environment, ENV_LOCAL_POD: mark}
    with log.open("ab") as output:
        if _servers is not None:
            forked = _servers.fork(command, environment, folder, output=output.fileno(), lifeline=lifeline.read_end)
            if forked is not None:
                return PodProcess(forked, mark)
        load_libc()  # before the fork, for the child
        popen = subprocess.Popen(
            list(command),
            env={**environment, ENV_LIFELINE_FD: str(lifeline.read_end)},
            pass_fds=(lifeline.read_end,),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The child dies with the *thread* that forks it, hence the main thread.
            preexec_fn=partial(set_parent_death_signal, os.getpid()),  # noqa: PLW1509
        )
    return PodProcess(popen, mark)


def find_marked(mark: str) -> list[int]:
    """Return the processes of this user that inherited a pod's mark; always empty on systems other than Linux."""
    variable = f"{ENV_LOCAL_POD}={mark}".encode()
    user = os.getuid()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == user and variable in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


async def _wait_for_exit(pid: int) -> None:
    """Wait until the process is a zombie, without reaping it."""
    if not hasattr(os, "pidfd_open"):
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, pid, options) is None:  # noqa: ASYNC110, ASYNC222 (there is no event to wait for)
            await asyncio.sleep(0.05)
        return
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill_marked(mark: str) -> None:
    """Kill the remaining processes of a pod, repeatedly: a killed process may just have started another."""
    for _ in range(3):
        if not (pids := find_marked(mark)):
            return
        for pid in pids:
            kill(pid, signal.SIGKILL)


async def _end_marked(mark: str) -> None:
    """Kill the remaining processes of a pod and wait for their end, which takes a while on a busy machine."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SECONDS_TO_DIE
    pause = 0.002
    while pids := find_marked(mark):
        for pid in pids:
            kill(pid, signal.SIGKILL)
        if loop.time() > deadline:  # a process hangs in the kernel
            return
        await asyncio.sleep(pause)
        pause = min(0.1, 2 * pause)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS returns EPERM for a group of zombies
        os.killpg(pid, signal.SIGKILL)
