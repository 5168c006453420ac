"""The progress of one rank, as its counters, its script's own page or its log show it, and of uploads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .records import text


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
    step: float | None = None
    """Step of the run."""
    steps: float | None = None
    """Steps of the rank's process since its start."""
    total_steps: float | None = None
    total_margin: float | None = None
    """Steps by which the total may be off, if it is from the log."""
    step_interval: float | None = None
    """Steps between two lines of the log."""
    is_count_full: bool = False
    """Whether the last count in the log is full, as ``20/20``, so that nothing more is announced."""
    share: float | None = None
    """Completed share of the run, 0 to 1."""
    epoch: float | None = None
    epochs: float | None = None
    loss: float | None = None
    lost_loss_step: float | None = None
    """The step since which the loss is not finite."""
    learning_rate: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    samples: float | None = None
    samples_per_second: float | None = None
    """Of all ranks, as the script states it."""
    step_seconds: float | None = None
    """Time spent in the steps of the process."""
    data_seconds: float | None = None
    compute_seconds: float | None = None
    last_step_time: float | None = None
    world_size: float | None = None
    heartbeats: float | None = None
    saving: float | None = None
    """1 while training waits for a checkpoint."""
    checkpoint_step: float | None = None
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
