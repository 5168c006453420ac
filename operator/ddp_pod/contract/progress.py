"""The progress of one rank, as its counters, its script's own page or its log show it, and of uploads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from .names import (
    METRIC_CHECKPOINT_STEP,
    METRIC_COMPUTE_SECONDS,
    METRIC_DATA_SECONDS,
    METRIC_EPOCH,
    METRIC_EPOCHS,
    METRIC_GLOBAL_RATE,
    METRIC_GLOBAL_STEP,
    METRIC_HEARTBEATS,
    METRIC_LAST_STEP,
    METRIC_LEARNING_RATE,
    METRIC_LOSS,
    METRIC_LOST_LOSS,
    METRIC_PROGRESS,
    METRIC_SAMPLES,
    METRIC_SAVING,
    METRIC_STEP_INTERVAL,
    METRIC_STEP_SECONDS,
    METRIC_STEPS,
    METRIC_TOTAL_MARGIN,
    METRIC_TOTAL_STEPS,
    METRIC_VAL_ACCURACY,
    METRIC_VAL_LOSS,
    METRIC_WORLD_SIZE,
)
from .records import text


def _series(name: str) -> Any:
    """Declare a number. ``name``: its series for Prometheus."""
    return field(default=None, metadata={"series": name})


@dataclass(frozen=True)
class MachineTime:
    """What the machine has given a rank and taken from it, in seconds. None: unknown.

    ``cpu_seconds``: CPU time of its process; ``cpu_wait_seconds``: how long its main thread was ready to run without
    a CPU; ``child_…``: the same of the processes that it has started, the wait of the one that waited longest.

    The others are the pod's: the time in which its cgroup had used up its limit of CPUs, in which a process of it
    waited for storage, for memory.
    """

    cpu_seconds: float | None = None
    cpu_wait_seconds: float | None = None
    child_cpu_seconds: float | None = None
    child_cpu_wait_seconds: float | None = None
    throttled_seconds: float | None = None
    storage_seconds: float | None = None
    memory_seconds: float | None = None


@dataclass
class RankProgress:
    """The progress of one rank. None: unknown."""

    rank: int = 0
    is_counted: bool = False
    """Whether its steps are optimizer steps, which advance with the rank's counter."""
    step: float | None = _series(METRIC_GLOBAL_STEP)
    """Step of the run."""
    steps: float | None = _series(METRIC_STEPS)
    """Steps of the rank's process since its start."""
    total_steps: float | None = _series(METRIC_TOTAL_STEPS)
    total_margin: float | None = _series(METRIC_TOTAL_MARGIN)
    """Steps by which the total may be off, if it is from the log."""
    step_interval: float | None = _series(METRIC_STEP_INTERVAL)
    """Steps between two lines of the log."""
    is_count_full: bool = False
    """Whether the last count in the log is full, as ``20/20``, so that nothing more is announced."""
    share: float | None = _series(METRIC_PROGRESS)
    """Completed share of the run, 0 to 1."""
    epoch: float | None = _series(METRIC_EPOCH)
    epochs: float | None = _series(METRIC_EPOCHS)
    loss: float | None = _series(METRIC_LOSS)
    lost_loss_step: float | None = _series(METRIC_LOST_LOSS)
    """The step since which the loss is not finite."""
    learning_rate: float | None = _series(METRIC_LEARNING_RATE)
    val_loss: float | None = _series(METRIC_VAL_LOSS)
    val_accuracy: float | None = _series(METRIC_VAL_ACCURACY)
    samples: float | None = _series(METRIC_SAMPLES)
    samples_per_second: float | None = _series(METRIC_GLOBAL_RATE)
    """Of all ranks, as the script states it."""
    step_seconds: float | None = _series(METRIC_STEP_SECONDS)
    """Time spent in the steps of the process."""
    data_seconds: float | None = _series(METRIC_DATA_SECONDS)
    compute_seconds: float | None = _series(METRIC_COMPUTE_SECONDS)
    last_step_time: float | None = _series(METRIC_LAST_STEP)
    world_size: float | None = _series(METRIC_WORLD_SIZE)
    heartbeats: float | None = _series(METRIC_HEARTBEATS)
    saving: float | None = _series(METRIC_SAVING)
    """1 while training waits for a checkpoint."""
    checkpoint_step: float | None = _series(METRIC_CHECKPOINT_STEP)
    machine: MachineTime = field(default_factory=MachineTime)

    def update(self, values: Mapping[str, float]) -> None:
        """Set numbers by the names of their fields."""
        for name, value in values.items():
            setattr(self, name, value)

    def note_lost_loss(self) -> None:
        """Record since which step the loss is not finite, at the latest since the last one: JSON has no such number."""
        if self.loss is not None and not math.isfinite(self.loss) and self.lost_loss_step is None:
            step = self.known_step or 0.0
            self.lost_loss_step = step if math.isfinite(step) else 0.0

    @property
    def known_step(self) -> float | None:
        """The step of the run; if it is unknown, the steps of the process."""
        return self.steps if self.step is None else self.step

    @property
    def run_step(self) -> float | None:
        """The step of the run; if it is unknown, the number of steps that the script itself reports.

        The steps that the launcher counts are none of the run: the process may have resumed from a checkpoint.
        """
        return self.step if self.is_counted else self.known_step


@dataclass(frozen=True)
class Uploads:
    """The upload of checkpoints to ``checkpoint.url``. ``step``, ``time``: of the newest snapshot.

    Other pods than pod 0 report a problem only: then ``bytes`` is None.
    """

    step: float | None = None
    time: float | None = None
    bytes: float | None = None
    failures: float | None = None
    problem: str = text(200)


SERIES: Final = {item.name: str(item.metadata["series"]) for item in fields(RankProgress) if "series" in item.metadata}
"""The series of each number of a RankProgress."""
FIELDS: Final = {series: name for name, series in SERIES.items()}
"""The number of a RankProgress that each series is."""
