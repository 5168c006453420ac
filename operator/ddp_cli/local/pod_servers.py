"""Fork the pods of several runs of this process from servers that have imported PyTorch.

An import takes longer than the few steps of a run of `ddp check`. Python draws the seed of its hashes once for each
server, so two pods of a run have two servers, and a rank gets another one than in the first run.
"""

import os
import re
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from ddp_operator.api.constants import ENV_LOCAL_POD
from ddp_pod.contract.names import ENV_COMPLETION_INDEX
from ddp_pod.contract.pod_start import SERVER_COMMAND, PodStart, send_start
from ddp_pod.contract.processes import adopt_orphans, load_libc, set_parent_death_signal

_LAUNCHER: Final = "launcher.py"
_RUN: Final = "run"
_START_SECONDS: Final = 120.0  # for the import on a busy machine; afterwards the pod starts in a fresh interpreter
_LEAST_SERVERS: Final = 2  # a seed of hashes for the first run, and another one
# Variables that an interpreter or a library reads only once.
_EARLY: Final = re.compile(r"(?:OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|LD|MALLOC|GLIBC|PYTHON)(?!PATH$)_?\w*")


class ForkedPod:
    """A pod that a server has forked: a child of this process. ``returncode``: None until ``wait`` returns."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class PodServers:
    """The servers of a process. ``pods``: of each run; ``is_first``: whether the next pods are of the first run."""

    def __init__(self, pods: int) -> None:
        self._pods = pods
        self._servers: dict[int, _Server] = {}
        self._can_adopt = adopt_orphans()
        self.is_first = True

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | None, *, output: int, lifeline: int
    ) -> ForkedPod | None:
        """Fork a pod; None if it has to start in a fresh interpreter. Its output is written to ``output``.

        ``lifeline``: the descriptor that closes when this process ends. It waits for the import of PyTorch.
        """
        index = environment.get(ENV_COMPLETION_INDEX, "")
        if not self._can_adopt or not _is_launcher(command) or not index.isdigit():
            return None
        place = (int(index) + (not self.is_first)) % max(self._pods, _LEAST_SERVERS)
        # Those of a run import at the same time.
        for number in range(self._pods) if self.is_first else (place,):
            if number not in self._servers:
                self._servers[number] = _Server(command, environment, folder)
        server = self._servers.get(place)
        if server is None or not server.fits(command, environment):
            return None
        return server.fork(PodStart(command[2:], environment, folder or os.getcwd()), output, lifeline)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.end()


class _Server:
    """A process that imports PyTorch, and forks pods. It dies with this one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: str | None) -> None:
        self._interpreter = command[0]
        self._environment = environment
        self._orders, theirs = socket.socketpair()
        load_libc()  # before the fork, for the child
        with theirs:
            arguments = [SERVER_COMMAND, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [command[0], "-u", command[1], *arguments],
                env={**environment, ENV_LOCAL_POD: "-" * len(environment[ENV_LOCAL_POD])},
                cwd=folder,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(set_parent_death_signal, os.getpid()),  # noqa: PLW1509 (from the main thread)
            )

    def fits(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether a pod would import the same PyTorch in the same way."""
        return command[0] == self._interpreter and _select_early(environment) == _select_early(self._environment)

    def fork(self, start: PodStart, output: int, lifeline: int) -> ForkedPod | None:
        """Fork a pod; None if the server cannot."""
        pid_start, pid_end = os.pipe()
        try:
            send_start(self._orders, start, [output, pid_end, lifeline])
        except OSError:
            os.close(pid_start)
            return None
        finally:
            os.close(pid_end)
        with os.fdopen(pid_start, "rb") as stream:
            if not select.select([stream], [], [], _START_SECONDS)[0]:
                self.end()
                return None
            text = stream.read()
        return ForkedPod(int(text)) if text else None

    def end(self) -> None:
        """End the server. It has no pods: a pod is a child of this process."""
        self._process.kill()
        self._process.wait()
        self._orders.close()


def _is_launcher(command: Sequence[str]) -> bool:
    return len(command) > 2 and Path(command[1]).name == _LAUNCHER and command[2] == _RUN


def _select_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _EARLY.fullmatch(name)}
