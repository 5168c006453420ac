"""Read the reports of pods, and measure rates from successive ones. Pure.

A report comes from the user's pod. It is decoded by the schema of ``ddp_pod.contract``, whose fields have limits; no
content raises an exception.
"""

from collections import deque

from ddp_operator.decide.report import STALLED, Counters, Page, Rates, average_rates, derive_rates, read_counters
from ddp_operator.reading.terminations import decode_object, sanitize_text
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.records import read_record
from ddp_pod.contract.report import REPORT_LIMIT, PodReport

# Rates are measured over this many seconds, if there are readings: one step is too short, an hour too long.
_RATE_WINDOW = 10.0
_LATE_STEPS = 10.0  # usual steps, after which a missing one is no slow step
_MAX_READINGS = 64


def decode_report(data: bytes) -> Page:
    """Return a pod's report; what is none, or too large, is an empty one."""
    return Page(**vars(read_record(PodReport, decode_object(data, REPORT_LIMIT), sanitize_text)))


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
