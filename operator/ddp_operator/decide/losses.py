"""Lost pods and nodes: which pods are declared failed, which are replaced in their Job, which nodes are left. Pure.

The life of a lost pod, whether a client deletes it, it is evicted, or its node is lost:

1. Its launcher gets SIGTERM (``Supervisor._on_signal``), announces the stop to its peers, and ends with 85. The
   kubelet of a lost node terminates nothing: ``find_lost_pods`` finds the pod, ``fail_lost_pods`` declares it failed
   and removes it. Until then the Job controller creates no pod for its index, and no further attempt starts.
2. The ranks of the peers lose it. If their launchers can wait, they restart the ranks, uncounted, and await the next
   round of the rendezvous (``InPlaceRestarts.observe``).
3. ``is_replaced`` decides between the two ways on. In its Job (ADR 0019): a spare joins at once, otherwise
   ``create_missing_pods`` returns its successor, as the Job controller would after a back-off.
4. Otherwise the attempt is over: ``diagnosis.diagnose`` returns the loss as its cause, which is not counted, and the
   next attempt starts once all pods have ended.

Features find troubles of nodes, and pods that others ask to leave.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta

from ddp_operator.api import child_names, constants
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.api.status import LastFailure, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, may_have_joined
from ddp_operator.decide.failures import describe_restart
from ddp_operator.decide.kueue import is_queued
from ddp_operator.decide.state import Children, CreatePod, EvictPod, FailPod, State, Trouble
from ddp_operator.decide.views import JobView, NodeView, PodView
from ddp_pod.contract.failure_table import CATEGORIES, KILLED, OOM, PREEMPTED
from ddp_pod.contract.plan import decode_plan

REASON = "NodeLost"
_REASONS = ("DeletionByTaintManager", "DeletionByPodGC", REASON)
# Limit of nodes read in one pass, and of pods freed in one pass.
MAX_NODES = 10
# Seconds between two reads of a node.
_RECHECK = 10.0
_SOON_LOST = timedelta(seconds=60)
_LATELY = timedelta(minutes=10)
_CLOCK_TOLERANCE = timedelta(seconds=10)
LOOK_SECONDS = 30.0
"""Seconds between two readings of the nodes."""


def list_nodes_to_inspect(job: DDPTrainingJob, children: Children, now: datetime) -> tuple[str, ...]:
    """Return the nodes whose state decides about a pod now, at most ``MAX_NODES``."""
    pods = sorted(_list_placed_pods(children), key=lambda pod: (pod.cut_off_since is None, pod.node_name))
    nodes: dict[str, None] = {}
    for pod in pods:
        due = find_due_time(job, pod)
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


def find_lost_pods(state: State) -> tuple[tuple[PodView, str], ...]:
    """Return the pods to declare failed now, each with the problem of its node."""
    lost = []
    for pod in _list_placed_pods(state.observation):
        problem = _find_loss(state, pod)
        if problem:
            lost.append((pod, problem))
    lost.sort(key=lambda item: (item[0].attempt, item[0].index, item[0].name))
    return tuple(lost[:MAX_NODES])


def fail_lost_pods(state: State, waits: list[float]) -> list[FailPod]:
    """Return the pods to declare failed; append to ``waits`` the seconds until the next check of a silent pod."""
    seconds = compute_next_check(state)
    if seconds is not None:
        waits.append(seconds)

    actions = [FailPod(pod.name, pod.uid, problem) for pod, problem in find_lost_pods(state)]
    for pod in (*state.observation.pods, *state.observation.orphans):
        reported = pod.raw.get("status") or {}
        removed = pod.raw["metadata"].get("deletionGracePeriodSeconds") == 0
        if pod.phase == "Failed" and reported.get("reason") == REASON and not removed:
            # An operator declared the pod failed and ended before it removed the pod.
            actions.append(FailPod(pod.name, pod.uid, str(reported.get("message") or "")))
    return actions


def compute_next_check(state: State) -> float | None:
    """Return in how many seconds a pod may have to be declared failed; None: all pods report."""
    moments = []
    for pod in _list_placed_pods(state.observation):
        moment = pod.cut_off_since or find_due_time(state.job, pod)
        if moment is not None:
            moments.append(moment)
    if not moments:
        return None
    return max(_RECHECK, (min(moments) - state.now).total_seconds())


def _list_placed_pods(children: Children) -> Iterator[PodView]:
    for pod in (*children.pods, *children.orphans):
        if pod.alive and pod.node_name:
            yield pod


def find_due_time(job: DDPTrainingJob, pod: PodView) -> datetime | None:
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


def _find_loss(state: State, pod: PodView) -> str:
    """Return why a pod has to be declared failed now; empty: it has not."""
    suspicion = state.observation.suspicions.get(pod.uid)
    if suspicion is not None and suspicion.is_lost:
        return suspicion.message
    due = find_due_time(state.job, pod)
    node = state.observation.nodes.get(pod.node_name, NodeView(True, ""))
    if due is None or state.now < due or node.ready:
        return ""
    if node.ready is not None:
        return node.message

    # The operator cannot read the node: only a pod that has outlived its grace period by that long counts as lost.
    patience = timedelta(seconds=state.spec.recovery.force_delete_after_seconds)
    if pod.grace_ends is None or state.now < pod.grace_ends + patience:
        return ""
    return "the pod did not terminate within its grace period"


def is_replaced(state: State, pod: PodView) -> bool:
    """Return whether a lost pod is replaced in its Job; otherwise the attempt is over.

    In a queue it always is, because a new Job would go to the end of the queue. In an elastic job it is if enough peers
    including pod 0 continue. In any other job the peers must be able to wait. A pod of a lost node may live on: pod 0
    could then train alone in an elastic job, or upload checkpoints beside its successor.
    """
    if is_queued(state.job, state.attempt_job) or _trains_without_lost_pods(state):
        return True
    if state.spec.recovery.count_disruptions or _was_replaced_before(state, pod):
        return False
    taken = pod.disrupted or pod.deleting or _is_killed_in_run(state, pod)
    has_place = bool(state.job.spares) or state.job.holds_pods or not is_lost_with_node(pod)
    has_place = has_place or _can_avoid_node(state, pod)
    return taken and has_place and _can_peers_wait(state)


def _can_avoid_node(state: State, pod: PodView) -> bool:
    """Return whether a pod of a lost node can be replaced elsewhere, and its successor has no rival."""
    is_avoided = pod.node_name in state.status.failed_nodes and state.spec.recovery.avoid_failed_nodes
    uploads = state.spec.checkpoint is not None and state.spec.checkpoint.url is not None
    may_compete = pod.index == 0 and (uploads or state.spec.elastic is not None)
    return is_avoided and not may_compete


def _is_killed_in_run(state: State, pod: PodView) -> bool:
    """Return whether a pod of `ddp dev` is the first one that its run has killed: a run may do so again and again."""
    last = state.status.last_failure
    is_first = last is None or last.pod == pod.name or last.category not in (OOM.name, KILLED.name)
    return state.job.holds_pods and is_first


def is_replacing(state: State) -> bool:
    """Return whether the status reports that a pod is being replaced."""
    restarting = state.status.condition(c.RESTARTING)
    return restarting is not None and (restarting.status, restarting.reason) == ("True", c.POD_REPLACEMENT)


def is_consequence(state: State, failure: LastFailure) -> bool:
    """Return whether workers saved and stopped, or lost a peer, because a pod was lost or the job was resized."""
    missing = state.pods.running < state.job.size_with(state.status.attempt_nodes).pods
    changed = missing or is_replacing(state) or was_lost_lately(state) or was_resized_lately(state)
    return changed and (failure.category == PREEMPTED.name or CATEGORIES[failure.category].symptom)


def was_lost_lately(state: State) -> bool:
    """Return whether the last interruption of the attempt was the loss of a pod, within the last minutes."""
    restart = state.status.last_restart
    if restart is None or (restart.attempt, restart.level) != (state.status.attempt, "ReplacedPod"):
        return False
    return state.now - restart.time <= _LATELY


def was_resized_lately(state: State) -> bool:
    """Return whether the last interruption of the attempt was a resize within it, within the last minutes.

    Without a time limit if the workers have not restarted for it yet: new pods may wait for nodes.
    """
    restart = state.status.last_restart
    if restart is None or (restart.attempt, restart.cause) != (state.status.attempt, c.RESIZED):
        return False
    return restart.level is None or (restart.level == "SamePods" and state.now - restart.time <= _LATELY)


def find_unseen_successor(state: State) -> PodView | None:
    """Return a running pod that was created after the workers had joined, although no loss was observed since.

    Pods of an elastic job, or of one with spares, are created at any time.
    """
    rendezvoused = state.status.condition(c.RENDEZVOUSED)
    if rendezvoused is None or rendezvoused.status != "True" or state.job.spares or state.spec.elastic is not None:
        return None
    if is_replacing(state) or was_lost_lately(state):
        return None
    known = rendezvoused.last_transition_time + _CLOCK_TOLERANCE
    restart = state.status.last_restart
    if restart is not None:
        known = max(known, restart.time)
    successors = [pod for pod in state.pods.newest.values() if pod.running and pod.created > known]
    return min(successors, key=lambda pod: (pod.created, pod.index), default=None)


def describe_replacement(status: Status, lost: LastFailure | None) -> str:
    """Return the message about a replaced pod. ``lost``: its loss; None: the cause is unknown."""
    return describe_restart("lost pod replaced, not counted", lost, status.checkpoint)


def create_missing_pods(state: State, attempt_job: JobView) -> list[CreatePod]:
    """Return the missing pods of a Job whose remaining pods wait for them.

    The Job controller would also create them, but after a back-off of 10 s that doubles with each failure. It replaces
    pods that were killed soon after their start, so that the back-off applies to them.
    """
    if attempt_job.finished or attempt_job.suspended or state.spec.suspend or attempt_job.started is None:
        return []
    if not is_replacing(state) and not (state.job.spares and _has_joined(state)):
        return []
    if _has_foreign_gang(state):
        return []
    if not is_queued(state.job, attempt_job) and not _can_peers_wait(state):
        return []
    newest = state.pods.newest
    serial = state.status.counts.replaced
    indexes = [index for index in range(attempt_job.nodes) if _needs_replacement(newest.get(index), state.now)]
    return [CreatePod(attempt_job.name, index, serial) for index in indexes]


def _was_replaced_before(state: State, pod: PodView) -> bool:
    """Return whether a lost pod was itself a replacement, so the loss may have a permanent cause."""
    suffix = child_names.replacement_suffix(state.status.counts.replaced)
    return is_replacing(state) and pod.name.endswith(f"-{suffix}")


def _trains_without_lost_pods(state: State) -> bool:
    """Return whether enough pods of an elastic job continue, including pod 0."""
    if state.spec.elastic is None:
        return False
    healthy = {
        pod.index
        for pod in state.pods
        if pod.phase == "Succeeded" or (pod.alive and not pod.deleting and not pod.disrupted)
    }
    return 0 in healthy and len(healthy) >= state.spec.elastic.min_nodes


def _can_peers_wait(state: State) -> bool:
    """Return whether the other pods wait: they have joined, none has ended, and their launchers restart the workers."""
    if state.attempt_job is None:
        return False
    if state.job.holds_pods:  # the peers have the code of the present run, and are held
        can_wait = any(pod.running and not pod.deleting and not pod.disrupted for pod in state.pods)
    else:
        can_wait = _awaits_peers(state.attempt_job) and _has_joined(state)
    if not can_wait:
        return False
    # A spare replaces the lost pod during the Job controller's back-off.
    is_blocked = _has_foreign_gang(state) and not state.job.spares
    return not is_blocked and not any(pod.phase == "Succeeded" for pod in state.pods)


def _has_foreign_gang(state: State) -> bool:
    """Return whether the Job controller made the pods a gang. Then only it creates pods that belong to the gang."""
    is_own = state.attempt_job is not None and state.attempt_job.ganged
    return not is_own and any(pod.ganged for pod in state.pods)


def _awaits_peers(job: JobView) -> bool:
    """Return whether the launchers of a Job restart the workers, not counted, when a peer is lost."""
    for variable in find_trainer(job.raw["spec"].get("template") or {}).get("env") or ():
        if variable["name"] == constants.ENV_LAUNCHER_CONFIG:
            with suppress(ValueError):  # of an older operator
                return decode_plan(variable["value"].replace("$$", "$")).awaits_peers
    return False


def _has_joined(state: State) -> bool:
    """Return whether the workers of this attempt have joined; with a spare they may be joining again."""
    if may_have_joined(state.status.condition(c.RENDEZVOUSED)) or is_replacing(state):
        return True
    restart = state.status.last_restart
    if restart is None or restart.attempt != state.status.attempt:
        return False
    return state.job.spares > 0 and restart.level != "NewPods"


def _needs_replacement(pod: PodView | None, now: datetime) -> bool:
    """Return whether the operator replaces a pod at once. None: the pod was deleted."""
    if pod is None:
        return True
    if pod.alive or pod.phase == "Succeeded":
        return False
    return pod.disrupted or pod.deleting or now - pod.created >= _SOON_LOST


def list_nodes_in_use(job: DDPTrainingJob, children: Children) -> tuple[str, ...]:
    """Return the nodes of the current attempt's pods; empty while the job is suspended."""
    if job.spec.suspend:
        return ()
    pods = children.pods_of(job.status.attempt)
    return tuple(sorted({pod.node_name for pod in pods if pod.alive and pod.node_name}))


