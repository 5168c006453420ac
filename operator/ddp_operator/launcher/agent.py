"""torchrun's agent: a forked child of the launcher, the only one that imports torch, and the channel of its reports."""

import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Iterable, Optional

from .contract import ENV_AGENT_PID
from .files import log
from .pod import Pod
from .processes import STOP_SIGNALS, die_with, kill
from .rendezvous import fork_store
from .torchrun_patches import adapt_torchrun
from .tracebacks import describe

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
RESTART, END = b"r", b"e"  # the launcher's reply to the agent's report of failures
_SECONDS_FOR_REPLY = 10.0


def agent_main(pod: Pod, flags: list[str], entry: list[str], channel: socket.socket, store_guard: Optional[int]) -> int:
    """Run torchrun in this process and report to the launcher over ``channel``. Returns the exit code."""

    def report(event: dict[str, Any]) -> None:
        channel.sendall(json.dumps(event).encode() + b"\n")

    def may_restart(event: dict[str, Any]) -> bool:
        """Report failures; the launcher replies whether the workers are to be restarted."""
        report(event)
        return not select.select([channel], [], [], _SECONDS_FOR_REPLY)[0] or channel.recv(1) == RESTART

    try:
        quiet = os.environ.setdefault(_CPP_LOG_LEVEL, "") == ""
        if quiet:  # a store that ends before its clients fills the log with C++ stacks, also when all is well
            os.environ[_CPP_LOG_LEVEL] = "ERROR"
        torch = importlib.import_module("torch")
        if quiet:
            del os.environ[_CPP_LOG_LEVEL]  # the workers' own logs stay as they are
        if store_guard is not None:
            report({"store": fork_store(torch, pod.port, store_guard, channel)})
            os.close(store_guard)
        torchrun = importlib.import_module("torch.distributed.run")
        leave = adapt_torchrun(pod, report, may_restart)
        if channel.recv(1) != b"g":  # the launcher sends it when the master is reachable
            return 1
        errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    except Exception as error:
        report({"result": "error", **describe(error)})
        return 1
    try:
        arguments = torchrun.parse_args([*flags, "--no-python", *entry])
    except SystemExit:
        problem = {"type": "ArgumentError", "message": "torchrun refused its arguments", "traceback": ""}
        report({"result": "error", **problem})
        return 2
    try:
        torchrun.run(arguments)
    except errors.ChildFailedError:
        report({"result": "failed"})  # which worker and why was reported when it happened
        return 1
    except processes.SignalException as error:
        leave()
        report({"result": "signal", "signal": int(error.sigval)})
        return 1
    except Exception as error:
        report({"result": "error", **describe(error)})
        return 1
    report({"result": "ok"})
    return 0


class AgentProcess:
    """The agent that runs now, or ran last, as the launcher sees it.

    ``status`` is None while it runs, a signal as a negative number.
    """

    def __init__(self, pod: Pod, entry: list[str]) -> None:
        self._pod = pod
        self._entry = entry
        self.pid = 0
        self.status: Optional[int] = None
        self.channel: Optional[socket.socket] = None  # None once the agent has closed its end
        self._unread = b""

    def start(self, flags: list[str], store_guard: Optional[int], launchers: Iterable[Optional[int]]) -> None:
        """Fork the agent. It closes ``launchers``, which are descriptors of the launcher's own."""
        if self.channel is not None:
            self.channel.close()
        self.status, self._unread = None, b""
        self.channel, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        # A signal to the agent that came before it has put off our handlers would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            if store_guard is not None:
                os.close(store_guard)
            self.channel.setblocking(False)
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*range(1, 16), signal.SIGUSR1, signal.SIGCHLD):
                if number not in (signal.SIGKILL, signal.SIGSEGV, signal.SIGFPE, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.setsid()
            die_with(launcher)
            for descriptor in launchers:
                if descriptor is not None and descriptor >= 0:
                    os.close(descriptor)
            self.channel.close()
            os.environ[ENV_AGENT_PID] = str(os.getpid())
            code = agent_main(self._pod, flags, self._entry, theirs, store_guard)
        except BaseException as error:
            log(describe(error)["traceback"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

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
        return [json.loads(line) for line in lines]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the agent."""
        kill(self.pid, number)
