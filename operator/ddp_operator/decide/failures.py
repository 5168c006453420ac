"""The failure of a pod, and how failures are described. ``reading/terminations`` reads them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ddp_operator.api import constants
from ddp_operator.api.status import CheckpointStatus, LastFailure
from ddp_pod.contract.failure_record import Failure, RankEnd, RunEnd
from ddp_pod.contract.failure_table import judge_exit_code
from ddp_pod.contract.failure_text import format_failure

HIDDEN_FAILURE_REMEDY: Final = (
    "its exit code 0 hides the failure: let the exception end the script, without a try that only prints it and "
    "without || true, and write set -o pipefail before a pipe"
)
_MAX_LINE: Final = 300
_MAX_TIME: Final = 4e9  # the year 2096
_CLOCK_TOLERANCE: Final = 3600.0  # seconds by which the clocks of launcher and kubelet may differ


def describe_failure(failure: LastFailure, *, whole: bool = False) -> str:
    """Return a failure in one line: its category, its place and its message's first line, or the ``whole`` message."""
    message = describe_detail(failure)
    line = " ".join(message.split()) if whole else _shorten(message.partition("\n")[0])
    return format_failure(failure.category, list_places(failure), line)


def describe_restart(which: str, cause: LastFailure | None, checkpoint: CheckpointStatus | None) -> str:
    """Return a restart in one line, such as ``restart 2 of 3: Network (rank 1): connection lost; from step 400``.

    ``which``: its number, and the limit if there is one. The step is that of the newest known checkpoint.
    """
    text = which
    if cause is not None:
        places = list_places(cause)
        known_places = places[:1] if cause.rank is not None else places[1:4]
        line = _shorten(describe_detail(cause).partition("\n")[0])
        text += f": {format_failure(cause.category, known_places, line)}"
    if checkpoint is not None:
        text += f"; from step {checkpoint.step}"
    return text


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 2].rstrip()} …"


def list_places(failure: LastFailure) -> tuple[tuple[str, object], ...]:
    """Return where a failure happened, the closest place first; an unknown one is None or empty."""
    return (
        ("rank", failure.rank),
        ("pod", failure.pod),
        ("init container", failure.container),
        ("node", failure.node_name),
        ("exit code", failure.exit_code),
    )


def describe_detail(failure: LastFailure) -> str:
    """Return the message, without the category in front of it."""
    return failure.message.strip().removeprefix(f"{failure.category}: ")


def describe_rank_end(end: RankEnd) -> str:
    """Return how a rank ended that exited with 0 and may not have completed its training."""
    position = " without a visible step"
    if end.step:
        position = f" at step {end.step:.0f}" + (f" of {end.total:.0f}" if end.total else "")
    trace = f" with a traceback in its output ({end.exception})" if end.exception else ""
    count = len(end.processes)
    remaining = f" while {count} of its processes still ran: {', '.join(end.processes)}" if count else ""
    kept = f"; the launcher ended it, because {end.keeper}" if end.keeper else ""
    return f"rank {end.rank} ended with exit code 0{position}{trace}{remaining}{kept}"


@dataclass(frozen=True)
class Termination(RunEnd):
    """The end of one pod: its last report, and those of the kubelet; values are checked."""

    container: str = ""
    """The init container that failed; empty: the training container."""
    permanent: bool = False
    """Whether another attempt would fail as well."""
    members: Mapping[str, Any] = field(default_factory=dict)
    """The launcher's message as it was sent, for features (``reading/parts``)."""
    ended_by_probe: bool = False
    """Whether the kubelet killed the training container for a probe or a hook."""


def complete_end(
    failure: Failure, exit_code: int = constants.EXIT_RETRYABLE, finished_at: datetime | None = None
) -> Termination:
    """Return a pod's failure with what the kubelet reports: the exit code and the end of the container."""
    by_code = judge_exit_code(exit_code)
    changes = {
        "category": failure.category or by_code.category,
        "container_exit_code": exit_code,
        "secondary": failure.secondary or by_code.secondary,
        "time": _choose_time(failure.time, finished_at),
        "permanent": exit_code == constants.EXIT_USER_ERROR,
    }
    return Termination(**{**vars(failure), **changes})


def _choose_time(reported: float | None, finished_at: datetime | None) -> float | None:
    """Return the launcher's time if it differs from the kubelet's by at most an hour, else the kubelet's."""
    finished = finished_at.timestamp() if finished_at else None
    if finished is not None and not 0 < finished < _MAX_TIME:
        finished = None
    if reported is None or not 0 < reported < _MAX_TIME:
        return finished
    if finished is not None and abs(finished - reported) > _CLOCK_TOLERANCE:
        return finished
    return reported
