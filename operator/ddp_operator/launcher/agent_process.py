"""torchrun's agent as the launcher sees it: a child, and the channel on which it reports."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any, Iterable

from .agent import agent_main
from .contract import ENV_AGENT_PID
from .files import log
from .pod import Pod
from .processes import STOP_SIGNALS, die_with, kill
from .tracebacks import describe


class AgentProcess:
    """The agent that runs now, or ran last. ``status`` is None while it runs, a signal as a negative number."""

    def __init__(self, pod: Pod, entry: list[str]) -> None:
        self._pod = pod
        self._entry = entry
        self.pid = 0
        self.status: int | None = None
        self.channel: socket.socket | None = None  # None once the agent has closed its end
        self._unread = b""

    def start(self, flags: list[str], store_guard: int | None, launchers: Iterable[int | None]) -> None:
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
        try:
            if self.channel is not None:
                self.channel.sendall(message)
        except OSError:
            pass

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
