"""Progress reports: rank 0's lines on standard output, and the gauges of every rank."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_sdk import contract
from ddp_sdk.exporter import Exporter
from ddp_sdk.meters import AsyncScalars
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import warn
from ddp_trainer.observability.logs import Log
from ddp_trainer.observability.stopwatch import Stopwatch
from ddp_trainer.plan import Plan, Position

# The scores that the accuracy gauge may show: shares from 0 to 1.
_SHARES = ("accuracy", "mean_iou")


@dataclass(frozen=True)
class _ProgressLine:
    """A progress line whose numbers are being copied from the device."""

    position: Position
    # Losses since the previous line that are already on the host.
    known_losses: list[float]
    # The other losses, followed by the gradient norm if ``has_norm``.
    numbers: AsyncScalars
    has_norm: bool
    lr: float
    # Samples of all ranks since the previous line, and a function that returns their time.
    samples: int
    lap: Callable[[], float]
    eta: float


class Reporter:
    """Collects the steps' measurements and reports them at log intervals, without waiting for the device.

    ``on_nonfinite_loss`` is called with the step (from 1) and the value of this rank's first non-finite loss: on a CPU
    at the next log interval, on a GPU some steps later.
    """

    def __init__(
        self,
        world: World,
        exporter: Exporter,
        log_every: int,
        on_nonfinite_loss: Callable[[int, float], None] | None = None,
    ) -> None:
        self._world = world
        self._exporter = exporter
        self._log_every = log_every
        self._watch = Stopwatch(world.device)
        self._samples = 0
        # Losses since the last line: on the device, bounded because each needs memory there, and on the host.
        self._losses: deque[Tensor] = deque(maxlen=4096)
        self._known_losses: list[float] = []
        self._last_step = 0
        self._lines: deque[_ProgressLine] = deque()
        self._on_nonfinite_loss = on_nonfinite_loss
        self.logs: Log | None = None

    def info(self, message: str) -> None:
        """Print on rank 0 without buffering: the output of a pod is a pipe."""
        if self._world.is_main:
            print(message, flush=True)

    def warn(self, message: str) -> None:
        """Print a warning on rank 0 only."""
        if self._world.is_main:
            warn(message)

    def begin(self, plan: Plan, tokens: int = 0) -> None:
        """Print the plan of the run and set its constant gauges; ``tokens`` is the number per sample, or 0."""
        self._plan = plan
        self._total = plan.total_steps
        self._tokens = tokens
        device = self._world.device.type
        threads = f" with {torch.get_num_threads()} thread(s) each" if device == "cpu" else ""
        self.info(
            f"training: {self._world.size} rank(s) on {device}{threads}, {plan.samples} samples, "
            f"{self._total} steps in {plan.epochs} epoch(s)"
        )
        first = plan.first
        self._exporter.set_total_steps(self._total)
        self._exporter.set(contract.METRIC_GLOBAL_STEP, first.step)
        self._exporter.set(contract.METRIC_PROGRESS, first.step / self._total if self._total else 1.0)
        self._exporter.set(contract.METRIC_EPOCH, min(first.epoch + 1, plan.epochs))
        self.started = time.perf_counter()
        self._watch.restart()
        self._samples = 0

    def step(
        self,
        position: Position,
        loss: Tensor,
        grad_norm: Tensor | None,
        samples: int,
        lr: float,
        *,
        seconds: float,
        waited: float,
        computed: float,
    ) -> None:
        """Record a step of this rank with ``samples`` samples; ``position`` is that after the step.

        ``seconds`` is the step's time, ``waited`` the part of it in the loader, ``computed`` the compute time measured
        since the previous call. ``loss`` and ``grad_norm`` stay on the device until a line is due.
        """
        self._losses.append(loss)
        self._last_step = position.step
        self._samples += samples * self._world.size
        self._exporter.step(
            samples=samples,
            tokens=samples * self._tokens,
            step=position.step,
            epoch=position.epoch + 1,
            learning_rate=lr,
            seconds=seconds,
            data_wait=waited,
            compute=computed,
        )
        done = position.step - self._plan.first.step
        # The first step is always reported: it shows that the training has started.
        if done == 1 or position.step % self._log_every == 0 or position.step == self._total:
            norms = [] if grad_norm is None else [grad_norm]
            lap = self._watch.lap()  # before the copy of the numbers: once they are copied, reading the lap is no wait
            line = _ProgressLine(
                position=replace(position),
                known_losses=self._known_losses,
                numbers=self._fetch_losses(*norms),
                has_norm=bool(norms),
                lr=lr,
                samples=self._samples,
                lap=lap,
                eta=(time.perf_counter() - self.started) / done * (self._total - position.step),
            )
            self._lines.append(line)
            self._known_losses = []
            self._samples = 0
        while self._lines and self._lines[0].numbers.ready():
            self._log(self._lines.popleft())

    def flush(self) -> None:
        """Print the pending lines, waiting for the device."""
        while self._lines:
            self._log(self._lines.popleft())

    def check_losses(self) -> None:
        """Check every loss so far, waiting for the device."""
        self.flush()
        losses = self._fetch_losses().read()
        self._count_nonfinite(losses, self._last_step)
        self._known_losses += losses

    def _fetch_losses(self, *scalars: Tensor) -> AsyncScalars:
        """Start to copy the losses since the last call from the device, followed by ``scalars``."""
        numbers = AsyncScalars([*self._losses, *scalars])
        self._losses.clear()
        return numbers

    def _log(self, line: _ProgressLine) -> None:
        position = line.position
        losses = line.numbers.read()
        scalars = {"train/lr": line.lr, "train/epoch": self._plan.fraction(position)}
        if line.has_norm:
            scalars["train/grad_norm"] = losses.pop()
            self._exporter.set("ddp_grad_norm", scalars["train/grad_norm"])
        self._count_nonfinite(losses, position.step)
        losses += line.known_losses
        loss = sum(losses) / len(losses)
        self._exporter.set(contract.METRIC_LOSS, loss)
        seconds = line.lap()
        rate = line.samples / seconds if seconds > 0 else 0.0
        if self._world.device.type == "cuda":
            self._exporter.set("ddp_gpu_memory_peak_bytes", torch.cuda.max_memory_allocated())
        self.info(
            f"epoch {position.epoch + 1}/{self._plan.epochs} step {position.step}/{self._total} loss {loss:.4f} "
            f"{self._format_rate(rate)} lr {line.lr:.4g} ETA {format_duration(line.eta)}"
        )
        if self._tokens:
            scalars["train/tokens_per_second"] = rate * self._tokens
        self._write(position.step, {"train/loss": loss, "train/samples_per_second": rate, **scalars})

    def _format_rate(self, samples: float) -> str:
        return f"{samples * self._tokens:.0f} tokens/s" if self._tokens else f"{samples:.0f} samples/s"

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.logs is not None:
            self.logs.write(step, scalars)

    def _count_nonfinite(self, losses: list[float], last_step: int) -> None:
        """Count the losses that are not finite; ``losses`` are those of the steps up to ``last_step``."""
        nonfinite = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        if nonfinite:
            self._exporter.count_nonfinite(len(nonfinite))
            if self._on_nonfinite_loss is not None:
                first = nonfinite[0]
                self._on_nonfinite_loss(last_step - len(losses) + 1 + first, losses[first])
                self._on_nonfinite_loss = None

    def pause(self, start: Any, end: Any) -> None:
        """Exclude the time between two moments of the device's timeline, of a validation or save, from the rate."""
        self._watch.pause(start, end)

    def validated(
        self,
        position: Position,
        scores: dict[str, float],
        score: str,
        seconds: float,
        training: Mapping[str, float],
    ) -> None:
        """Report a validation at ``position``; ``score`` names the score by which runs are compared.

        ``training`` has the values of the epoch before it; it is empty without one.
        """
        self.flush()
        details = []
        if "seconds" in training:
            details += [
                f"training: {training['seconds']:.1f} s",
                self._format_rate(training["samples_per_second"]),
                f"cumulative {training['cumulative_seconds']:.1f} s",
            ]
        if "accuracy" in training:
            details.append(f"training accuracy {training['accuracy']:.4f}")
        if score in _SHARES:  # the score of a user's task may be an error
            self._exporter.set(contract.METRIC_VAL_ACCURACY, scores[score])
        if "loss" in scores:
            self._exporter.set(contract.METRIC_VAL_LOSS, scores["loss"])
        epoch = f"epoch {position.epoch + (1 if position.consumed else 0)}/{self._plan.epochs}"
        text = " ".join(f"{name} {value:.4f}" for name, value in scores.items())
        self.info(", ".join([f"{epoch} validation: {text} in {seconds:.1f} s", *details]))

        scalars = {f"validation/{name}": value for name, value in scores.items()}
        scalars |= {f"epoch/{name}": value for name, value in training.items()}
        self._write(position.step, {"train/epoch": self._plan.fraction(position), **scalars})

    def resumed(self, folder: str, position: Position) -> None:
        """Report that the run resumes from a checkpoint."""
        self._exporter.set(contract.METRIC_CHECKPOINT_STEP, position.step)
        self.info(f"resumed from {folder}: {position.step} steps and {position.epoch} epoch(s) are done")

    def saved(self, step: int, seconds: float) -> None:
        """Record a finished checkpoint; called from the writing thread."""
        self._exporter.set(contract.METRIC_CHECKPOINT_STEP, step)
        self._exporter.observe("ddp_checkpoint_duration_seconds", seconds)

    def done(self, position: Position, score: str, weights: Path | None) -> None:
        """Report the run's result: the ``score`` of its validations, and the path of its weights."""
        self.flush()
        seconds = time.perf_counter() - self.started
        scores = ""
        if position.accuracy is not None and position.best_accuracy is not None:
            scores = f", validation {score} {position.accuracy:.4f} (best {position.best_accuracy:.4f})"
        where = f", weights in {weights}" if weights else ""
        self.info(f"done: {position.step} steps, {seconds:.1f} s{scores}{where}")


def format_duration(seconds: float) -> str:
    """Format seconds as 2:03 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
