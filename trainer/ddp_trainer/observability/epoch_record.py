"""The record of every epoch: training time, training accuracy, the early-stop streak, the CSV file."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_sdk.files import writable
from ddp_trainer.config.run import RunConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import warn
from ddp_trainer.observability.stopwatch import Stopwatch
from ddp_trainer.plan import Position

HEADER = ["time", "val_accuracy"]


class EpochRecord:
    """One rank's record. All ranks call the same methods at the same steps; only rank 0 has a file.

    Raises :class:`UserError` on all ranks if the file can't be written.
    """

    def __init__(self, config: RunConfig, world: World, position: Position, seconds: float = 0.0) -> None:
        self._world = world
        self._position = position
        self._early_stop = config.early_stop
        self._watch = Stopwatch(world.device)
        # Training time of the whole run, across restarts; it starts with the ``seconds`` before this process.
        self._seconds = seconds
        self._csv: CsvLog | None = None
        with world.agreed():
            if config.csv_dir is not None and world.is_main:
                self._csv = CsvLog(Path(config.csv_dir) / file_name(config, world.size), position.epoch)
        if self._csv is not None:  # longer than ``seconds`` if no checkpoint was loaded
            self._seconds = max(self._seconds, self._csv.seconds)
        self.begin()

    def begin(self) -> None:
        """Start an epoch, or the rest of one."""
        self._watch.restart()
        self._started = time.perf_counter()
        self._paused = 0.0
        self._lap: Callable[[], float] | None = None
        self._samples = 0
        self._correct: Tensor | None = None

    def step(self, correct: Tensor | None, samples: int) -> None:
        """Add a step of all ranks' ``samples``; ``correct`` holds the numbers of correct answers and of answers."""
        self._samples += samples
        if correct is not None:
            self._correct = correct.double() if self._correct is None else self._correct + correct

    def pause(self, start: Any, end: Any, host_seconds: float) -> None:
        """Exclude the time between two moments of the device's timeline from the epoch's time."""
        self._watch.pause(start, end)
        self._paused += host_seconds

    def measure_total(self) -> float:
        """Return the training time of the whole run; within an epoch by the host's clock, which waits for no step."""
        if self._samples == 0:
            return self._seconds
        if self._lap is not None:
            return self._seconds + self._lap()
        return self._seconds + time.perf_counter() - self._started - self._paused

    def end(self) -> None:
        """End the epoch after its last step was launched; does not wait for the device."""
        self._lap = self._watch.lap()

    def validated(self, score: float) -> dict[str, float]:
        """Record the epoch, whose validation had the ``score``; rank 0's updates the early-stop streak.

        Returns the epoch's values: ``accuracy`` over the training batches of all ranks, if it is counted; and if steps
        were taken since :meth:`begin`, their ``seconds``, ``samples_per_second``, and the ``cumulative_seconds`` of the
        whole run, across restarts.
        """
        position = self._position
        streak = self._early_stop.count(position.streak, score)
        position.streak = int(self._world.sum([float(streak) if self._world.is_main else 0.0])[0])
        values: dict[str, float] = {}
        if self._correct is not None:
            correct, answers = self._world.sum(self._correct.tolist())
            values["accuracy"] = correct / answers if answers else 0.0
        seconds = 0.0 if self._lap is None else self._lap()
        self._seconds += seconds
        if seconds > 0:
            values["seconds"] = seconds
            values["cumulative_seconds"] = self._seconds
            values["samples_per_second"] = self._samples / seconds
        self._samples = 0
        if self._csv is not None:
            self._csv.epoch(self._seconds - self._csv.seconds, score)
        return values

    @property
    def target_met(self) -> bool:
        """Return whether the run has reached its target; the same on all ranks."""
        return self._early_stop.met(self._position.streak)


def file_name(config: RunConfig, world_size: int) -> str:
    """Return the CSV file's name, by the settings in which runs differ: ``2ranks-32bs-0.01lr-0.9m-5w.csv``."""
    return (
        f"{world_size}ranks-{config.data.batch_size}bs-{config.optim.lr:g}lr-"
        f"{config.optim.momentum:g}m-{config.schedule.warmup_epochs:g}w.csv"
    )


class CsvLog:
    """Rank 0's file. Its times are seconds of training steps since the start of the run, across restarts."""

    def __init__(self, path: Path, epochs_done: int) -> None:
        """Create the file, or keep the first ``epochs_done`` epochs of an existing one.

        Raises :class:`UserError` if it can't be written.
        """
        self.path = path
        rows = [["0.0", "0.0"], *self._read()[1 : epochs_done + 1]]
        self.seconds = float(rows[-1][0])
        with writable(path, "csv_dir"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write("w", [HEADER, *rows])

    def epoch(self, seconds: float, accuracy: float) -> None:
        """Add an epoch that took ``seconds`` to train; a failure is only a warning."""
        self.seconds += seconds
        try:
            self._write("a", [[str(round(self.seconds, 1)), str(round(accuracy, 4))]])
        except OSError as error:
            warn(f"cannot write to {self.path}: {error}")

    def _write(self, mode: str, rows: list[list[str]]) -> None:
        with open(self.path, mode, newline="") as file:
            csv.writer(file).writerows(rows)

    def _read(self) -> list[list[str]]:
        """Return the rows of an existing file without its header; none if it does not exist or has another format."""
        try:
            with open(self.path, newline="") as file:
                header, *rows = csv.reader(file)
            valid = header == HEADER and all(len(row) == 2 and float(row[0]) >= 0 for row in rows)
        except (OSError, ValueError, csv.Error):
            return []
        return rows if valid else []
