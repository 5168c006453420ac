"""The record of a rank that exited with 0 and may not have completed its training, in a termination message."""

from dataclasses import dataclass
from typing import Final

MOST_RANK_ENDS: Final = 2
"""Records in the message of one pod."""
RANK_END_TEXT: Final = 160
"""Characters kept of each text of a record."""


@dataclass(frozen=True)
class RankEnd:
    """How such a rank ended. It is the member ``ends`` of the message."""

    rank: int
    step: float | None = None
    total: float | None = None
    """The number of steps that the script stated, if the rank ended short of it."""
    exception: str = ""
    """The exception of the traceback in the last lines of its output."""
    secondary: bool = False
    """Whether that exception is the loss of a peer."""
    processes: tuple[str, ...] = ()
    """The commands of its processes that still ran when its program ended."""
