"""Compare a status with the Jobs that exist: a client may have replaced it, and its numbers end attempts. Pure."""

from typing import Final

from ddp_operator.api import child_names
from ddp_operator.api.status import Restarts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.observation import Pods, State
from ddp_operator.decide.views import JobView
from ddp_operator.decide.waiting import is_queued

# A restart, a resize and an avoided node may follow each other before the next Job is created.
_MOST_WITHOUT_JOB: Final = 3


def contradicts(state: State, newest: JobView) -> bool:
    """Return whether the status contradicts the newest Job, whose pods are alive.

    An attempt is written with its restart and its counts before its Job is created, while the former Job still exists.
    """
    status = state.status
    pods = state.observation.pods_of(newest.attempt)
    is_alive = any(pod.alive for pod in pods)
    if newest.finished or newest.deleting or not is_alive or newest.attempt == 0:
        return False
    if _has_invented_end(status, pods):
        return True
    is_named = status.job_name == child_names.job_name(state.job.name, status.attempt)
    if not is_named or status.restarts.total != status.attempt - 1 or not has_plausible_counts(status.restarts):
        return True
    if status.attempt == newest.attempt:
        has_requested_size = state.job.size_of(newest.nodes).nodes == state.spec.nodes
        return has_requested_size and status.attempt_nodes != state.spec.nodes and not is_queued(state.job, newest)
    is_announced = status.last_restart is not None and status.last_restart.attempt == status.attempt
    return not is_announced or status.attempt - newest.attempt > _MOST_WITHOUT_JOB


def _has_invented_end(status: Status, pods: Pods) -> bool:
    """Return whether a terminal condition lacks the time, or the succeeded pod, that the operator writes it with."""
    has_succeeded = status.is_true(c.SUCCEEDED)
    if has_succeeded and not any(pod.phase == "Succeeded" for pod in pods):
        return True
    ended = status.completion_time
    is_old = ended is None or (status.attempt_time is not None and ended < status.attempt_time)
    return is_old and (has_succeeded or status.is_true(c.FAILED))


def has_plausible_counts(restarts: Restarts) -> bool:
    """Return whether no restart is counted that did not happen."""
    return 0 <= restarts.used <= restarts.counted <= restarts.total + restarts.in_place
