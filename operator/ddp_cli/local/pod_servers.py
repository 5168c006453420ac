"""Fork the pods of several runs of this process from servers that have imported PyTorch.

An import takes longer than the few steps of a run of `ddp check`. Python draws the seed of its hashes once for each
server, so two pods of a run have two servers, and a rank gets another one than in the first run.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ddp_operator.api.constants import ENV_LOCAL_POD
from ddp_pod.contract.names import ENV_COMPLETION_INDEX, ENV_LIFELINE_FD
from ddp_pod.contract.pod_start import PodServer, PodStart
from ddp_pod.contract.processes import adopt_orphans

_LAUNCHER: Final = "launcher.py"
_RUN: Final = "run"
_LEAST_SERVERS: Final = 2  # a seed of hashes for the first run, and another one


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
        self._servers: dict[int, PodServer] = {}
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
                unmarked = {**environment, ENV_LOCAL_POD: "-" * len(environment[ENV_LOCAL_POD])}
                self._servers[number] = PodServer(command, unmarked, folder)
        server = self._servers.get(place)
        if server is None or not server.fits(command[0], environment):
            return None
        start = PodStart(command[2:], environment, folder or os.getcwd(), ENV_LIFELINE_FD)
        pid = server.fork(start, (output, output, lifeline))
        return None if pid is None else ForkedPod(pid)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.end()


def _is_launcher(command: Sequence[str]) -> bool:
    return len(command) > 2 and Path(command[1]).name == _LAUNCHER and command[2] == _RUN
