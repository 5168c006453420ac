"""Rank 0's logs of scalars: JSONL, TensorBoard, W&B, MLflow.

Each log has its own thread, so that none blocks a step or another log. The first failure of a log disables it with a
warning; the run continues. A resumed run appends to its logs: entries of steps that are repeated are removed, or not
sent again if a log can't remove entries.
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
from typing import Any, NamedTuple, Protocol

from ddp_sdk import contract
from ddp_sdk.files import writable, write_atomically
from ddp_trainer.config.run import RunConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import warn

FILE = "metrics.jsonl"
_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"  # the folder of spec.tracking.tensorboard
# How long the run waits at its end for slow logs. The grace period of a terminated pod allows no more.
_MAX_WAIT_SECONDS = 10.0


class Log(Protocol):
    """A destination for scalars. Any exception of these methods disables the log."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars after ``step`` steps; a step may be written several times with different names."""

    def close(self) -> None:
        """Finish writing."""


class JsonLines:
    """One JSON object per line: ``step``, ``time`` (Unix, seconds) and the scalars; non-finite numbers are null."""

    def __init__(self, path: Path, step: int) -> None:
        """Create the file, or keep the lines of an existing one up to ``step``."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        # A new file, because a superseded process may still have the old one open.
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
    """Return the step of a line; infinite if the line is incomplete or of another format."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, LookupError, TypeError):
        return math.inf


class TensorBoardLog:
    """Event files in ``folder``; TensorBoard ignores an earlier process's entries after ``step``."""

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


class WandBLog:
    """A run of Weights & Biases, configured by ``WANDB_*``; the service ignores steps before its last one."""

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


class MLflowLog:
    """A run of MLflow, configured by ``MLFLOW_*``; metrics that it already has are not sent again."""

    def __init__(self, settings: Mapping[str, Any], run: str | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        name = os.environ.get("MLFLOW_RUN_NAME") or os.environ.get(contract.ENV_JOB_NAME)
        active = self._mlflow.start_run(run_id=os.environ.get("MLFLOW_RUN_ID") or run, run_name=name)
        self.run: str = active.info.run_id
        history = self._mlflow.MlflowClient().get_metric_history
        self._last_steps = {key: max(metric.step for metric in history(self.run, key)) for key in active.data.metrics}
        if not active.data.params:  # MLflow does not allow changes of parameters
            self._mlflow.log_params({key: str(value)[:500] for key, value in _flatten(settings)})

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """See :class:`Log`."""
        new = {name: value for name, value in scalars.items() if step > self._last_steps.get(name, -1)}
        self._mlflow.log_metrics(new, step=step)

    def close(self) -> None:
        """See :class:`Log`."""
        self._mlflow.end_run()


class _Service(NamedTuple):
    """A service that environment variables enable."""

    name: str
    # Prefix of the variables.
    prefix: str
    module: str
    log: type[WandBLog | MLflowLog]


_SERVICES = (_Service("W&B", "WANDB_", "wandb", WandBLog), _Service("MLflow", "MLFLOW_", "mlflow", MLflowLog))


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class _Background:
    """A log that its own thread opens, writes and closes."""

    def __init__(self, name: str, start: Callable[[], Log]) -> None:
        self._name = name
        self._start = start
        self._queue: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._disabled = False
        self._thread = threading.Thread(target=self._work, name=f"ddp-log-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            log = self._start()
            while (item := self._queue.get()) is not None:
                log.write(*item)
            log.close()
        except Exception as error:  # an unreachable server or a full disk must not stop the training
            self._disabled = True
            _warn_disabled(self._name, error)

    def put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        """Queue a step and its scalars, or None at the end; never waits."""
        if not self._disabled:
            self._queue.put(item)

    def join(self, deadline: float) -> None:
        """Wait until everything is written, or ``deadline`` on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            warn(f"{self._name} did not finish in time; its last scalars of this run are lost")


class ScalarLogs:
    """All logs of a run, from ``step`` steps on. Every rank creates them; only rank 0 writes.

    Raises :class:`UserError` on all ranks if the folder is not writable.
    """

    def __init__(self, config: RunConfig, world: World, step: int) -> None:
        self._logs: list[_Background] = []
        enabled = world.is_main
        folder = None if config.log_dir is None else Path(config.log_dir)
        with world.agreed():
            if folder is not None and enabled:
                with writable(folder, "log_dir"):
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / FILE).open("a").close()
        if not enabled:
            return
        if folder is not None:
            self._add(FILE, "json", partial(JsonLines, folder / FILE, step))
        events = Path(os.environ[_TENSORBOARD]) if os.environ.get(_TENSORBOARD) else folder
        if events is not None and importlib.util.find_spec("tensorboard"):
            self._add("TensorBoard", "torch.utils.tensorboard", partial(TensorBoardLog, events, step))
        for service in _SERVICES:
            variables = sorted(variable for variable in os.environ if variable.startswith(service.prefix))
            if variables and importlib.util.find_spec(service.module):
                self._add(service.name, service.module, partial(_open_service, service.log, config, step))
            elif variables:
                warn(f"{variables[0]} is set, but {service.module} is not installed: nothing is sent to {service.name}")

    def _add(self, name: str, module: str, start: Callable[[], Log]) -> None:
        """Start a log. Imports ``module`` in this thread, because data readers may be forked while threads run."""
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation
            _warn_disabled(name, error)
        else:
            self._logs.append(_Background(name, start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue the scalars in all logs; never waits."""
        for log in self._logs:
            log.put((step, scalars))

    def close(self) -> None:
        """Wait, ten seconds at most, until the logs have written everything; a second call does nothing."""
        logs = self._logs
        self._logs = []
        for log in logs:
            log.put(None)
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        for log in logs:
            log.join(deadline)


def _open_service(kind: type[WandBLog | MLflowLog], config: RunConfig, step: int) -> Log:
    """Open a service's log; after a resume at ``step`` it continues the run whose id is next to the checkpoints."""
    if config.checkpoint.dir is None:
        return kind(asdict(config), None)
    path = Path(config.checkpoint.dir) / f"{kind.__name__}-run.txt"
    log = kind(asdict(config), path.read_text() if step and path.exists() else None)
    write_atomically(path, log.run.encode())
    return log


def _warn_disabled(name: str, error: Exception) -> None:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    warn(f"{name} is disabled for the rest of this run: {reason}")
