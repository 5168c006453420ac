"""The subcommand ``run``: prepare the pod and supervise torchrun."""

import dataclasses
import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from ..base.files import BOOTSTRAP, add_delivered_packages, log
from ..base.pod import (
    Pod,
    PodSetupError,
    RuntimeDirectory,
    default_threads,
    make_runtime_dir,
    read_pod,
)
from ..contract.command_line import PythonLine, find_missing_program, split_python_line
from ..contract.names import (
    ENV_COMPLETION_INDEX,
    ENV_OMP_NUM_THREADS,
    ENV_RENDEZVOUS_SECRET,
    ENV_RUNTIME_DIR,
    EXIT_RETRYABLE,
    EXIT_USER_ERROR,
)
from ..contract.processes import adopt_orphans
from ..failures.termination import build_end, finish
from ..failures.text import advise_on_program
from ..progress.line_steps import find_total
from ..rank.tracebacks import describe
from ..rank.tracking import start_tracking
from ..torchrun.fork_server import start_fork_server
from .agent_process import ForkServer, list_worker_arguments
from .standby import RunStart, find_standby
from .supervisor import Supervisor


def main(argv: Sequence[str], signals: list[int]) -> int:
    """Run the pod. ``signals``: those received so far. Returns the exit code."""
    index = os.environ.get(ENV_COMPLETION_INDEX, "")
    pod_index = int(index) if index.isdigit() else 0
    standby = find_standby(os.environ)
    server: ForkServer | None = None
    try:
        command = list(argv[1:])
        if argv[:1] != ["--"] or not command:
            raise ValueError("no training command after --")
        runtime = make_runtime_dir()
        pod = read_pod(os.environ, runtime.path)
        if pod.dev is not None and standby is None:
            return _hold(pod, command, signals, runtime)
        former = ""
        if standby is not None:
            server = _start_early(pod, command)
            start = standby.wait()
            if start is None:
                return 0
            command = list(start.command)
            former = start.former
            pod = _replace_code(pod, start)
        line = None if pod.program else split_python_line(command)
        pod, has_installed = _prepare_pod(pod, command, line, signals, former)
    except PodSetupError as error:
        failure = build_end(pod_index, error.exit_code, str(error), remedy=error.hint, traceback=error.output)
        return finish(failure)
    except ValueError as error:
        return finish(build_end(pod_index, EXIT_USER_ERROR, str(error)))

    if server is None:
        _set_environment(pod)
    elif has_installed:
        server[1].close()  # it ends; another one will find the packages
        server = None
    start_tracking(pod.runtime)
    warm = _can_fork_ranks(pod, line)
    try:
        return Supervisor(pod, _build_entry(command, line), signals, warm=warm, server=server).run()
    except Exception as error:
        bug = describe(error)
        message = f"internal error of the launcher: {bug['type']}: {bug['message']}"
        return finish(build_end(pod_index, EXIT_RETRYABLE, message, traceback=bug["traceback"]))
    finally:
        _remove(runtime)


def _hold(pod: Pod, command: list[str], signals: list[int], runtime: RuntimeDirectory) -> int:
    """Hold the pod between the runs of `ddp dev`, each of which is a launcher of its own."""
    try:
        return int(importlib.import_module("..dev.holder", __package__).hold(pod, command, signals))
    finally:
        _remove(runtime)


def _remove(runtime: RuntimeDirectory) -> None:
    if runtime.is_temporary:
        shutil.rmtree(runtime.path, ignore_errors=True)


def _start_early(pod: Pod, command: list[str]) -> ForkServer | None:
    """Start the import of PyTorch before the run is known. None: packages that it may need are not installed yet."""
    if pod.code is not None and pod.code.requirements:
        code: Any = importlib.import_module("..transfer.code", __package__)
        if not code.has_packages(pod.code):
            return None
        code.use_packages(pod.code)
    _set_environment(pod)
    line = None if pod.program else split_python_line(command)
    warm = _can_fork_ranks(pod, line)
    return start_fork_server(list_worker_arguments(_build_entry(command, line)) if warm else [])


def _replace_code(pod: Pod, start: RunStart) -> Pod:
    """Return the pod with the code of a run."""
    if pod.code is None or not start.archive:
        return pod
    return dataclasses.replace(pod, code=dataclasses.replace(pod.code, archive=start.archive, digest=start.digest))


def _prepare_pod(
    pod: Pod, command: Sequence[str], line: PythonLine | None, signals: list[int], former: str
) -> tuple[Pod, bool]:
    """Unpack the pod's code, check that the program can start, and read its totals. Raises: PodSetupError.

    ``line``: the Python command line; None for another program; ``former``: see ``prepare_code``. Returns also whether
    packages were installed.
    """
    has_installed = False
    if pod.code is not None:
        prepare_code: Any = importlib.import_module("..transfer.code", __package__).prepare_code
        has_installed = prepare_code(pod.code, signals, former)
    problem = find_missing_program(line, command)
    if problem:
        raise PodSetupError(problem.message, problem.remedy or advise_on_program(pod.code))
    epochs = find_total(command, epochs=True)
    steps = find_total(command, epochs=False)
    return dataclasses.replace(pod, epochs=pod.epochs or epochs, steps=steps), has_installed


def _set_environment(pod: Pod) -> None:
    """Set the variables of torchrun and the ranks, and make the delivered packages available."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun would take defaults of its flags from them
    os.environ.pop(ENV_RENDEZVOUS_SECRET, None)
    threads = default_threads(pod.nproc_per_node)
    if threads:
        os.environ.setdefault(ENV_OMP_NUM_THREADS, threads)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ[ENV_RUNTIME_DIR] = pod.runtime
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
