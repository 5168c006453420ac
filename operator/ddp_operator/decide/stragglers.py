"""Stragglers and stalls: ranks that are slower than their peers, and steps that have stopped. Pure.

docs/metrics.md has the formulas.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median_low
from typing import NamedTuple

from ddp_operator.api import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Straggler
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.metrics_page import Page, RankSample, StalledRank, build_progress
from ddp_operator.decide.observation import Observation, Stall
from ddp_operator.decide.views import PodView

Ranks = Mapping[int, RankSample]

WINDOW = 60.0
"""Seconds between two readings of all ranks, the time over which they are compared."""
MAX_PODS = 16
RATIO = 1.3
_MAX_STRAGGLERS = 8
_MAX_PLACES = 4
_IO = constants.STALLED_STATES.index("IO")
_BUSY = constants.STALLED_STATES.index("Busy")
_SLOW_REMEDY = "if this is slow by design, raise spec.watchdog.stallSeconds or call exporter.heartbeat()"


def sample_pods(pods: Sequence[PodView], most: int = MAX_PODS) -> tuple[PodView, ...]:
    """Return the running pods whose pages are read beside pod 0's: all, or an even spread of ``most`` - 1."""
    peers = [pod for pod in pods if pod.index != 0 and pod.phase == "Running" and not pod.deleting]
    if len(peers) < most:
        return tuple(peers)
    return tuple(peers[i * len(peers) // (most - 1)] for i in range(most - 1))


class _RankTime(NamedTuple):
    """The mean seconds of one rank's step, and whether it spent most of them waiting for data."""

    seconds: float
    waits_for_data: bool


def find_stragglers(before: Ranks, now: Ranks) -> tuple[Straggler, ...]:
    """Return the ranks that take longer for a step than their peers, between two readings of all ranks."""
    times: dict[int, _RankTime] = {}
    for rank in before.keys() & now.keys():
        time = _measure_step(before[rank], now[rank])
        if time is not None:
            times[rank] = time
    # The lower median: between two ranks, the mean of both would make any slow one at most twice as slow.
    usual = median_low(time.seconds for time in times.values()) if len(times) > 1 else 0.0
    if not usual > 0:
        return ()
    slow = sorted((-time.seconds / usual, rank) for rank, time in times.items() if time.seconds / usual >= RATIO)
    return tuple(
        Straggler(
            rank=rank,
            ratio=f"{min(-ratio, 1e6):.1f}",
            cause="data" if times[rank].waits_for_data else "compute",
        )
        for ratio, rank in slow[:_MAX_STRAGGLERS]
    )


def _measure_step(before: RankSample, now: RankSample) -> _RankTime | None:
    """Return the time of a rank's steps between two readings; None: it made none, or its process restarted."""
    steps = now.steps - before.steps
    compute = now.compute - before.compute
    data_wait = now.data_wait - before.data_wait
    if steps < 1 or compute < 0 or data_wait < 0:
        return None
    return _RankTime((compute + data_wait) / steps, data_wait > compute)


def is_stalled(job: DDPTrainingJob, page: Page | None) -> bool:
    """Return whether steps have stopped.

    They have if none was made for a third of the watchdog's time and no checkpoint is being saved, or if the launcher
    reports a stall. If the script has reported no step, the launcher only knows that it uses no CPU. If steps are
    read from its log, this counts only after the time until the first step.
    """
    if page is None:
        return False
    watchdog = job.spec.watchdog
    stalled_seconds = _read_seconds(page, constants.METRIC_STALLED)
    if page.training:
        saving = page.values.get(constants.METRIC_SAVING, 0.0) > 0
        heartbeat_is_late = _read_seconds(page, constants.METRIC_HEARTBEAT_AGE) >= watchdog.stall_seconds / 3
        return stalled_seconds > 0 or (heartbeat_is_late and not saving)
    starting = job.spec.metrics.log_patterns and stalled_seconds < watchdog.start_seconds
    return stalled_seconds > 0 and not starting


def describe_stall(job: DDPTrainingJob, observation: Observation) -> Fact | None:
    """Return Progressing of a job whose steps have stopped; None: they have not.

    The message stays until a step or a heartbeat is reported, or the workers restart. A page without a stall is no
    progress: the hung workers may have been ended.
    """
    page = observation.page
    before = job.status.condition(c.PROGRESSING)
    if observation.stall is not None:
        return Fact(c.PROGRESSING, "False", c.STALLED, _describe(page, observation.stall))
    if before is None or before.reason != c.STALLED or _has_progressed(job, page):
        return None
    return Fact(c.PROGRESSING, "False", c.STALLED, before.message)


def _has_progressed(job: DDPTrainingJob, page: Page | None) -> bool:
    """Return whether the page reports progress, or new workers, since the job stalled."""
    if page is None:
        return False
    progress = build_progress(page.values)
    before = job.status.progress
    stepped = progress is not None and before is not None and progress.step != before.step
    return not page.training or stepped or constants.METRIC_HEARTBEAT_AGE in page.values


def is_explained(places: Iterable[StalledRank]) -> bool:
    """Return whether the rank for which its peers wait is known."""
    return any(place.order < _BUSY for place in places)


def _choose_places(places: Sequence[StalledRank]) -> list[str]:
    """Return the states of the ranks that explain a stall: missing ones, else computing ones, else all that wait."""
    first = min((place.order for place in places), default=0)
    last = _IO if first < _IO else first
    if first in (_IO, _BUSY):
        slow = [place.what for place in places if place.order == first][: _MAX_PLACES - 1]
        waiting = [place.what for place in places if place.order > _BUSY][:1]
        return [*slow, *waiting, _SLOW_REMEDY]
    return list(dict.fromkeys(place.what for place in places if place.order <= last))[:_MAX_PLACES]


def stalled_since(page: Page, now: datetime) -> datetime:
    """Return since when a page reports no step."""
    heartbeat_age = _read_seconds(page, constants.METRIC_HEARTBEAT_AGE)
    seconds = max(heartbeat_age, _read_seconds(page, constants.METRIC_STALLED))
    return now - timedelta(seconds=min(seconds, 1e8))


def _describe(page: Page | None, stall: Stall) -> str:
    since = format_time(stall.since)
    state = f"no step since {since}"
    if page is not None and not page.training:
        state = f"no step reported, and the workers have used no CPU since {since}"
    cause = "; ".join(_choose_places(stall.places)) or _describe_lagging_ranks(stall.ranks)
    return f"{state}; {cause}"


def _describe_lagging_ranks(ranks: Ranks) -> str:
    if not ranks:
        return "no per-rank steps are reported"
    steps = {rank: sample.step or sample.steps for rank, sample in ranks.items()}
    farthest = max(steps.values())
    lagging = sorted(rank for rank, step in steps.items() if step < farthest)
    if not lagging:
        return f"all {len(ranks)} ranks with a readable metrics page are at step {farthest:.0f}"
    return f"ranks {c.list_indexes(lagging)} are behind step {farthest:.0f}"


def _read_seconds(page: Page, name: str) -> float:
    value = page.values.get(name, 0.0)
    return value if math.isfinite(value) else 0.0
