"""What the feature reads of a job's pods, and keeps from one pass to the next."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from ddp_operator.api.status import Straggler
from ddp_operator.decide.report import Page
from ddp_operator.features.stalls.peers import UnreachableReport, needs_peer_reports
from ddp_operator.features.stalls.stall import ObservedStall, is_explained, is_stalled, stalled_since
from ddp_operator.features.stalls.stragglers import Comparison
from ddp_operator.reconcile.limits import READ_INTERVAL, is_due, sample_pods
from ddp_pod.contract.progress import RankProgress

if TYPE_CHECKING:  # of a pass, which the commands do not have
    from ddp_operator.reconcile.acting import PodPages


@dataclass(frozen=True, slots=True)
class StallReading:
    """What is observed of the ranks when the page of pod 0 is due, and what the next reading needs of it."""

    stragglers: tuple[Straggler, ...] | None = None
    """By that page. None: the ranks were not compared."""
    stall: ObservedStall | None = None
    """By that page. None: training makes steps, or no page reports steps."""
    unreachable: tuple[UnreachableReport, ...] = ()
    """Reports of pods that cannot reach pod 0 or a peer, by index."""
    last_stall: ObservedStall | None = None
    """The stall by the last page."""
    compared: Comparison | None = None
    """The ranks at the last comparison."""
    peers_read: datetime | None = None
    """Time of the last read of the peers' pages for what they cannot reach."""


async def observe(pages: "PodPages", former: StallReading | None) -> StallReading:
    """Return what the page of pod 0 shows, and at limited intervals those of its peers. Raises: ClusterError."""
    compared = await _compare_ranks(pages, former or StallReading())
    return await _read_unreachable(pages, compared)


async def _compare_ranks(pages: "PodPages", before: StallReading) -> StallReading:
    """Compare the ranks of sampled pods, once a minute and when steps have stopped."""
    page = pages.page
    reading = replace(before, stragglers=None, stall=None)
    if page is None:
        return reading
    stalled = is_stalled(pages.job, page)
    if not (stalled or (page.training and list_by_rank(page))):
        return replace(reading, last_stall=None)

    known = before.last_stall
    places = {place.rank: place for place in (*(known.places if known else ()), *page.stall.ranks)}
    ranks = list_by_rank(page)
    attempt = pages.job.status.attempt
    last = before.compared
    knows_cause = known is not None and (not places or is_explained(places.values()))
    if last is None or last.is_due(pages.now) or (stalled and not knows_cause):
        for _, peer_page in await pages.read(sample_pods(pages.children.pods_of(attempt))):
            ranks |= list_by_rank(peer_page)
            places.update((place.rank, place) for place in peer_page.stall.ranks)
        stragglers = None if last is None else last.find_stragglers(attempt, ranks)
        is_first = last is None or last.attempt != attempt
        reading = replace(reading, stragglers=stragglers, compared=Comparison(pages.now, attempt, ranks, is_first))

    stall = None
    if stalled:
        ordered = tuple(sorted(places.values(), key=lambda place: (place.order, place.rank)))
        stall = replace(known or ObservedStall(stalled_since(page, pages.now), ranks), places=ordered)
    return replace(reading, stall=stall, last_stall=stall)


async def _read_unreachable(pages: "PodPages", reading: StallReading) -> StallReading:
    """Read what pods cannot reach: by pod 0's page, or else by those of its peers at limited intervals."""
    page = pages.page
    if page is not None and page.unreachable:
        return replace(reading, unreachable=(UnreachableReport(0, page.unreachable),))
    if needs_peer_reports(pages.job.status, page, pages.page_lost_since, pages.now):
        if not is_due(reading.peers_read, pages.now, READ_INTERVAL):
            return reading
        read = await pages.read(sample_pods(pages.children.pods_of(pages.job.status.attempt)))
        reports = [UnreachableReport(pod.index, peer.unreachable) for pod, peer in read if peer.unreachable]
        return replace(reading, unreachable=tuple(sorted(reports)), peers_read=pages.now)
    is_lost = page is None and pages.page_lost_since is not None
    return reading if is_lost else replace(reading, unreachable=())


def list_by_rank(page: Page) -> dict[int, RankProgress]:
    """Return the ranks that report steps, by their number."""
    return {rank.rank: rank for rank in page.ranks if rank.known_step is not None}