def list_nodes_to_leave(state: State) -> Mapping[str, Trouble]:
    """Return the nodes that a new attempt has to leave now, with the reasons.

    Nodes that are avoided already are omitted, and all of them if no other nodes had room. A request names pods of this
    attempt only, so the next one cannot follow it again.
    """
    if state.spec.suspend:
        return {}
    leaving = [pod for pod in _list_leaving_pods(state) if pod.node_name]
    if _can_move_alone(state, leaving):
        leaving = []
    requests = state.observation.departures
    nodes = {pod.node_name: Trouble(requests[pod.name], planned=True, leaves=True) for pod in leaving}
    restart = state.status.last_restart
    is_new = restart is None or (restart.cause, restart.attempt) != (c.NODES_READMITTED, state.status.attempt)
    for name, trouble in _select_troubles(state).items():
        if (
            trouble.leaves
            and is_new
            and state.spec.recovery.avoid_failed_nodes
            and name not in state.status.failed_nodes
        ):
            nodes.setdefault(name, trouble)
    return nodes


def evict_leaving_pods(state: State) -> list[EvictPod]:
    """Return the pods to evict that their Job replaces, all at once: their peers then wait only one time."""
    leaving = _list_leaving_pods(state)
    evicted = leaving if _can_move_alone(state, leaving) else []
    return [EvictPod(pod.name, pod.uid, state.observation.departures[pod.name]) for pod in evicted]


