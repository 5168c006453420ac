"""Measures a recovery from samples of the metrics page: seconds without training, and steps that were lost. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddp_operator import constants


@dataclass(frozen=True, slots=True)
class Sample:
    """What rank 0's page said at a moment (seconds of the clock of whoever looked). None: not said."""

    time: float
    attempt: int = 1
    step: int | None = None
    steps_of_process: int | None = None
    in_place_restarts: int | None = None
    running: bool = False
    interval: int = 1
    """Steps between two reports: 1 of the exporter, else those between two lines of the log."""

    @property
    def answered(self) -> bool:
        """True where there was a page."""
        return self.in_place_restarts is not None or self.step is not None


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a job came back, on which level (process, pod or group). Steps are None where the script reports none."""

    seconds: float
    level: str
    step_before: int | None
    resumed_from: int | None
    """The step before the first one that the new process reported."""
    began_at: int | None = None
    """The same of the process that was killed."""
    interval: int = 1
    """Steps between two reports, so the new process may have resumed as many steps before its first report."""

    @property
    def from_beginning(self) -> bool:
        """Whether training restarted at step 0, so that every step was lost."""
        if self.resumed_from is None:
            return False
        if self.began_at is None:
            return self.resumed_from == 0
        return self.resumed_from == 0 or self.resumed_from <= self.began_at < self.interval

    @property
    def earliest_resume(self) -> int | None:
        """The earliest step from which training may have resumed."""
        if self.resumed_from is None:
            return None
        return 0 if self.from_beginning else max(0, self.resumed_from + 1 - self.interval)

    @property
    def latest_resume(self) -> int | None:
        """The latest step from which training may have resumed."""
        if self.resumed_from is None:
            return None
        if self.from_beginning or self.interval == 1:
            return self.earliest_resume
        return self.resumed_from + 1

    @property
    def steps_lost(self) -> int | None:
        """Steps that were repeated, at most."""
        if self.step_before is None or self.earliest_resume is None:
            return None
        return max(0, self.step_before - self.earliest_resume)


def parse_sample(values: Mapping[str, float], now: float, attempt: int) -> Sample:
    """Return a line of the probe as a sample taken ``now``."""

    def number(name: str) -> int | None:
        return int(values[name]) if name in values else None

    return Sample(
        time=now,
        attempt=attempt,
        step=number(constants.METRIC_GLOBAL_STEP),
        steps_of_process=number(constants.METRIC_STEPS),
        in_place_restarts=number(constants.METRIC_LAUNCHER_RESTARTS),
        running=bool(values.get("running")),
        interval=max(1, number(constants.METRIC_STEP_INTERVAL) or 1),
    )


def measure(before: Sample, killed_at: float, after: Iterable[Sample]) -> Recovery | None:
    """Return the recovery as soon as the samples show it, None where they end before.

    Where ``before`` has no steps, workers that run again are one.

    The counter of a process starts at 0 with it, and the run's step goes on from the checkpoint: once a new process has
    made a step, their difference is where it took up. A dead worker's last page may be shown for a moment beside the
    next restart's count, and be renewed once. So there is a new process where the counter is smaller than before; and,
    as that may be missed between two samples, where after a restart the difference is another, or the counter goes on.
    """
    step, made, gone, reborn = before.step, before.steps_of_process, False, False
    counts: set[int] = set()
    for sample in after:
        if not sample.answered:
            gone = gone or sample.time >= killed_at
            continue
        level = "group" if sample.attempt > before.attempt else "pod" if gone else "process"
        restarted = level != "process" or (sample.in_place_restarts or 0) > (before.in_place_restarts or 0)
        if made is None:
            if sample.running and restarted:
                return Recovery(sample.time - killed_at, level, None, None)
            continue
        if sample.steps_of_process is None or sample.step is None:
            continue
        if restarted:
            counts.add(sample.steps_of_process)
            other = step is not None and sample.step - sample.steps_of_process != step - made
            reborn = reborn or other or len(counts) > 2
        reborn = reborn or sample.steps_of_process < made
        if not reborn:
            made, step = sample.steps_of_process, sample.step
        elif sample.steps_of_process > 0:
            resumed_from = max(0, sample.step - sample.steps_of_process)
            return Recovery(sample.time - killed_at, level, step, resumed_from)
    return None
