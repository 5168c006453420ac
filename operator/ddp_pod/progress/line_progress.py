"""The progress of a rank whose script is unknown: its counters, completed from its lines."""

import math
import re
from collections.abc import Callable

from ..contract.progress import RankProgress
from ..rank.counters import RankCounters
from .line_steps import LineSteps, StepPosition, find_metrics
from .log_patterns import LogLines

_LINES_PER_SECOND = 500  # searched; a faster writer's other lines are skipped
ReadCounters = Callable[[], RankCounters | None]

_RECORD = re.compile(r"\s*\{.*\}\s*$")  # a line that is one JSON object or dict of Python


class LineProgress:
    """Completes the counters of one process of a rank from its lines: position, totals, and the metrics it prints."""

    def __init__(self, read_counters: ReadCounters, epochs: int | None = None, steps: int | None = None) -> None:
        self._read_counters = read_counters
        self._epochs = epochs
        self._steps = steps
        self._lines = LogLines()
        self._finder = LineSteps(epochs, steps)
        self._metrics: dict[str, float] = {}
        self._counters: RankCounters | None = None  # at the last validated line
        self._second = 0
        self._searched = 0  # lines of this second

    def restarted(self) -> "LineProgress":
        """Return the initial progress of the process that replaces this one."""
        successor = LineProgress(self._read_counters, self._epochs, self._steps)
        successor._finder.epoch_base = self._finder.epoch_base
        return successor

    def feed(self, chunk: bytes, now: float) -> bool:
        """Search output. ``now``: Unix time. Returns whether it showed progress."""
        counters = self._read_counters()
        lines = self._lines.split(chunk)
        if counters is None or not counters.is_counted:
            return False
        has_value = False
        for line in lines:
            if self._may_search(now) and self._read(line, counters):
                has_value = True
        return has_value

    def _may_search(self, now: float) -> bool:
        if int(now) != self._second:
            self._second = int(now)
            self._searched = 0
        self._searched += 1
        return self._searched <= _LINES_PER_SECOND

    def _read(self, line: str, counters: RankCounters) -> bool:
        """Search one line. Returns whether it showed progress."""
        if self._finder.read(line, float(counters.steps), counters.epoch):
            self._counters = counters
        elif self._counters is None or not _RECORD.match(line):
            return False
        metrics = find_metrics(line)
        self._metrics.update(metrics)
        if math.isfinite(metrics.get("loss", math.nan)):
            self._metrics.pop("lost_loss_step", None)
        elif "loss" in metrics:
            position = self._find_position(counters)
            counted = float(counters.steps) if position is None else position.step
            self._metrics.setdefault("lost_loss_step", self._finder.last_step or counted)
        return True

    def _find_position(self, counters: RankCounters) -> StepPosition | None:
        first_step = None if counters.first_step is None else float(counters.first_step)
        return self._finder.find_position(float(counters.steps), first_step)

    def build(self, rank: int, world_size: int | None = None) -> RankProgress:
        """Return the progress. Its steps are optimizer steps."""
        progress = RankProgress(rank, is_counted=True)
        progress.update(self._metrics)
        progress.world_size = None if world_size is None else float(world_size)
        counters = self._counters
        if counters is None:
            return progress
        progress.steps = float(counters.steps)
        position = self._find_position(counters)
        if position is not None:
            progress.step = position.step
            progress.total_steps = position.total
            progress.total_margin = position.margin if position.total and position.margin else None
            progress.share = position.step / position.total if position.total else None
            progress.is_count_full = position.is_full
            progress.epoch = position.epoch
            progress.epochs = position.epochs
        progress.note_lost_loss()
        return progress
