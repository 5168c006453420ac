"""The subcommand ``run``: prepare the pod and supervise torchrun."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from ..base.exceptions import describe
from ..base.files import BOOTSTRAP, add_delivered_packages, log
from ..base.launcher_part import LauncherPart, StandbyLauncher
from ..base.pod import Pod, PodSetupError
from ..base.pod_setup import RuntimeDirectory, default_threads, make_runtime_dir, read_pod
from ..contract.command_line import PythonLine, split_python_line
from ..contract.names import (
    ENV_COMPLETION_INDEX,
    ENV_OMP_NUM_THREADS,
    ENV_RANK_FEATURES,
    ENV_RENDEZVOUS_SECRET,
    ENV_RUNTIME_DIR,
    EXIT_RETRYABLE,
    EXIT_USER_ERROR,
)
from ..contract.processes import adopt_orphans
from ..failures.termination import build_end, finish
from ..failures.text import advise_on_program
from ..network.resolver import repeat_lost_queries_soon
from ..progress.line_steps import find_total
from ..progress.log_reader import keep_reading
from ..torchrun.fork_client import start_fork_server
from .agent_process import ForkServer, list_worker_arguments
from .program import find_missing_program
from .supervisor import Supervisor

Hold = Callable[[Pod, list[str], list[int]], int]


class Features(Protocol):
    """The package of features, which this one may not import."""

    def load_launcher_parts(self, pod: Pod) -> Sequence[LauncherPart]:
        """Return the parts in this process."""

    def list_rank_features(self, pod: Pod) -> Sequence[str]:
        """Return the features with a part in the pod's ranks."""


def main(argv: Sequence[str], signals: list[int], features: Features) -> int:
    """Run the pod. ``signals``: those received so far; ``features``: the package. Returns the exit code."""
    index = os.environ.get(ENV_COMPLETION_INDEX, "")
    pod_index = int(index) if index.isdigit() else 0
    server: ForkServer | None = None
    try:
        command = list(argv[1:])
        if argv[:1] != ["--"] or not command:
            raise ValueError("no training command after --")
        runtime = make_runtime_dir()
        pod = read_pod(os.environ, runtime.path)
        parts = features.load_launcher_parts(pod)
        names = features.list_rank_features(pod)
        standby = _find_standby(parts)
        hold = next((part.hold for part in parts if part.hold is not None), None)
        if hold is not None and standby is None:
            return _hold(hold, pod, command, signals, runtime)
        former = ""
        if standby is not None:
            server = _start_early(pod, command, parts, names)
            start = standby.wait(pod)
            if start is None:
                return 0
            command = start.command
            pod = start.pod
            former = start.former
        line = None if pod.program else split_python_line(command)
        has_installed = False
        for part in parts:
            if part.prepare is not None and part.prepare(pod, signals, former):
                has_installed = True
        pod = _complete_pod(pod, command, line)
    except PodSetupError as error:
        failure = build_end(pod_index, error.exit_code, str(error), remedy=error.hint, traceback=error.output)
        return finish(failure)
    except ValueError as error:
        return finish(build_end(pod_index, EXIT_USER_ERROR, str(error)))

    if server is None:
        _set_environment(pod, names)
    elif has_installed:
        server[1].close()  # it ends; another one will find the packages
        server = None
    warm = _can_fork_ranks(pod, line)
    services = [part.create for part in parts if part.create is not None]
    try:
        entry = _build_entry(command, line)
        return Supervisor(
            pod, entry, signals, warm=warm, server=server, copy_output=keep_reading, features=services
        ).run()
    except Exception as error:
        bug = describe(error)
        message = f"internal error of the launcher: {bug['type']}: {bug['message']}"
        return finish(build_end(pod_index, EXIT_RETRYABLE, message, traceback=bug["traceback"]))
    finally:
        _remove(runtime)


def _find_standby(parts: Sequence[LauncherPart]) -> StandbyLauncher | None:
    """Return this launcher's wait for a run; None: it starts at once."""
    for part in parts:
        standby = part.find_standby(os.environ) if part.find_standby is not None else None
        if standby is not None:
            return standby
    return None


def _hold(hold: Hold, pod: Pod, command: list[str], signals: list[int], runtime: RuntimeDirectory) -> int:
    """Let a feature run the pod, with a launcher of its own for each run."""
    try:
        return hold(pod, command, signals)
    finally:
        _remove(runtime)


def _remove(runtime: RuntimeDirectory) -> None:
    if runtime.is_temporary:
        shutil.rmtree(runtime.path, ignore_errors=True)


def _start_early(
    pod: Pod, command: list[str], parts: Sequence[LauncherPart], names: Sequence[str]
) -> ForkServer | None:
    """Start the import of PyTorch before the run is known. None: packages that it may need are not installed yet."""
    if not all(part.can_import_early(pod) for part in parts if part.can_import_early is not None):
        return None
    _set_environment(pod, names)
    line = None if pod.program else split_python_line(command)
    warm = _can_fork_ranks(pod, line)
    return start_fork_server(list_worker_arguments(_build_entry(command, line)) if warm else [])


def _complete_pod(pod: Pod, command: Sequence[str], line: PythonLine | None) -> Pod:
    """Check that the program can start, and return the pod with its totals. Raises: PodSetupError.

    ``line``: the Python command line; None for another program.
    """
    problem = find_missing_program(line, command)
    if problem:
        raise PodSetupError(problem.message, problem.remedy or advise_on_program(pod.code))
    epochs = find_total(command, epochs=True)
    steps = find_total(command, epochs=False)
    return dataclasses.replace(pod, epochs=pod.epochs or epochs, steps=steps)


def _set_environment(pod: Pod, features: Sequence[str]) -> None:
    """Set the variables of torchrun and the ranks, and make the delivered packages available.

    ``features``: those with a part in the ranks.
    """
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun would take defaults of its flags from them
    os.environ.pop(ENV_RENDEZVOUS_SECRET, None)
    threads = default_threads(pod.nproc_per_node)
    if threads:
        os.environ.setdefault(ENV_OMP_NUM_THREADS, threads)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    repeat_lost_queries_soon(os.environ)
    os.environ[ENV_RUNTIME_DIR] = pod.runtime
    os.environ.pop(ENV_RANK_FEATURES, None)
    if features:
        os.environ[ENV_RANK_FEATURES] = ",".join(features)
    add_delivered_packages(pod.runtime)


def _build_entry(command: Sequence[str], line: PythonLine | None) -> list[str]:
    """Return the command that torchrun starts for each rank: the shim with the user's program."""
    if line is None:
        return [sys.executable, "-u", BOOTSTRAP, "worker", "program", "${local_rank}", *command]
    interpreter = [sys.executable, "-u", *line.flags]
    return [*interpreter, BOOTSTRAP, "worker", line.kind, "${local_rank}", line.target, *line.args]


def _can_fork_ranks(pod: Pod, line: PythonLine | None) -> bool:
    """Decide whether to fork ranks from a process with PyTorch, and make this process the subreaper of all others."""
    has_subreaper = adopt_orphans()
    if not pod.warm_start or line is None:
        return False
    if set(line.flags) - {"-u"}:
        obstacle = f"the command has options of the interpreter, {' '.join(line.flags)}"
    elif not has_subreaper:
        obstacle = "this system has no child subreapers"
    else:
        return True
    log(f"ranks start in fresh interpreters, and each imports PyTorch: {obstacle}")
    return False
