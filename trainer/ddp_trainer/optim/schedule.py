"""The learning rate as a pure function of the position in the training: nothing to save, nothing to disagree on."""

import math
from dataclasses import dataclass

from ddp_trainer.config.options import Settings, option


@dataclass(frozen=True)
class ScheduleConfig(Settings, group="schedule"):
    """How the learning rate runs over the training."""

    name: str = option("constant", "course after the warm-up", flag="--schedule", choices=("constant", "cosine"))
    warmup_epochs: float = option(0.0, "epochs over which the learning rate rises linearly", at_least=0)
    warmup_start: float | None = option(
        None,
        "share of the learning rate at the first step; none: the rate before scaling",
        at_least=0,
        at_most=1,
    )
    warmup_by_node: bool = option(False, "begin the warm-up at 1 / the processes of this node, as a document wrote it")
    warmup_stairs: bool = option(False, "raise the rate from epoch to epoch, not from step to step")
    final: float = option(0.0, "share of the rate at the end (cosine)", flag="--lr-final", at_least=0, at_most=1)


@dataclass(frozen=True)
class Schedule:
    """The learning rate at every position of a training of ``length`` epochs.

    ``base`` is the rate before scaling with the world size, ``scale`` the factor of the scaling. Positions are in
    epochs, not steps, so that a run resumed on another number of ranks goes on where it was.
    """

    config: ScheduleConfig
    base: float
    scale: float
    length: float
    processes_per_node: int = 1

    def _start(self) -> float:
        if self.config.warmup_start is not None:
            return self.config.warmup_start
        return 1.0 / (self.processes_per_node if self.config.warmup_by_node else self.scale)

    def lr(self, position: float) -> float:
        """The learning rate of the step that begins ``position`` epochs into the training.

        Warm-up: ``base * scale`` times a factor that rises linearly from ``warmup_start`` to 1. After it constant, or
        times ``final + (1 - final) * (1 + cos(pi * t)) / 2`` with t from 0 to 1 over what is left of the training.
        """
        peak = self.base * self.scale
        warmup = self.config.warmup_epochs
        if position < warmup:
            start = self._start()
            if self.config.warmup_stairs:
                position = math.floor(position)
            return peak * (start + (1.0 - start) * position / warmup)
        if self.config.name == "constant" or self.length <= warmup:
            return peak
        progress = min(1.0, (position - warmup) / (self.length - warmup))
        final = self.config.final
        return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))
