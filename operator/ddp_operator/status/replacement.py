"""Lost pods whose place is taken in the same Job, while the others wait for them (ADR 0019). Pure."""

from contextlib import suppress
from datetime import datetime, timedelta

from ddp_operator import constants, names
from ddp_operator.api.status import LastFailure, Status
from ddp_operator.failures import describe_restart
from ddp_operator.kubeobjects import find_trainer
from ddp_operator.launcher.failure_table import CATEGORIES, PREEMPTED
from ddp_operator.launcher.pod import decode_config
from ddp_operator.status import conditions as c
from ddp_operator.status.decision import CreatePod
from ddp_operator.status.lost_nodes import is_lost_with_node
from ddp_operator.status.observation import State
from ddp_operator.status.views import JobView, PodView
from ddp_operator.status.waiting import is_queued

_SOON_LOST = timedelta(seconds=60)
_LATELY = timedelta(minutes=10)


def is_replaced(state: State, pod: PodView) -> bool:
    """Tell whether a pod that is lost is replaced in its Job; otherwise the attempt is over.

    In a queue it always is, as a new Job would stand at the end. An elastic job's other pods go on meanwhile, as long
    as there are enough and pod 0, where they meet, is among them. Else the others must be able to wait, and the pod
    must have been taken from a node that is well, as another one is avoided by the pods of a new Job, or a spare takes
    its place.
    """
    if is_queued(state.job, state.attempt_job) or _goes_on(state):
        return True
    taken = (pod.disrupted or pod.deleting) and (bool(state.job.spares) or not is_lost_with_node(pod))
    counts = state.spec.recovery.count_disruptions
    suffix = names.replacement_suffix(state.status.restarts.replaced)
    again = is_replacing(state) and pod.name.endswith(f"-{suffix}")  # perhaps not by chance
    return taken and not again and not counts and _can_wait(state)


def is_replacing(state: State) -> bool:
    """Tell whether the status says that a pod is being replaced."""
    found = state.status.condition(c.RESTARTING)
    return found is not None and (found.status, found.reason) == ("True", c.POD_REPLACEMENT)


def is_consequence(state: State, failure: LastFailure) -> bool:
    """Tell whether workers were restarted because a pod is lost: all saved and stopped together, or missed it."""
    missing = state.pods.running < state.job.attempt_size.pods
    lost = missing or is_replacing(state) or was_lost_lately(state)
    return lost and (failure.category == PREEMPTED.name or CATEGORIES[failure.category].symptom)


def was_lost_lately(state: State) -> bool:
    """Tell whether the last thing that has interrupted the attempt was the loss of a pod, some minutes ago at most."""
    last, attempt = state.status.last_restart, state.status.attempt
    known = last is not None and (last.attempt, last.level) == (attempt, "ReplacedPod")
    return known and last is not None and state.now - last.time <= _LATELY


def describe_replacement(status: Status, lost: LastFailure | None) -> str:
    """Return in words that the place of a lost pod is taken; None: what took it is not known."""
    return describe_restart("lost pod replaced, not counted", lost, status.checkpoint)


def create_missing_pods(state: State, attempt_job: JobView) -> list[CreatePod]:
    """Return the pods to create in a Job whose other pods wait for them.

    The Job controller would do so too, but waits 10 s after the first failure, twice as long after each further one. A
    pod that was killed soon after its start is left to it.
    """
    waits = attempt_job.finished or attempt_job.suspended or state.spec.suspend or attempt_job.started is None
    wanted = is_replacing(state) or (state.job.spares and _have_met(state))
    if waits or not wanted or any(pod.ganged for pod in state.pods):
        return []
    if not is_queued(state.job, attempt_job) and not _can_wait(state):
        return []
    newest, serial = state.pods.newest, state.status.restarts.replaced
    indexes = [index for index in range(attempt_job.nodes) if _is_gone(newest.get(index), state.now)]
    return [CreatePod(attempt_job.name, index, serial) for index in indexes]


def _goes_on(state: State) -> bool:
    if state.spec.elastic is None:
        return False
    well = {
        pod.index
        for pod in state.pods
        if pod.phase == "Succeeded" or (pod.alive and not pod.deleting and not pod.disrupted)
    }
    return 0 in well and len(well) >= state.spec.elastic.min_nodes


def _can_wait(state: State) -> bool:
    """Tell whether the other pods wait: they have met, none has ended, and their launchers start workers again."""
    launchers = state.attempt_job is not None and _awaits_peers(state.attempt_job)
    # In Kubernetes' own gang nobody but the Job controller makes pods: a spare bridges its back-off.
    too_late = any(pod.phase == "Succeeded" or (pod.ganged and not state.job.spares) for pod in state.pods)
    return launchers and _have_met(state) and not too_late


def _awaits_peers(job: JobView) -> bool:
    """Tell whether the launchers that a Job was made with start the workers again for free when a peer is lost."""
    for variable in find_trainer(job.raw["spec"].get("template") or {}).get("env") or ():
        if variable["name"] == constants.ENV_LAUNCHER_CONFIG:
            with suppress(ValueError):  # an older operator's launcher
                return decode_config(variable["value"].replace("$$", "$")).awaits_peers
    return False


def _have_met(state: State) -> bool:
    """Tell whether the workers of this attempt have begun; with a spare they may meet again meanwhile."""
    if c.may_have_joined(state.status.condition(c.RENDEZVOUSED)) or is_replacing(state):
        return True
    last = state.status.last_restart
    again = last is not None and last.attempt == state.status.attempt and last.level != "NewPods"
    return state.job.spares > 0 and again


def _is_gone(pod: PodView | None, now: datetime) -> bool:
    """Tell whether a pod is to be replaced at once; None: its Job has let it go."""
    if pod is None or pod.alive or pod.phase == "Succeeded":
        return pod is None
    return pod.disrupted or pod.deleting or now - pod.created >= _SOON_LOST
