"""Rates and the remaining time in ``status.progress``, from successive reports of pod 0."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.conditions import is_finished, may_have_joined
from ddp_operator.decide.hooks import Feature, PodHook
from ddp_operator.decide.pace import RateMeter, Rates, average_rates, drop_eta, drop_pace, set_pace
from ddp_operator.decide.report import build_progress, find_last_report
from ddp_operator.decide.state import State
from ddp_operator.decide.views import Pods
from ddp_pod.contract.progress import RankProgress

if TYPE_CHECKING:  # of a pass, which the commands do not have
    from ddp_operator.reconcile.acting import PodPages

_WITHOUT_STEPS: Final = (
    *(c.HELD, other_reasons.STALLED, c.PEER_UNREACHABLE, c.NO_STEP_YET),
    *(other_reasons.NODE_NOT_READY, other_reasons.NODE_SILENT),  # no step since then
)


@dataclass(frozen=True, slots=True)
class PaceReading:
    """The rates at the last report of pod 0. ``meter``: has the reports before it."""

    meter: RateMeter
    rates: Rates | None = None


class _Report(NamedTuple):
    progress: RankProgress
    rates: Rates | None


async def observe(pages: "PodPages", former: PaceReading | None) -> PaceReading | None:
    """Return the rates at the report of this pass."""
    page = pages.page
    pods = pages.children.pods_of(pages.job.status.attempt)
    zero = next((pod for pod in pods if pod.index == 0 and pod.running), None)
    if page is None or zero is None:
        return former
    meter = RateMeter() if former is None else former.meter
    process = zero.uid, page.restarts
    return PaceReading(meter, meter.measure(process, page.progress, pages.now.timestamp()))


def account(state: State, status: Status) -> Status:
    """Return the status, which is about to be written, with its pace. A job that makes no step has no remaining time.

    The rates of a job that ends are those of the whole process, which no report before the end has.
    """
    progress = status.progress
    if progress is None:
        return status
    for report in _list_reports(state, status):
        if build_progress(report.progress) is not None:
            progress = set_pace(progress, report.progress, report.rates)

    progressing = status.condition(c.PROGRESSING)
    reason = "" if progressing is None else progressing.reason
    if status.phase != "Running" or reason == c.WAITING_FOR_PEERS:
        progress = drop_eta(progress)
    if progressing is not None and progressing.status != "True" and reason in _WITHOUT_STEPS:
        progress = drop_pace(progress)
    return status if progress == status.progress else replace(status, progress=progress)


def _list_reports(state: State, status: Status) -> Iterator[_Report]:
    """Yield the reports from which the progress of the status is, the latest last."""
    progressing = status.condition(c.PROGRESSING)
    if progressing is not None and progressing.reason == c.WAITING_FOR_PEERS:
        return
    page = state.observation.page
    is_last = is_finished(status) or status.attempt == state.status.attempt + 1
    if page is not None:
        reading = state.observation.find_observed(PaceReading)
        measured = None if is_last or reading is None else reading.rates
        yield _Report(page.progress, measured)
    if is_last or state.spec.suspend:
        yield from _read_end(state.pods)
    elif page is None and not state.pods and not may_have_joined(state.status.condition(c.RENDEZVOUSED)):
        yield from _read_end(state.observation.pods_of(status.attempt - 1))


def _read_end(pods: Pods) -> Iterator[_Report]:
    last = find_last_report(pods)
    if last is not None and last.progress is not None:
        yield _Report(last.progress, average_rates(last.progress))


FEATURE: Final = Feature(
    "pace", maturity="stable", page="metrics.md", pods=PodHook(PaceReading, observe), account=account
)
