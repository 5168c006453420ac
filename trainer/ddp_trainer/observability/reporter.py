"""What a run reports: rank 0's lines on standard output, and the gauges of every rank."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_trainer import contract
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import warn
from ddp_trainer.exporter import Exporter
from ddp_trainer.observability.logs import Log
from ddp_trainer.observability.meters import AsyncScalars, Stopwatch
from ddp_trainer.plan import Plan, Position

# The scores that the gauge of accuracy may show: shares of what is right, from 0 to 1.
_SHARES = ("accuracy", "mean_iou")


@dataclass(frozen=True)
class _Line:
    """A progress line that waits for its numbers."""

    position: Position
    # Losses of the steps since the line before, as far as they have been looked at already.
    seen: list[float]
    # The rest of them; after them the norm of the gradients, if there is one.
    numbers: AsyncScalars
    has_norm: bool
    lr: float
    # Samples of all ranks since the line before, and the time that they took.
    samples: int
    lap: Callable[[], float]
    eta: float


class Reporter:
    """Collects the steps' measurements and puts them out at log intervals, without ever waiting for the device.

    ``on_nonfinite_loss`` is called with the step (from 1) and the value of this rank's first loss that is not finite,
    once it is known: on a CPU at the next log interval, on a GPU some steps later.
    """

    def __init__(
        self,
        world: World,
        exporter: Exporter,
        log_every: int,
        on_nonfinite_loss: Callable[[int, float], None] | None = None,
    ) -> None:
        self._world, self._exporter, self._log_every = world, exporter, log_every
        self._watch, self._samples = Stopwatch(world.device), 0
        # Those since the last line; bounded, because each is a small allocation on the device.
        self._losses: deque[Tensor] = deque(maxlen=4096)
        self._seen: list[float] = []
        self._last_step = 0
        self._lines: deque[_Line] = deque()
        self._on_nonfinite_loss = on_nonfinite_loss
        self.logs: Log | None = None

    def info(self, message: str) -> None:
        """Print on rank 0 only, at once: the output of a pod is a pipe."""
        if self._world.is_main:
            print(message, flush=True)

    def warn(self, message: str) -> None:
        """Print a warning on rank 0 only."""
        if self._world.is_main:
            warn(message)

    def begin(self, plan: Plan, tokens: int = 0) -> None:
        """Say what is about to be done and set the gauges that last for the run; a sample has ``tokens``, or none."""
        self._plan, self._total, self._tokens = plan, plan.total_steps, tokens
        device = self._world.device.type
        threads = f" with {torch.get_num_threads()} thread(s) each" if device == "cpu" else ""
        self.info(
            f"training: {self._world.size} rank(s) on {device}{threads}, {plan.samples} samples, "
            f"{self._total} steps in {plan.epochs} epoch(s)"
        )
        first, exporter = plan.first, self._exporter
        exporter.set_total_steps(self._total)
        exporter.set(contract.METRIC_GLOBAL_STEP, first.step)
        exporter.set(contract.METRIC_PROGRESS, first.step / self._total if self._total else 1.0)
        exporter.set(contract.METRIC_EPOCH, min(first.epoch + 1, plan.epochs))
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
        """Record a step that this rank has just finished with ``samples`` samples; ``position`` is after it.

        ``seconds`` is the step's time, ``waited`` its part in the loader, ``computed`` the compute time that has become
        known. ``loss`` and ``grad_norm`` stay on the device until a line is due.
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
        # The first step too: it shows that everything before training has gone well.
        if done == 1 or position.step % self._log_every == 0 or position.step == self._total:
            norms = [] if grad_norm is None else [grad_norm]
            eta = (time.perf_counter() - self.started) / done * (self._total - position.step)
            lap = self._watch.lap()  # before the numbers: when they are there, its end is known
            numbers = self._take(*norms)
            self._lines.append(_Line(replace(position), self._seen, numbers, bool(norms), lr, self._samples, lap, eta))
            self._seen, self._samples = [], 0
        while self._lines and self._lines[0].numbers.ready():
            self._log(self._lines.popleft())

    def flush(self) -> None:
        """Put out the lines that wait for the device."""
        while self._lines:
            self._log(self._lines.popleft())

    def check_losses(self) -> None:
        """Look at every loss up to now, waiting for the device."""
        self.flush()
        losses = self._take().read()
        self._count_nonfinite(losses, self._last_step)
        self._seen += losses

    def _take(self, *others: Tensor) -> AsyncScalars:
        """Begin to fetch the losses since the last time, and ``others`` after them."""
        scalars = AsyncScalars([*self._losses, *others])
        self._losses.clear()
        return scalars

    def _log(self, line: _Line) -> None:
        position, losses = line.position, line.numbers.read()
        figures = {"train/lr": line.lr, "train/epoch": self._plan.fraction(position)}
        if line.has_norm:
            figures["train/grad_norm"] = losses.pop()
            self._exporter.set("ddp_grad_norm", figures["train/grad_norm"])
        self._count_nonfinite(losses, position.step)
        losses += line.seen
        loss = sum(losses) / len(losses)
        self._exporter.set(contract.METRIC_LOSS, loss)
        seconds = line.lap()
        rate = line.samples / seconds if seconds > 0 else 0.0
        if self._world.device.type == "cuda":
            self._exporter.set("ddp_gpu_memory_peak_bytes", torch.cuda.max_memory_allocated())
        self.info(
            f"epoch {position.epoch + 1}/{self._plan.epochs} step {position.step}/{self._total} loss {loss:.4f} "
            f"{self._say_rate(rate)} lr {line.lr:.4g} ETA {clock(line.eta)}"
        )
        if self._tokens:
            figures["train/tokens_per_second"] = rate * self._tokens
        self._write(position.step, {"train/loss": loss, "train/samples_per_second": rate, **figures})

    def _say_rate(self, samples: float) -> str:
        return f"{samples * self._tokens:.0f} tokens/s" if self._tokens else f"{samples:.0f} samples/s"

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        if self.logs is not None:
            self.logs.write(step, figures)

    def _count_nonfinite(self, losses: list[float], last_step: int) -> None:
        """Count the losses that are not finite; ``losses`` are those of the steps up to ``last_step``."""
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            self._exporter.count_nonfinite(len(bad))
            if self._on_nonfinite_loss is not None:
                self._on_nonfinite_loss(last_step - len(losses) + 1 + bad[0], losses[bad[0]])
                self._on_nonfinite_loss = None

    def pause(self, start: Any, end: Any) -> None:
        """Leave validation or saving between two moments of the device's timeline out of the rate."""
        self._watch.pause(start, end)

    def validated(
        self, position: Position, scores: dict[str, float], score: str, seconds: float, training: Mapping[str, float]
    ) -> None:
        """Report a validation at ``position``; ``score`` names the one of ``scores`` by which runs are compared.

        ``training`` holds the figures of the epoch before it, where there was one.
        """
        self.flush()
        facts = []
        if "seconds" in training:
            facts += [
                f"training: {training['seconds']:.1f} s",
                self._say_rate(training["samples_per_second"]),
                f"cumulative {training['cumulative_seconds']:.1f} s",
            ]
        if "accuracy" in training:
            facts.append(f"training accuracy {training['accuracy']:.4f}")
        epoch = f"epoch {position.epoch + (1 if position.consumed else 0)}/{self._plan.epochs}"
        self.evaluated(scores, score, seconds, f"{epoch} ", facts)
        figures = {f"validation/{name}": value for name, value in scores.items()}
        figures |= {f"epoch/{name}": value for name, value in training.items()}
        self._write(position.step, {"train/epoch": self._plan.fraction(position), **figures})

    def evaluated(
        self, scores: dict[str, float], score: str, seconds: float, when: str = "", facts: Sequence[str] = ()
    ) -> None:
        """Report the ``scores`` of the validation data; ``score`` names the one by which runs are compared.

        ``facts`` about the training before it follow on the same line.
        """
        if score in _SHARES:  # a task's own score may be an error
            self._exporter.set(contract.METRIC_VAL_ACCURACY, scores[score])
        if "loss" in scores:
            self._exporter.set(contract.METRIC_VAL_LOSS, scores["loss"])
        text = " ".join(f"{name} {value:.4f}" for name, value in scores.items())
        self.info(", ".join([f"{when}validation: {text} in {seconds:.1f} s", *facts]))

    def resumed(self, folder: str, position: Position) -> None:
        """Report that the run goes on from a checkpoint."""
        self._exporter.set(contract.METRIC_CHECKPOINT_STEP, position.step)
        self.info(f"resumed from {folder}: {position.step} steps and {position.epoch} epoch(s) are done")

    def saved(self, step: int, seconds: float) -> None:
        """Record a finished checkpoint; called from the writing thread."""
        self._exporter.set(contract.METRIC_CHECKPOINT_STEP, step)
        self._exporter.observe("ddp_checkpoint_duration_seconds", seconds)

    def done(self, position: Position, score: str, weights: Path | None) -> None:
        """Say the run's result: the ``score`` of its validations, and where its weights are."""
        self.flush()
        seconds = time.perf_counter() - self.started
        scores = ""
        if position.accuracy is not None and position.best_accuracy is not None:
            scores = f", validation {score} {position.accuracy:.4f} (best {position.best_accuracy:.4f})"
        where = f", weights in {weights}" if weights else ""
        self.info(f"done: {position.step} steps, {seconds:.1f} s{scores}{where}")


def clock(seconds: float) -> str:
    """Seconds as 2:03 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
