"""Pods on lost nodes: which may be declared failed, when, and on which nodes that depends.

A kubelet that is gone ends no pod. The API server then keeps a deleted pod for ever, and with it the index that the Job
controller wants to fill and the former pods that a next attempt waits for.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.kubeobjects import format_time
from ddp_operator.status.decision import FailPod
from ddp_operator.status.observation import Children, Observation
from ddp_operator.status.views import NodeView, PodView

REASON = "NodeLost"
_REASONS = ("DeletionByTaintManager", "DeletionByPodGC", REASON)
# How many nodes are asked after in one pass, pods freed in one pass, and nodes remembered in status.
MAX_NODES = 10
# How often a node is asked after, seconds.
_RECHECK = 10.0


def nodes_to_inspect(job: DDPTrainingJob, children: Children, now: datetime) -> tuple[str, ...]:
    """Return the nodes whose state decides about a pod now, at most ``MAX_NODES``."""
    found = {
        pod.node_name: None
        for pod in sorted(_pods(children), key=lambda pod: (pod.cut_off_since is None, pod.node_name))
        if pod.cut_off_since is not None or ((due := _due(job, pod)) is not None and due <= now)
    }
    return tuple(found)[:MAX_NODES]


def is_lost_with_node(pod: PodView) -> bool:
    """Tell whether a pod was taken away because its node is gone, or does not report."""
    return pod.disruption in _REASONS


def find_node_problem(pod: PodView, nodes: Mapping[str, NodeView]) -> str:
    """Return what is wrong with a living pod's node, so that nothing can be known of the pod; empty: nothing is."""
    node = nodes.get(pod.node_name)
    if not (pod.alive and pod.node_name) or (node is not None and node.ready):
        return ""
    if node is not None and node.ready is False:
        return node.message
    return "the node is not ready: its kubelet does not report" if pod.cut_off_since is not None else ""


def describe_lost_contact(
    job: DDPTrainingJob, observation: Observation, pods: Iterable[PodView]
) -> tuple[datetime, str] | None:
    """Return since when a pod of the attempt is on a node that is not ready, and what follows; None: none is."""
    found = [
        (since, pod, message)
        for pod in pods
        if (message := find_node_problem(pod, observation.nodes)) and (since := pod.cut_off_since or pod.deleted_at)
    ]
    if not found:
        return None
    since, pod, message = min(found, key=lambda item: (item[0], item[1].index))
    others = f" (and those of {len(found) - 1} more pods)" if len(found) > 1 else ""
    due = _due(job, pod)
    if due is not None:
        then = (
            f"unless it is Ready again by {format_time(due)}, pod {pod.index} is declared failed and the job restarts"
        )
    else:
        then = "Kubernetes evicts the pod when its toleration of the node's taint ends, by default after 5 minutes"
    where, when = f"pod {pod.index}'s node {pod.node_name}{others}", format_time(since)
    return since, f"{where} has been NotReady since {when} ({message}); {then}"


def lost_pods(job: DDPTrainingJob, observation: Observation, now: datetime) -> tuple[tuple[PodView, str], ...]:
    """Return the pods to declare failed now, each with what is wrong with its node."""
    found = [(pod, message) for pod in _pods(observation) if (message := _loss(job, pod, observation, now))]
    return tuple(sorted(found, key=lambda item: (item[0].attempt, item[0].index, item[0].name))[:MAX_NODES])


def fail_lost_pods(job: DDPTrainingJob, observation: Observation, now: datetime, waits: list[float]) -> list[FailPod]:
    """Return the pods to declare failed; add to ``waits`` when to look again, where a pod is in doubt."""
    look = next_check(job, observation, now)
    if look is not None:
        waits.append(look)
    found = [FailPod(pod.name, pod.uid, message) for pod, message in lost_pods(job, observation, now)]
    for pod in (*observation.pods, *observation.orphans):
        reported = pod.raw.get("status") or {}
        freed = pod.raw["metadata"].get("deletionGracePeriodSeconds") == 0
        if pod.phase == "Failed" and reported.get("reason") == REASON and not freed:
            # An operator has declared it failed, and ended before it could take the pod away.
            found.append(FailPod(pod.name, pod.uid, str(reported.get("message") or "")))
    return found


def next_check(job: DDPTrainingJob, observation: Observation, now: datetime) -> float | None:
    """Return in how many seconds a pod may have to be declared failed; None: no pod is in doubt."""
    due = [moment for pod in _pods(observation) if (moment := pod.cut_off_since or _due(job, pod)) is not None]
    return max(_RECHECK, (min(due) - now).total_seconds()) if due else None


def remember(failed: tuple[str, ...], nodes: Iterator[str]) -> tuple[str, ...]:
    """Return the list of failed nodes with some more, the latest last, without the eldest where there are too many."""
    kept = list(failed)
    for node in nodes:
        if node:
            kept = [*(name for name in kept if name != node), node]
    return tuple(kept[-MAX_NODES:])


def _pods(children: Children) -> Iterator[PodView]:
    for pod in (*children.pods, *children.orphans):
        if pod.alive and pod.node_name:
            yield pod


def _due(job: DDPTrainingJob, pod: PodView) -> datetime | None:
    """Return when a pod is in doubt: deleted or silent for longer than recovery.forceDeleteAfterSeconds."""
    patience = timedelta(seconds=job.spec.recovery.force_delete_after_seconds)
    if pod.deleted_at is not None:
        return pod.deleted_at + patience
    last_step = job.status.progress.last_step_time if job.status.progress else None
    # The node controller takes the readiness of the pods away when a kubelet falls silent. Where steps are still made
    # (or none are ever reported) the pod is left to the node's taints.
    silent = pod.unready_since is not None and last_step is not None and last_step < pod.unready_since
    return pod.unready_since + patience if silent and pod.has_run and pod.unready_since else None


def _loss(job: DDPTrainingJob, pod: PodView, observation: Observation, now: datetime) -> str:
    due = _due(job, pod)
    node = observation.nodes.get(pod.node_name, NodeView(True, ""))
    if due is None or now < due or node.ready:
        return ""
    if node.ready is None:
        # Nothing is known of the node: only a pod that has outlived its grace time by that long is given up.
        patience = timedelta(seconds=job.spec.recovery.force_delete_after_seconds)
        if pod.grace_ends is None or now < pod.grace_ends + patience:
            return ""
        return "the pod did not terminate within its grace period"
    return node.message
