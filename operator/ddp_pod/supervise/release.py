"""The wait of a new agent for pod 0, and for the delay after restarts in a row. It imports PyTorch meanwhile."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..base.pod import Pod
from ..network.master import MasterChecked, wait_for_master


class _MasterCheck(NamedTuple):
    """The end of a wait for the master. ``agent``: the channel of the agent that waits; ``problem``: or None."""

    agent: Any
    problem: str | None


class AgentRelease:
    """Decides when an agent may join the rendezvous. ``earliest``: after restarts in a row, of the monotonic clock."""

    def __init__(self, pod: Pod, note: Callable[[MasterChecked], None], wake: Callable[[], None]) -> None:
        self._pod = pod
        self._note = note
        self._wake = wake
        self._agent: Any = None  # the channel of the one that waits
        self._has_master = False
        self._checks: list[_MasterCheck] = []  # finished and not handled yet
        self.earliest = 0.0

    def begin(self, agent: Any) -> None:
        """Begin the wait of an agent. ``agent``: its channel."""
        self._agent = agent
        self._has_master = not self._pod.is_multi_node
        if self._pod.is_multi_node:
            threading.Thread(target=self._wait_for_master, args=(agent,), daemon=True).start()

    def _wait_for_master(self, agent: Any) -> None:
        pod = self._pod
        port = None if pod.node == 0 else pod.port

        def note(problem: str | None) -> None:
            self._note(MasterChecked(problem))

        problem = wait_for_master(pod.master, port, pod.join_timeout_seconds, note)
        # The check first: the supervisor reads the list when the pipe wakes it, and then waits without a limit.
        self._checks.append(_MasterCheck(agent, problem))
        self._wake()

    def take_problem(self) -> str | None:
        """Handle finished waits. Returns why pod 0 was not reached; None: it was, or the wait continues."""
        while self._checks:
            check = self._checks.pop(0)
            if check.agent is not self._agent:
                continue  # of a former agent, whose thread outlives it
            if check.problem is not None:
                return check.problem
            self._has_master = True
        return None

    @property
    def is_due(self) -> bool:
        """Whether an agent waits that pod 0 and the delay no longer hold up."""
        return self._has_master and time.monotonic() >= self.earliest

    @property
    def seconds_left(self) -> float:
        """Seconds of the delay that is all an agent waits for; infinite if there is none."""
        left = self.earliest - time.monotonic()
        return left if self._has_master and left > 0 else math.inf

    def end(self) -> None:
        """Note that the agent was released: a second message would be read as the reply to its first request."""
        self._has_master = False
