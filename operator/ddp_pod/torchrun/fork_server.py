"""One import of PyTorch for a pod: the fork server imports it, and torchrun's agents and the ranks are forked from it.

    launcher  ->  fork server (imports PyTorch; no threads, no GPU, no process group)
              ->  torchrun's agent (forked)  ->  its fork server, forked before the agent has threads
                                             ->  ranks (forked)

A process that is forked on request is no child of the server: the intermediate process between the two exits, and
Linux reparents its child to the nearest subreaper. That is the requester, which waits for the child; the child dies
with it.
"""

import atexit
import gc
import importlib
import os
import re
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from typing import Any, NamedTuple, NoReturn, Optional

from ..base.files import BOOTSTRAP, log
from ..contract.frames import Delivery, read_frame, receive_with_descriptors
from ..contract.processes import adopt_orphans, read_stat, set_environment, set_parent_death_signal
from .fork_client import ServerStart, request_fork
from .frames import decode
from .renewal import renew_imported_state

# Variables that PyTorch or one of its libraries reads only once, at its import.
_SETS_EARLY = re.compile(
    r"""(?: environ \s* (?: \[ | \.setdefault\( | \.update\(\s*\{ ) | putenv\( ) \s*
        ["'] ( (?:OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH)_ (?!NCCL_|HOME\b) \w+ ) ["']
        \s* (?: \] \s* =(?!=) | [,:] )""",
    re.VERBOSE,
)
PATHS = "PYTHONPATH"
_SECONDS_TO_ASK = 0.1  # in which a launcher that is not on standby has asked for its agent


class RankRequest(NamedTuple):
    """An agent's request to its fork server: a rank with this command and environment."""

    command: list[str]
    environment: dict[str, str]


class AgentFork(NamedTuple):
    """A process that is to become torchrun's agent.

    ``request``: an encoded AgentRequest; ``descriptors``: of its channel, and of the guard of the store that it hosts;
    ``problem``: why PyTorch could not be imported; ``server``: the process that forks its ranks; ``forker``: how it
    requests them, None if this process is the server itself.
    """

    request: bytes
    descriptors: list[int]
    problem: Exception | None
    server: int
    forker: Optional["RankForker"]


def serve(
    argv: Sequence[str],
    import_agent: Callable[[], None],
    import_for_ranks: Callable[[], None],
    run_agent: Callable[[AgentFork], NoReturn],
) -> list[str]:
    """Import PyTorch and fork agents. ``argv``: a socket's descriptor, the launcher's pid, arguments of a rank's shim.

    ``import_agent``, ``import_for_ranks``: import what an agent and its ranks need. Returns only in a forked rank, with
    the arguments of its shim.
    """
    os.setsid()
    launcher = int(argv[1])
    forks_ranks = bool(argv[2:])
    set_parent_death_signal(launcher)
    requests = socket.socket(fileno=int(argv[0]))
    problem = import_torch(with_optimizer=forks_ranks)
    if problem is None and not select.select([requests], [], [], _SECONDS_TO_ASK)[0]:
        import_agent()  # on standby there is time for it; ranks then have it too
    obstacle = find_obstacle_in_server(count_lasting_threads()) if forks_ranks else None
    return _serve(requests, launcher, problem, import_for_ranks, run_agent, obstacle, forks_ranks=forks_ranks)


def _serve(
    requests: socket.socket,
    launcher: int,
    problem: Exception | None,
    import_for_ranks: Callable[[], None],
    run_agent: Callable[[AgentFork], NoReturn],
    obstacle: str | None,
    *,
    forks_ranks: bool,
) -> list[str]:
    """Fork agents, or become the first one. Returns only in a forked rank, with the arguments of its shim.

    ``obstacle``: see ``find_obstacle_in_server``.
    """
    if not forks_ranks:
        received = _receive(requests)
        run_agent(AgentFork(*received, problem, os.getpid(), None))

    received = _fork_on_request(requests, launcher)
    agent = os.getpid()
    ranks, theirs = socket.socketpair()
    server = os.fork()
    if server == 0:
        set_parent_death_signal(agent)
        ranks.close()
        _close_all(received.descriptors)
        import_for_ranks()  # once, while the agent joins its first round, rather than in each rank at each restart
        received = _fork_on_request(theirs, agent)
        return _become_rank(decode(received.data), received.descriptors, obstacle)
    theirs.close()
    run_agent(AgentFork(*received, problem, server, RankForker(ranks)))


