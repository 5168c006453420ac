"""Pods that do not reach their peers, as they report it. Pure."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from ddp_operator.api.status import Status
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide import conditions as c
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact, list_indexes
from ddp_operator.decide.losses import is_replacing
from ddp_operator.decide.report import Page
from ddp_pod.contract.failure_text import UNRESOLVED

_PATIENCE: Final = timedelta(seconds=5)
_LATE_HEARTBEAT: Final = 15.0
_MASTER: Final = "cannot reach pod 0 "
_ADDRESS: Final = re.compile(r"[0-9a-fA-F]*[.:][0-9a-fA-F.:]+")


class UnreachableReport(NamedTuple):
    """What a pod cannot reach, in its message. ``pod``: its completion index."""

    pod: int
    message: str


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


def describe_waiting(attempt: ObservedAttempt, rendezvous: Fact, unreachable: Sequence[UnreachableReport]) -> Fact:
    """Return Rendezvoused with what keeps a pod from its peers, if the workers have not joined."""
    waits = rendezvous.status == "False" and rendezvous.reason == c.WAITING_FOR_WORKERS
    reports = [report for report in unreachable if not _is_about_lost_pod(attempt, report)]
    if not waits or not reports:
        return rendezvous
    return Fact(
        c.RENDEZVOUSED, "False", c.PEER_UNREACHABLE, f"{_describe_reports(attempt, reports)} ({rendezvous.message})"
    )


def _is_about_lost_pod(attempt: ObservedAttempt, report: UnreachableReport) -> bool:
    """Return whether a report is about the address of a pod that is being replaced: that of no pod, and not pod 0's."""
    is_known = report.message.startswith(_MASTER) or bool(_find_peers(attempt, report.message))
    return is_replacing(attempt.state) and not is_known


def describe_cut_off_training(
    attempt: ObservedAttempt, stall: Fact | None, reports: Sequence[UnreachableReport]
) -> Fact | None:
    """Return Progressing of a job whose pods do not reach each other while they train; None: they do.

    ``stall``: Progressing of a job whose steps have stopped. An address that belongs to no pod of the job may be a
    server that training does not need, so it counts only where no step is made.
    """
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
