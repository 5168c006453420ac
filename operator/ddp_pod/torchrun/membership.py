"""Which pods are the members of a rendezvous round. Pure: pod 0 decides by it, and publishes the result."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..base.awake_clock import AwakeClock

FIRST_ROUND_SECONDS = 30.0  # that the first round waits for more pods, once there are enough


class GroupSize(NamedTuple):
    """How many pods a round has: ``least`` to ``most``. ``nodes``: of an elastic job the number at its start."""

    nodes: int
    least: int
    most: int


def choose_members(
    size: GroupSize,
    registrations: Mapping[int, int | None],
    previous: Sequence[int],
    dead: Collection[int],
    waited: float,
) -> list[int] | None:
    """Return the members of a round in the order of their ranks; None while it waits for more.

    ``registrations``: the restarts of each pod's ranks, None for a pod that has left the run; ``previous``: the members
    of the round before; ``dead``: pods whose heartbeats have stopped; ``waited``: seconds since the round began. Pods
    that were members and live come first. Spares take the seats of those that do not.
    """
    joined = {pod for pod, restarts in registrations.items() if restarts is not None and pod not in dead}
    expected = {pod for pod in previous if registrations.get(pod, 0) is not None and pod not in dead}
    if len(joined) < size.least or not expected <= joined:
        return None
    is_early = not previous and waited <= FIRST_ROUND_SECONDS
    if is_early and not joined.issuperset(range(size.nodes)):
        return None
    candidates = [*sorted(expected), *sorted(joined - expected)]
    return sorted(candidates[: size.most])


class Registration(NamedTuple):
    """A line in the log of a round. ``restarts``: of the pod's ranks, None as it leaves; ``identity``: of the pod."""

    pod: int
    restarts: int | None
    identity: str


class Seats:
    """Which pod is behind each index. A pod whose place another one has taken never gets it back.

    The lost pod may live on behind a broken network, and return while its successor trains.
    """

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}
        self._replaced: set[str] = set()

    def note_round(self, members: Sequence[int], identities: Sequence[str]) -> None:
        """Note who has taken part in a round. The rounds come in their order."""
        for pod, identity in zip(members, identities, strict=True):
            former = self._owners.get(pod, identity)
            if former != identity:
                self._replaced.add(former)
            self._owners[pod] = identity

    def select(self, log: Sequence[Registration]) -> dict[int, Registration]:
        """Return the last registration of each index, of the pod that has a right to it.

        A pod that has not taken part yet was created after the loss of the one that has.
        """
        selected: dict[int, Registration] = {}
        for line in log:
            if line.identity in self._replaced:
                continue
            before = selected.get(line.pod)
            is_former = line.identity == self._owners.get(line.pod, line.identity)
            if before is not None and before.identity != line.identity and is_former:
                continue
            selected[line.pod] = line
        return selected

    def find_replaced(self, log: Sequence[Registration]) -> set[int]:
        """Return the members in whose places other pods have registered."""
        selected = self.select(log)
        return {pod for pod, line in selected.items() if line.identity != self._owners.get(pod, line.identity)}


class Heartbeats:
    """Detects stopped heartbeats from this pod's own observations.

    A busy machine or store may delay all pods. So a pod is dead only after this process has itself observed the same
    heartbeat for the whole of ``patience`` seconds.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._clock = AwakeClock(patience / 3, now)
        self._seen: dict[int, tuple[Any, float]] = {}

    def find_dead(self, beats: Mapping[int, Any], now: float) -> set[int]:
        """Record the last heartbeat of each pod; return the dead pods. ``now``: monotonic time."""
        time_ = self._clock.tick(now)
        before = self._seen
        self._seen = {}
        for pod, beat in beats.items():
            is_same = pod in before and before[pod][0] == beat
            self._seen[pod] = before[pod] if is_same else (beat, time_)
        return {pod for pod, (_, since) in self._seen.items() if time_ - since >= self._patience}
