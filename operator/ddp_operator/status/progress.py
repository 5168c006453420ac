"""Progress and checkpoint in the status, from what pods report. Pure."""

from collections.abc import Mapping
from datetime import datetime

from msgspec.structs import replace

from ddp_operator.api.status import CheckpointStatus, Progress, Restarts, Status
from ddp_operator.kubeobjects import truncate
from ddp_operator.status.metrics_page import Rates, build_checkpoint, build_progress
from ddp_operator.status.observation import Pods


def apply_metrics(status: Status, values: Mapping[str, float], now: datetime, rates: Rates | None = None) -> Status:
    """Return the status with the progress and the checkpoint that pod 0's metrics report."""
    progress = build_progress(values, status.progress, rates)
    return replace(
        status,
        progress=progress or status.progress,
        checkpoint=_find_newest_checkpoint(values, status.checkpoint, now),
    )


def record_final_progress(status: Status, pods: Pods, now: datetime) -> Status:
    """Return the status with the progress and the restarts in the termination messages of ended pods."""
    terminations = [pod.termination for pod in pods.newest.values() if pod.termination]
    values = next((termination.progress for termination in terminations if termination.progress), {})
    reported = apply_metrics(status, values, now)
    restarts = max((termination.restarts for termination in terminations), default=0)
    return replace(reported, restarts=count_in_place(status.restarts, restarts))


def count_in_place(restarts: Restarts, in_attempt: int) -> Restarts:
    """Return the restarts with those in the same pods of the current attempt; the count never decreases.

    A new pod reports fewer than its peers until it has joined them.
    """
    return replace(restarts, in_place=max(restarts.in_place, restarts.in_place_before + in_attempt))


def drop_eta(progress: Progress | None) -> Progress | None:
    """Return the progress of a job that makes no steps at present, which has no remaining time."""
    return None if progress is None else replace(progress, eta=None, eta_seconds=None)


def drop_pace(progress: Progress | None) -> Progress | None:
    """Return the progress of a job whose steps have stopped, which has no rate and no remaining time."""
    paceless = drop_eta(progress)
    if paceless is None:
        return None
    return replace(paceless, throughput=None, samples_per_second=None, steps_per_second=None)


def _find_newest_checkpoint(
    values: Mapping[str, float], before: CheckpointStatus | None, now: datetime
) -> CheckpointStatus | None:
    checkpoint = build_checkpoint(values)
    if checkpoint is None:
        return before
    if before is not None and before.step == checkpoint.step:
        return before
    return replace(checkpoint, time=truncate(now))
