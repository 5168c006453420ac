"""A CSV of training time and validation accuracy, one row an epoch, to lay runs beside each other."""

from __future__ import annotations

import csv
from pathlib import Path

from ddp_trainer.config.run import RunConfig
from ddp_trainer.errors import warn
from ddp_trainer.files import writable

HEADER = ["time", "val_accuracy"]


def file_name(config: RunConfig, world_size: int) -> str:
    """Named after what the runs differ in: ``2ranks-32bs-0.01lr-0.9m-5w.csv``."""
    return (
        f"{world_size}ranks-{config.data.batch_size}bs-{config.optim.lr:g}lr-"
        f"{config.optim.momentum:g}m-{config.schedule.warmup_epochs:g}w.csv"
    )


class CsvLog:
    """Rank 0's file. Time is that of training steps alone, in seconds since the run began, across its restarts.

    Of an epoch that was interrupted what came before the interruption is not counted.
    """

    def __init__(self, path: Path, epochs_done: int) -> None:
        """Begin the file, or go on with its first ``epochs_done`` epochs.

        Raises :class:`UserError` where it can't be written.
        """
        self.path = path
        rows = [["0.0", "0.0"], *self._read()[1 : epochs_done + 1]]
        self.seconds = float(rows[-1][0])
        with writable(path, "csv_dir"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write("w", [HEADER, *rows])

    def epoch(self, seconds: float, accuracy: float) -> None:
        """Add an epoch that took ``seconds`` to train; a failure is a warning, for the run matters more."""
        self.seconds += seconds
        try:
            self._write("a", [[str(round(self.seconds, 1)), str(round(accuracy, 4))]])
        except OSError as error:
            warn(f"cannot write to {self.path}: {error}")

    def _write(self, mode: str, rows: list[list[str]]) -> None:
        with open(self.path, mode, newline="") as file:
            csv.writer(file).writerows(rows)

    def _read(self) -> list[list[str]]:
        """The rows of a file of ours without its header; none where there is no such file."""
        try:
            with open(self.path, newline="") as file:
                header, *rows = csv.reader(file)
            valid = header == HEADER and all(len(row) == 2 and float(row[0]) >= 0 for row in rows)
        except (OSError, ValueError, csv.Error):
            return []
        return rows if valid else []
