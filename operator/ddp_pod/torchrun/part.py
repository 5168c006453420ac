"""A feature's part in torchrun's agent."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..base.pod import Pod


class LocalRank(NamedTuple):
    """A rank of this pod in a round."""

    local_rank: int
    rank: int
    world_size: int


class Store(Protocol):
    """What the pods of a round share. Raises: RuntimeError without the rendezvous store."""

    def write(self, key: str, value: Any) -> None:
        """Write a value."""

    def read(self, key: str) -> Any:
        """Return a value; None if there is none."""

    def append(self, log: str, value: Any) -> None:
        """Append a value to a log."""

    def read_log(self, log: str) -> Any:
        """Return the values of a log."""


class Round(Protocol):
    """A rendezvous round of this pod, before its ranks start."""

    @property
    def number(self) -> int:
        """How many rounds were before it."""

    @property
    def pods(self) -> int:
        """How many pods it has."""

    @property
    def ranks(self) -> Sequence[LocalRank]:
        """The ranks of this pod."""

    @property
    def store(self) -> Store:
        """What the pods of this round share."""

    def is_over(self) -> bool:
        """Return whether the pods have to join another round, because one of them was lost."""

    def report(self, event: object) -> None:
        """Tell the feature's service in the launcher, by ``Service.note``."""

    def request(self, request: object) -> Any:
        """Return what the feature's service replies, by ``Service.answer``."""


class AgentPart:
    """The hooks of a feature in torchrun's agent. A ``KnownFailure`` ends the pod, with that failure.

    Any other exception of a part that is not vital is logged, and the training goes on.
    """

    name = ""

    def is_vital(self, pod: Pod) -> bool:
        """Return whether this pod must not train without it."""
        return False

    def prepare_round(self, pod: Pod, current: Round) -> bool:
        """Prepare the start of the ranks. Returns False if the round ended before: the next one is prepared, too."""
        return True

    def prepare_stop(self, pod: Pod) -> None:
        """Wait, for seconds at most, until the ranks can be stopped."""
