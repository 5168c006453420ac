"""Why a job that succeeded may not have trained as intended: reasons of TrainsAsOne and TrainingComplete. Pure."""

from typing import Final

from ddp_operator.api.status import Condition, Status
from ddp_operator.decide.conditions import REPLICAS_DIFFER, SAME_BATCHES

# TrainsAsOne: only of a job with several ranks
PROCESS_GROUP_OF_ALL_RANKS: Final = "ProcessGroupOfAllRanks"
NO_PROCESS_GROUP: Final = "NoProcessGroup"  # of Failed too, as the next
SEPARATE_GROUPS: Final = "SeparateGroups"
WAITING_FOR_GROUP: Final = "WaitingForGroup"
GROUP_UNKNOWN: Final = "GroupUnknown"
# TrainingComplete: only of a job that has succeeded
ALL_STEPS_MADE: Final = "AllStepsMade"
TOTAL_UNKNOWN: Final = "TotalUnknown"
TRACEBACK_AT_END: Final = "TracebackAtEnd"
PROCESSES_LEFT: Final = "ProcessesLeft"
ENDED_BY_LAUNCHER: Final = "EndedByLauncher"
ENDED_SHORT: Final = "EndedShort"
NO_STEP: Final = "NoStep"
LOSS_NOT_FINITE: Final = "LossNotFinite"
DOUBTS: Final = (
    TRACEBACK_AT_END,
    PROCESSES_LEFT,
    NO_PROCESS_GROUP,
    SEPARATE_GROUPS,
    REPLICAS_DIFFER,
    SAME_BATCHES,
    ENDED_SHORT,
    NO_STEP,
    LOSS_NOT_FINITE,
    ENDED_BY_LAUNCHER,
)
"""Reasons why a job that succeeded may not have trained as intended, the most important first."""


def find_doubts(status: Status) -> list[Condition]:
    """Return the conditions for which a job that succeeded may not have trained as intended."""
    doubts = [condition for condition in status.conditions if condition.reason in DOUBTS]
    return sorted(doubts, key=lambda condition: DOUBTS.index(condition.reason)) if status.phase == "Succeeded" else []
