"""Progress from a script's log, by the patterns of spec.metrics.logPatterns."""

import math
import re
import signal
from contextlib import suppress
from typing import Collection, Mapping, Optional

from ...contract.names import METRIC_LAST_STEP, METRIC_PROGRESS, METRIC_STEP_INTERVAL, METRIC_STEPS, METRIC_WORLD_SIZE
from ..files import log
from .known_loops import LOOPS, Loop

_STEP = "ddp_step"
_PLANNED_STEPS = "ddp_planned_steps"
_EPOCH = "ddp_epoch"
_PLANNED_EPOCHS = "ddp_planned_epochs"
_SAMPLES = "ddp_samples_total"
# The groups that a pattern may name, as in status.progress, and the series that each becomes.
LOG_GROUPS = {
    "step": _STEP,
    "totalSteps": _PLANNED_STEPS,
    "epoch": _EPOCH,
    "epochs": _PLANNED_EPOCHS,
    "loss": "ddp_loss",
    "learningRate": "ddp_learning_rate",
    "samples": _SAMPLES,
    "samplesPerSecond": "ddp_global_samples_per_second",
    "valAccuracy": "ddp_validation_accuracy_ratio",
    "valLoss": "ddp_validation_loss",
}
_LINE_LIMIT = 4096
_LINES_PER_CHUNK = 200  # the last ones of each chunk are searched, so that a fast writer is not slowed down
_MATCH_SECONDS = 0.1  # of CPU time: waiting for a CPU makes no pattern slow
_SLOW_MATCHES = 3
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def compile_log_pattern(text: str) -> re.Pattern[str]:
    """Compile one of metrics.logPatterns. Raises: ValueError with the remedy."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a valid Python regular expression ({error}); fix it or remove it") from None
    check_groups(pattern.groupindex)
    return pattern


def check_groups(groups: Collection[str]) -> None:
    """Check the named groups of one of metrics.logPatterns. Raises: ValueError with the remedy."""
    known = ", ".join(LOG_GROUPS)
    unknown = sorted(set(groups) - set(LOG_GROUPS))
    if unknown:
        raise ValueError(f"has the unknown group {unknown[0]}; known groups: {known}")
    if not groups:
        raise ValueError(f"has no named group, so it finds no value; write for example (?P<step>\\d+); groups: {known}")


class PatternTooSlow(Exception):
    """A match took too long."""


class LogProgress:
    """The progress that patterns find in one rank's output.

    ``epochs``, ``steps``: of the run, used if no line names them. ``per_epoch``: whether steps restart with each epoch;
    None: to be inferred.
    """

    def __init__(
        self,
        patterns: list[re.Pattern[str]],
        epochs: Optional[int] = None,
        steps: Optional[int] = None,
        per_epoch: Optional[bool] = None,
    ) -> None:
        self._patterns = patterns
        self._epochs = epochs
        self._total = steps
        self._slow: dict[re.Pattern[str], int] = {}
        self._rest = b""
        self._values: dict[str, float] = {}
        self._steps = 0.0
        self._last_samples = 0.0
        self._interval = 1.0  # steps between two lines; before the second line those up to the first one
        self._intervals = 0
        self._epoch: Optional[float] = None  # of the last step
        self._first_epoch: Optional[float] = None  # 0 or 1, with which the script starts to count
        self._counts_per_epoch = per_epoch

    def restarted(self) -> "LogProgress":
        """Return the initial progress of the process that replaces this one."""
        successor = LogProgress(self._patterns, self._epochs, self._total)
        successor._counts_per_epoch = self._counts_per_epoch
        successor._first_epoch = self._first_epoch
        return successor

    def feed(self, chunk: bytes, now: float) -> bool:
        """Search output. ``now``: Unix time. Returns whether it had a value."""
        *lines, rest = re.split(rb"[\r\n]", self._rest + chunk)  # progress bars end their lines with \r
        self._rest = rest[:_LINE_LIMIT]  # only the head of a line is searched
        has_value = False
        for line in lines[-_LINES_PER_CHUNK:]:
            text = COLOURS.sub("", line[:_LINE_LIMIT].decode("utf-8", "replace"))
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

    def page(self, rank: int, world_size: Optional[int] = None) -> str:
        """Return the values as a Prometheus page."""
        values = self._convert_to_run()
        step = values.get(_STEP)
        total = values.get(_PLANNED_STEPS)
        if step is not None and total:
            values[METRIC_PROGRESS] = min(1.0, max(0.0, step / total))
        if self._steps:
            values[METRIC_STEPS] = self._steps
            values[METRIC_STEP_INTERVAL] = self._interval
        if world_size is not None:
            values[METRIC_WORLD_SIZE] = float(world_size)
        rows = []
        for name in sorted(values):
            rows.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
            rows.append(f'{name}{{rank="{rank}"}} {values[name]!r}')
        return "\n".join(rows) + "\n"

    def _convert_to_run(self) -> dict[str, float]:
        """Return the values with steps of an epoch converted to steps of the run: 3/60 is not 5 % of the run."""
        values = dict(self._values)
        if self._epochs is not None:
            values.setdefault(_PLANNED_EPOCHS, float(self._epochs))
        if self._total is not None and not self._counts_per_epoch:
            values.setdefault(_PLANNED_STEPS, float(self._total))
        if self._counts_per_epoch is None:
            self._drop_ambiguous(values)
        elif self._counts_per_epoch and _PLANNED_STEPS in values:
            self._add_former_epochs(values)
        return values

    def _drop_ambiguous(self, values: dict[str, float]) -> None:
        """Drop steps that may be of an epoch: whether 60/60 ends the run is unknown before the next epoch."""
        if self._epoch is None or _PLANNED_EPOCHS in values:
            return
        values.pop(_PLANNED_STEPS, None)
        if self._epoch > (self._first_epoch or 0.0):
            values.pop(_STEP, None)

    def _add_former_epochs(self, values: dict[str, float]) -> None:
        steps_per_epoch = values.pop(_PLANNED_STEPS)
        if _PLANNED_EPOCHS in values:
            values[_PLANNED_STEPS] = values[_PLANNED_EPOCHS] * steps_per_epoch
        if self._epoch is not None:
            values[_STEP] += (self._epoch - (self._first_epoch or 0.0)) * steps_per_epoch
        else:
            values.pop(_STEP, None)  # the process has not logged its epoch yet

    def _search(self, pattern: re.Pattern[str], text: str) -> Optional[re.Match[str]]:
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

    def take(self, groups: Mapping[str, Optional[str]], now: float) -> bool:
        """Use values by the names of LOG_GROUPS. ``now``: Unix time. Returns whether there are any."""
        values = {}
        for group, text in groups.items():
            with suppress(ValueError):  # not a number
                values[LOG_GROUPS[group]] = float((text or "").replace(",", ""))
        step = values.get(_STEP)
        before = self._values.get(_STEP)
        if step is not None and step != before and math.isfinite(step):
            self._take_step(step, before, values.get(_EPOCH, self._values.get(_EPOCH)))
            values[METRIC_LAST_STEP] = now
        if _SAMPLES in values:
            values[_SAMPLES] = self._accumulate_samples(values[_SAMPLES])
        self._values.update(values)
        if self._counts_per_epoch is None and self._contradicts_run():
            self._counts_per_epoch = True
        return bool(values)

    def _take_step(self, step: float, before: Optional[float], epoch: Optional[float]) -> None:
        """Count a new step. A count that starts over, as with each epoch, is one step."""
        self._steps += step - before if before is not None and step > before else 1
        self._measure_interval(step, before)
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
        return self._values.get(_SAMPLES, 0.0) + added

    def _measure_interval(self, step: float, before: Optional[float]) -> None:
        """Keep the smallest number of steps between two lines."""
        if before is None:
            self._interval = max(1.0, step)
        elif step > before:
            gap = step - before
            self._interval = min(self._interval, gap) if self._intervals else gap
            self._intervals += 1

    def _contradicts_run(self) -> bool:
        """Return whether the last step cannot be one of the run, because its share of the total is not its epoch's."""
        step = self._values.get(_STEP)
        total = self._values.get(_PLANNED_STEPS)
        epochs = self._values.get(_PLANNED_EPOCHS, self._epochs)
        if step is None or not total or not epochs or self._epoch is None or self._first_epoch is None:
            return False
        former_epochs = self._epoch - self._first_epoch
        # The first epoch of a process that starts in a later one is unknown: the script may count from 0.
        last_epoch = former_epochs + 1 if former_epochs <= 0 else former_epochs + 2
        margin = 1.5 / total
        return not former_epochs / epochs - margin <= step / total <= last_epoch / epochs + margin


