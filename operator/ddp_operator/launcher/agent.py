"""torchrun's agent: forked for the launcher from a process that has imported torch, and the channel of its reports."""

import importlib
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any, Optional, Sequence

from .agent_failure import ArgumentError, examine_agent_error
from .fork_server import RankForker, request_fork, start_fork_server
from .pod import Pod, decode_pod, encode_config
from .processes import kill
from .rendezvous import TrainingOver, fork_store
from .torchrun_patches import adapt_torchrun, log_errors_only

RESTART, END = b"r", b"e"  # the launcher's reply to the agent's report of failures
_SECONDS_FOR_REPLY = 10.0


def agent_main(
    request: dict[str, Any],
    channel: socket.socket,
    guards: Sequence[int],
    problem: Optional[Exception],
    forker: Optional[RankForker],
) -> int:
    """Run torchrun in this process and report to the launcher over ``channel``. Returns the exit code.

    ``guards``: of the store that this agent hosts; ``problem``: why torch could not be imported.
    """
    pod = decode_pod(request["pod"])

    def report(event: dict[str, Any]) -> None:
        channel.sendall(json.dumps(event).encode() + b"\n")

    def may_restart(event: dict[str, Any]) -> bool:
        """Report failures; the launcher replies whether the workers are to be restarted."""
        report(event)
        return not select.select([channel], [], [], _SECONDS_FOR_REPLY)[0] or channel.recv(1) == RESTART

    def synchronize(known: Optional[str]) -> str:
        """Have the folder of checkpoints made as a snapshot, for None a snapshot of the folder. Returns its name."""
        report({"snapshot": known})
        with channel.makefile("r", encoding="utf-8") as reply:
            return reply.readline().strip()

    try:
        if problem is not None:
            raise problem
        torch = importlib.import_module("torch")
        # A store that ends before its clients fills the log with C++ stacks, also when all is well.
        log_errors_only(torch)
        host = pod.master if pod.local else "localhost"
        for guard in guards:
            report({"store": fork_store(torch, host, pod.port, guard, channel)})
            os.close(guard)
        torchrun = importlib.import_module("torch.distributed.run")
        leave = adapt_torchrun(pod, report, may_restart, forker, request["restarts"], synchronize)
        if channel.recv(1) != b"g":  # the launcher sends it when the master is reachable
            return 1
        errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    except Exception as error:
        report(_build_error_event(pod, error))
        return 1
    try:
        arguments = torchrun.parse_args([*request["flags"], "--no-python", *request["entry"]])
    except SystemExit:
        report(_build_error_event(pod, ArgumentError()))
        return 2
    try:
        torchrun.run(arguments)
    except errors.ChildFailedError:
        report({"result": "failed"})  # which worker and why was reported when it happened
        return 1
    except TrainingOver:
        report({"result": "ok"})
        return 0
    except processes.SignalException as error:
        leave()
        report({"result": "signal", "signal": int(error.sigval)})
        return 1
    except Exception as error:
        report(_build_error_event(pod, error))
        return 1
    report({"result": "ok"})
    return 0


def _build_error_event(pod: Pod, error: BaseException) -> dict[str, Any]:
    return {"result": "error", "failure": examine_agent_error(pod, error).to_json()}


class AgentProcess:
    """The agent that runs now, or ran last, as the launcher sees it.

    ``status`` is None while it runs, a signal as a negative number. Until the agent has reported ``pid`` is that of
    ``server``, from which it is being forked; 0: there is none.
    """

    def __init__(self, pod: Pod, entry: Sequence[str], *, warm: bool) -> None:
        self._pod = pod
        self._entry = list(entry)
        self._worker = self._entry[self._entry.index("worker") + 1 :] if warm else []
        self.pid = self.server = self.rank_server = 0
        self.status: Optional[int] = None
        self.channel: Optional[socket.socket] = None  # None once the agent has closed its end
        self._requests: Optional[socket.socket] = None
        self._unread = b""
        self._early = 0  # a signal that its server got in its place

    def start(self, flags: Sequence[str], store_guard: Optional[int], restarts: int) -> None:
        """Ask for an agent; the first one, and one after the server's end, waits for the import of torch.

        ``restarts``: those of the workers so far.
        """
        if self.channel is not None:
            self.channel.close()
        self.status, self._unread, self._early = None, b"", 0
        self.channel, theirs = socket.socketpair()
        if not self.server or self._requests is None:
            if self._requests is not None:
                self._requests.close()
            self.server, self._requests = start_fork_server(self._worker)
        self.pid, self.rank_server = self.server, 0
        request = {"pod": encode_config(self._pod), "flags": list(flags), "entry": self._entry, "restarts": restarts}
        guards = [] if store_guard is None else [store_guard]
        with suppress(OSError):  # it has ended, as the channel will show
            request_fork(self._requests, request, [theirs.fileno(), *guards])
        theirs.close()
        for guard in guards:
            os.close(guard)
        self.channel.setblocking(False)

    def send(self, message: bytes) -> None:
        """Send to the agent, unless it has ended meanwhile."""
        with suppress(OSError):
            if self.channel is not None:
                self.channel.sendall(message)

    def receive(self) -> list[dict[str, Any]]:
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
        events = [json.loads(line) for line in lines]
        for event in events:
            if "server" in event:
                known, self.pid, self.rank_server = self.pid, event["pid"], event["server"]
                if self._early and self.pid != known:  # it was forked all the same, and waits to be let go
                    kill(self.pid, self._early)
        if self.channel is None and not self.rank_server:
            self.kill()  # it never came to be: the server ends as it would have
        return events

    def note_end(self, pid: int, status: int) -> None:
        """Take in that a child of the launcher's has ended."""
        if pid == self.pid:
            self.status = os.waitstatus_to_exitcode(status)
        if pid == self.server:
            self.server = 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the agent; it also reaches one that is being forked."""
        if not self.rank_server:
            self._early = number
        kill(self.pid, number)
