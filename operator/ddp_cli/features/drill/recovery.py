"""Measure a recovery from samples of the report: seconds without training, and lost steps. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """The report of rank 0 at a moment (seconds of the reader's clock). None: not reported."""

    time: float
    attempt: int = 1
    step: int | None = None
    steps_of_process: int | None = None
    in_place_restarts: int | None = None
    running: bool = False
    interval: int = 1
    """Steps between two reports: 1 with the exporter, else those between two lines of the log."""

    @property
    def answered(self) -> bool:
        """True if the page could be read."""
        return self.in_place_restarts is not None or self.step is not None


@dataclass(frozen=True, slots=True)
class MeasuredRecovery:
    """A job's recovery and its level (process, pod or group). Steps are None if the script reports none."""

    seconds: float
    level: str
    step_before: int | None
    resumed_from: int | None
    """The step before the first one that the new process reported."""
    began_at: int | None = None
    """The step before the first one that the killed process reported."""
    interval: int = 1
    """Steps between two reports; the new process may have resumed as many steps before its first report."""

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
    """Return the sample in a line of the probe at time ``now``."""

    def number(name: str) -> int | None:
        return int(values[name]) if name in values else None

    return Sample(
        time=now,
        attempt=attempt,
        step=number("step"),
        steps_of_process=number("steps"),
        in_place_restarts=number("restarts"),
        running=bool(values.get("running")),
        interval=max(1, number("interval") or 1),
    )


def measure(before: Sample, killed_at: float, after: Iterable[Sample]) -> MeasuredRecovery | None:
    """Return the recovery as soon as the samples show it; None: they end before.

    If ``before`` has no steps, workers that run again are a recovery.

    The step counter of a process starts at 0, the run's step at the checkpoint: once a new process has made a step,
    their difference is the step from which it resumed. For a moment, the page of a dead worker may appear
    with the next restart's count, and change once. So a process is new if its counter is smaller than before. A sample
    may miss that. So after a restart a process is also new if the difference has changed, or if its counter advances
    twice.
    """
    step = before.step
    made = before.steps_of_process
    page_was_lost = False
    is_new_process = False
    counts: set[int] = set()
    for sample in after:
        if not sample.answered:
            page_was_lost = page_was_lost or sample.time >= killed_at
            continue

        level = _find_level(before, sample, page_was_lost=page_was_lost)
        restarted = level != "process" or (sample.in_place_restarts or 0) > (before.in_place_restarts or 0)
        if made is None:
            if sample.running and restarted:
                return MeasuredRecovery(sample.time - killed_at, level, None, None)
            continue
        if sample.steps_of_process is None or sample.step is None:
            continue

        if restarted:
            counts.add(sample.steps_of_process)
            resumed_elsewhere = step is not None and sample.step - sample.steps_of_process != step - made
            is_new_process = is_new_process or resumed_elsewhere or len(counts) > 2
        is_new_process = is_new_process or sample.steps_of_process < made
        if not is_new_process:
            made = sample.steps_of_process
            step = sample.step
        elif sample.steps_of_process > 0:
            resumed_from = max(0, sample.step - sample.steps_of_process)
            return MeasuredRecovery(sample.time - killed_at, level, step, resumed_from)
    return None


def _find_level(before: Sample, sample: Sample, *, page_was_lost: bool) -> str:
    if sample.attempt > before.attempt:
        return "group"
    return "pod" if page_was_lost else "process"


def describe_loss(recovery: MeasuredRecovery) -> str:
    """Return how many steps were lost, in words."""
    lost = recovery.steps_lost
    if lost is None:
        return "unknown (--after 0)"
    if recovery.from_beginning:
        return f"all {lost} (at step {recovery.step_before}, restarted at step 0)"
    earliest = recovery.earliest_resume
    latest = recovery.latest_resume
    if earliest == latest:
        return f"{lost} (at step {recovery.step_before}, resumed from {earliest})"
    return (
        f"at most {lost} (at step {recovery.step_before}, resumed between {earliest} and {latest}: the log has every "
        f"{recovery.interval}th step)"
    )
