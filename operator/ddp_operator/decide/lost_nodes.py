"""Pods on lost nodes: which of them the operator declares failed, when, and on which nodes that depends. Pure.

The kubelet of a lost node terminates no pod, so the API server keeps a deleted pod without limit. Until it is removed,
the Job controller creates no pod for its index, and the next attempt does not start.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.texts import format_more_pods
from ddp_operator.decide.decision import FailPod
from ddp_operator.decide.observation import Children, Observation
from ddp_operator.decide.views import NodeView, PodView

REASON = "NodeLost"
_REASONS = ("DeletionByTaintManager", "DeletionByPodGC", REASON)
# Limit of nodes read in one pass, of pods freed in one pass, and of nodes recorded in the status.
MAX_NODES = 10
# Seconds between two reads of a node.
_RECHECK = 10.0


class LostContact(NamedTuple):
    """A pod of the attempt runs on a node that is not ready."""

    since: datetime
    message: str


class _SilentPod(NamedTuple):
    since: datetime
    pod: PodView
    problem: str


def list_nodes_to_inspect(job: DDPTrainingJob, children: Children, now: datetime) -> tuple[str, ...]:
    """Return the nodes whose state decides about a pod now, at most ``MAX_NODES``."""
    pods = sorted(_list_placed_pods(children), key=lambda pod: (pod.cut_off_since is None, pod.node_name))
    nodes: dict[str, None] = {}
    for pod in pods:
        due = _find_due_time(job, pod)
        if pod.cut_off_since is not None or (due is not None and due <= now):
            nodes[pod.node_name] = None
    return tuple(nodes)[:MAX_NODES]


def is_lost_with_node(pod: PodView) -> bool:
    """Return whether a pod was taken away because its node is deleted or does not report."""
    return pod.disruption in _REASONS


def find_node_problem(pod: PodView, nodes: Mapping[str, NodeView]) -> str:
    """Return the problem of a living pod's node that hides the state of the pod; empty: there is none."""
    node = nodes.get(pod.node_name)
    if not (pod.alive and pod.node_name) or (node is not None and node.ready):
        return ""
    if node is not None and node.ready is False:
        return node.message
    return "the node is not ready: its kubelet does not report" if pod.cut_off_since is not None else ""


def describe_lost_contact(job: DDPTrainingJob, observation: Observation, pods: Iterable[PodView]) -> LostContact | None:
    """Return since when a pod of the attempt is on a node that is not ready, and what follows; None: none is."""
    silent_pods = []
    for pod in pods:
        problem = find_node_problem(pod, observation.nodes)
        since = pod.cut_off_since or pod.deleted_at
        if problem and since:
            silent_pods.append(_SilentPod(since, pod, problem))
    if not silent_pods:
        return None

    since, pod, problem = min(silent_pods, key=lambda silent: (silent.since, silent.pod.index))
    more = format_more_pods(len(silent_pods) - 1, preposition="of")
    state = f"node {pod.node_name} of pod {pod.index}{more} has been NotReady since {format_time(since)} ({problem})"
    due = _find_due_time(job, pod)
    if due is None:
        consequence = "Kubernetes evicts the pod when its toleration of the node's taint expires (default: 5 minutes)"
    else:
        consequence = (
            f"the operator declares pod {pod.index} failed and restarts the job at {format_time(due)}, unless the node "
            "is Ready by then"
        )
    return LostContact(since, f"{state}; {consequence}")


def find_lost_pods(job: DDPTrainingJob, observation: Observation, now: datetime) -> tuple[tuple[PodView, str], ...]:
    """Return the pods to declare failed now, each with the problem of its node."""
    lost = []
    for pod in _list_placed_pods(observation):
        problem = _find_loss(job, pod, observation, now)
        if problem:
            lost.append((pod, problem))
    lost.sort(key=lambda item: (item[0].attempt, item[0].index, item[0].name))
    return tuple(lost[:MAX_NODES])


def fail_lost_pods(job: DDPTrainingJob, observation: Observation, now: datetime, waits: list[float]) -> list[FailPod]:
    """Return the pods to declare failed; append to ``waits`` the seconds until the next check of a silent pod."""
    seconds = compute_next_check(job, observation, now)
    if seconds is not None:
        waits.append(seconds)

    actions = [FailPod(pod.name, pod.uid, problem) for pod, problem in find_lost_pods(job, observation, now)]
    for pod in (*observation.pods, *observation.orphans):
        reported = pod.raw.get("status") or {}
        removed = pod.raw["metadata"].get("deletionGracePeriodSeconds") == 0
        if pod.phase == "Failed" and reported.get("reason") == REASON and not removed:
            # An operator declared the pod failed and ended before it removed the pod.
            actions.append(FailPod(pod.name, pod.uid, str(reported.get("message") or "")))
    return actions


def compute_next_check(job: DDPTrainingJob, observation: Observation, now: datetime) -> float | None:
    """Return in how many seconds a pod may have to be declared failed; None: all pods report."""
    moments = []
    for pod in _list_placed_pods(observation):
        moment = pod.cut_off_since or _find_due_time(job, pod)
        if moment is not None:
            moments.append(moment)
    if not moments:
        return None
    return max(_RECHECK, (min(moments) - now).total_seconds())


def add_failed_nodes(failed: tuple[str, ...], nodes: Iterator[str]) -> tuple[str, ...]:
    """Return the failed nodes with more of them, the latest last; the oldest ones are dropped above the limit."""
    kept = list(failed)
    for node in nodes:
        if node:
            kept = [*(name for name in kept if name != node), node]
    return tuple(kept[-MAX_NODES:])


def _list_placed_pods(children: Children) -> Iterator[PodView]:
    for pod in (*children.pods, *children.orphans):
        if pod.alive and pod.node_name:
            yield pod


def _find_due_time(job: DDPTrainingJob, pod: PodView) -> datetime | None:
    """Return when a pod has been deleted or silent for recovery.forceDeleteAfterSeconds; None: it is neither."""
    patience = timedelta(seconds=job.spec.recovery.force_delete_after_seconds)
    if pod.deleted_at is not None:
        return pod.deleted_at + patience
    if pod.unready_since is None or not pod.has_run:
        return None
    # The node controller marks the pods of a silent kubelet as not ready. While steps are still made, or if none are
    # ever reported, the taints of the node decide.
    last_step = job.status.progress.last_step_time if job.status.progress else None
    if last_step is None or last_step >= pod.unready_since:
        return None
    return pod.unready_since + patience


def _find_loss(job: DDPTrainingJob, pod: PodView, observation: Observation, now: datetime) -> str:
    """Return why a pod has to be declared failed now; empty: it has not."""
    due = _find_due_time(job, pod)
    node = observation.nodes.get(pod.node_name, NodeView(True, ""))
    if due is None or now < due or node.ready:
        return ""
    if node.ready is not None:
        return node.message

    # The operator cannot read the node: only a pod that has outlived its grace period by that long counts as lost.
    patience = timedelta(seconds=job.spec.recovery.force_delete_after_seconds)
    if pod.grace_ends is None or now < pod.grace_ends + patience:
        return ""
    return "the pod did not terminate within its grace period"
