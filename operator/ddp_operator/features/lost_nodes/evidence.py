"""What witnesses know of silent pods, and which of these are lost. Pure.

There are three kinds of witnesses: the peers that probe a pod, the operator's own requests to it, and the Lease that
the kubelet of its node renews. At least two kinds must agree, the Lease among them, and nothing may contradict them.
In doubt the rules wait: a wrong decision ends a healthy pod, a late one costs seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

from ddp_operator.decide.state import Suspicion

SILENT_SECONDS: Final = 6.0
"""For how long a majority of the witnesses must have had no answer."""
FROZEN_SECONDS: Final = 6.0
"""For how long a pod must have accepted requests of the operator without a response."""
RENEWALS: Final = 1.3
"""Intervals of its renewal after which a Lease is late. The kubelet adds 4 % to an interval."""
_REACHED_LATELY: Final = 4.0
_RENEWED_AFTER: Final = 3.0  # the beginning of the silence, which the witnesses notice late

Reach = Literal["", "Answers", "Frozen", "Silent"]
"""How the operator's own requests to a pod end; empty: the pod has never answered one."""


class LeaseAge(NamedTuple):
    """The age of a node's Lease by the clock of the API server. ``interval``: seconds between two renewals."""

    seconds: float
    interval: float

    @property
    def is_late(self) -> bool:
        """Whether a renewal is missing."""
        return self.seconds > RENEWALS * self.interval


@dataclass(frozen=True, slots=True)
class PodEvidence:
    """What is known of one pod that a witness has no answer from.

    ``peers``: seconds for which each peer has had no answer from it, 0 for one that has; ``reach``: of the operator's
    own requests, for ``reach_seconds``; ``lease``: of its node, None if it cannot be read, for ``lease_problem``;
    ``end``: what has happened to its node since, after which the pod is not there; empty: nothing that is known.
    """

    name: str
    uid: str
    index: int
    node: str
    peers: Sequence[float]
    reach: Reach
    reach_seconds: float
    lease: LeaseAge | None
    lease_problem: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class JobEvidence:
    """The silent pods of a job. ``nodes``: the number of those on which the pods of the attempt run.

    ``unexamined``: the number of those from which a witness has no answer, but about which it was not asked yet.
    ``fresh``, ``late``: how many Leases of nodes of other pods are renewed, and are not: an API server that no kubelet
    reached makes all Leases late.
    """

    silent: Sequence[PodEvidence]
    nodes: int
    fresh: int
    late: int
    unexamined: int = 0


def judge_pods(evidence: JobEvidence, now: datetime) -> Mapping[str, Suspicion]:
    """Return what is suspected of the pods, by their UIDs."""
    silent = [(pod, _find_silence(pod)) for pod in evidence.silent]
    suspected = [(pod, silence) for pod, silence in silent if silence is not None]
    obstacle = _find_obstacle(evidence, len({pod.node for pod, _ in suspected}) + evidence.unexamined)
    return {pod.uid: _judge_pod(pod, silence, obstacle, now) for pod, silence in suspected}


class _Silence(NamedTuple):
    """Since when, and for whom a pod is silent. ``is_long``: for long enough."""

    seconds: float
    text: str
    is_long: bool
    is_frozen: bool


def _find_silence(pod: PodEvidence) -> _Silence | None:
    """Return the silence of a pod; None: the operator reaches it, or most of its peers do."""
    if pod.reach == "Answers" and pod.reach_seconds < _REACHED_LATELY:
        return None
    silences = sorted((seconds for seconds in pod.peers if seconds > 0), reverse=True)
    majority = len(pod.peers) // 2 + 1
    if len(silences) >= majority:
        seconds = silences[majority - 1]
        text = f"{len(silences)}/{len(pod.peers)} of its peers get no answer from it"
        if pod.reach == "Silent":
            text += ", nor does the operator"
        return _Silence(seconds, text, seconds >= SILENT_SECONDS, is_frozen=False)
    if pod.reach == "Frozen":
        is_long = pod.reach_seconds >= FROZEN_SECONDS
        text = "its machine accepts connections, but its launcher does not respond"
        return _Silence(pod.reach_seconds, text, is_long, is_frozen=True)
    return None


def _find_obstacle(evidence: JobEvidence, suspected: int) -> str:
    """Return why no pod of the job may be declared lost now; empty: nothing speaks against it."""
    # Of two nodes one may be lost; of more the rest has to be a majority.
    if suspected * 2 >= evidence.nodes and (suspected, evidence.nodes) != (1, 2):
        return (
            f"{suspected}/{evidence.nodes} nodes are silent at once, as if the network were split: the operator waits"
        )
    if evidence.late and evidence.late >= evidence.fresh:
        return "the Leases of other nodes are late too, as after an outage of the API server: the operator waits"
    if not evidence.fresh:
        return "no Lease of another node can be read: the operator waits"
    return ""


def _judge_pod(pod: PodEvidence, silence: _Silence, obstacle: str, now: datetime) -> Suspicion:
    since = now - timedelta(seconds=silence.seconds)
    if pod.end:
        return Suspicion(since, f"{silence.text}: its node {pod.end}", is_lost=True)
    if pod.lease is None:
        return Suspicion(since, f"{silence.text}; {pod.lease_problem}", is_lost=False)
    age = f"its kubelet has renewed its Lease {pod.lease.seconds:.0f} s ago"
    text = f"{silence.text}, and {age}"
    limit = RENEWALS * pod.lease.interval
    if pod.lease.seconds <= limit:
        conclusion = f"; it counts as lost after {limit:.0f} s without a renewal"
        if pod.lease.seconds + _RENEWED_AFTER < silence.seconds and not silence.is_frozen:
            conclusion = ", while the pod was silent: the node lives, and the pod or its network does not"
        return Suspicion(since, f"{text}{conclusion}", is_lost=False)
    if obstacle:
        return Suspicion(since, f"{text}; {obstacle}", is_lost=False)
    if not silence.is_long:
        return Suspicion(since, text, is_lost=False)
    state = "it is frozen" if silence.is_frozen else "it has no power or no network, or restarts"
    return Suspicion(since, f"{text}: {state}", is_lost=True)
