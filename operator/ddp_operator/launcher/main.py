"""The launcher's command line."""

import dataclasses
import importlib
import os
import sys
import time
from typing import Sequence

from .command_line import find_missing_program, split_python_line
from .contract import ENV_COMPLETION_INDEX, ENV_OMP_NUM_THREADS, ENV_RUNTIME_DIR, EXIT_RETRYABLE, EXIT_USER_ERROR
from .failure_record import Failure
from .failure_table import EXIT_CODES
from .failure_text import advise_on_program
from .files import BOOTSTRAP, log
from .known_loops import find_total
from .pod import PodSetupError, add_pod_flags, default_threads, make_runtime_dir, read_pod
from .processes import adopt_orphans
from .supervisor import Supervisor
from .termination import finish
from .tracebacks import describe
from .tracking import start_tracking


def run_main(words: Sequence[str], signals: list[int]) -> int:
    """``run <torchrun flags> -- <command>``; ``signals`` are those that have come already. Returns the exit code."""
    index = os.environ.get(ENV_COMPLETION_INDEX, "")
    pod_index = int(index) if index.isdigit() else 0
    remedy = ""
    flags = list(words[: words.index("--")]) if "--" in words else list(words)
    command = list(words[len(flags) + 1 :])
    program = "--no-python" in flags
    runtime, ours = "", False
    try:
        if not command:
            raise ValueError("no training command after --")
        line = None if program else split_python_line(command)
        runtime, ours = make_runtime_dir()
        pod = read_pod(dict(os.environ), runtime, program=program)
        if pod.code is not None:
            importlib.import_module(".code", __package__).prepare_code(pod.code, signals)
        missing = find_missing_program(line, command)
        if missing:
            remedy = advise_on_program(pod.code)
            raise ValueError(missing)
        epochs, steps = (find_total(command, epochs=of_epochs) for of_epochs in (True, False))
        pod = dataclasses.replace(pod, epochs=pod.epochs or epochs, steps=steps)
    except PodSetupError as error:
        failure = _build_failure(pod_index, error.exit_code, str(error), remedy=error.hint, traceback=error.output)
        return finish(failure)
    except ValueError as error:
        return finish(_build_failure(pod_index, EXIT_USER_ERROR, str(error), remedy=remedy))
    flags = [flag for flag in flags if flag != "--no-python"]
    if not any(flag.startswith("--log-dir") for flag in flags):
        flags.append(f"--log-dir={os.path.join(runtime, 'torchrun')}")
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun would take its defaults from them
    threads = default_threads(pod.nproc_per_node)
    if threads:
        os.environ.setdefault(ENV_OMP_NUM_THREADS, threads)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # Without it restarted workers read stale addresses from the agent's store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[ENV_RUNTIME_DIR] = runtime
    start_tracking(runtime)
    own = [sys.executable, "-u", *(line.flags if line else []), BOOTSTRAP, "worker"]
    kind, what = ("program", command) if line is None else (line.kind, [line.target, *line.args])
    obstacle = "" if adopt_orphans() else "this system has no child subreapers"
    if line is not None and set(line.flags) - {"-u"}:
        obstacle = f"the command has options of the interpreter, {' '.join(line.flags)}"
    warm = pod.warm_start and line is not None
    if warm and obstacle:
        log(f"ranks start in fresh interpreters, each of which imports PyTorch: {obstacle}")
    try:
        entry = [*own, kind, "${local_rank}", *what]
        return Supervisor(pod, add_pod_flags(flags, pod), entry, signals, warm=warm and not obstacle).run()
    except Exception as error:
        bug = describe(error)
        message = f"internal error of the launcher: {bug['type']}: {bug['message']}"
        return finish(_build_failure(pod_index, EXIT_RETRYABLE, message, remedy=remedy, traceback=bug["traceback"]))
    finally:
        if ours:
            import shutil

            shutil.rmtree(runtime, ignore_errors=True)


def _build_failure(pod_index: int, exit_code: int, message: str, *, remedy: str, traceback: str = "") -> Failure:
    """Return the failure of a pod before its workers start. ``exit_code``: one of the launcher's."""
    outcome = EXIT_CODES[exit_code]
    return Failure(
        category=outcome.category,
        container_exit_code=outcome.exit_code,
        secondary=outcome.secondary,
        pod_index=pod_index,
        exit_code=exit_code,
        message=message,
        traceback=traceback,
        remedy=remedy,
        time=time.time(),
    )
