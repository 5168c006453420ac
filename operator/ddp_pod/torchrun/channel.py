"""The channel between the launcher and torchrun's agent, and the agent's end of it."""

import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

RELEASE = {"release": True}  # the launcher sends it when the master is reachable and the checkpoints are ready

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
        self._replies = channel.makefile("r", encoding="utf-8")

    def report(self, event: AgentEvent) -> None:
        """Send an event that needs no reply."""
        self._channel.sendall(json.dumps(event).encode() + b"\n")

    def request(self, event: AgentEvent) -> Mapping[str, Any]:
        """Send an event and return the launcher's reply, however late; empty if the launcher has ended."""
        self.report(event)
        return self._read_reply()

    def wait_for_release(self) -> bool:
        """Wait for the launcher. Returns False if it has closed the channel instead."""
        return self._read_reply() == RELEASE

    def _read_reply(self) -> Mapping[str, Any]:
        line = self._replies.readline()
        reply: Mapping[str, Any] = json.loads(line) if line.endswith("\n") else {}
        return reply