def serve_kept(requests: socket.socket, launcher: int, run_agent: Callable[[AgentFork], NoReturn]) -> list[str]:
    """Serve in a process that was forked with PyTorch, beside its launcher. Returns as ``serve`` does."""
    os.setsid()
    set_parent_death_signal(launcher)
    try:
        start: ServerStart = decode(read_frame(requests))
    except EOFError:
        os._exit(0)
    replace_paths(os.environ.get(PATHS, ""), start.environment.get(PATHS, ""))
    set_environment(start.environment)
    os.chdir(start.folder)
    # The server of pods has imported all, and forks none if there is an obstacle.
    return _serve(requests, launcher, None, lambda: None, run_agent, None, forks_ranks=bool(start.worker))


def replace_paths(before: str, after: str) -> None:
    """Replace the folders of a PYTHONPATH in the import path of this process."""
    former = _split_paths(before)
    rest = [path for path in sys.path if path not in former]
    sys.path[:] = [*_split_paths(after), *rest]


def _split_paths(paths: str) -> list[str]:
    return [os.path.abspath(path) for path in paths.split(os.pathsep)] if paths else []


def list_imported_below(paths: str) -> list[str]:
    """Return the files of modules that were imported from the folders of a PYTHONPATH."""
    folders = tuple(os.path.join(path, "") for path in _split_paths(paths))
    if not folders:
        return []  # reading all modules would copy their pages in a forked process
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [file for file in files if isinstance(file, str) and file.startswith(folders)]


def import_torch(*, with_optimizer: bool) -> Exception | None:
    """Import PyTorch and freeze its objects. Returns the exception if that fails."""
    problem: Exception | None = None
    gc.disable()  # collections during the import take a fifth of its time
    try:
        torch = importlib.import_module("torch")
        if with_optimizer:
            _load_optimizer(torch)
    except Exception as error:  # a broken installation may raise anything; the agent reports it
        problem = error
    gc.freeze()  # the collector would write into pages that all forked processes share
    gc.enable()
    return problem


def _load_optimizer(torch: Any) -> None:
    """Create an optimizer: the first one imports modules, which takes as long as PyTorch itself."""
    try:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    except Exception as error:  # an optional dependency of PyTorch is broken; ranks that need it report it
        log(f"each rank imports PyTorch's optimizers itself: {type(error).__name__}: {error}")


def _receive(requests: socket.socket) -> Delivery:
    """Return the next request; exit when the requester has closed its end."""
    received = receive_with_descriptors(requests, 3)
    if received is None:
        os._exit(0)
    for descriptor in received.descriptors:
        os.set_inheritable(descriptor, False)
    return received


def leave_intermediate() -> None:
    """Fork again and end the process between: Linux then gives this one to the nearest subreaper."""
    intermediate = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == intermediate:
        time.sleep(0.0005)


def _fork_on_request(requests: socket.socket, parent: int) -> Delivery:
    """Fork a process for each request. Returns in that process, a child of ``parent``, with its request."""
    while True:
        received = _receive(requests)
        intermediate = os.fork()
        if intermediate == 0:
            leave_intermediate()
            requests.close()
            os.setsid()
            set_parent_death_signal(parent)
            return received
        _close_all(received.descriptors)
        os.waitpid(intermediate, 0)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def count_lasting_threads() -> int:
    """Return the number of threads without those that a library ends before each fork, as OpenBLAS does."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task"))


# -- the agent's side


class RankForker:
    """Forks an agent's ranks while its fork server lives."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests: socket.socket | None = requests

    def fork(self, command: Sequence[str], environment: dict[str, str], output: Sequence[Any]) -> int | None:
        """Fork a rank equivalent to ``command``. Returns its process id; None if the server has ended.

        ``output``: the files for stdout and stderr, or None for the agent's own. The rank is a child of this process.
        """
        if self._requests is None:
            return None
        pid_start, pid_end = os.pipe()
        files = [file.fileno() if file else number for number, file in enumerate(output, 1)]
        request = RankRequest(list(command), environment)
        adopt_orphans()
        try:
            request_fork(self._requests, request, [*files, pid_end])
        except OSError:
            pass  # the server has ended: the pipe stays empty
        finally:
            os.close(pid_end)
            pid = os.read(pid_start, 32)
            os.close(pid_start)
            adopt_orphans(enabled=False)  # the launcher reaps a rank's orphans
        if pid:
            return int(pid)
        self._requests = None
        log("the ranks' fork server has ended: ranks start in fresh interpreters")
        return None


