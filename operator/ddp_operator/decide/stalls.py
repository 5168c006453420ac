"""Jobs that make no steps: stragglers, stalls, and pods that do not reach their peers. Pure.

docs/metrics.md has the formulas.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from statistics import median_low
from typing import Final, NamedTuple

from ddp_operator.api import constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status, Straggler, StragglerCause
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact, list_indexes
from ddp_operator.decide.losses import is_replacing
from ddp_operator.decide.report import Page, build_progress
from ddp_operator.decide.state import Observation, Stall, UnreachableReport
from ddp_operator.decide.views import PodView
from ddp_pod.contract.failure_text import UNRESOLVED
from ddp_pod.contract.progress import MachineTime, RankProgress
from ddp_pod.contract.report import StalledRank

Ranks = Mapping[int, RankProgress]

WINDOW = 60.0
"""Seconds between two readings of all ranks, the time over which they are compared."""
FIRST_WINDOW = 15.0
"""The same for the first two readings of an attempt, if they are _FIRST_STEPS apart."""
_FIRST_STEPS: Final = 10
MAX_PODS = 16
RATIO = 1.3
_COUNTED_CAUSES: Final[Mapping[str, StragglerCause]] = {
    "throttled_seconds": "throttled",
    "memory_seconds": "memory",
    "storage_seconds": "storage",
}
_ASLEEP: Final = 0.3
"""The share of its step for which a process uses a CPU, below which it sleeps for most of it."""
_MAX_STRAGGLERS = 8
_MAX_PLACES = 4
_IO = constants.STALLED_STATES.index("IO")
_BUSY = constants.STALLED_STATES.index("Busy")
SLOW_REMEDY = "if this is slow by design, raise spec.watchdog.stallSeconds or call exporter.heartbeat()"
READ_INTERVAL: Final = 10.0
"""Seconds between two reads of the pages of pod 0's peers."""
_PATIENCE: Final = timedelta(seconds=5)
_LATE_HEARTBEAT: Final = 15.0
_MASTER: Final = "cannot reach pod 0 "
_ADDRESS: Final = re.compile(r"[0-9a-fA-F]*[.:][0-9a-fA-F.:]+")