class LoopProgress(LogProgress):
    """The progress in the lines of one known training loop."""

    _SEARCHED = 512  # characters of a line: these patterns have no time limit

    def __init__(self, loop: Loop, epochs: Optional[int] = None, steps: Optional[int] = None) -> None:
        super().__init__([re.compile(pattern) for pattern in loop.patterns], epochs, steps, loop.per_epoch)
        self._loop = loop
        self._seen: set[re.Pattern[str]] = set()

    @property
    def certain(self) -> bool:
        """Whether this is the script's loop: its steps advance, and enough of its patterns have matched."""
        return self._steps > 1 and len(self._seen) >= self._loop.needed

    def restarted(self) -> "LoopProgress":
        """Return the initial progress of the process that replaces this one."""
        successor = LoopProgress(self._loop, self._epochs, self._total)
        successor._first_epoch = self._first_epoch
        return successor

    def take(self, groups: Mapping[str, Optional[str]], now: float) -> bool:
        """Use the values of a line, unless another progress bar, such as that of a validation, wrote it."""
        if groups.get("step") and groups.get("totalSteps"):
            step = float(groups["step"] or 0)
            total = float(groups["totalSteps"] or 0)
            planned = self._values.get(_PLANNED_STEPS)
            current = self._values.get(_STEP, 0.0)
            is_other_bar = planned is not None and total != planned and (current < planned or total < planned)
            if step > total or (is_other_bar and not self._loop.per_epoch):
                return False
        return super().take(groups, now)

    def _search(self, pattern: re.Pattern[str], text: str) -> Optional[re.Match[str]]:
        match = pattern.search(text[: self._SEARCHED])
        if match:
            self._seen.add(pattern)
        return match


class KnownLoops(LogProgress):
    """The progress of a script whose loop may be a known one. It has no values before the loop is certain."""

    def __init__(self, epochs: Optional[int] = None, steps: Optional[int] = None) -> None:
        super().__init__([])
        self._loops = [LoopProgress(loop, epochs, steps) for loop in LOOPS]

    def restarted(self) -> "LogProgress":
        """Return the initial progress of the process that replaces this one."""
        successor = KnownLoops()
        successor._loops = [loop.restarted() for loop in self._loops]
        return successor

    def page(self, rank: int, world_size: Optional[int] = None) -> str:
        """Return the values as a Prometheus page."""
        return self._loops[0].page(rank, world_size)

    def _read(self, text: str, now: float) -> bool:
        matching = [loop for loop in self._loops if loop._read(text, now)]
        certain = [loop for loop in matching if loop.certain]
        if certain:
            self._loops = certain[:1]
        return bool(matching) and len(self._loops) == 1
