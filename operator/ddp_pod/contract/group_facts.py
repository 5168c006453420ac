"""Whether the ranks of a job train as one: in one process group, with equal replicas, on different data.

As the launcher of one pod has observed it. The record is in the pod's report while the ranks run, and in its
termination message.
"""

from dataclasses import dataclass
from typing import Final

from .records import choice, number, text

TOGETHER: Final = "Together"  # a process group spans all ranks
ALONE: Final = "Alone"  # ranks make steps without a process group
SEPARATE: Final = "Separate"  # processes have groups, none of which spans all ranks
WAITING: Final = "Waiting"  # ranks wait in init_process_group
DIFFERENT: Final = "Different"  # a group spans all ranks, but their parameters differ
SAME_DATA: Final = "SameData"  # a group spans all ranks, but they train on the same batches
LOST_LOSS: Final = "LostLoss"  # a group spans all ranks, but some lost their loss before the others
UNKNOWN: Final = "Unknown"
GROUP_STATES: Final = (TOGETHER, ALONE, SEPARATE, WAITING, DIFFERENT, SAME_DATA, LOST_LOSS, UNKNOWN)
OF_REPLICAS: Final = (DIFFERENT, SAME_DATA, LOST_LOSS)  # known from samples of all ranks
TEXT_LIMIT: Final = 400  # characters of each text


@dataclass(frozen=True)
class GroupFacts:
    """The process groups of a pod's ranks, and of the processes that they have started.

    ``rank`` and ``pod``: the cause of a wait, the replica that differs or the first one to lose its loss, if it is one
    rank; ``since``: Unix time of the first wait; ``is_mistake``: whether the script is the cause, so that a repetition
    would end in the same way; ``is_final``: whether the wait cannot end, as no other rank can join or serve it.
    """

    state: str = choice(GROUP_STATES, UNKNOWN)
    world_size: int = number(default=0)
    message: str = text(TEXT_LIMIT)
    remedy: str = text(TEXT_LIMIT)
    rank: int | None = number()
    pod: int | None = number()
    since: float = number(4e9, default=0.0)
    is_mistake: bool = False
    is_final: bool = False