def sample_pods(pods: Sequence[PodView], most: int = MAX_PODS) -> tuple[PodView, ...]:
    """Return the running pods whose pages are read beside pod 0's: all, or an even spread of ``most`` - 1."""
    peers = [pod for pod in pods if pod.index != 0 and pod.phase == "Running" and not pod.deleting]
    if len(peers) < most:
        return tuple(peers)
    return tuple(peers[i * len(peers) // (most - 1)] for i in range(most - 1))


class Comparison(NamedTuple):
    """A reading of all ranks with which the next one is compared. ``is_first``: of an attempt."""

    time: datetime
    attempt: int
    ranks: Ranks
    is_first: bool

    def is_due(self, now: datetime) -> bool:
        """Return whether it is time for the next reading."""
        return (now - self.time).total_seconds() >= (FIRST_WINDOW if self.is_first else WINDOW)

    def find_stragglers(self, attempt: int, ranks: Ranks) -> tuple[Straggler, ...] | None:
        """Return the stragglers by the next reading; None if it is of another attempt."""
        if attempt != self.attempt:
            return None
        return find_stragglers(self.ranks, ranks, least_steps=_FIRST_STEPS if self.is_first else 1)


class _RankTime(NamedTuple):
    """The mean step of one rank, in seconds. ``machine``: what the machine gave and took in it."""

    compute: float
    data: float
    machine: MachineTime

    @property
    def own(self) -> float:
        """The time that it does not wait for other ranks."""
        return self.compute + self.data

    @property
    def with_cpu(self) -> float:
        """The same without the time for which it waited for a CPU."""
        # Not their sum: the main thread may wait for a CPU while others do.
        return self.own - max(self.machine.cpu_wait_seconds or 0.0, self.machine.child_cpu_wait_seconds or 0.0)


def find_stragglers(before: Ranks, now: Ranks, *, least_steps: int = 1) -> tuple[Straggler, ...]:
    """Return the ranks that take longer for a step than their peers, between two readings of all ranks.

    Ranks that have made fewer than ``least_steps`` are left out.
    """
    times: dict[int, _RankTime] = {}
    for rank in before.keys() & now.keys():
        time = _measure_step(before[rank], now[rank], least_steps)
        if time is not None:
            times[rank] = time
    # The lower median: between two ranks, the mean of both would make any slow one at most twice as slow.
    usual = median_low(time.own for time in times.values()) if len(times) > 1 else 0.0
    if not usual > 0:
        return ()
    slow = sorted((-time.own / usual, rank) for rank, time in times.items() if time.own / usual >= RATIO)
    others = [time for time in times.values() if time.own / usual < RATIO]
    return tuple(
        Straggler(rank=rank, ratio=f"{min(-ratio, 1e6):.1f}", cause=_find_cause(times[rank], usual, others))
        for ratio, rank in slow[:_MAX_STRAGGLERS]
    )


def _measure_step(before: RankProgress, now: RankProgress, least_steps: int) -> _RankTime | None:
    """Return the time of a rank's steps between two readings; None: it made too few, or its process restarted."""
    steps = (now.steps or 0.0) - (before.steps or 0.0)
    compute = (now.compute_seconds or 0.0) - (before.compute_seconds or 0.0)
    data_wait = (now.data_seconds or 0.0) - (before.data_seconds or 0.0)
    if steps < least_steps or compute < 0 or data_wait < 0:
        return None
    return _RankTime(compute / steps, data_wait / steps, _measure_machine(before.machine, now.machine, steps))


def _measure_machine(before: MachineTime, now: MachineTime, steps: float) -> MachineTime:
    """Return the machine's seconds of a step; None where one reading lacks them, or a process has ended."""
    means: dict[str, float | None] = {}
    for name in (item.name for item in fields(MachineTime)):
        first, last = getattr(before, name), getattr(now, name)
        means[name] = None if first is None or last is None or last < first else (last - first) / steps
    return MachineTime(**means)


def _find_cause(slow: _RankTime, usual: float, others: Sequence[_RankTime]) -> StragglerCause:
    """Return why a rank is slow: a wait that explains half of the excess and no other rank has, or its own work.

    Waits for a CPU are the cause only if the rank would not be slow without them.
    """

    def explains(name: str) -> bool:
        lost = getattr(slow.machine, name)
        most = max((getattr(time.machine, name) or 0.0 for time in others), default=0.0)
        return lost is not None and lost - most >= (slow.own - usual) / 2

    for name, cause in _COUNTED_CAUSES.items():
        if explains(name):
            return cause
    # On a busy node a rank waits for as long as it computes: one that computes more is slow without the waits too.
    machine = slow.machine
    if slow.with_cpu < median_low(time.with_cpu for time in others) * RATIO:
        return "cpu"
    if slow.data > slow.compute:
        return "data"
    if machine.cpu_seconds is None:
        return "compute"
    is_asleep = machine.cpu_seconds + (machine.cpu_wait_seconds or 0.0) < slow.own * _ASLEEP
    if not is_asleep:
        return "compute"
    return "data" if explains("child_cpu_seconds") else "sleep"


def is_stalled(job: DDPTrainingJob, page: Page | None) -> bool:
    """Return whether steps have stopped.

    They have if none was made for a third of the watchdog's time and no checkpoint is being saved, or if the launcher
    reports a stall. If the script has reported no step, the launcher only knows that it uses no CPU. If steps are
    read from its log, this counts only after the time until the first step.
    """
    if page is None or page.is_held:
        return False
    watchdog = job.spec.watchdog
    stalled_seconds = page.stall.seconds or 0.0
    if page.training:
        saving = (page.progress.saving or 0.0) > 0
        heartbeat_is_late = (page.stall.heartbeat_age or 0.0) >= watchdog.stall_seconds / 3
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
        return Fact(c.PROGRESSING, "False", c.STALLED, _describe_stall(page, observation.stall))
    if before is None or before.reason != c.STALLED or _has_progressed(job, page):
        return None
    return Fact(c.PROGRESSING, "False", c.STALLED, before.message)


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


def _describe_stall(page: Page | None, stall: Stall) -> str:
    since = format_time(stall.since)
    state = f"no step since {since}"
    if page is not None and not page.training:
        state = f"no step reported, and the workers have used no CPU since {since}"
    awaited = page.stall.awaited if page is not None else ""
    cause = "; ".join(_choose_places(stall.places)) or awaited or _describe_lagging_ranks(stall.ranks)
    return f"{state}; {cause}"


def _describe_lagging_ranks(ranks: Ranks) -> str:
    if not ranks:
        return "no per-rank steps are reported"
    steps = {rank: progress.known_step or 0.0 for rank, progress in ranks.items()}
    farthest = max(steps.values())
    lagging = sorted(rank for rank, step in steps.items() if step < farthest)
    if not lagging:
        return f"all {len(ranks)} ranks with a readable report are at step {farthest:.0f}"
    return f"ranks {list_indexes(lagging)} are behind step {farthest:.0f}"


def needs_peer_reports(status: Status, page: Page | None, page_lost_since: datetime | None, now: datetime) -> bool:
    """Return whether the pages of pod 0's peers may report why it waits or makes no step, or why its page is lost."""
    if page_lost_since is not None:
        return now - page_lost_since >= _PATIENCE
    if page is not None and (page.stall.seconds or 0.0) > 0:
        return True
    rendezvoused = status.condition(c.RENDEZVOUSED)
    if page is None or page.phase != "Rendezvous" or rendezvoused is None:
        return False
    return rendezvoused.status == "False" and now - rendezvoused.last_transition_time >= _PATIENCE


def describe_waiting(attempt: ObservedAttempt, rendezvous: Fact) -> Fact:
    """Return Rendezvoused with what keeps a pod from its peers, if the workers have not joined."""
    waits = rendezvous.status == "False" and rendezvous.reason == c.WAITING_FOR_WORKERS
    reports = [report for report in attempt.state.observation.unreachable if not _is_about_lost_pod(attempt, report)]
    if not waits or not reports:
        return rendezvous
    return Fact(
        c.RENDEZVOUSED, "False", c.PEER_UNREACHABLE, f"{_describe_reports(attempt, reports)} ({rendezvous.message})"
    )


def _is_about_lost_pod(attempt: ObservedAttempt, report: UnreachableReport) -> bool:
    """Return whether a report is about the address of a pod that is being replaced: that of no pod, and not pod 0's."""
    is_known = report.message.startswith(_MASTER) or bool(_find_peers(attempt, report.message))
    return is_replacing(attempt.state) and not is_known


def describe_cut_off_training(attempt: ObservedAttempt, stall: Fact | None) -> Fact | None:
    """Return Progressing of a job whose pods do not reach each other while they train; None: they do.

    ``stall``: Progressing of a job whose steps have stopped. An address that belongs to no pod of the job may be a
    server that training does not need, so it counts only where no step is made.
    """
    reports = attempt.state.observation.unreachable
    if not reports or not (attempt.was_joined or stall):
        return None
    is_peer = any(_find_peers(attempt, report.message) for report in reports)
    page = attempt.state.observation.page
    heartbeat_age = (page.stall.heartbeat_age or 0.0) if page is not None else 0.0
    if not is_peer and stall is None and not heartbeat_age >= _LATE_HEARTBEAT:
        return None
    consequence = stall.message if stall is not None else "training cannot continue until it does"
    return Fact(c.PROGRESSING, "False", c.PEER_UNREACHABLE, f"{_describe_reports(attempt, reports)}; {consequence}")


def _describe_reports(attempt: ObservedAttempt, reports: Iterable[UnreachableReport]) -> str:
    report, *others = reports
    more = format_more_pods(len(others))
    peers = _find_peers(attempt, report.message)
    names = f" (pod {list_indexes(peers)})" if peers else ""
    zero = attempt.pods.newest.get(0)
    if (
        not peers
        and zero is not None
        and report.message.startswith(_MASTER)
        and not report.message.endswith(UNRESOLVED)
    ):
        names = f" (pod 0 has the address {zero.address})"
    return f"pod {report.pod}{more} reports: {report.message}{names}"


def _find_peers(attempt: ObservedAttempt, message: str) -> list[int]:
    """Return the indexes of the pods whose addresses a report names."""
    addresses = {text.strip(".:") for text in _ADDRESS.findall(message)}
    return [index for index, pod in attempt.pods.newest.items() if pod.address and pod.address in addresses]
