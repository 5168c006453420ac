"""torchrun's agent: forked for the launcher from a process that has imported torch, and the channel of its reports."""

import importlib
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from ..failures.agent_failure import ArgumentError, examine_agent_error
from ..pod import Pod, decode_pod, encode_config
from ..processes import kill
from .fork_server import RankForker, request_fork, start_fork_server
from .rendezvous import TrainingOver, fork_store
from .torchrun_patches import adapt_torchrun, log_errors_only

RESTART, END = b"r", b"e"  # the launcher's reply to the agent's report of failures
RELEASE = b"g"  # the launcher sends it when the master is reachable and the checkpoints are ready
_SECONDS_FOR_REPLY = 10.0

AgentEvent = Mapping[str, Any]
"""A JSON object that an agent reports; ``Supervisor`` handles each of its keys."""


class AgentRequest(NamedTuple):
    """What the launcher asks its fork server for: an agent. ``pod``: encoded; ``restarts``: of the workers so far."""

    pod: str
    flags: list[str]
    entry: list[str]
    restarts: int


class _LauncherChannel:
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
        """Make the checkpoint folder equal a snapshot; for None, upload the folder as one. Returns its name."""
        self.report({"snapshot": known})
        with self._channel.makefile("r", encoding="utf-8") as reply:
            return reply.readline().strip()

    def wait_for_release(self) -> bool:
        """Wait for the launcher. Returns False if it has closed the channel instead."""
        return self._channel.recv(1) == RELEASE


class _Torchrun(NamedTuple):
    """The modules of torchrun, and the function with which the pod leaves the rendezvous."""

    run: Any
    errors: Any
    processes: Any
    leave: Callable[[], None]


def run_agent(
    raw: Mapping[str, Any],
    channel: socket.socket,
    guards: Sequence[int],
    problem: Optional[Exception],
    forker: Optional[RankForker],
) -> int:
    """Run torchrun in this process and report to the launcher over ``channel``. Returns the exit code.

    ``raw``: an AgentRequest; ``guards``: of the store that this agent hosts; ``problem``: why torch could not be
    imported.
    """
    request = AgentRequest(**raw)
    pod = decode_pod(request.pod)
    launcher = _LauncherChannel(channel)
    try:
        if problem is not None:
            raise problem
        torchrun = _prepare_torchrun(pod, request, channel, launcher, guards, forker)
        if not launcher.wait_for_release():
            return 1
    except Exception as error:
        launcher.report(_build_error_event(pod, error))
        return 1
    try:
        arguments = torchrun.run.parse_args([*request.flags, "--no-python", *request.entry])
    except SystemExit:
        launcher.report(_build_error_event(pod, ArgumentError()))
        return 2
    return _run_torchrun(pod, torchrun, arguments, launcher)


def _prepare_torchrun(
    pod: Pod,
    request: AgentRequest,
    channel: socket.socket,
    launcher: _LauncherChannel,
    guards: Sequence[int],
    forker: Optional[RankForker],
) -> _Torchrun:
    """Host the rendezvous store, import torchrun and adapt it."""
    torch = importlib.import_module("torch")
    # A store that ends before its clients logs C++ stacks, even in a successful run.
    log_errors_only(torch)
    host = pod.master if pod.local else "localhost"
    for guard in guards:
        launcher.report({"store": fork_store(torch, host, pod.port, guard, channel)})
        os.close(guard)
    run = importlib.import_module("torch.distributed.run")
    leave = adapt_torchrun(pod, launcher.report, launcher.may_restart, forker, request.restarts, launcher.synchronize)
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    return _Torchrun(run, errors, processes, leave)


def _run_torchrun(pod: Pod, torchrun: _Torchrun, arguments: Any, launcher: _LauncherChannel) -> int:
    """Run the workers and report how they ended. Returns the exit code."""
    try:
        torchrun.run.run(arguments)
    except torchrun.errors.ChildFailedError:
        launcher.report({"result": "failed"})  # the failures were reported when they happened
        return 1
    except TrainingOver:
        launcher.report({"result": "ok"})
        return 0
    except torchrun.processes.SignalException as error:
        torchrun.leave()
        launcher.report({"result": "signal", "signal": int(error.sigval)})
        return 1
    except Exception as error:
        launcher.report(_build_error_event(pod, error))
        return 1
    launcher.report({"result": "ok"})
    return 0


def _build_error_event(pod: Pod, error: BaseException) -> AgentEvent:
    return {"result": "error", "failure": examine_agent_error(pod, error).to_json()}


class AgentProcess:
    """The agent that runs now, or ran last, from the launcher's side.

    ``status``: its exit code, negative for a signal; None while it runs. ``pid`` is 0 without an agent, and that of
    ``server``, from which it is forked, until the agent has reported its own.
    """

    def __init__(self, pod: Pod, entry: Sequence[str], *, warm: bool) -> None:
        self._pod = pod
        self._entry = list(entry)
        self._worker = self._entry[self._entry.index("worker") + 1 :] if warm else []
        self.pid = 0
        self.server = 0
        self.rank_server = 0
        self.status: Optional[int] = None
        self.channel: Optional[socket.socket] = None  # None once the agent has closed its end
        self._requests: Optional[socket.socket] = None
        self._unread = b""
        self._early_signal = 0  # that its server received instead

    def start(self, flags: Sequence[str], store_guard: Optional[int], restarts: int) -> None:
        """Request an agent. The first one, and one after the server's end, waits for the import of torch.

        ``restarts``: of the workers so far.
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
        request = AgentRequest(encode_config(self._pod), list(flags), self._entry, restarts)
        guards = [] if store_guard is None else [store_guard]
        with suppress(OSError):  # the server has ended, as the channel will show
            request_fork(requests, request._asdict(), [theirs.fileno(), *guards])
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

    def send(self, message: bytes) -> None:
        """Send to the agent, unless it has ended."""
        with suppress(OSError):  # it has ended just now
            if self.channel is not None:
                self.channel.sendall(message)

    def receive(self) -> list[AgentEvent]:
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
        *lines, self._unread = self._unread.split(b"\n")
        events: list[AgentEvent] = [json.loads(line) for line in lines]
        for event in events:
            if "server" in event:
                self._note_start(event["pid"], event["server"])
        if self.channel is None and not self.rank_server:
            self.kill()  # the agent was never forked: its server's end counts as its own
        return events

    def _note_start(self, pid: int, server: int) -> None:
        """Note an agent's process id. Forward a signal that its server received before the fork."""
        server_pid = self.pid
        self.pid = pid
        self.rank_server = server
        if self._early_signal and pid != server_pid:
            kill(pid, self._early_signal)

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
