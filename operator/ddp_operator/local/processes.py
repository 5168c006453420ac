"""Starting, watching and ending the process of a pod, so that whatever happens nothing of it stays behind.

A pod's process leads a session of its own: Ctrl-C in the terminal reaches `ddp run` alone, which then ends pods in
order. On Linux the kernel kills it when `ddp run` dies (PR_SET_PDEATHSIG); the launcher does the same to torchrun, and
torchrun's workers to themselves. Elsewhere the launcher sees the end of a pipe. As when a container ends, everything
that still runs for a pod is killed with its first process.
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
from typing import Final

from ddp_operator.constants import ENV_LIFELINE_FD, ENV_LOCAL_POD
from ddp_operator.launcher.processes import kill, load_libc, set_parent_death_signal

_SECONDS_TO_DIE: Final = 15.0


class PodProcess:
    """A started process, its exit and its end."""

    def __init__(self, popen: subprocess.Popen[bytes], mark: str) -> None:
        self._popen = popen
        self._mark = mark
        self.pid = popen.pid

    # Only ``wait`` reaps, so until it has returned the number still means this process.

    def terminate(self) -> None:
        """Ask the first process to end, as the kubelet does."""
        if self._popen.returncode is None:
            kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill everything of the pod."""
        if self._popen.returncode is None:
            _kill_group(self.pid)
        _kill_marked(self._mark)

    async def wait(self) -> int:
        """Wait for the exit; return the exit code as a container's (128 + signal), with nothing left behind."""
        await _exited(self.pid)
        # The leader is dead but not reaped, so its group's number cannot have gone to a stranger.
        _kill_group(self.pid)
        code = self._popen.wait()
        await _end_marked(self._mark)
        return code if code >= 0 else 128 - code


class Lifeline:
    """A pipe that ends when this process does: how a launcher notices that where the kernel does not end it itself."""

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

    Raises: OSError where the program or the folder is not there or not allowed.
    """
    load_libc()  # which set_parent_death_signal needs
    with log.open("ab") as output:
        popen = subprocess.Popen(
            list(command),
            env={**environment, ENV_LOCAL_POD: mark, ENV_LIFELINE_FD: str(lifeline.read_end)},
            pass_fds=(lifeline.read_end,),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The request is the *thread's* that forks, hence the main thread.
            preexec_fn=partial(set_parent_death_signal, os.getpid()),  # noqa: PLW1509
        )
    return PodProcess(popen, mark)


def find_marked(mark: str) -> list[int]:
    """Return the processes of this user that inherited a pod's mark. Linux only; elsewhere there are none."""
    wanted = f"{ENV_LOCAL_POD}={mark}".encode()
    user, found = os.getuid(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.stat().st_uid == user and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


async def _exited(pid: int) -> None:
    """Return once the process is a zombie, without reaping it."""
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
    """Kill what is left of a pod. More than once, since one that was killed may just have started another."""
    for _ in range(3):
        if not (pids := find_marked(mark)):
            return
        for pid in pids:
            kill(pid, signal.SIGKILL)


async def _end_marked(mark: str) -> None:
    """Kill what is left of a pod, and wait until the kernel has ended it: that takes a while on a busy machine."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + _SECONDS_TO_DIE, 0.002
    while pids := find_marked(mark):
        for pid in pids:
            kill(pid, signal.SIGKILL)
        if loop.time() > deadline:  # it hangs in the kernel
            return
        await asyncio.sleep(pause)
        pause = min(0.1, 2 * pause)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        os.killpg(pid, signal.SIGKILL)
