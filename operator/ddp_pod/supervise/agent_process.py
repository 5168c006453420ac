"""torchrun's agent from the launcher's side: its process, which a fork server forks, and the events that it reports."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..base.pod import Pod
from ..contract.processes import kill
from ..torchrun.channel import AgentRequest, Started
from ..torchrun.fork_client import request_fork, start_fork_server
from ..torchrun.frames import decode_all, encode

ForkServer = tuple[int, socket.socket]
"""The process id of a fork server, and the socket for requests to it."""


def list_worker_arguments(entry: Sequence[str]) -> list[str]:
    """Return the arguments of a rank's shim in the command of a rank."""
    return list(entry[entry.index("worker") + 1 :])


class AgentProcess:
    """The agent that runs now, or ran last, from the launcher's side.

    ``status``: its exit code, negative for a signal; None while it runs. ``pid`` is 0 without an agent, and that of
    ``server``, from which it is forked, until the agent has reported its own.
    """

    def __init__(self, pod: Pod, entry: Sequence[str], *, warm: bool, server: ForkServer | None = None) -> None:
        self._pod = pod
        self._entry = list(entry)
        self._worker = list_worker_arguments(entry) if warm else []
        self.pid = 0
        self.server = server[0] if server else 0
        self._requests = server[1] if server else None
        self.rank_server = 0
        self.status: int | None = None
        self.channel: socket.socket | None = None  # None once the agent has closed its end
        self._unread = b""
        self._early_signal = 0  # that its server received instead

    def start(self, store_guard: int | None, *, restarts: int, restarts_left: int) -> None:
        """Request an agent. The first one, and one after the server's end, waits for the import of torch.

        ``restarts``, ``restarts_left``: see ``AgentRequest``.
        """
        if self.channel is not None:
            self.channel.close()
        self.status = None
        self._unread = b""
        self._early_signal = 0
        self.channel, theirs = socket.socketpair()
        requests = self._start_server()
        self.pid = self.server
        self.rank_server = 0
        request = AgentRequest(self._pod, self._entry, restarts, restarts_left)
        guards = [] if store_guard is None else [store_guard]
        with suppress(OSError):  # the server has ended, as the channel will show
            request_fork(requests, request, [theirs.fileno(), *guards])
        theirs.close()
        for guard in guards:
            os.close(guard)
        self.channel.setblocking(False)

    def _start_server(self) -> socket.socket:
        """Start a fork server, unless one runs. Returns the socket for requests."""
        if self.server and self._requests is not None:
            return self._requests
        if self._requests is not None:
            self._requests.close()
        self.server, self._requests = start_fork_server(self._worker)
        return self._requests

    def reply(self, reply: object) -> None:
        """Reply to the agent's request, unless it has ended."""
        with suppress(OSError):  # it has ended just now
            if self.channel is not None:
                self.channel.sendall(encode(reply))

    def receive(self) -> list[Any]:
        """Return the events that the agent has reported since the last call."""
        while self.channel is not None:
            try:
                data = self.channel.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.channel.close()
                self.channel = None
            self._unread += data
        events, self._unread = decode_all(self._unread)
        for event in events:
            if isinstance(event, Started):
                self._note_start(event)
        if self.channel is None and not self.rank_server:
            self.kill()  # the agent was never forked: its server's end counts as its own
        return events

    def _note_start(self, event: Started) -> None:
        """Note an agent's process id. Forward a signal that its server received before the fork."""
        server_pid = self.pid
        self.pid = event.pid
        self.rank_server = event.server
        if self._early_signal and self.pid != server_pid:
            kill(self.pid, self._early_signal)

    def note_end(self, pid: int, status: int) -> None:
        """Note that a child of the launcher has ended."""
        if pid == self.pid:
            self.status = os.waitstatus_to_exitcode(status)
        if pid == self.server:
            self.server = 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the agent, also to one that is being forked."""
        if not self.rank_server:
            self._early_signal = number
        kill(self.pid, number)
