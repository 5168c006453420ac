"""Where rank 0 keeps a run's figures, besides its lines and its metrics: JSONL, TensorBoard, W&B, MLflow.

Each log has a thread of its own, so that none can hold up a step or another log. The first failure ends a log with a
line, and not the run. A resumed run goes on with its logs: what they have of steps that are taken again is cut, or,
where a log takes nothing back, not sent again.
"""

import importlib
import importlib.util
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from ddp_trainer import contract
from ddp_trainer.config.run import RunConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import warn
from ddp_trainer.files import writable, write_atomically

FILE = "metrics.jsonl"
_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"  # the folder of spec.tracking.tensorboard
# How long a run waits at its end for logs that have not taken everything. A pod that must go has no more.
_PATIENCE_SECONDS = 10.0


class Log(Protocol):
    """A place for figures. Any exception of these methods ends the log."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures after ``step`` steps; the same step may come again with other names."""

    def close(self) -> None:
        """Take nothing more."""


class JsonLines:
    """An object a line with ``step``, ``time`` (Unix, seconds) and the figures; what is not a finite number is null."""

    def __init__(self, path: Path, step: int) -> None:
        """Begin the file, or go on after ``step`` with what it has up to there."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        # In a new file: a process that is no longer to write here may have the old one open.
        write_atomically(path, b"".join(line for line in lines if _step_of(line) <= step))
        self._file = path.open("a", buffering=1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See :class:`Log`."""
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")

    def close(self) -> None:
        """See :class:`Log`."""
        self._file.close()


def _step_of(line: bytes) -> float:
    """The step of a line; infinite where it is not a whole one of ours."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, LookupError, TypeError):
        return math.inf


class TensorBoard:
    """Event files in ``folder``, in which steps after ``step`` that an earlier process wrote no longer count."""

    def __init__(self, folder: Path, step: int) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See :class:`Log`."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See :class:`Log`."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, where ``WANDB_*`` say; it ignores steps before its last by itself."""

    def __init__(self, settings: Mapping[str, Any], run: str | None) -> None:
        self._run = importlib.import_module("wandb").init(
            config=settings,
            name=os.environ.get("WANDB_NAME") or os.environ.get(contract.ENV_JOB_NAME),
            id=os.environ.get("WANDB_RUN_ID") or run,
            resume=os.environ.get("WANDB_RESUME") or ("allow" if run else None),
        )
        self.run: str = self._run.id

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See :class:`Log`."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """See :class:`Log`."""
        self._run.finish()


class MLflow:
    """A run of MLflow, where ``MLFLOW_*`` say; figures that it has already are not sent again."""

    def __init__(self, settings: Mapping[str, Any], run: str | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        name = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get(contract.ENV_JOB_NAME)
        active = self._mlflow.start_run(run_id=os.environ.get("MLFLOW_RUN_ID") or run, run_name=name)
        self.run: str = active.info.run_id
        history = self._mlflow.MlflowClient().get_metric_history
        self._last = {key: max(one.step for one in history(self.run, key)) for key in active.data.metrics}
        if not active.data.params:  # which MLflow does not let change
            self._mlflow.log_params({key: str(value)[:500] for key, value in _flat(settings)})

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See :class:`Log`."""
        new = {name: value for name, value in scalars.items() if step > self._last.get(name, -1)}
        self._mlflow.log_metrics(new, step=step)

    def close(self) -> None:
        """See :class:`Log`."""
        self._mlflow.end_run()


# name -> by which variables it is wanted, the module that it needs, and the log
_SERVICES: dict[str, tuple[str, str, type[WandB | MLflow]]] = {
    "W&B": ("WANDB_", "wandb", WandB),
    "MLflow": ("MLFLOW_", "mlflow", MLflow),
}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class _Background:
    """A log that is opened, written to and closed by a thread of its own."""

    def __init__(self, name: str, start: Callable[[], Log]) -> None:
        self._name, self._start = name, start
        self._queue: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._off = False
        self._thread = threading.Thread(target=self._work, name=f"ddp-log-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            log = self._start()
            while (item := self._queue.get()) is not None:
                log.write(*item)
            log.close()
        except Exception as error:  # a server that is away, a full disk: training goes on
            self._off = True
            _switch_off(self._name, error)

    def put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        """Hand over figures, or at the end None; never waits."""
        if not self._off:
            self._queue.put(item)

    def join(self, deadline: float) -> None:
        """Wait until everything is written, or ``deadline`` on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            warn(f"{self._name} has not taken all figures of this run; the run does not wait for it")


class Logs:
    """All logs of a run, from ``step`` steps on. Every rank makes them; only rank 0's take anything.

    Raises :class:`UserError` on all ranks where the folder can't be written to.
    """

    def __init__(self, config: RunConfig, world: World, step: int) -> None:
        self._logs: list[_Background] = []
        wanted = world.is_main and not config.eval_only
        folder = None if config.log_dir is None else Path(config.log_dir)
        with world.agreed():
            if folder is not None and wanted:
                with writable(folder, "log_dir"):
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / FILE).open("a").close()
        if not wanted:
            return
        if folder is not None:
            self._add(FILE, "json", partial(JsonLines, folder / FILE, step))
        events = Path(os.environ[_TENSORBOARD]) if os.environ.get(_TENSORBOARD) else folder
        if events is not None and importlib.util.find_spec("tensorboard"):
            self._add("TensorBoard", "torch.utils.tensorboard", partial(TensorBoard, events, step))
        for name, (prefix, module, service) in _SERVICES.items():
            variables = sorted(variable for variable in os.environ if variable.startswith(prefix))
            if variables and importlib.util.find_spec(module):
                self._add(name, module, partial(_go_on, service, config, step))
            elif variables:
                warn(f"{variables[0]} is set, but {module} is not installed: nothing is sent to {name}")

    def _add(self, name: str, module: str, start: Callable[[], Log]) -> None:
        """Start a log; ``module`` is imported here, because readers of data may be forked while threads run."""
        try:
            importlib.import_module(module)
        except Exception as error:  # an installation that is broken
            _switch_off(name, error)
        else:
            self._logs.append(_Background(name, start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hand figures to all logs; never waits."""
        for log in self._logs:
            log.put((step, scalars))

    def close(self) -> None:
        """Let the logs write what is left, and end; waits ten seconds at most. Twice is once."""
        logs, self._logs = self._logs, []
        for log in logs:
            log.put(None)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for log in logs:
            log.join(deadline)


def _go_on(service: type[WandB | MLflow], config: RunConfig, step: int) -> Log:
    """A service's log: a run resumed after ``step`` steps goes on with the one whose name is beside its checkpoints."""
    path = None if config.checkpoint.dir is None else Path(config.checkpoint.dir) / f"{service.__name__}-run.txt"
    log = service(asdict(config), path.read_text() if path is not None and step and path.exists() else None)
    if path is not None:
        write_atomically(path, log.run.encode())
    return log


def _switch_off(name: str, error: Exception) -> None:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    warn(f"{name} takes no more figures of this run: {reason}")
