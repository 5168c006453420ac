"""Progress from a script's log, by the patterns of spec.metrics.logPatterns."""

import math
import re
import signal
from contextlib import suppress
from typing import Mapping, Optional

from .contract import METRIC_LAST_STEP, METRIC_PROGRESS, METRIC_STEP_INTERVAL, METRIC_STEPS, METRIC_WORLD_SIZE
from .files import log
from .known_loops import LOOPS, Loop

# The groups that a pattern may name, as in status.progress, and the series that each becomes.
LOG_GROUPS = {
    "step": "ddp_step",
    "totalSteps": "ddp_planned_steps",
    "epoch": "ddp_epoch",
    "epochs": "ddp_planned_epochs",
    "loss": "ddp_loss",
    "learningRate": "ddp_learning_rate",
    "samples": "ddp_samples_total",
    "samplesPerSecond": "ddp_global_samples_per_second",
    "valAccuracy": "ddp_validation_accuracy_ratio",
    "valLoss": "ddp_validation_loss",
}
_LINE_LIMIT = 4096
_LINES_A_CHUNK = 200  # of a script that writes faster than anyone reads, the last lines of each chunk are searched
_MATCH_SECONDS = 0.1  # of CPU: a reader that only gets no CPU has no slow pattern
_SLOW_MATCHES = 3
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def compile_log_pattern(text: str) -> re.Pattern[str]:
    """Compile one of metrics.logPatterns. Raises: ValueError with the remedy."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a valid Python regular expression ({error}); fix it or remove it") from None
    names = ", ".join(LOG_GROUPS)
    unknown = sorted(set(pattern.groupindex) - set(LOG_GROUPS))
    if unknown:
        raise ValueError(f"names the unknown group {unknown[0]}; known are {names}")
    if not pattern.groupindex:
        raise ValueError(f"names no group, so nothing would be read; write for example (?P<step>\\d+), known: {names}")
    return pattern


class PatternTooSlow(Exception):
    """A match took too long."""


class LogProgress:
    """What patterns find in one rank's output."""

    def __init__(
        self,
        patterns: list[re.Pattern[str]],
        epochs: Optional[int] = None,
        steps: Optional[int] = None,
        per_epoch: Optional[bool] = None,
    ) -> None:
        self._patterns = patterns
        self._epochs, self._total = epochs, steps  # of the run, where no line names them
        self._slow: dict[re.Pattern[str], int] = {}
        self._rest = b""
        self._values: dict[str, float] = {}
        self._steps = self._last_samples = 0.0
        self._interval = 1.0  # steps between two lines; before the second one those up to the first one
        self._intervals = 0
        self._epoch: Optional[float] = None  # of the last step
        self._first_epoch: Optional[float] = None  # their numbers begin with 0 or 1
        self._counts_per_epoch = per_epoch  # the step counts from the begin of its epoch; None: not known yet

    def restarted(self) -> "LogProgress":
        """Return the progress of the process that takes this one's place."""
        other = LogProgress(self._patterns, self._epochs, self._total)
        other._counts_per_epoch, other._first_epoch = self._counts_per_epoch, self._first_epoch
        return other

    def feed(self, chunk: bytes, now: float) -> bool:
        """Take in output; ``now`` is Unix time. Returns whether a value was found."""
        *lines, rest = re.split(rb"[\r\n]", self._rest + chunk)  # progress bars end their lines with \r
        self._rest = rest[:_LINE_LIMIT]  # of a line without end its head is searched, as of any other
        found = False
        for line in lines[-_LINES_A_CHUNK:]:
            text = COLOURS.sub("", line[:_LINE_LIMIT].decode("utf-8", "replace"))
            found = self._read(text, now) or found
        return found

    def _read(self, text: str, now: float) -> bool:
        """Take in one line. Returns whether a value was found."""
        matches = [self._search(pattern, text) for pattern in list(self._patterns)]
        found = [self.take(match.groupdict(), now) for match in matches if match]
        return True in found

    def page(self, rank: int, world_size: Optional[int] = None) -> str:
        """Return the values as a Prometheus page."""
        values = self._count_on()
        step, total = values.get("ddp_step"), values.get("ddp_planned_steps")
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

    def _count_on(self) -> dict[str, float]:
        """Return the values, with steps that start over in each epoch as those of the run: 3/60 is no 5 % of it."""
        values = dict(self._values)
        if self._epochs is not None:
            values.setdefault("ddp_planned_epochs", float(self._epochs))
        if self._total is not None and not self._counts_per_epoch:
            values.setdefault("ddp_planned_steps", float(self._total))
        if self._counts_per_epoch is None and self._epoch is not None and "ddp_planned_epochs" not in values:
            # Whether 60/60 ends the run or an epoch is not known before the next one begins.
            values.pop("ddp_planned_steps", None)
            if self._epoch > (self._first_epoch or 0.0):
                values.pop("ddp_step", None)
        if self._counts_per_epoch and "ddp_planned_steps" in values:
            each = values.pop("ddp_planned_steps")
            if "ddp_planned_epochs" in values:
                values["ddp_planned_steps"] = values["ddp_planned_epochs"] * each
            if self._epoch is not None:
                values["ddp_step"] += (self._epoch - (self._first_epoch or 0.0)) * each
            else:
                values.pop("ddp_step", None)  # of a process that has not logged yet in which epoch it is
        return values

    def _search(self, pattern: re.Pattern[str], text: str) -> Optional[re.Match[str]]:
        """Search within a bounded CPU time; a pattern that is too slow three times is not used any more."""
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
                log(f"metrics.logPatterns: {pattern.pattern!r} takes too long to match and is not used any more")
            return None

    def take(self, groups: Mapping[str, Optional[str]], now: float) -> bool:
        """Take in what was found, by the names of LOG_GROUPS; ``now`` is Unix time. Returns whether it has a value."""
        found = {}
        for group, text in groups.items():
            with suppress(ValueError):
                found[LOG_GROUPS[group]] = float((text or "").replace(",", ""))
        step, before = found.get("ddp_step"), self._values.get("ddp_step")
        if step is not None and step != before and math.isfinite(step):
            # A count that starts over, as in each epoch, is a step too.
            self._steps += step - before if before is not None and step > before else 1
            self._measure_interval(step, before)
            epoch = found.get("ddp_epoch", self._values.get("ddp_epoch"))
            if epoch is not None:
                if self._first_epoch is None:
                    self._first_epoch = min(1.0, epoch)
                later = self._epoch is not None and epoch > self._epoch
                if before is not None and later and not self._counts_per_epoch:
                    self._counts_per_epoch = step < before
                self._epoch = epoch
            found[METRIC_LAST_STEP] = now
        samples = found.get("ddp_samples_total")
        if samples is not None:
            before = self._last_samples
            self._last_samples = samples
            found["ddp_samples_total"] = self._values.get("ddp_samples_total", 0.0) + (
                samples - before if samples >= before else samples
            )
        self._values.update(found)
        if self._counts_per_epoch is None and self._contradicts_run():
            self._counts_per_epoch = True
        return bool(found)

    def _measure_interval(self, step: float, before: Optional[float]) -> None:
        """Keep the smallest number of steps between two lines."""
        if before is None:
            self._interval = max(1.0, step)
        elif step > before:
            gap = step - before
            self._interval = min(self._interval, gap) if self._intervals else gap
            self._intervals += 1

    def _contradicts_run(self) -> bool:
        """Tell whether the last step can't be one of the run's total: its share of it is not that of its epoch."""
        step, total = self._values.get("ddp_step"), self._values.get("ddp_planned_steps")
        epochs = self._values.get("ddp_planned_epochs", self._epochs)
        if step is None or not total or not epochs or self._epoch is None or self._first_epoch is None:
            return False
        past, share, margin = self._epoch - self._first_epoch, step / total, 1.5 / total
        # One that was not seen to begin may count its epochs from 0.
        until = past + 1 if past <= 0 else past + 2
        return not past / epochs - margin <= share <= until / epochs + margin


