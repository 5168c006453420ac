"""Progress from a script's log, by the patterns of spec.metrics.logPatterns."""

import math
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..base.files import log
from ..contract.log_patterns import LOG_GROUPS
from ..contract.progress import RankProgress
from ..rank.counters import RankCounters
from .line_steps import NumberSeries
from .output_ends import COLOURS

_LINE_LIMIT = 4096
_LINES_PER_CHUNK = 200  # the last ones of each chunk are searched, so that a fast writer is not slowed down
_MATCH_SECONDS = 0.1  # of CPU time: waiting for a CPU makes no pattern slow
_SLOW_MATCHES = 3


class PatternTooSlow(Exception):
    """A match took too long."""


class LogLines:
    """The lines in chunks of a rank's output, without colours."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, chunk: bytes) -> list[str]:
        """Return the last lines that a chunk completes."""
        *lines, rest = re.split(rb"[\r\n]", self._rest + chunk)  # progress bars end their lines with \r
        self._rest = rest[:_LINE_LIMIT]  # only the head of a line is searched
        return [COLOURS.sub("", line[:_LINE_LIMIT].decode("utf-8", "replace")) for line in lines[-_LINES_PER_CHUNK:]]


class LogProgress:
    """The progress that patterns find in one rank's output.

    ``epochs``: of the run, used if no line has them; ``per_epoch``: whether steps restart with each epoch, None: to be
    inferred; ``read_counters``: of the rank's optimizer steps.
    """

    def __init__(
        self,
        patterns: list[re.Pattern[str]],
        epochs: int | None = None,
        per_epoch: bool | None = None,
        read_counters: Callable[[], RankCounters | None] = lambda: None,
    ) -> None:
        self._patterns = patterns
        self._epochs = epochs
        self._read_counters = read_counters
        self._alignment = NumberSeries("step")  # of the steps with the rank's counter
        self._counted: float | None = None  # the rank's counter at the last new step
        self._slow: dict[re.Pattern[str], int] = {}
        self._lines = LogLines()
        self._values: dict[str, float] = {}
        self._steps = 0.0
        self._last_samples = 0.0
        self._interval = 1.0  # steps between two lines; before the second line those up to the first one
        self._intervals = 0
        self._epoch: float | None = None  # of the last step
        self._first_epoch: float | None = None  # 0 or 1, with which the script starts to count
        self._counts_per_epoch = per_epoch

    def restarted(self) -> "LogProgress":
        """Return the initial progress of the process that replaces this one."""
        successor = LogProgress(self._patterns, self._epochs, read_counters=self._read_counters)
        successor._counts_per_epoch = self._counts_per_epoch
        successor._first_epoch = self._first_epoch
        return successor

    def feed(self, chunk: bytes, now: float) -> bool:
        """Search output. ``now``: Unix time. Returns whether it had a value."""
        has_value = False
        for text in self._lines.split(chunk):
            if self._read(text, now):
                has_value = True
        return has_value

    def _read(self, text: str, now: float) -> bool:
        """Search one line. Returns whether it had a value."""
        matches = [self._search(pattern, text) for pattern in list(self._patterns)]
        has_value = False
        for match in matches:
            if match and self.take(match.groupdict(), now):
                has_value = True
        return has_value

    def build(self, rank: int, world_size: int | None = None) -> RankProgress:
        """Return the progress."""
        progress = RankProgress(rank)
        progress.update(self._convert_to_run())
        progress.world_size = None if world_size is None else float(world_size)
        if progress.step is not None and progress.total_steps:
            progress.share = min(1.0, max(0.0, progress.step / progress.total_steps))
        progress.is_counted = self._counted is not None and self._alignment.scale == 1.0
        if progress.is_counted:
            progress.steps = self._counted or 0.0
        elif self._steps:
            progress.steps = self._steps
            progress.step_interval = self._interval
            progress.total_margin = self._interval
        progress.note_lost_loss()
        return progress

    def _convert_to_run(self) -> dict[str, float]:
        """Return the values with steps of an epoch converted to steps of the run: 3/60 is not 5 % of the run."""
        values = dict(self._values)
        if self._epochs is not None:
            values.setdefault("epochs", float(self._epochs))
        if self._counts_per_epoch is None:
            self._drop_ambiguous(values)
        elif self._counts_per_epoch and "total_steps" in values:
            self._add_former_epochs(values)
        return values

    def _drop_ambiguous(self, values: dict[str, float]) -> None:
        """Drop steps that may be of an epoch: whether 60/60 ends the run is unknown before the next epoch."""
        if self._epoch is None or "epochs" in values:
            return
        values.pop("total_steps", None)
        if self._epoch > (self._first_epoch or 0.0):
            values.pop("step", None)

    def _add_former_epochs(self, values: dict[str, float]) -> None:
        steps_per_epoch = values.pop("total_steps")
        if "epochs" in values:
            values["total_steps"] = values["epochs"] * steps_per_epoch
        if self._epoch is not None:
            values["step"] += (self._epoch - (self._first_epoch or 0.0)) * steps_per_epoch
        else:
            values.pop("step", None)  # the process has not logged its epoch yet

    def _search(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """Search within a limited CPU time. A pattern that exceeds it three times is disabled."""
        if not text:
            return None
        signal.setitimer(signal.ITIMER_VIRTUAL, _MATCH_SECONDS)
        try:
            try:
                return pattern.search(text)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except PatternTooSlow:
            self._slow[pattern] = self._slow.get(pattern, 0) + 1
            if self._slow[pattern] >= _SLOW_MATCHES:
                self._patterns.remove(pattern)
                log(f"metrics.logPatterns: {pattern.pattern!r} takes too long to match and is disabled")
            return None

    def take(self, groups: Mapping[str, str | None], now: float) -> bool:
        """Use values by the names of LOG_GROUPS. ``now``: Unix time. Returns whether there are any."""
        values = {}
        for group, text in groups.items():
            with suppress(ValueError):  # not a number
                values[LOG_GROUPS[group]] = float((text or "").replace(",", ""))
        step = values.get("step")
        before = self._values.get("step")
        if step is not None and step != before and math.isfinite(step):
            self._take_step(step, before, values.get("epoch", self._values.get("epoch")))
            values["last_step_time"] = now
        if "samples" in values:
            values["samples"] = self._accumulate_samples(values["samples"])
        self._values.update(values)
        if self._counts_per_epoch is None and self._contradicts_run():
            self._counts_per_epoch = True
        return bool(values)

    def _take_step(self, step: float, before: float | None, epoch: float | None) -> None:
        """Count a new step. A count that starts over, as with each epoch, is one step."""
        self._steps += step - before if before is not None and step > before else 1
        self._measure_interval(step, before)
        counters = self._read_counters()
        if counters is not None and counters.is_counted:
            self._counted = float(counters.steps)
            self._alignment.observe(step, None, self._counted)
        if epoch is None:
            return
        if self._first_epoch is None:
            self._first_epoch = min(1.0, epoch)
        is_later = self._epoch is not None and epoch > self._epoch
        if before is not None and is_later and not self._counts_per_epoch:
            self._counts_per_epoch = step < before
        self._epoch = epoch

    def _accumulate_samples(self, samples: float) -> float:
        """Return the sum of a count that may start over."""
        before = self._last_samples
        self._last_samples = samples
        added = samples - before if samples >= before else samples
        return self._values.get("samples", 0.0) + added

    def _measure_interval(self, step: float, before: float | None) -> None:
        """Keep the smallest number of steps between two lines."""
        if before is None:
            self._interval = max(1.0, step)
        elif step > before:
            gap = step - before
            self._interval = min(self._interval, gap) if self._intervals else gap
            self._intervals += 1

    def _contradicts_run(self) -> bool:
        """Return whether the last step cannot be one of the run, because its share of the total is not its epoch's."""
        step = self._values.get("step")
        total = self._values.get("total_steps")
        epochs = self._values.get("epochs", self._epochs)
        if step is None or not total or not epochs or self._epoch is None or self._first_epoch is None:
            return False
        former_epochs = self._epoch - self._first_epoch
        # The first epoch of a process that starts in a later one is unknown: the script may count from 0.
        last_epoch = former_epochs + 1 if former_epochs <= 0 else former_epochs + 2
        margin = 1.5 / total
        return not former_epochs / epochs - margin <= step / total <= last_epoch / epochs + margin
