"""What this pod cannot reach, for its report."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...base.files import log
from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Service
from ...network.connections import Connection, list_unacknowledged
from ...network.master import MasterChecked

_INTERVAL: Final = 5.0
_TEXT_LIMIT: Final = 300


class UnreachablePeers(Service):
    """Reports unreachable peers to the operator and in the pod's log."""

    name = "unreachable peers"

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._master_problem = ""
        self._peer_problem = ""

    def note(self, event: object) -> None:
        """Record the result of an attempt to reach pod 0."""
        if not isinstance(event, MasterChecked):
            return
        problem = event.problem
        target = self._pod.master if self._pod.node == 0 else f"{self._pod.master}:{self._pod.port}"
        self._master_problem = f"cannot reach pod 0 at {target}: {problem}" if problem else ""

    def report(self) -> Mapping[str, object]:
        """Return what the pod cannot reach; empty if it reaches everything."""
        return {"unreachable": (self._master_problem or self._peer_problem)[:_TEXT_LIMIT]}

    def run(self) -> None:
        """Check the connections of the ranks and the agent continuously."""
        while True:
            time.sleep(_INTERVAL)
            self.check(list_unacknowledged())

    def check(self, connections: Sequence[Connection]) -> None:
        """Record the connections that wait for an acknowledgement now."""
        addresses = sorted({connection.address for connection in connections})
        problem = ""
        if addresses:
            problem = _describe_silence(addresses)
        if problem and not self._peer_problem:
            log(f"{problem}: the network drops packets, or its machine is lost")
        elif self._peer_problem and not problem:
            log("all peers acknowledge data again")
        self._peer_problem = problem


def _describe_silence(addresses: Sequence[str]) -> str:
    first = addresses[0]
    others = len(addresses) - 1
    if not others:
        return f"{first} does not acknowledge data"
    return f"{first} and {others} more address{'es' if others > 1 else ''} do not acknowledge data"


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (UnreachablePeers(pod),)


PART = LauncherPart(create=_create)
