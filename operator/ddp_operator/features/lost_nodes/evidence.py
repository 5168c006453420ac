"""What witnesses know of silent pods, and which of these are lost. Pure.

There are three kinds of witnesses: the peers that probe a pod, the operator's own requests to it, and the Lease that
the kubelet of its node renews. At least two kinds must agree, and nothing may contradict them: soon if the Lease is one
of them, later if only the network shows it. In doubt the rules wait: a wrong decision ends a healthy pod, a late one
costs seconds.
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
UNREACHED_SECONDS: Final = 8.0
"""The same for a pod whose Lease is no witness: for how long neither peers nor the operator must have reached it.

Its node lives, and the network of its pods does not: no step can be made until that is repaired. One that only receives
nothing has its Lease renewed once more, because the request for it still arrives.
"""
RENEWALS: Final = 1.15
"""Intervals of its renewal after which a Lease is late. The kubelet adds 4 % to an interval."""
_REACHED_LATELY: Final = 4.0
_OFF: Final = "it has no power or no network, or restarts"
_LIVES: Final = ", while the pod was silent: the node lives, and the pod or its network does not"
_RENEWED_AFTER: Final = 3.0  # the beginning of the silence, which the witnesses notice late

Reach = Literal["", "Answers", "Refused", "Frozen", "Silent"]
"""How the operator's own requests to a pod end; empty: the pod has never answered one.

``Refused``: its machine does, for a launcher that is not there, so it has ended, or its node has restarted.
"""


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
    """The evidence about one pod that a witness has no answer from.

    ``peers``: seconds for which each peer has had no answer from it, 0 for one that has; ``reach``: of the operator's
    own requests, for ``reach_seconds``; ``lease``: of its node, None if it cannot be read, for ``lease_problem``;
    ``end``: the end of its node since, after which the pod is not there; empty: none that is known.
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
    """Return the suspicions of the pods, by their UIDs."""
    silent = [(pod, _find_silence(pod)) for pod in evidence.silent]
    suspected = [(pod, silence) for pod, silence in silent if silence is not None]
    split = _find_split(evidence, len({pod.node for pod, _ in suspected}) + evidence.unexamined)
    outage = _find_outage(evidence)
    suspicions = {}
    for pod, silence in suspected:
        text, is_lost = _conclude(pod, silence, split, outage)
        since = now - timedelta(seconds=silence.seconds)
        suspicions[pod.uid] = Suspicion(since, f"{silence.text}{text}", is_lost, silence.is_frozen)
    return suspicions


class _Silence(NamedTuple):
    """Since when, and for whom a pod is silent. ``is_long``: for long enough.

    ``is_unreached``: it was not reached for so long that the Lease does not matter.
    """

    seconds: float
    text: str
    is_long: bool
    is_frozen: bool
    is_unreached: bool = False


def _find_silence(pod: PodEvidence) -> _Silence | None:
    """Return the silence of a pod; None: the operator reaches it, or most of its peers do."""
    if pod.reach == "Refused":
        text = "its machine answers, but its launcher has ended"
        return _Silence(pod.reach_seconds, text, is_long=True, is_frozen=False) if pod.end else None
    if pod.reach == "Answers" and pod.reach_seconds < _REACHED_LATELY:
        return None
    silences = sorted((seconds for seconds in pod.peers if seconds > 0), reverse=True)
    majority = len(pod.peers) // 2 + 1
    if len(silences) >= majority:
        seconds = silences[majority - 1]
        text = f"{len(silences)}/{len(pod.peers)} of its peers get no answer from it"
        if pod.reach == "Silent":
            text += ", nor does the operator"
        is_unreached = pod.reach == "Silent" and min(seconds, pod.reach_seconds) >= UNREACHED_SECONDS
        return _Silence(seconds, text, seconds >= SILENT_SECONDS, is_frozen=False, is_unreached=is_unreached)
    if pod.reach == "Frozen":
        is_long = pod.reach_seconds >= FROZEN_SECONDS
        text = "its machine accepts connections, but its launcher does not respond"
        return _Silence(pod.reach_seconds, text, is_long, is_frozen=True)
    return None


def _find_split(evidence: JobEvidence, suspected: int) -> str:
    """Return why no pod of the job may be declared lost if so many nodes are suspected; empty: it may.

    Of two nodes one may be lost; of more the rest has to be a majority.
    """
    if suspected * 2 >= evidence.nodes and (suspected, evidence.nodes) != (1, 2):
        return (
            f"{suspected}/{evidence.nodes} nodes are silent at once, as if the network were split: the operator waits"
        )
    return ""


def _find_outage(evidence: JobEvidence) -> str:
    """Return why a late Lease is no evidence about its node; empty: it is."""
    if evidence.late and evidence.late >= evidence.fresh:
        return "the Leases of other nodes are late too, as after an outage of the API server: the operator waits"
    if not evidence.fresh:
        return "no Lease of another node can be read: the operator waits"
    return ""


class _Conclusion(NamedTuple):
    """What follows from a silence, as the rest of its text."""

    text: str
    is_lost: bool


def _conclude(pod: PodEvidence, silence: _Silence, split: str, outage: str) -> _Conclusion:
    """Return what follows. ``split``, ``outage``: why a pod, or a late Lease, may not count as lost now."""
    if pod.end:
        return _Conclusion(f": its node {pod.end}", is_lost=True)
    lease = pod.lease
    witness = f"; {pod.lease_problem}"
    if lease is not None:
        witness = f", and its kubelet has renewed its Lease {lease.seconds:.0f} s ago"
    if split:
        return _Conclusion(f"{witness}; {split}", is_lost=False)
    if silence.is_unreached:
        return _Conclusion(f"{witness}{_explain_unreached(lease, silence)}", is_lost=True)
    if lease is None:
        return _Conclusion(witness, is_lost=False)
    if not lease.is_late:
        return _Conclusion(f"{witness}{_explain_wait(lease, silence)}", is_lost=False)
    if outage or not silence.is_long:
        return _Conclusion(f"{witness}; {outage}" if outage else witness, is_lost=False)
    state = "it is frozen" if silence.is_frozen else _OFF
    return _Conclusion(f"{witness}: {state}", is_lost=True)


def _explain_unreached(lease: LeaseAge | None, silence: _Silence) -> str:
    if lease is None:
        return ": it is lost without this witness"
    if lease.is_late:
        return f": {_OFF}"
    return _LIVES if _has_renewed(lease, silence) else ": nobody reaches the pod"


def _explain_wait(lease: LeaseAge, silence: _Silence) -> str:
    if not silence.is_frozen and _has_renewed(lease, silence):
        return _LIVES
    return f"; it counts as lost after {RENEWALS * lease.interval:.0f} s without a renewal"


def _has_renewed(lease: LeaseAge, silence: _Silence) -> bool:
    """Return whether the Lease was renewed while the pod was silent."""
    return lease.seconds + _RENEWED_AFTER < silence.seconds
