"""One import of PyTorch for a pod: the process that makes it, from which torchrun's agents and the ranks are forked.

    launcher  ->  fork server (imports PyTorch; no threads, no GPU, no process group)
              ->  torchrun's agent (forked)  ->  a fork server of its own, made before it has threads
                                             ->  ranks (forked)

What is forked on request is no child of the server: the process between the two ends at once, and Linux gives its child
to the nearest ancestor that is a subreaper. That is who asked, waits for it, and takes it along when it dies.
"""

import atexit
import gc
import importlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib.machinery import PathFinder
from typing import Any, Optional, Sequence

from .contract import ENV_AGENT_PID
from .files import BOOTSTRAP, log
from .loopback import bind_stores
from .processes import adopt_orphans, set_parent_death_signal

_LENGTH = struct.Struct("!I")
# Read when PyTorch, or a library that it loads, is imported; others are read when they are needed.
_SETS_EARLY = re.compile(
    r"""(?: environ \s* (?: \[ | \.setdefault\( | \.update\(\s*\{ ) | putenv\( ) \s*
        ["'] ( (?:OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH)_ (?!NCCL_|HOME\b) \w+ ) ["']
        \s* (?: \] \s* =(?!=) | [,:] )""",
    re.VERBOSE,
)


def start_fork_server(worker: Sequence[str]) -> tuple[int, socket.socket]:
    """Start a server. Returns its process and the socket for requests.

    ``worker``: what the shim of a rank is told; with nothing the server forks none, and becomes the first agent itself.
    """
    requests, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    own = [sys.executable, "-u", BOOTSTRAP, "forkserver", str(theirs.fileno()), str(os.getpid())]
    pid = os.posix_spawn(sys.executable, [*own, *worker], os.environ)
    theirs.close()
    return pid, requests


def request_fork(requests: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Ask a server for a process. Raises: OSError when the server is gone."""
    data = json.dumps(request).encode()
    socket.send_fds(requests, [_LENGTH.pack(len(data))], descriptors)
    requests.sendall(data)


def serve(words: Sequence[str]) -> list[str]:
    """``forkserver <descriptor> <launcher> …``: import PyTorch and fork agents.

    Returns in a rank only: the words that its shim is told.
    """
    os.setsid()
    launcher, forks_ranks = int(words[1]), bool(words[2:])
    set_parent_death_signal(launcher)
    requests = socket.socket(fileno=int(words[0]))
    problem: Optional[Exception] = None
    gc.disable()  # it would go through what is imported again and again, a fifth of the time
    try:
        torch = importlib.import_module("torch")
        bind_stores()
        if forks_ranks:
            with suppress(Exception):  # an optimizer loads what takes as long again
                torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    except Exception as error:
        problem = error
    gc.freeze()  # the collector would write into pages that all of them share
    gc.enable()
    threads = _count_lasting_threads() if forks_ranks else 1
    request, descriptors = _fork_on_request(requests, launcher) if forks_ranks else _receive(requests)
    agent = os.getpid()
    ranks, theirs = socket.socketpair()
    server = os.fork() if forks_ranks else agent
    if server == 0:
        set_parent_death_signal(agent)
        ranks.close()
        for descriptor in descriptors:
            os.close(descriptor)
        request, descriptors = _fork_on_request(theirs, agent)
        return _become_rank(request["command"], request["environment"], descriptors, threads)
    theirs.close()
    code = 1
    try:
        os.environ[ENV_AGENT_PID] = str(agent)
        ours = importlib.import_module(".agent", __package__)
        channel = socket.socket(fileno=descriptors[0])
        channel.sendall(json.dumps({"pid": agent, "server": server}).encode() + b"\n")
        code = ours.agent_main(request, channel, descriptors[1:], problem, RankForker(ranks) if forks_ranks else None)
    except BaseException as error:
        log("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _receive(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(requests, _LENGTH.size, 3)
    if not head:
        os._exit(0)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return json.loads(requests.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)), descriptors


def _fork_on_request(requests: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Returns in it, a child of ``parent``, with the request and its descriptors."""
    while True:
        request, descriptors = _receive(requests)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            requests.close()
            os.setsid()
            set_parent_death_signal(parent)
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)