class LoopProgress(LogProgress):
    """What the lines of one known loop show."""

    _KNOWN_LINE = 512  # characters: a pattern of ours is not timed, so what it searches is short

    def __init__(self, loop: Loop, epochs: Optional[int] = None, steps: Optional[int] = None) -> None:
        super().__init__([re.compile(pattern) for pattern in loop.patterns], epochs, steps, loop.per_epoch)
        self._loop = loop
        self._seen: set[re.Pattern[str]] = set()

    @property
    def certain(self) -> bool:
        """Whether this is the script's loop: its steps have moved on, and enough of its lines were seen."""
        return self._steps > 1 and len(self._seen) >= self._loop.needed

    def restarted(self) -> "LoopProgress":
        """Return the progress of the process that takes this one's place."""
        other = LoopProgress(self._loop, self._epochs, self._total)
        other._first_epoch = self._first_epoch
        return other

    def take(self, groups: Mapping[str, Optional[str]], now: float) -> bool:
        """Take in a line, unless its step is one of another bar, such as that of a validation."""
        if (done := groups.get("step")) and (of := groups.get("totalSteps")):
            step, total = float(done), float(of)
            known, current = self._values.get("ddp_planned_steps"), self._values.get("ddp_step", 0.0)
            other_bar = known is not None and total != known and (current < known or total < known)
            if step > total or (other_bar and not self._loop.per_epoch):
                return False
        return super().take(groups, now)

    def _search(self, pattern: re.Pattern[str], text: str) -> Optional[re.Match[str]]:
        match = pattern.search(text[: self._KNOWN_LINE])
        if match:
            self._seen.add(pattern)
        return match


class KnownLoops(LogProgress):
    """What the log of a script shows whose loop may be a known one. Nothing is shown before it is certain which."""

    def __init__(self, epochs: Optional[int] = None, steps: Optional[int] = None) -> None:
        super().__init__([])
        self._loops = [LoopProgress(loop, epochs, steps) for loop in LOOPS]

    def restarted(self) -> "LogProgress":
        """Return the progress of the process that takes this one's place."""
        other = KnownLoops()
        other._loops = [loop.restarted() for loop in self._loops]
        return other

    def page(self, rank: int, world_size: Optional[int] = None) -> str:
        """Return the values as a Prometheus page."""
        return self._loops[0].page(rank, world_size)

    def _read(self, text: str, now: float) -> bool:
        found = [loop for loop in self._loops if loop._read(text, now)]
        self._loops = [loop for loop in found if loop.certain][:1] or self._loops
        return bool(found) and len(self._loops) == 1
