"""Stalls: jobs whose steps have stopped, and what their ranks do meanwhile. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ddp_operator.api import constants
from ddp_operator.api.display_texts import SLOW_REMEDY
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.conditions import Fact, list_indexes
from ddp_operator.decide.report import Page, build_progress
from ddp_operator.features.stalls.fields import FIELDS
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.run_report import StalledRank

_MAX_PLACES = 4
_IO = constants.STALLED_STATES.index("IO")
_BUSY = constants.STALLED_STATES.index("Busy")


@dataclass(frozen=True, slots=True)
class ObservedStall:
    """A stall: its start, the steps of the ranks, and the states of hanging ranks."""

    since: datetime
    ranks: Mapping[int, RankProgress] = field(default_factory=dict)
    places: tuple[StalledRank, ...] = ()


def is_stalled(job: DDPTrainingJob, page: Page | None) -> bool:
    """Return whether steps have stopped.

    They have if none was made for a third of the watchdog's time and no checkpoint is being saved, or if the launcher
    reports a stall. If the script has reported no step, the launcher only knows that it uses no CPU. If steps are
    read from its log, this counts only after the time until the first step.
    """
    if page is None or page.is_held:
        return False
    watchdog = FIELDS.read(job.spec).watchdog
    stalled_seconds = page.stall.seconds or 0.0
    if page.training:
        saving = (page.progress.saving or 0.0) > 0
        heartbeat_is_late = (page.stall.heartbeat_age or 0.0) >= watchdog.stall_seconds / 3
        return stalled_seconds > 0 or (heartbeat_is_late and not saving)
    starting = job.spec.metrics.log_patterns and stalled_seconds < watchdog.start_seconds
    return stalled_seconds > 0 and not starting


def describe_stall(job: DDPTrainingJob, page: Page | None, stall: ObservedStall | None) -> Fact | None:
    """Return Progressing of a job whose steps have stopped; None: they have not. ``stall``: as observed in this pass.

    The message stays until a step or a heartbeat is reported, or the workers restart. A page without a stall is no
    progress: the hung workers may have been ended.
    """
    before = job.status.condition(c.PROGRESSING)
    if stall is not None:
        return Fact(c.PROGRESSING, "False", other_reasons.STALLED, _describe_stall(page, stall))
    if before is None or before.reason != other_reasons.STALLED or _has_progressed(job, page):
        return None
    return Fact(c.PROGRESSING, "False", other_reasons.STALLED, before.message)


def _has_progressed(job: DDPTrainingJob, page: Page | None) -> bool:
    """Return whether the page reports progress, or new workers, since the job stalled."""
    if page is None or page.is_empty:
        return False
    progress = build_progress(page.progress)
    before = job.status.progress
    stepped = progress is not None and before is not None and progress.step != before.step
    return not page.training or stepped or page.stall.heartbeat_age is not None


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
        return [*slow, *waiting, SLOW_REMEDY]
    return list(dict.fromkeys(place.what for place in places if place.order <= last))[:_MAX_PLACES]


def stalled_since(page: Page, now: datetime) -> datetime:
    """Return since when a page reports no step."""
    return now - timedelta(seconds=max(page.stall.heartbeat_age or 0.0, page.stall.seconds or 0.0))


def _describe_stall(page: Page | None, stall: ObservedStall) -> str:
    since = format_time(stall.since)
    state = f"no step since {since}"
    if page is not None and not page.training:
        state = f"no step reported, and the workers have used no CPU since {since}"
    awaited = page.stall.awaited if page is not None else ""
    cause = "; ".join(_choose_places(stall.places)) or awaited or _describe_lagging_ranks(stall.ranks)
    return f"{state}; {cause}"


def _describe_lagging_ranks(ranks: Mapping[int, RankProgress]) -> str:
    if not ranks:
        return "no per-rank steps are reported"
    steps = {rank: progress.known_step or 0.0 for rank, progress in ranks.items()}
    farthest = max(steps.values())
    lagging = sorted(rank for rank, step in steps.items() if step < farthest)
    if not lagging:
        return f"all {len(ranks)} ranks with a readable report are at step {farthest:.0f}"
    return f"ranks {list_indexes(lagging)} are behind step {farthest:.0f}"
