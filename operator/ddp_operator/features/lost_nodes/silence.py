"""Conditions of a job, one of whose nodes is silent: since when, and what follows. Pure."""

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.losses import find_due_time, find_node_problem
from ddp_operator.decide.state import State
from ddp_operator.decide.views import PodView


class LostContact(NamedTuple):
    """A pod of the attempt runs on a node that is not ready, or that witnesses get no answer from."""

    since: datetime
    message: str
    reason: str = other_reasons.NODE_NOT_READY


class _SilentPod(NamedTuple):
    since: datetime
    pod: PodView
    problem: str


def explain(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Return Rendezvoused or Progressing of a job, one of whose nodes may be lost. It explains more than peers know."""
    state = attempt.state
    if attempt.restart is not None or state.spec.suspend or fact.type not in (c.RENDEZVOUSED, c.PROGRESSING):
        return fact
    lost_contact = describe_lost_contact(state, attempt.pods)
    if lost_contact is None:
        return fact
    if fact.type == c.PROGRESSING:
        return _add_lost_contact(fact, lost_contact, attempt.reported)
    if fact.reason in (c.WAITING_FOR_WORKERS, c.PEER_UNREACHABLE):
        return Fact(c.RENDEZVOUSED, "False", lost_contact.reason, lost_contact.message)
    return fact


def _add_lost_contact(progressing: Fact, lost_contact: LostContact, status: Status) -> Fact:
    """Return Progressing of a job, one of whose nodes may be lost: training may continue there all the same."""
    last_step = status.progress.last_step_time if status.progress else None
    if progressing.status == "True" and last_step is not None and last_step > lost_contact.since:
        message = f"{progressing.message}; {lost_contact.message}"
        return Fact(c.PROGRESSING, "True", progressing.reason, message)
    return Fact(c.PROGRESSING, "False" if last_step else "Unknown", lost_contact.reason, lost_contact.message)


def describe_lost_contact(state: State, pods: Iterable[PodView]) -> LostContact | None:
    """Return since when a pod of the attempt is on a node that is not ready, and what follows; None: none is."""
    silent_pods = []
    for pod in pods:
        problem = find_node_problem(pod, state.observation.nodes)
        since = pod.cut_off_since or pod.deleted_at
        if problem and since:
            silent_pods.append(_SilentPod(since, pod, problem))
    if not silent_pods:
        return _describe_suspicions(state, pods)

    since, pod, problem = min(silent_pods, key=lambda silent: (silent.since, silent.pod.index))
    more = format_more_pods(len(silent_pods) - 1, preposition="of")
    report = f"node {pod.node_name} of pod {pod.index}{more} has been NotReady since {format_time(since)} ({problem})"
    due = find_due_time(state.job, pod)
    if due is None:
        consequence = "Kubernetes evicts the pod when its toleration of the node's taint expires (default: 5 minutes)"
    else:
        consequence = (
            f"the operator declares pod {pod.index} failed and restarts the job at {format_time(due)}, unless the node "
            "is Ready by then"
        )
    return LostContact(since, f"{report}; {consequence}")


def _describe_suspicions(state: State, pods: Iterable[PodView]) -> LostContact | None:
    """Return since when witnesses get no answer from a pod, and what they know; None: they do from all."""
    suspicions = state.observation.suspicions
    silent_pods = [
        _SilentPod(suspicions[pod.uid].since, pod, suspicions[pod.uid].message)
        for pod in pods
        if pod.alive and pod.uid in suspicions
    ]
    if not silent_pods:
        return None
    since, pod, problem = min(silent_pods, key=lambda silent: (silent.since, silent.pod.index))
    more = format_more_pods(len(silent_pods) - 1, preposition="of")
    message = f"node {pod.node_name} of pod {pod.index}{more} may be lost since {format_time(since)}: {problem}"
    return LostContact(since, message, other_reasons.NODE_SILENT)