# -- the rank's side


def _become_rank(request: RankRequest, descriptors: Sequence[int], obstacle: str | None) -> list[str]:
    """Make this process equivalent to a fresh interpreter with this command, or start that interpreter.

    ``obstacle``: see ``find_obstacle_in_server``. Returns the arguments of the shim.
    """
    output, errors, pid_end = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    set_environment(request.environment)
    os.write(pid_end, str(os.getpid()).encode())
    _close_all(descriptors)

    command = request.command
    argv = command[command.index(BOOTSTRAP) + 2 :]
    kind, local_rank, target = argv[:3]
    obstacle = obstacle or find_obstacle(kind, target)
    if obstacle:
        if local_rank == "0" and request.environment.get("TORCHELASTIC_RESTART_COUNT") == "0":
            log(f"ranks start in fresh interpreters, and each imports PyTorch: {obstacle}")
        os.execv(command[0], command)  # noqa: S606
    renew_imported_state()
    sys.orig_argv = command
    # Only at the end: an earlier collection would write into pages that all ranks share.
    atexit.register(unfreeze_for_leak_reports)
    _set_title(command)
    return argv


def unfreeze_for_leak_reports() -> None:
    """Let the interpreter collect what the fork server imported, if an extension would report it as leaked.

    triton is such an extension (nanobind). Elsewhere the objects stay frozen: their collection takes up to a second of
    the rank's exit, which delays every restart.
    """
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()


def find_obstacle_in_server(threads: int) -> str | None:
    """Return why no rank can be forked from this process, which has imported PyTorch. ``threads``: of this process."""
    if threads > 1:
        return f"the import of PyTorch has left {threads} threads (of sitecustomize? of a preloaded library?)"
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return "the import of PyTorch has initialized the GPU"
    return None


def find_obstacle(kind: str, target: str) -> str | None:
    """Return why a program would run differently in a forked process than in a fresh interpreter; None if it does not.

    ``kind``, ``target``: of a ``PythonLine``.
    """
    return _find_early_variable(kind, target) or _find_shadowing_module(kind, target)


def _find_early_variable(kind: str, target: str) -> str | None:
    """Report a variable that the program sets before the import and that had an effect in the fork server already."""
    text = target if kind == "code" else _read_program(kind, target)
    match = _SETS_EARLY.search(text)
    if match is None:
        return None
    return f"the script sets {match[1]} itself before it imports PyTorch; set it in spec.template's env"


def _read_program(kind: str, target: str) -> str:
    """Return the source of a script or module; empty if it is no source file."""
    if kind == "module":
        base = os.path.join(os.getcwd(), *target.split("."))
        paths = [f"{base}.py", os.path.join(base, "__main__.py")]
    else:
        paths = [target, os.path.join(target, "__main__.py")]
    text = ""
    for path in paths:
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    return text


def _find_shadowing_module(kind: str, target: str) -> str | None:
    """Report a file of the program that has the name of a module which the fork server has imported."""
    folder = os.getcwd()
    if kind == "script":
        folder = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
    imported = {name.partition(".")[0] for name in sys.modules} - {"__main__", "__mp_main__"}
    for name in sorted(imported):
        spec = PathFinder.find_spec(name, [folder])
        if spec and spec.origin and spec.origin != getattr(sys.modules.get(name), "__file__", None):
            return f"{spec.origin} shadows a module that PyTorch imports"
    sys.path_importer_cache.pop(folder, None)  # a listing that the script's first import has to make
    return None


def _set_title(command: Sequence[str]) -> None:
    """Show a rank's command in ``ps`` and ``pkill -f``, within the room of the server's own command line."""
    with suppress(ImportError, OSError, ValueError, IndexError):  # ranks run without a title too
        import ctypes

        fields = read_stat("self")
        start = int(fields[45])  # the command line's place in memory, see proc(5)
        end = int(fields[46])
        title = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)
