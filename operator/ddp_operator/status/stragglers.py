"""Ranks beside each other: who keeps the others waiting, who has fallen behind. docs/metrics.md has the formulas."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median_low

from ddp_operator import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Straggler
from ddp_operator.kubeobjects import format_time
from ddp_operator.progress import Page, RankSample, StalledRank, build_progress
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact
from ddp_operator.status.observation import Observation, Stall
from ddp_operator.status.views import PodView

Ranks = Mapping[int, RankSample]

WINDOW = 60.0
"""Seconds between two looks at all ranks: what lies between them is the time over which they are compared."""
MAX_PODS = 16
RATIO = 1.3
_MAX_STRAGGLERS = 8
_MAX_NAMED = 10
_MAX_PLACES = 4
_BUSY = constants.STALLED_STATES.index("Busy")


def sample_pods(pods: Sequence[PodView], most: int = MAX_PODS) -> tuple[PodView, ...]:
    """Return the running pods whose pages are read beside pod 0's: all, or an even spread where there are many."""
    others = [pod for pod in pods if pod.index != 0 and pod.phase == "Running" and not pod.deleting]
    if len(others) < most:
        return tuple(others)
    return tuple(others[i * len(others) // (most - 1)] for i in range(most - 1))


def find_stragglers(before: Ranks, now: Ranks) -> tuple[Straggler, ...]:
    """Compare what the ranks have done between two looks. A rank that began anew meanwhile is left out."""
    work, waits = {}, {}
    for rank in before.keys() & now.keys():
        old, new = before[rank], now[rank]
        steps, compute, wait = new.steps - old.steps, new.compute - old.compute, new.data_wait - old.data_wait
        if steps >= 1 and compute >= 0 and wait >= 0:
            work[rank], waits[rank] = (compute + wait) / steps, wait > compute
    # The lower one: between two ranks, the mean of both would make any slow one at most twice as slow.
    usual = median_low(work.values()) if len(work) > 1 else 0.0
    if not usual > 0:
        return ()
    slow = sorted((-work[rank] / usual, rank) for rank in work if work[rank] / usual >= RATIO)
    return tuple(
        Straggler(rank=rank, ratio=f"{min(-ratio, 1e6):.1f}", cause="data" if waits[rank] else "compute")
        for ratio, rank in slow[:_MAX_STRAGGLERS]
    )


def is_stalled(job: DDPTrainingJob, page: Page | None) -> bool:
    """Tell whether steps have stopped.

    So they have where none was made for a third of the watchdog's time and no checkpoint is being saved, or where the
    launcher says so. Of a script that has shown no step the launcher only knows that it does nothing: where steps are
    to be read from its log, it has the time until its first step before that counts.
    """
    if page is None:
        return False
    watchdog, stalled = job.spec.watchdog, _seconds(page, constants.METRIC_STALLED)
    if page.training:
        saving = page.values.get(constants.METRIC_SAVING, 0.0) > 0
        return stalled > 0 or (_age(page) >= watchdog.stall_seconds / 3 and not saving)
    return stalled > 0 and not (job.spec.metrics.log_patterns and stalled < watchdog.start_seconds)


def describe_stall(job: DDPTrainingJob, observation: Observation) -> Fact | None:
    """Return Progressing of a job whose steps have stopped, or None.

    Its message stands until a step or a heartbeat comes, or the workers begin anew; that the page shows no stall any
    more is no progress, for so it is when the hung workers have been ended.
    """
    page, before = observation.page, job.status.condition(c.PROGRESSING)
    if observation.stall is not None:
        return Fact(c.PROGRESSING, "False", c.STALLED, _describe(page, observation.stall))
    stands = before is not None and before.reason == c.STALLED and not _goes_on(job, page)
    return Fact(c.PROGRESSING, "False", c.STALLED, before.message) if before is not None and stands else None


def _goes_on(job: DDPTrainingJob, page: Page | None) -> bool:
    """Tell whether something has happened since the job was stalled."""
    if page is None:
        return False
    found, before = build_progress(page.values), job.status.progress
    stepped = found is not None and before is not None and found.step != before.step
    return not page.training or stepped or constants.METRIC_HEARTBEAT_AGE in page.values


def is_explained(places: Iterable[StalledRank]) -> bool:
    """Tell whether it is known for which rank the others wait."""
    return any(one.order < _BUSY for one in places)


def _choose_places(places: Sequence[StalledRank]) -> list[str]:
    """Return what is said of the ranks: who is waited for, else who computes, else where all wait."""
    first = min((one.order for one in places), default=0)
    least = _BUSY - 1 if first < _BUSY else first
    return list(dict.fromkeys(one.what for one in places if one.order <= least))[:_MAX_PLACES]


def stalled_since(page: Page, now: datetime) -> datetime:
    """Return since when a page shows no step."""
    return now - timedelta(seconds=min(max(_age(page), _seconds(page, constants.METRIC_STALLED)), 1e8))


def _describe(page: Page | None, stall: Stall) -> str:
    since = format_time(stall.since)
    what = f"no step since {since}"
    if page is not None and not page.training:
        what = f"no step was reported, and the workers have used no CPU since {since}"
    return f"{what}; {'; '.join(_choose_places(stall.places)) or _who_lags(stall.ranks)}"


def _who_lags(ranks: Ranks) -> str:
    if not ranks:
        return "the ranks report no steps of their own"
    farthest = max(sample.step or sample.steps for sample in ranks.values())
    behind = sorted(rank for rank, sample in ranks.items() if (sample.step or sample.steps) < farthest)
    if not behind:
        return f"all {len(ranks)} ranks whose metrics pages answer are at step {farthest:.0f}"
    named = ", ".join(map(str, behind[:_MAX_NAMED])) + (", …" if len(behind) > _MAX_NAMED else "")
    return f"ranks {named} are behind step {farthest:.0f}"


def _age(page: Page | None) -> float:
    return _seconds(page, constants.METRIC_HEARTBEAT_AGE)


def _seconds(page: Page | None, name: str) -> float:
    value = page.values.get(name, 0.0) if page else 0.0
    return value if math.isfinite(value) else 0.0
