"""Ending a run when it has reached its target."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_trainer.errors import require
from ddp_trainer.options import option


@dataclass(frozen=True)
class EarlyStopConfig:
    """When the run may end before its last epoch."""

    target_accuracy: float | None = option(
        None, "stop when validations reach this share, 0 to 1 (segmentation: mean intersection over union)"
    )
    patience: int = option(2, "how many validations in a row must reach it")

    def __post_init__(self) -> None:
        target = self.target_accuracy
        percent = target is not None and 1.0 < target <= 100.0
        require(
            target is None or 0.0 < target <= 1.0,
            "early_stop.target_accuracy",
            f"{target} is not a share between 0 and 1",
            f"give {target / 100:g} for {target:g} percent"
            if target is not None and percent
            else "give for example 0.85",
        )
        require(self.patience >= 1, "early_stop.patience", f"{self.patience} is less than one", "give 1 or more")

    def count(self, streak: int, score: float) -> int:
        """How many validations in a row have reached the target, after one more with ``score``; NaN never does."""
        return streak + 1 if self.target_accuracy is not None and score >= self.target_accuracy else 0

    def met(self, streak: int) -> bool:
        """Whether the run has reached its target for as long as it should."""
        return self.target_accuracy is not None and streak >= self.patience
