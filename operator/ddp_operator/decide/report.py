"""The report of a pod, the progress that it shows, and what the status keeps of it. Pure.

``reading/pages`` reads it. Its fields have limits, and no content raises an exception.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.faults import contain
from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import (
    CheckpointStatus,
    LastFailure,
    Progress,
    RestartCounts,
    Status,
)
from ddp_operator.decide.failures import Termination
from ddp_operator.decide.views import Pods
from ddp_pod.contract.progress import RankProgress, Uploads
from ddp_pod.contract.run_report import RunReport


@dataclass(frozen=True)
class Page(RunReport):
    """One read of a pod's report. ``members``: as it was sent, for features (``reading/parts``)."""

    members: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def progress(self) -> RankProgress:
        """The numbers of the lowest rank that reports each."""
        progress = RankProgress()
        for rank in sorted(self.ranks, key=lambda rank: rank.rank, reverse=True):
            known = {item.name: getattr(rank, item.name) for item in fields(rank)}
            progress.update({name: value for name, value in known.items() if value is not None})
        return progress

    @property
    def is_empty(self) -> bool:
        """Whether it is no report of a launcher of this version."""
        return not (self.phase or self.ranks)

    @property
    def completed_restarts(self) -> int | None:
        """Restarts in the same pods; None while the last one may still fail, because the workers have not joined."""
        return None if self.joining else self.restarts

    @property
    def is_held(self) -> bool:
        """Whether the pods of `ddp dev` run no rank. The values of the last run stay."""
        return self.dev is not None and self.phase == "Held"

    @property
    def training(self) -> bool:
        """True if running workers have reported a step. Values from a log stay after a restart."""
        return (self.progress.known_step or 0.0) > 0 and not self.joining and not self.is_held

    @property
    def began_at(self) -> int | None:
        """The step of the run from which these workers started; None: unknown, or they have made no step yet."""
        progress = self.progress
        if not self.training or progress.step is None or not progress.steps:
            return None
        first = _whole(progress.step - progress.steps)
        return None if first is None else max(0, first)

    @property
    def restarted_at(self) -> int | None:
        """The step of the run at which workers were last stopped for a restart in the same pods; None: unknown."""
        step = _whole(self.restart_step)
        return None if step is None else max(0, step)


def build_progress(progress: RankProgress, previous: Progress | None = None) -> Progress | None:
    """Return the progress for the status; None: the rank reports none. What features measure stays as it was."""
    steps = find_steps(progress)
    loss = format_number(progress.loss) if progress.lost_loss_step is None else "nan"
    if steps is None and loss is None:
        return None
    before = previous or Progress()
    return replace(
        before,
        epoch=_whole(progress.epoch),
        epochs=_whole(progress.epochs),
        step=_whole(steps),
        total_steps=_whole(progress.total_steps),
        percent=_format_percent(progress.share, steps, progress.total_steps),
        loss=loss,
        learning_rate=format_number(progress.learning_rate),
        val_accuracy=format_number(progress.val_accuracy) or before.val_accuracy,
        val_loss=format_number(progress.val_loss) or before.val_loss,
        last_step_time=convert_time(progress.last_step_time),
    )


def find_steps(progress: RankProgress) -> float | None:
    """Return the step for the status. A process without one may resume from a checkpoint: its zero is none of it."""
    return (progress.steps or None) if progress.step is None else progress.step


def advance_progress(progress: Progress, step: int) -> Progress:
    """Return the progress at a later step, which another source than the page reports."""
    percent = _format_percent(None, step, progress.total_steps) or progress.percent
    return replace(progress, step=step, percent=percent)


def _format_percent(share: float | None, steps: float | None, total: float | None) -> str | None:
    if share is None and steps is not None and total:
        share = steps / total
    return None if share is None else f"{100 * min(max(share, 0.0), 1.0):.1f}%"


def build_checkpoint(progress: RankProgress, uploads: Uploads | None = None) -> CheckpointStatus | None:
    """Return the newest checkpoint; with checkpoint.url, the newest uploaded one."""
    is_uploaded = uploads is not None and uploads.bytes is not None
    step = _whole(uploads.step if uploads is not None and is_uploaded else progress.checkpoint_step)
    return CheckpointStatus(step=step) if step else None


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) or abs(value) > 1e15 else int(value)


def format_number(value: float | None) -> str | None:
    """Return a measurement for the status."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{min(max(value, -1e15), 1e15):.0f}"


def convert_time(value: float | None) -> datetime | None:
    """Return a time in Unix seconds as the status stores it; None: it is unknown, or no time."""
    if value is None or not math.isfinite(value) or not 0 < value < 4e9:
        return None
    return truncate(datetime.fromtimestamp(value, UTC))


def apply_progress(status: Status, progress: RankProgress, uploads: Uploads | None, now: datetime) -> Status:
    """Return the status with the progress and the checkpoint that a pod reports."""
    with contain("progress", status.job_name):
        status = replace(
            status,
            progress=build_progress(progress, status.progress) or status.progress,
            checkpoint=_find_newest_checkpoint(build_checkpoint(progress, uploads), status.checkpoint, now),
        )
    return status


def record_final_progress(status: Status, pods: Pods, now: datetime, page: Page | None = None) -> Status:
    """Return the status with the progress and the restarts in the last page and the termination messages of ended pods.

    The progress is that of the newest pods; a replaced pod may have reported more restarts than its successor.
    """
    if page is not None:
        status = apply_progress(status, page.progress, page.uploads, now)
    last = find_last_report(pods)
    reported = status
    if last is not None:
        progress = last.progress or RankProgress()
        reported = apply_progress(status, progress, last.uploads, now)
    reported = replace(reported, progress=_keep_total(reported.progress, status.progress))
    terminations = [pod.termination for pod in pods if pod.termination]
    return reported.remember(restarts=count_in_place(status.counts, _count_completed_restarts(terminations)))


def find_last_report(pods: Pods) -> Termination | None:
    """Return the termination message with the final progress of the newest pods; None: there is none."""
    ends = [pod.termination for pod in pods.newest.values() if pod.termination]
    return next((end for end in ends if end.progress is not None or end.uploads is not None), None)


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


def count_in_place(counts: RestartCounts, in_attempt: int) -> RestartCounts:
    """Return the counts with the restarts in the same pods of the current attempt; the count never decreases.

    A new pod reports fewer than its peers until it has joined them.
    """
    return replace(counts, in_place=max(counts.in_place, counts.in_place_before + in_attempt))


def record_failed_step(status: Status, failure: LastFailure | None) -> Status:
    """Return the status with the step of a failed rank, which is newer than that of the last page."""
    progress = status.progress
    if progress is None or failure is None or failure.step is None or failure.step <= (progress.step or 0):
        return status
    return replace(status, progress=advance_progress(progress, failure.step))


def _find_newest_checkpoint(
    checkpoint: CheckpointStatus | None, before: CheckpointStatus | None, now: datetime
) -> CheckpointStatus | None:
    if checkpoint is None:
        return before
    if before is not None and before.step == checkpoint.step:
        return before
    return replace(checkpoint, time=truncate(now))
