"""The condition TrainingComplete: whether a job whose ranks have exited with 0 has trained to its end."""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from ddp_operator.api.status import Progress, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.failures import Termination, describe_rank_end
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import State
from ddp_pod.contract.failure_record import RankEnd

_NOT_FINITE: Final = ("nan", "inf", "-inf")


def conclude(state: State, status: Status) -> Fact:
    """Return TrainingComplete. ``status``: with the final progress."""
    reports = [pod.termination for pod in state.pods.newest.values() if pod.termination]
    ends = [end for report in reports for end in report.ends]
    ends.sort(key=lambda end: (end.secondary, not end.exception, not end.processes, end.total is None, end.rank))
    kept = [end for end in ends if _is_only_kept(end)]
    if len(kept) < len(ends):
        return Fact(c.TRAINING_COMPLETE, "False", _find_reason(ends[0]), _describe_ends(ends))

    progress = status.progress or Progress()
    if not progress.step and _sees_steps(state) and reports:
        message = "all ranks ended with exit code 0 without a visible step"
        return Fact(c.TRAINING_COMPLETE, "Unknown", doubts.NO_STEP, message)
    if progress.loss in _NOT_FINITE:
        return Fact(c.TRAINING_COMPLETE, "False", doubts.LOSS_NOT_FINITE, _describe_lost_loss(progress, reports))
    if kept:
        return Fact(c.TRAINING_COMPLETE, "Unknown", doubts.ENDED_BY_LAUNCHER, _describe_ends(kept))
    if progress.total_steps:
        message = f"step {progress.step} of {progress.total_steps}"
        return Fact(c.TRAINING_COMPLETE, "True", doubts.ALL_STEPS_MADE, message)
    message = "the script states no total number of steps"
    return Fact(c.TRAINING_COMPLETE, "Unknown", doubts.TOTAL_UNKNOWN, message)


def _is_only_kept(end: RankEnd) -> bool:
    """Return whether nothing is known against a rank's training, only that its process did not end by itself."""
    return bool(end.keeper) and not (end.exception or end.processes or end.total)


def _find_reason(end: RankEnd) -> str:
    if end.exception:
        return doubts.TRACEBACK_AT_END
    return doubts.PROCESSES_LEFT if end.processes else doubts.ENDED_SHORT


def _describe_ends(ends: list[RankEnd]) -> str:
    """Return the root cause, and how many ranks ended likewise. Ranks that lost a peer are not described beside it."""
    first = ends[0]
    text = describe_rank_end(first)
    lost = sum(end.secondary and not first.secondary for end in ends)
    likewise = len(ends) - lost - 1
    if likewise:
        text += f"; so did {likewise} more rank{'s' if likewise > 1 else ''}"
    return f"{text}; {lost} other rank{'s' if lost > 1 else ''} lost a peer" if lost else text


def _describe_lost_loss(progress: Progress, reports: Sequence[Termination]) -> str:
    lost = [report.progress.lost_loss_step for report in reports if report.progress is not None]
    steps = [step for step in lost if step]
    since = f" since step {min(steps):.0f}" if steps else ""
    last = f"; the last step was {progress.step}" if progress.step else ""
    return f"the loss is {progress.loss}{since}{last}"


def _sees_steps(state: State) -> bool:
    """Return whether the spec lets the launcher count steps."""
    return state.spec.metrics.auto_instrument or bool(state.spec.metrics.log_patterns)


def account(state: State, status: Status) -> Status:
    """Return the status of a job that has succeeded with the most important doubt as its reason."""
    doubt = next(iter(doubts.find_doubts(status)), None)
    return status if doubt is None else replace(status, reason=doubt.reason)


FEATURE: Final = Feature("completion", maturity="stable", page="metrics.md", conclude=conclude, account=account)
