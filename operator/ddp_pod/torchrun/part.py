"""A feature's part in torchrun's agent."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from ..base.files import log
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

    def delete(self, key: str) -> None:
        """Delete a value."""


class JoinedRound(Protocol):
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
        """Report to the feature's service in the launcher, by ``Service.note``."""

    def request(self, request: object) -> Any:
        """Return what the feature's service replies, by ``Service.answer``."""


class RoundExchange:
    """A feature's part in what the pods of a job share in a round, some times a minute while the ranks run.

    ``summary``: in pod 0 what it publishes for the feature's services in all pods that take part, as JSON; None:
    nothing. They get it with each exchange, as a ``FeatureSummary``.
    """

    name: ClassVar[str] = ""
    summary: Any = None

    def collect(self, now: float) -> Any:
        """Return what this pod has to share at a time of the monotonic clock; empty: nothing. It may not wait."""

    def share(self, own: Any) -> Mapping[str, Any] | None:
        """Share it, in a thread. Returns in pod 0 a ``GroupFacts`` record about the job; None: there is none.

        Raises: RuntimeError without the store.
        """

    def forget(self) -> None:
        """Delete what the store has of this pod, at the end of the round. Raises: as ``share``."""


def log_fault(name: str, error: Exception) -> None:
    """Log the fault of a feature's part."""
    log(f"internal error of the launcher in {name}; training continues without it. Please report this: {error!r}")


class AgentPart:
    """The hooks of a feature in torchrun's agent. A ``KnownFailure`` ends the pod, with that failure.

    Any other exception of a part that is not vital is logged, and the training continues.
    """

    name = ""

    def is_vital(self, pod: Pod) -> bool:
        """Return whether this pod must not train without it."""
        return False

    def prepare_round(self, pod: Pod, current: JoinedRound) -> bool:
        """Prepare the start of the ranks. Returns False if the round ended before: the next one is prepared, too."""
        return True

    def join_round(self, pod: Pod, store: Store, pods: int) -> RoundExchange | None:
        """Return this pod's part in what the ``pods`` pods of a new round share; None: nothing."""
        return None

    def prepare_stop(self, pod: Pod) -> None:
        """Wait, for seconds at most, until the ranks can be stopped."""
