"""Replacement of lost pods in the same Job, while their peers wait (ADR 0019). Pure."""

from contextlib import suppress
from datetime import datetime, timedelta

from ddp_operator.api import child_names, constants
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.api.status import LastFailure, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.decision import CreatePod
from ddp_operator.decide.failures import describe_restart
from ddp_operator.decide.lost_nodes import is_lost_with_node
from ddp_operator.decide.observation import State
from ddp_operator.decide.views import JobView, PodView
from ddp_operator.decide.waiting import is_queued
from ddp_pod.contract.failure_table import CATEGORIES, PREEMPTED
from ddp_pod.contract.plan import decode_config

_SOON_LOST = timedelta(seconds=60)
_LATELY = timedelta(minutes=10)
_CLOCK_TOLERANCE = timedelta(seconds=10)


def is_replaced(state: State, pod: PodView) -> bool:
    """Return whether a lost pod is replaced in its Job; otherwise the attempt is over.

    In a queue it always is, because a new Job would go to the end of the queue. In an elastic job it is if enough peers
    including pod 0 continue. In any other job the peers must be able to wait, and a spare or a healthy node must be
    available, because only pods of a new Job avoid a failed node.
    """
    if is_queued(state.job, state.attempt_job) or _trains_without_lost_pods(state):
        return True
    if state.spec.recovery.count_disruptions or _was_replaced_before(state, pod):
        return False
    taken = pod.disrupted or pod.deleting
    has_place = bool(state.job.spares) or not is_lost_with_node(pod)
    return taken and has_place and _can_peers_wait(state)


def is_replacing(state: State) -> bool:
    """Return whether the status reports that a pod is being replaced."""
    restarting = state.status.condition(c.RESTARTING)
    return restarting is not None and (restarting.status, restarting.reason) == ("True", c.POD_REPLACEMENT)


def is_consequence(state: State, failure: LastFailure) -> bool:
    """Return whether workers saved and stopped, or lost a peer, because a pod was lost or the job was resized."""
    missing = state.pods.running < state.job.attempt_size.pods
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
    serial = state.status.restarts.replaced
    indexes = [index for index in range(attempt_job.nodes) if _needs_replacement(newest.get(index), state.now)]
    return [CreatePod(attempt_job.name, index, serial) for index in indexes]


def _was_replaced_before(state: State, pod: PodView) -> bool:
    """Return whether a lost pod was itself a replacement, so the loss may have a permanent cause."""
    suffix = child_names.replacement_suffix(state.status.restarts.replaced)
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
    if state.attempt_job is None or not _awaits_peers(state.attempt_job) or not _has_joined(state):
        return False
    # A spare replaces the lost pod during the Job controller's back-off.
    is_blocked = _has_foreign_gang(state) and not state.job.spares
    return not is_blocked and not any(pod.phase == "Succeeded" for pod in state.pods)


def _has_foreign_gang(state: State) -> bool:
    """Return whether the Job controller made the pods a gang. Then only it creates pods that belong to the gang."""
    return state.spec.scheduling.gang != constants.NATIVE_GANG and any(pod.ganged for pod in state.pods)


def _awaits_peers(job: JobView) -> bool:
    """Return whether the launchers of a Job restart the workers, not counted, when a peer is lost."""
    for variable in find_trainer(job.raw["spec"].get("template") or {}).get("env") or ():
        if variable["name"] == constants.ENV_LAUNCHER_CONFIG:
            with suppress(ValueError):  # of an older operator
                return decode_config(variable["value"].replace("$$", "$")).awaits_peers
    return False


def _has_joined(state: State) -> bool:
    """Return whether the workers of this attempt have joined; with a spare they may be joining again."""
    if c.may_have_joined(state.status.condition(c.RENDEZVOUSED)) or is_replacing(state):
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
