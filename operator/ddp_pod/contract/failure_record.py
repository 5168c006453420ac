"""The record of a failure, from the pod, which writes it, to the operator, which reads it.

A termination message is a ``pod_end.PodEnd`` as JSON (docs/pod-contract.md). The operator reads it in
``ddp_operator.reading.terminations``, where nothing in it is trusted.
"""

import math
from dataclasses import dataclass
from typing import Final

from .failure_table import CATEGORIES, Outcome
from .names import EXIT_OK
from .progress import RankProgress, Uploads
from .records import choice, items, number, text

TYPE_LIMIT: Final = 200
"""Characters kept of an exception's type and of a signature."""
_TEXT_LIMIT: Final = 2048
MOST_STEPS: Final = 2**53 - 1  # the largest integer that JSON readers keep (RFC 8259, section 6)
_LAST_TIME: Final = 4e9  # the year 2096

# What a failure was derived from.
EVIDENCE_ERROR: Final = "Error"  # an exception, a message or a signal
EVIDENCE_EXIT_CODE: Final = "ExitCode"  # nothing but an exit code
EVIDENCE_STOPPED: Final = "Stopped"  # torchrun's agent stopped the rank after another one had failed
EVIDENCE_TIMEOUT: Final = "Timeout"  # the rank gave up a wait for a peer, rather than lost a connection
EVIDENCE: Final = (EVIDENCE_ERROR, EVIDENCE_EXIT_CODE, EVIDENCE_STOPPED, EVIDENCE_TIMEOUT)

MOST_RANK_ENDS: Final = 2
"""Ranks in the message of one pod that may not have completed their training."""
RANK_END_TEXT: Final = 160
"""Characters kept of each text about such a rank."""


@dataclass(frozen=True)
class Failure:
    """How a pod ended: what failed, where, and with which outcome. The category is empty where the pod succeeded."""

    category: str = choice(tuple(CATEGORIES))
    container_exit_code: int = EXIT_OK
    """The launcher's own exit code, on which the Job's podFailurePolicy acts."""
    secondary: bool = False
    """Whether another rank's failure caused it, as with a lost peer."""
    rank: int | None = number()
    local_rank: int | None = number()
    pod_index: int | None = number()
    exit_code: int | None = number()
    """The worker's exit code; 128 + the number where a signal killed it."""
    exception_type: str = text(TYPE_LIMIT)
    message: str = text(_TEXT_LIMIT)
    traceback: str = text(_TEXT_LIMIT, keeps_end=True)
    remedy: str = text(_TEXT_LIMIT)
    time: float | None = number(_LAST_TIME)
    """When it failed, in Unix seconds."""
    restarts: int = number(default=0)
    """How often the workers were restarted in the same pod."""
    signature: str = text(TYPE_LIMIT)
    """What all repetitions of a failure of the script share; empty where the failure is not the script's."""
    step: float | None = number(MOST_STEPS)
    repeated: bool = False
    """Whether this pod had failed in the same way before, without progress in between."""
    evidence: str = choice(EVIDENCE, EVIDENCE_ERROR)

    @property
    def outcome(self) -> Outcome:
        """Category, exit code of the container, and whether the failure is secondary."""
        return Outcome(self.category, self.container_exit_code, self.secondary)


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended that exited with 0 and may not have completed its training."""

    rank: int = number(default=0)
    step: float | None = number(MOST_STEPS)
    total: float | None = number(MOST_STEPS)
    """The number of steps that the script stated, if the rank ended short of it."""
    exception: str = text(RANK_END_TEXT)
    """The exception of the traceback in the last lines of its output."""
    secondary: bool = False
    """Whether that exception is the loss of a peer."""
    processes: tuple[str, ...] = items(MOST_RANK_ENDS)
    """The commands of its processes that still ran when its program ended."""
    keeper: str = text(RANK_END_TEXT)
    """What kept its process alive after its program, until the launcher ended it."""
    pod: int | None = number()
    """Its pod, if another one reports it."""
    line: str = text(RANK_END_TEXT)
    """The last line that it wrote."""


@dataclass(frozen=True)
class RunEnd(Failure):
    """The end of a pod: its failure, and what else decisions read in its last report."""

    progress: RankProgress | None = None
    """Of the lowest rank."""
    uploads: Uploads | None = None
    """Only of a pod that uploads checkpoints."""
    last_failure: Failure | None = None
    """Only of a pod that succeeded: the failure before the last restart of its workers, as in its report."""
    awaited: Failure | None = None
    """The failure of a rank that was outside of collectives while its peers may have waited for it."""
    ends: tuple[RankEnd, ...] = items(MOST_RANK_ENDS)
    """Ranks that exited with 0 and may not have completed their training."""


def order_causes(failure: Failure) -> tuple[bool, bool, float]:
    """Return the sort key of the failures of one incident, which puts the root cause first.

    The earliest failure that is not secondary is the root cause. A rank that the agent stopped is last, because another
    one had failed before. Among equals, a failure without a time is last.
    """
    time = math.inf if failure.time is None else failure.time
    return failure.evidence == EVIDENCE_STOPPED, failure.secondary, time
