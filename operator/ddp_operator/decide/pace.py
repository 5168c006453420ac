"""The pace of training: rates from successive reports, and the remaining time. Pure.

The feature ``pace`` adds them to the status of a job, and `ddp run` to its display and its rows.
"""

import math
from collections import deque
from dataclasses import dataclass

from msgspec.structs import replace

from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.status import SAMPLES, Progress
from ddp_operator.decide.report import build_progress, find_steps, format_number
from ddp_pod.contract.progress import RankProgress

# Rates are measured over this many seconds, if there are readings: one step is too short, an hour too long.
_RATE_WINDOW = 10.0
_LATE_STEPS = 10.0  # usual steps, after which a missing one is no slow step
_MAX_READINGS = 64


@dataclass(frozen=True, slots=True)
class Rates:
    """Steps per second, and samples per second of all ranks together; None: unknown."""

    steps: float | None = None
    samples: float | None = None


STALLED = Rates(0.0, 0.0)
"""The rates of a process that makes no steps any more."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a rank's process at a moment. ``seconds``: time spent in its steps, None if not reported."""

    time: float
    steps: float | None = None
    samples: float | None = None
    seconds: float | None = None
    last_step: float | None = None
    world_size: float = 1.0


def average_rates(progress: RankProgress) -> Rates | None:
    """Return the mean rates of a process since its start; None: it does not report the time spent in steps."""
    reading = read_counters(progress, 0.0)
    if reading.seconds is None:
        return None
    return derive_rates(Counters(0.0, 0.0, 0.0, 0.0), reading)


def read_counters(progress: RankProgress, now: float) -> Counters:
    """Return the counters of a rank's process at a moment."""
    return Counters(
        time=now,
        steps=progress.steps,
        samples=progress.samples,
        seconds=progress.step_seconds,
        last_step=progress.last_step_time,
        world_size=progress.world_size or 1.0,
    )


def derive_rates(before: Counters, after: Counters) -> Rates | None:
    """Return the rates between two readings, over the time in steps if it is reported, else between the last steps."""
    seconds = after.time - before.time
    if before.last_step is not None and after.last_step is not None and after.last_step > before.last_step:
        seconds = after.last_step - before.last_step
    if before.seconds is not None and after.seconds is not None:
        seconds = after.seconds - before.seconds

    def rate(old: float | None, new: float | None, ranks: float = 1.0) -> float | None:
        if old is None or new is None or seconds <= 0:
            return None
        value = (new - old) * ranks / seconds
        return value if 0 < value < 1e15 else None

    # Ranks step together, so every rank has processed as many samples.
    rates = Rates(rate(before.steps, after.steps), rate(before.samples, after.samples, after.world_size))
    return None if rates == Rates() else rates


class RateMeter:
    """Measures rates from successive readings of one rank's counters."""

    def __init__(self) -> None:
        self._process: object = None
        self._readings: deque[Counters] = deque(maxlen=_MAX_READINGS)
        self._rates: Rates | None = None

    def measure(self, process: object, progress: RankProgress, now: float) -> Rates | None:
        """Return the rates at this reading; None: they are unknown yet.

        ``process`` is equal for two readings of the same process. The rates of the first reading are its averages.
        While no step ends the last rates remain, because a step may take long. After ten usual steps they are STALLED.
        """
        reading = read_counters(progress, now)
        if reading.steps is None and reading.samples is None:
            return None
        last = self._readings[-1] if self._readings else None
        if last is not None and (process != self._process or _has_restarted(last, reading)):
            self._readings.clear()
            last = self._rates = None
        self._process = process
        if last is None:
            self._rates = average_rates(progress)
        elif (reading.steps, reading.samples) != (last.steps, last.samples):
            while len(self._readings) > 1 and now - self._readings[1].time >= _RATE_WINDOW:
                self._readings.popleft()
            self._rates = derive_rates(self._readings[0], reading) or self._rates
        else:
            usual = self._rates.steps if self._rates is not None else None
            is_late = usual is not None and now - last.time > max(_RATE_WINDOW, _LATE_STEPS / usual)
            return STALLED if is_late else self._rates
        self._readings.append(reading)
        return self._rates


def _has_restarted(before: Counters, after: Counters) -> bool:
    pairs = ((before.steps, after.steps), (before.samples, after.samples), (before.seconds, after.seconds))
    return any(old is not None and (new is None or new < old) for old, new in pairs)


def build_paced_progress(
    reported: RankProgress, previous: Progress | None = None, rates: Rates | None = None
) -> Progress | None:
    """Return the progress with its pace; None: the rank reports none. ``rates``: None: no new ones were measured."""
    progress = build_progress(reported, previous)
    return None if progress is None else set_pace(progress, reported, rates)


def set_pace(progress: Progress, reported: RankProgress, rates: Rates | None) -> Progress:
    """Return a progress with the pace of the report from which it is, and with former rates where no new are known.

    The remaining time is the number of remaining steps divided by their rate; without a rate or a total it is omitted.
    """
    if rates is None:
        rates = Rates() if progress.steps_per_second else average_rates(reported) or Rates()
    step_rate = format_number(rates.steps or None) or progress.steps_per_second
    # The script's own value (metrics.logPatterns) is used if its samples are not counted.
    sample_rate = format_number(rates.samples or reported.samples_per_second) or progress.samples_per_second
    eta = None if rates == STALLED else _eta(find_steps(reported), reported.total_steps, step_rate)
    return replace(
        progress,
        eta=None if eta is None else format_duration(eta),
        steps_per_second=step_rate,
        throughput=None if rates == STALLED else _format_throughput(sample_rate, step_rate),
    )


def _format_throughput(sample_rate: str | None, step_rate: str | None) -> str | None:
    if sample_rate:
        return f"{sample_rate} {SAMPLES}"
    return f"{step_rate} steps/s" if step_rate else None


def read_rate(text: str | None) -> float | None:
    """Return a rate of the status as a number; None: it is unknown, or no positive number."""
    try:
        rate = float(text or 0.0)
    except ValueError:
        return None
    return rate if 0.0 < rate < math.inf else None


def estimate_seconds_left(progress: Progress) -> int | None:
    """Return the remaining seconds at the last step; None: the progress has no remaining time."""
    if progress.eta is None:
        return None
    return _eta(progress.step, progress.total_steps, progress.steps_per_second)


def _eta(steps: float | None, total: float | None, steps_per_second: str | None) -> int | None:
    rate = read_rate(steps_per_second)
    if not steps or not total or rate is None:
        return None
    remaining = max(total - steps, 0.0) / rate
    return round(remaining) if 0 <= remaining < 1e9 else None


def drop_eta(progress: Progress | None) -> Progress | None:
    """Return the progress of a job that makes no steps at present, which has no remaining time."""
    return None if progress is None else replace(progress, eta=None)


def drop_pace(progress: Progress | None) -> Progress | None:
    """Return the progress of a job whose steps have stopped, which has no throughput and no remaining time.

    The last measured rates stay: the cost of repeated steps is computed from them.
    """
    paceless = drop_eta(progress)
    return None if paceless is None else replace(paceless, throughput=None)
