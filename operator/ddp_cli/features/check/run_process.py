"""The process of `ddp run` for all runs of a check: its pods are forked from servers that import PyTorch once."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ddp_cli import commands
from ddp_cli.commands.io import ExitCode
from ddp_cli.local.pod_servers import PodServers
from ddp_cli.local.processes import use_servers
from ddp_pod.contract.frames import pack, receive_with_descriptors, send_with_descriptors
from ddp_pod.contract.processes import STOP_SIGNALS, kill, load_libc, set_environment, set_parent_death_signal

_RUN: Final = "run"
_LIMIT: Final = 1 << 24  # bytes of an order
_END_SECONDS: Final = 5.0  # for the end of the servers


class RunOrder(NamedTuple):
    """A run. ``words``: the arguments of `ddp run`; ``is_first``: of the check."""

    words: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    is_first: bool


class RunProcess:
    """A run of `ddp run`, with the methods of a `subprocess.Popen`. ``returncode``: None while it runs."""

    def __init__(self, host: "RunHost") -> None:
        self._host = host
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._host.read_code(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._host.read_code(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(_RUN, timeout or 0)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            kill(self._host.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; the pods die too."""
        if self.poll() is None:
            kill(self._host.pid, signal.SIGKILL)


class RunHost:
    """The process that runs one `ddp run` after another. It is forked from this one, and dies with it."""

    def __init__(self, pods: int) -> None:
        """``pods``: of each run."""
        self._pods = pods
        self._orders: socket.socket | None = None
        self.pid = 0

    def start(self, order: RunOrder, text: Path, output: Path) -> RunProcess:
        """Start a run. ``text``: the file of its standard input; ``output``: of its output."""
        if self._orders is None:
            self._fork()
        assert self._orders is not None
        with text.open("rb") as stdin, output.open("wb") as stdout:
            data = pack(json.dumps(order._asdict()).encode())
            send_with_descriptors(self._orders, data, [stdin.fileno(), stdout.fileno()])
        return RunProcess(self)

    def read_code(self, timeout: float | None) -> int | None:
        """Return the exit code of the run, None if it still runs after ``timeout`` seconds."""
        assert self._orders is not None
        if not select.select([self._orders], [], [], timeout)[0]:
            return None
        try:
            data = self._orders.recv(4)
        except ConnectionResetError:  # it was killed before it had read the order
            data = b""
        if data:
            return int.from_bytes(data, "big", signed=True)
        self._orders.close()
        self._orders = None
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """End the process, and the servers of its pods."""
        if self._orders is None:
            return
        self._orders.shutdown(socket.SHUT_WR)
        if self.read_code(_END_SECONDS) is None:
            kill(self.pid, signal.SIGKILL)
            self.read_code(None)

    def _fork(self) -> None:
        self._orders, theirs = socket.socketpair()
        load_libc()  # before the fork, for the child
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._orders.close()
            try:
                _serve(theirs, parent, self._pods)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(ExitCode.BROKEN)
        theirs.close()


def _serve(orders: socket.socket, parent: int, pods: int) -> None:
    """Run one order after another until the other end closes."""
    os.setsid()
    set_parent_death_signal(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    servers = PodServers(pods)
    use_servers(servers)
    while True:
        received = receive_with_descriptors(orders, 2, _LIMIT)
        if received is None:
            servers.close()
            os._exit(0)
        order = RunOrder(**json.loads(received.data))
        servers.is_first = order.is_first
        code = _run(order, received.descriptors)
        orders.sendall(code.to_bytes(4, "big", signed=True))


def _run(order: RunOrder, descriptors: Sequence[int]) -> int:
    """Run the command as in a separate process; return its exit code."""
    text, output = descriptors
    for descriptor, number in ((text, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(text)
    os.close(output)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
    os.chdir(order.folder)
    set_environment(order.environment)
    listed = [command for command in commands.COMMANDS if command.name == _RUN]
    try:
        code = commands.main(listed, [_RUN, *order.words])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir("/")
    return code
