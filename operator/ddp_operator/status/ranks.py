"""Ranks beside each other: who keeps the others waiting, who has fallen behind. docs/metrics.md has the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median_low

from ddp_operator import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Straggler
from ddp_operator.progress import Page, RankSample
from ddp_operator.status import conditions as c
from ddp_operator.status.conditions import Fact
from ddp_operator.status.observation import Observation, PodView
from ddp_operator.status.termination import format_time

Ranks = Mapping[int, RankSample]

WINDOW = 60.0
"""Seconds between two looks at all ranks: what lies between them is the time over which they are compared."""
MAX_PODS = 16
_RATIO = 1.3
_MAX_STRAGGLERS = 8
_MAX_NAMED = 10


def choose_pods(pods: Sequence[PodView], most: int = MAX_PODS) -> tuple[PodView, ...]:
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
    slow = sorted((-work[rank] / usual, rank) for rank in work if work[rank] / usual >= _RATIO)
    return tuple(
        Straggler(rank=rank, ratio=f"{min(-ratio, 1e6):.1f}", cause="data" if waits[rank] else "compute")
        for ratio, rank in slow[:_MAX_STRAGGLERS]
    )


def is_stalled(job: DDPTrainingJob, page: Page | None) -> bool:
    """Tell whether steps have stopped, for a third of the watchdog's time, and no checkpoint is being saved."""
    age = _age(page)
    saving = page is not None and page.values.get(constants.METRIC_SAVING, 0.0) > 0
    return page is not None and page.training and age >= job.spec.watchdog.stall_seconds / 3 and not saving


def describe_stall(job: DDPTrainingJob, observation: Observation, now: datetime) -> Fact | None:
    """Return Progressing of a job whose steps have stopped, or None. Its words stand until steps are made again."""
    before = c.find(job.status.conditions, c.PROGRESSING)
    stalled_before = before is not None and before.reason == c.STALLED
    if observation.page is None and stalled_before and not observation.asked:
        return Fact(c.PROGRESSING, "False", c.STALLED, before.message if before else "")
    if not is_stalled(job, observation.page):
        return None
    if stalled_before and before is not None:
        return Fact(c.PROGRESSING, "False", c.STALLED, before.message)
    since = format_time(now - timedelta(seconds=min(_age(observation.page), 1e8)))
    return Fact(c.PROGRESSING, "False", c.STALLED, f"no step since {since}; {_who_lags(observation.ranks)}")


def _who_lags(ranks: Ranks) -> str:
    if not ranks:
        return "the ranks report no steps of their own"
    farthest = max(sample.step or sample.steps for sample in ranks.values())
    behind = sorted(rank for rank, sample in ranks.items() if (sample.step or sample.steps) < farthest)
    if not behind:
        return f"all {len(ranks)} ranks whose pages answer stand at step {farthest:.0f}"
    named = ", ".join(map(str, behind[:_MAX_NAMED])) + (", …" if len(behind) > _MAX_NAMED else "")
    return f"ranks {named} are behind step {farthest:.0f}"


def _age(page: Page | None) -> float:
    age = page.values.get(constants.METRIC_HEARTBEAT_AGE, 0.0) if page else 0.0
    return age if math.isfinite(age) else 0.0
