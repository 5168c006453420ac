"""One import of PyTorch for launchers that run one after another: in the runs of `ddp check`, and in a held pod.

    requester  ->  pod server (imports PyTorch and the launcher; no threads, no GPU)
         ->  launcher (forked)  ->  its fork server (forked before the launcher has threads), as in any pod

A forked pod is no child of the server: Linux reparents it to the nearest subreaper, which is the requester.
"""

import ctypes
import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from ..base.pod_setup import default_threads, read_pod
from ..contract.names import ENV_LOCAL_POD, ENV_OMP_NUM_THREADS
from ..contract.pod_start import READY, PodStart, receive_start
from ..contract.processes import read_stat, set_environment, set_parent_death_signal
from .fork_client import keep_server
from .fork_server import (
    PATHS,
    AgentFork,
    count_lasting_threads,
    find_obstacle_in_server,
    import_torch,
    leave_intermediate,
    list_imported_below,
    replace_paths,
    serve_kept,
)

RunAgent = Callable[[AgentFork], NoReturn]


class ForkedProcess(NamedTuple):
    """What a forked process has to do: a subcommand of the launcher with its arguments."""

    subcommand: str
    arguments: list[str]


def serve_pods(
    argv: Sequence[str],
    import_agent: Callable[[], None],
    import_for_ranks: Callable[[], None],
    run_agent: RunAgent,
    catch_signals: Callable[[], None],
) -> ForkedProcess:
    """Import PyTorch, and fork a pod for each order. ``argv``: a socket's descriptor, the requester's process id.

    ``import_agent``, ``import_for_ranks``: import what agents and ranks need; ``catch_signals``: prepares a launcher
    for signals. Returns only in a forked launcher or rank. Without PyTorch, or if the import has left threads, this
    process ends: pods then start in fresh interpreters, which report it.
    """
    requester = int(argv[1])
    set_parent_death_signal(requester)
    orders = socket.socket(fileno=int(argv[0]))
    threads = default_threads(read_pod(os.environ, "").nproc_per_node)
    if threads:
        os.environ.setdefault(ENV_OMP_NUM_THREADS, threads)  # libraries read it at their import
    problem = import_torch(with_optimizer=True)
    if problem is not None or find_obstacle_in_server(count_lasting_threads()):
        os._exit(1)
    import_agent()
    import_for_ranks()
    gc.freeze()  # as after the import of PyTorch
    folders = list_import_folders()
    installed = read_change_times(folders)
    orders.sendall(READY)
    while True:
        order = receive_start(orders)
        if order is None or read_change_times(folders) != installed:
            os._exit(0)  # the requester's pipe for the process id is closed without one
        start, descriptors = order
        intermediate = os.fork()
        if intermediate == 0:
            if list_imported_below(find_removed_paths(start.environment)):
                os._exit(0)  # the modules of this pod may be others
            leave_intermediate()
            orders.close()
            set_parent_death_signal(requester)
            return _become_pod(start, descriptors, run_agent, catch_signals)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(intermediate, 0)


def list_import_folders() -> list[str]:
    """Return the folders of the import path from which this process has imported modules."""
    return [path for path in sys.path if os.path.isdir(path) and list_imported_below(path)]


def read_change_times(folders: Sequence[str]) -> list[int]:
    """Return when folders have changed, as they do when packages are installed; 0 for one that was deleted."""
    return [os.stat(path).st_mtime_ns if os.path.isdir(path) else 0 for path in folders]


def find_removed_paths(environment: Mapping[str, str]) -> str:
    """Return the folders of this process's PYTHONPATH that are none of another environment's."""
    kept = environment.get(PATHS, "").split(os.pathsep)
    return os.pathsep.join(path for path in os.environ.get(PATHS, "").split(os.pathsep) if path not in kept)


def _become_pod(
    start: PodStart, descriptors: Sequence[int], run_agent: RunAgent, catch_signals: Callable[[], None]
) -> ForkedProcess:
    """Make this process equivalent to a launcher that has just started, with a fork server as its child."""
    output, errors, pid_end, passed = descriptors
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    if ENV_LOCAL_POD in os.environ:
        write_mark(os.environ[ENV_LOCAL_POD], start.environment[ENV_LOCAL_POD])
    replace_paths(os.environ.get(PATHS, ""), start.environment.get(PATHS, ""))
    set_environment(start.environment)
    os.environ[start.variable] = str(passed)
    os.chdir(start.folder)

    kept, theirs = socket.socketpair()
    launcher = os.getpid()
    server = os.fork()
    if server == 0:
        kept.close()
        os.close(pid_end)
        os.close(passed)
        return ForkedProcess("worker", serve_kept(theirs, launcher, run_agent))
    theirs.close()
    keep_server(server, kept)
    catch_signals()
    sys.argv[1:] = start.arguments
    os.write(pid_end, str(launcher).encode())
    os.close(pid_end)
    return ForkedProcess(start.arguments[0], list(start.arguments[1:]))


def write_mark(former: str, mark: str) -> None:
    """Replace a pod's mark in the memory from which /proc shows the environment that this process started with.

    `ddp` finds the processes of a pod by it, also those that their parents have left.
    """
    fields = read_stat("self")
    start = int(fields[47])  # env_start and env_end, see proc(5)
    end = int(fields[48])
    place = ctypes.string_at(start, end - start).find(f"{ENV_LOCAL_POD}={former}\0".encode())
    assert place >= 0
    assert len(former) == len(mark)
    ctypes.memmove(start + place + len(ENV_LOCAL_POD) + 1, mark.encode(), len(mark))
