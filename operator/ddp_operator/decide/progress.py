"""Progress and checkpoint in the status, from what pods report. Pure."""

from collections.abc import Sequence
from datetime import datetime

from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import CheckpointStatus, LastFailure, Progress, Restarts, Status
from ddp_operator.decide.failures import Termination
from ddp_operator.decide.report import Page, Rates, advance_progress, build_checkpoint, build_progress
from ddp_operator.decide.state import Pods
from ddp_pod.contract.progress import RankProgress, Uploads


def apply_progress(
    status: Status, progress: RankProgress, uploads: Uploads | None, now: datetime, rates: Rates | None = None
) -> Status:
    """Return the status with the progress and the checkpoint that a pod reports."""
    return replace(
        status,
        progress=build_progress(progress, status.progress, rates) or status.progress,
        checkpoint=_find_newest_checkpoint(build_checkpoint(progress, uploads), status.checkpoint, now),
    )


def record_final_progress(status: Status, pods: Pods, now: datetime, page: Page | None = None) -> Status:
    """Return the status with the progress and the restarts in the last page and the termination messages of ended pods.

    The progress is that of the newest pods; a replaced pod may have reported more restarts than its successor.
    """
    if page is not None:
        status = apply_progress(status, page.progress, page.uploads, now)
    newest = [pod.termination for pod in pods.newest.values() if pod.termination]
    last = next((end for end in newest if end.progress is not None or end.uploads is not None), None)
    reported = status
    if last is not None:
        reported = apply_progress(status, last.progress or RankProgress(), last.uploads, now)
    reported = replace(reported, progress=_keep_total(reported.progress, status.progress))
    terminations = [pod.termination for pod in pods if pod.termination]
    return replace(reported, restarts=count_in_place(status.restarts, _count_completed_restarts(terminations)))


def _keep_total(progress: Progress | None, before: Progress | None) -> Progress | None:
    """Return the final progress with the last reported total, if it has none itself.

    The pod that ended first may know the step but not the total, which another pod read from its log.
    """
    if progress is None or before is None or before.total_steps is None or progress.total_steps is not None:
        return progress
    step = progress.step or 0
    if step > before.total_steps:
        return progress
    return advance_progress(replace(progress, total_steps=before.total_steps), step)


def _count_completed_restarts(terminations: Sequence[Termination]) -> int:
    """Return the restarts in the same pods before these ends.

    The pod with the root cause ends instead of a restart that its peers have counted already.
    """
    deciding = [end.restarts for end in terminations if not end.secondary and _fails_by_itself(end)]
    if deciding:
        return min(deciding)
    return max((end.restarts for end in terminations), default=0)


def _fails_by_itself(end: Termination) -> bool:
    code = end.container_exit_code
    return code not in (constants.EXIT_OK, constants.EXIT_PREEMPTED) and code <= 128


def count_in_place(restarts: Restarts, in_attempt: int) -> Restarts:
    """Return the restarts with those in the same pods of the current attempt; the count never decreases.

    A new pod reports fewer than its peers until it has joined them.
    """
    return replace(restarts, in_place=max(restarts.in_place, restarts.in_place_before + in_attempt))


def drop_eta(progress: Progress | None) -> Progress | None:
    """Return the progress of a job that makes no steps at present, which has no remaining time."""
    return None if progress is None else replace(progress, eta=None, eta_seconds=None)


def record_failed_step(status: Status, failure: LastFailure | None) -> Status:
    """Return the status with the step of a failed rank, which is newer than that of the last page."""
    progress = status.progress
    if progress is None or failure is None or failure.step is None or failure.step <= (progress.step or 0):
        return status
    return replace(status, progress=advance_progress(progress, failure.step))


def drop_pace(progress: Progress | None) -> Progress | None:
    """Return the progress of a job whose steps have stopped, which has no throughput and no remaining time.

    The last measured rates stay: the cost of repeated steps is computed from them.
    """
    paceless = drop_eta(progress)
    return None if paceless is None else replace(paceless, throughput=None)


def _find_newest_checkpoint(
    checkpoint: CheckpointStatus | None, before: CheckpointStatus | None, now: datetime
) -> CheckpointStatus | None:
    if checkpoint is None:
        return before
    if before is not None and before.step == checkpoint.step:
        return before
    return replace(checkpoint, time=truncate(now))