def _count_lasting_threads() -> int:
    """Return how many threads this process has but those that a library ends before each fork, as OpenBLAS does."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task"))


# -- the agent's side


class ForkedRank:
    """A rank that was forked for this process; what torchrun uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: Optional[int] = None

    def poll(self) -> Optional[int]:
        """Return the exit code, a signal's as a negative number; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: Optional[float] = None) -> int:
        """Wait for the end, at most ``timeout`` seconds. Raises: subprocess.TimeoutExpired."""
        since = time.monotonic()
        while self.poll() is None:
            if timeout is not None and time.monotonic() - since > timeout:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class RankForker:
    """Forks an agent's ranks, as long as its server is there."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests: Optional[socket.socket] = requests

    def fork(self, command: Sequence[str], environment: dict[str, str], output: Sequence[Any]) -> Optional[ForkedRank]:
        """Fork a rank that is as if ``command`` had been started. Returns None where it has to be.

        ``output``: the files for stdout and stderr, or None for the agent's own.
        """
        if self._requests is None or command[0] != sys.executable:  # wrapped, as by numactl
            return None
        pid, pid_end = os.pipe()
        files = [file.fileno() if file else number for number, file in enumerate(output, 1)]
        adopt_orphans()
        try:
            request_fork(self._requests, {"command": command, "environment": environment}, [*files, pid_end])
        except OSError:
            pass
        finally:
            os.close(pid_end)
            answer = os.read(pid, 32)
            os.close(pid)
            adopt_orphans(wanted=False)  # orphans of a rank go to the launcher, which reaps them
        if answer:
            return ForkedRank(int(answer))
        self._requests = None
        log("the process from which ranks are forked is gone: they start in fresh interpreters")
        return None


# -- the rank's side


def _become_rank(
    command: list[str], environment: dict[str, str], descriptors: Sequence[int], threads: int
) -> list[str]:
    """Let this process be what a fresh interpreter with this command would be, or start that.

    Returns the words that the shim is told.
    """
    output, errors, pid = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    os.environ.update(environment)
    os.write(pid, str(os.getpid()).encode())
    for descriptor in descriptors:
        os.close(descriptor)
    words = command[command.index(BOOTSTRAP) + 2 :]
    obstacle = find_obstacle(words[0], words[2], threads)
    if obstacle:
        if words[1] == "0" and environment.get("TORCHELASTIC_RESTART_COUNT") == "0":
            log(f"ranks start in fresh interpreters, each of which imports PyTorch: {obstacle}")
        os.execv(command[0], command)  # noqa: S606
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or all ranks would draw the same numbers
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # looked up anew: the script may set TMPDIR
    sys.orig_argv = command
    # The interpreter's last collection skips frozen objects, and nanobind modules such as triton's then report leaks.
    # Only at the end: before it, the collector would write into pages that all ranks share.
    atexit.register(gc.unfreeze)
    _set_title(command)
    return words


def find_obstacle(kind: str, target: str, threads: int) -> Optional[str]:
    """Return why a program would not find in a forked process what it has in a fresh interpreter; None: it would."""
    if threads > 1:
        return f"the interpreter has {threads} threads once PyTorch is imported (sitecustomize? a preloaded library?)"
    bad_fork = getattr(sys.modules["torch"].cuda, "_is_in_bad_fork", None)
    if bad_fork is not None and bad_fork():
        return "the GPU was used while PyTorch was imported"
    folder, places = os.getcwd(), []
    if kind == "module":
        base = os.path.join(folder, *target.split("."))
        places = [f"{base}.py", os.path.join(base, "__main__.py")]
    elif kind == "script":
        places = [target, os.path.join(target, "__main__.py")]
        folder = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
    text = target if kind == "code" else ""
    for place in places:
        with suppress(OSError), open(place, encoding="utf-8", errors="replace") as file:
            text = file.read()
    early = _SETS_EARLY.search(text)
    if early:
        return f"the script sets {early[1]} itself, before it imports PyTorch; spec.template's env could do that"
    for name in sorted({name.partition(".")[0] for name in sys.modules} - {"__main__", "__mp_main__"}):
        found = PathFinder.find_spec(name, [folder])
        if found and found.origin and found.origin != getattr(sys.modules.get(name), "__file__", None):
            return f"{found.origin} stands in for a module that PyTorch imports"
    return None


def _set_title(command: Sequence[str]) -> None:
    """Let ``ps`` and ``pkill -f`` see the command of a rank, as far as the server's own command line has room."""
    with suppress(Exception):
        import ctypes

        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # where the kernel reads it
        title = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)
