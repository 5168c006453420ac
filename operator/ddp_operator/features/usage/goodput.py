"""The goodput of a job: the share of its time in which it has made steps that count. Pure."""

import math

from msgspec.structs import replace

from ddp_operator.api.kubeobjects import parse_time
from ddp_operator.api.status import Status
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.report import find_last_report
from ddp_operator.decide.state import State
from ddp_pod.contract.progress import RankProgress


def record(state: State, status: Status) -> Status:
    """Return the status with the goodput by the report of pod 0, and the step from which it counts."""
    page = state.observation.page
    if page is None:
        return status
    known_starts = [step for step in (status.operator_state.start_step, page.began_at) if step is not None]
    start_step = min(known_starts, default=None)
    if start_step != status.operator_state.start_step:
        status = status.remember(start_step=start_step)
    goodput = _measure(state, status, page.progress)
    return status if goodput == status.goodput else replace(status, goodput=goodput)


def record_final(state: State, status: Status) -> Status:
    """Return the status of a job that ends with the goodput by its last termination message."""
    last = find_last_report(state.pods) if is_finished(status) else None
    if last is None or last.progress is None:
        return status
    return replace(status, goodput=_measure(state, status, last.progress))


def _measure(state: State, status: Status, progress: RankProgress) -> str | None:
    """Return the goodput until now, or until the end of the run of `ddp dev`; the former one if it is unknown."""
    began = status.dev.start_time if status.dev is not None else parse_time(state.job.created)
    ended = (status.dev.completion_time if status.dev is not None else None) or state.now
    wall_seconds = (ended - began).total_seconds() if began else 0.0
    return compute_goodput(progress, wall_seconds, status.operator_state.start_step or 0) or status.goodput


def compute_goodput(progress: RankProgress, wall_seconds: float, start_step: int = 0) -> str | None:
    """Return the share of the wall time in which steps were made that the run keeps: docs/metrics.md has the formula.

    ``start_step``: the step from which the job started; steps of a former job took none of its time.
    """
    if not progress.steps or not progress.step_seconds or not progress.step or wall_seconds <= 0:
        return None
    share = (progress.step - start_step) * (progress.step_seconds / progress.steps) / wall_seconds
    return f"{min(share, 1.0):.2f}" if math.isfinite(share) and share >= 0 else None
