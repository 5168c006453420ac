"""How far a run is, how far it has to go and when it may end early: pure arithmetic on samples, epochs and steps."""

from dataclasses import dataclass, field

from ddp_trainer.config.options import Settings, option
from ddp_trainer.errors import UserError


@dataclass
class Position:
    """How far the run is: enough, with the configuration, to know every sample that comes next."""

    step: int = 0
    epoch: int = 0
    # Samples of the current epoch that all ranks together have used.
    consumed: int = 0
    # The score of the last validation, and the best of all so far.
    accuracy: float | None = None
    best_accuracy: float | None = None
    # Validations in a row that have reached the target.
    streak: int = 0
    # The step after which the last validation was.
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
        """Steps of an epoch of which ``consumed`` samples are used."""
        left = max(0, self.samples - consumed)
        return left // self.samples_per_step if self.drop_last else -(-left // self.samples_per_step)

    @property
    def total_steps(self) -> int:
        """Value of the step counter at the end of the run."""
        epochs_left = self.epochs - self.first.epoch
        if epochs_left <= 0:
            return self.first.step
        steps = self.first.step + self.steps_left(self.first.consumed) + (epochs_left - 1) * self.steps_left(0)
        return steps if self.max_steps is None else max(self.first.step, min(steps, self.max_steps))

    @property
    def length(self) -> float:
        """Epochs from the beginning to the end of the run; a part of one where ``max_steps`` cuts it short."""
        if self.max_steps is None:
            return float(self.epochs)
        return min(float(self.epochs), self.max_steps / self.steps_left(0))

    def fraction(self, position: Position) -> float:
        """Epochs done at ``position``, the argument of the learning-rate schedule."""
        return position.epoch + position.consumed / self.samples


@dataclass(frozen=True)
class EarlyStopConfig(Settings, group="early_stop"):
    """When the run may end before its last epoch."""

    target_accuracy: float | None = option(
        None,
        "stop when validations reach this share, 0 to 1 (segmentation: mean intersection over union)",
        above=0,
        at_most=1,
    )
    patience: int = option(2, "how many validations in a row must reach it", at_least=1)

    def __post_init__(self) -> None:
        target = self.target_accuracy
        if target is not None and 1.0 < target <= 100.0:
            remedy = f"give {target / 100:g} for {target:g} percent"
            raise UserError("early_stop.target_accuracy", f"{target:g} is not a share between 0 and 1", remedy)
        super().__post_init__()

    def count(self, streak: int, score: float) -> int:
        """How many validations in a row have reached the target, after one more with ``score``; NaN never does."""
        return streak + 1 if self.target_accuracy is not None and score >= self.target_accuracy else 0

    def met(self, streak: int) -> bool:
        """Whether the run has reached its target for as long as it should."""
        return self.target_accuracy is not None and streak >= self.patience
