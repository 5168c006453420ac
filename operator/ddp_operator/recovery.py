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

    @property
    def steps_lost(self) -> int | None:
        """Steps that had been made and were made again."""
        if self.step_before is None or self.resumed_from is None:
            return None
        return max(0, self.step_before - self.resumed_from)


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
            return Recovery(sample.time - killed_at, level, step, sample.step - sample.steps_of_process)
    return None
