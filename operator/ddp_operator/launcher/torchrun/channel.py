"""The channel between the launcher and torchrun's agent, and the agent's end of it."""

import json
import select
import socket
from typing import Any, Mapping, NamedTuple, Optional

RESTART, END = b"r", b"e"  # the launcher's reply to the agent's report of failures
RELEASE = b"g"  # the launcher sends it when the master is reachable and the checkpoints are ready
_SECONDS_FOR_REPLY = 10.0

AgentEvent = Mapping[str, Any]
"""A JSON object that an agent reports; ``Supervisor`` handles each of its keys."""


class AgentRequest(NamedTuple):
    """A request to the fork server for an agent. ``pod``: encoded; ``restarts``: of the workers so far."""

    pod: str
    flags: list[str]
    entry: list[str]
    restarts: int


class LauncherChannel:
    """The agent's end of the channel to the launcher."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def report(self, event: AgentEvent) -> None:
        """Send an event."""
        self._channel.sendall(json.dumps(event).encode() + b"\n")

    def may_restart(self, event: AgentEvent) -> bool:
        """Report failures. Returns whether to restart the workers: the launcher's reply, or yes without any."""
        self.report(event)
        has_reply = bool(select.select([self._channel], [], [], _SECONDS_FOR_REPLY)[0])
        return not has_reply or self._channel.recv(1) == RESTART

    def synchronize(self, known: Optional[str]) -> str:
        """Make the checkpoint folder equal a snapshot. For None: upload the folder, in other pods than pod 0 shards.

        Returns the snapshot's name.
        """
        self.report({"snapshot": known})
        with self._channel.makefile("r", encoding="utf-8") as reply:
            return reply.readline().strip()

    def wait_for_release(self) -> bool:
        """Wait for the launcher. Returns False if it has closed the channel instead."""
        return self._channel.recv(1) == RELEASE
