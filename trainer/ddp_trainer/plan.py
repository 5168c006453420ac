"""The position of a run, its length, and its early stop: pure arithmetic on samples, epochs and steps."""

from dataclasses import dataclass, field

from ddp_sdk.errors import UserError
from ddp_trainer.options import SettingsGroup, option


@dataclass
class Position:
    """The position of a run. Together with the configuration it determines every following sample."""

    step: int = 0
    epoch: int = 0
    # Samples of the current epoch that all ranks together have used.
    consumed: int = 0
    # The score of the last validation, and the best so far.
    accuracy: float | None = None
    best_accuracy: float | None = None
    # Consecutive validations that reached the target.
    streak: int = 0
    # The step of the last validation.
    validated: int = 0
    # All scores of the last validation.
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The length of a run at one world size.

    ``samples`` is the length of the training data, ``samples_per_step`` counts all ranks, ``first`` is the position
    from which this process starts: steps before it may have been taken by another number of ranks.
    """

    samples: int
    samples_per_step: int
    drop_last: bool
    epochs: int
    max_steps: int | None
    first: Position

    def steps_left(self, consumed: int) -> int:
        """Return the remaining steps of an epoch of which ``consumed`` samples are used."""
        remaining = max(0, self.samples - consumed)
        return remaining // self.samples_per_step if self.drop_last else -(-remaining // self.samples_per_step)

    @property
    def total_steps(self) -> int:
        """Return the value of the step counter at the end of the run."""
        epochs_left = self.epochs - self.first.epoch
        if epochs_left <= 0:
            return self.first.step
        steps = self.first.step + self.steps_left(self.first.consumed) + (epochs_left - 1) * self.steps_left(0)
        return steps if self.max_steps is None else max(self.first.step, min(steps, self.max_steps))

    @property
    def length(self) -> float:
        """Return the epochs of the whole run; not a whole number if ``max_steps`` ends the run within an epoch."""
        if self.max_steps is None:
            return float(self.epochs)
        return min(float(self.epochs), self.max_steps / self.steps_left(0))

    def fraction(self, position: Position) -> float:
        """Return the epochs completed at ``position``, the argument of the learning-rate schedule."""
        return position.epoch + position.consumed / self.samples


@dataclass(frozen=True)
class EarlyStopConfig(SettingsGroup, group="early_stop"):
    """The condition on which the run ends before its last epoch."""

    target_accuracy: float | None = option(
        None,
        "stop when validations reach this accuracy, 0 to 1 (segmentation: mean intersection over union)",
        above=0,
        at_most=1,
    )
    patience: int = option(
        2,
        "consecutive validations that must reach the target",
        only={"early_stop.target_accuracy": ()},
        at_least=1,
    )

    def __post_init__(self) -> None:
        target = self.target_accuracy
        if target is not None and 1.0 < target <= 100.0:
            remedy = f"give {target / 100:g} for {target:g} percent"
            raise UserError("early_stop.target_accuracy", f"{target:g} is not a share between 0 and 1", remedy)
        super().__post_init__()

    def count(self, streak: int, score: float) -> int:
        """Return ``streak`` after another validation with ``score``: one more, or 0 below the target and for NaN."""
        reached = self.target_accuracy is not None and score >= self.target_accuracy
        return streak + 1 if reached else 0

    def met(self, streak: int) -> bool:
        """Return whether ``streak`` validations suffice to end the run."""
        return self.target_accuracy is not None and streak >= self.patience
