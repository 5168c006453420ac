"""Whether a queue decides when a Job's pods may run. The operator may delete such a Job, and changes nothing of it."""

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.constants import KUEUE_QUEUE_LABEL
from ddp_operator.status import conditions as c
from ddp_operator.status.views import JobView


def is_queued(job: DDPTrainingJob, view: JobView | None) -> bool:
    """Tell whether somebody else than the operator suspends and resumes a Job; None: the one that is to be made.

    Kueue says so by labels. Whoever else does it, and Kueue where it manages Jobs without labels, is known by a
    ``spec.suspend`` that is not what the operator has written there.
    """
    if view is None:
        return KUEUE_QUEUE_LABEL in job.labels
    if view.queue or view.admitted:
        return True
    if view.suspend_written is None:  # of an older operator, which says in the status what it has suspended
        ended = job.status.is_true(c.SUCCEEDED) or job.status.is_true(c.FAILED)
        return view.suspended and not (ended or was_suspending(job))
    return view.suspended != view.suspend_written


def waits_in_queue(job: DDPTrainingJob, view: JobView | None) -> bool:
    """Tell whether a job waits until a queue lets its Job run."""
    return view is not None and view.suspended and not view.finished and not job.spec.suspend and is_queued(job, view)


def was_suspending(job: DDPTrainingJob) -> bool:
    """Tell whether the job was suspended, or about to be, at the last look."""
    suspended = job.status.condition(c.SUSPENDED)
    return suspended is not None and (suspended.status == "True" or suspended.reason == c.STOPPING)
