"""The time of training without its pauses, measured without a wait for the device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ddp_sdk.meters import Timeline


class Stopwatch:
    """Measures laps of training, without pauses for validation and checkpoints."""

    def __init__(self, device: torch.device) -> None:
        self._timeline = Timeline(device)
        self.restart()

    def restart(self) -> None:
        """Start a lap now."""
        self._start: Any = self._timeline.now()
        self._pauses: list[tuple[Any, Any]] = []

    def pause(self, start: Any, end: Any) -> None:
        """Exclude the time between two moments of this device's timeline."""
        self._pauses.append((start, end))

    def lap(self) -> Callable[[], float]:
        """End the lap and start the next one, without waiting for the device.

        Returns a function that waits, and returns the seconds of the lap without its pauses.
        """
        start = self._start
        pauses = self._pauses
        self.restart()
        return partial(self._timeline.seconds, start, self._start, pauses)
