"""Pods that cannot reach pod 0 or a peer, by their own reports: the reason PeerUnreachable. Pure."""

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from ddp_operator.api import constants
from ddp_operator.api.status import Status
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.metrics_page import Page
from ddp_operator.decide.observation import UnreachableReport
from ddp_operator.decide.observed_attempt import ObservedAttempt
from ddp_pod.contract.failure_text import UNRESOLVED

READ_INTERVAL: Final = 10.0
"""Seconds between two reads of the pages of pod 0's peers."""
_PATIENCE: Final = timedelta(seconds=5)
_LATE_HEARTBEAT: Final = 15.0
_MASTER: Final = "cannot reach pod 0 "
_ADDRESS: Final = re.compile(r"[0-9a-fA-F]*[.:][0-9a-fA-F.:]+")


def needs_peer_reports(status: Status, page: Page | None, page_lost_since: datetime | None, now: datetime) -> bool:
    """Return whether the pages of pod 0's peers may report why it waits or makes no step, or why its page is lost."""
    if page_lost_since is not None:
        return now - page_lost_since >= _PATIENCE
    if page is not None and page.values.get(constants.METRIC_STALLED, 0.0) > 0:
        return True
    rendezvoused = status.condition(c.RENDEZVOUSED)
    if page is None or page.launcher_phase != "Rendezvous" or rendezvoused is None:
        return False
    return rendezvoused.status == "False" and now - rendezvoused.last_transition_time >= _PATIENCE


def describe_waiting(attempt: ObservedAttempt, rendezvous: Fact) -> Fact:
    """Return Rendezvoused with what keeps a pod from its peers, if the workers have not joined."""
    waits = rendezvous.status == "False" and rendezvous.reason == c.WAITING_FOR_WORKERS
    reports = attempt.state.observation.unreachable
    if not waits or not reports:
        return rendezvous
    return Fact(c.RENDEZVOUSED, "False", c.PEER_UNREACHABLE, f"{_describe(attempt, reports)} ({rendezvous.message})")


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
    heartbeat_age = page.values.get(constants.METRIC_HEARTBEAT_AGE, 0.0) if page is not None else 0.0
    if not is_peer and stall is None and not heartbeat_age >= _LATE_HEARTBEAT:
        return None
    consequence = stall.message if stall is not None else "training cannot continue until it does"
    return Fact(c.PROGRESSING, "False", c.PEER_UNREACHABLE, f"{_describe(attempt, reports)}; {consequence}")


def _describe(attempt: ObservedAttempt, reports: Iterable[UnreachableReport]) -> str:
    report, *others = reports
    more = format_more_pods(len(others))
    peers = _find_peers(attempt, report.message)
    names = f" (pod {c.list_indexes(peers)})" if peers else ""
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