def describe_nodes(state: State) -> Fact | None:
    """Return the condition NodesHealthy; None: no node is read, and no request has named a pod."""
    troubles = _select_troubles(state)
    texts = [f"{name}: {trouble.message}" for name, trouble in troubles.items()]
    requests = state.observation.departures
    requested = [pod for pod in state.pods if pod.alive and pod.name in requests]
    texts += [f"pod {pod.name} on {pod.node_name}: {requests[pod.name]}" for pod in requested]
    if texts:
        is_planned = requested or any(trouble.planned for trouble in troubles.values())
        reason = c.DRAINED if is_planned else c.NODE_UNHEALTHY
        return Fact(c.NODES_HEALTHY, "False", reason, "; ".join(texts)[:1024])
    if state.observation.troubles is None and state.status.condition(c.NODES_HEALTHY) is None:
        return None
    return Fact(c.NODES_HEALTHY, "True", c.NO_TROUBLE)


def _select_troubles(state: State) -> Mapping[str, Trouble]:
    """Return the troubles of the nodes that the attempt uses."""
    used = list_nodes_in_use(state.job, state.observation)
    return {name: trouble for name, trouble in (state.observation.troubles or {}).items() if name in used}


def _list_leaving_pods(state: State) -> list[PodView]:
    """Return the pods of a running Job that have to move now, because a request names them."""
    job = state.attempt_job
    if job is None or job.finished or job.deleting or state.spec.suspend:
        return []
    return [pod for pod in state.pods if pod.name in state.observation.departures and pod.alive and not pod.deleting]


def _can_move_alone(state: State, leaving: list[PodView]) -> bool:
    """Return whether the Job would replace these pods if they were deleted, and peers wait for them."""
    names = {pod.name for pod in leaving}
    if not names:
        return True
    pods = tuple(replace(pod, deleting=pod.deleting or pod.name in names) for pod in state.observation.pods)
    after = replace(state, observation=replace(state.observation, pods=pods))
    lost = [pod for pod in after.pods if pod.name in names and pod.has_run]
    has_peers = any(pod.running for pod in after.pods) or is_queued(state.job, state.attempt_job)
    return not lost or (has_peers and all(is_replaced(after, pod) for pod in lost))
