"""Which pods are the members of a rendezvous round. Pure: pod 0 decides by it, and publishes the result."""

from typing import Any, Collection, Iterable, Mapping, NamedTuple, Optional, Sequence

from ..clock import AwakeClock

FREE_RESTARTS = 100  # uncounted ones after losing a peer, for each pod; more are no coincidence
FIRST_ROUND_SECONDS = 30.0  # that the first round waits for more pods, once there are enough


class FreeRestarts:
    """The uncounted restarts of a pod's workers."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self) -> bool:
        """Use one. Returns whether there was one left."""
        self._taken += 1
        return self._taken <= FREE_RESTARTS


class GroupSize(NamedTuple):
    """How many pods a round has: ``nodes``; of an elastic job the number at its start, and ``least`` to ``most``."""

    nodes: int
    least: int
    most: int
    elastic: bool = False


class Registrations(NamedTuple):
    """The pods that have registered for a round, with their counts of restarts, and those that have left the run."""

    joined: Mapping[int, int]
    left: frozenset[int]


def read_registrations(entries: Iterable[Any]) -> Registrations:
    """Return the registrations from a round's log of ``[pod, restarts]``; a pod without restarts leaves."""
    joined: dict[int, int] = {}
    left: set[int] = set()
    for pod, restarts in entries:
        if restarts is not None:
            joined[pod] = restarts
            left.discard(pod)
        else:
            joined.pop(pod, None)
            left.add(pod)
    return Registrations(joined, frozenset(left))


def choose_members(
    size: GroupSize,
    registrations: Registrations,
    previous: Sequence[int],
    dead: Collection[int],
    waited: float,
) -> Optional[list[int]]:
    """Return the members of a round in the order of their ranks; None while it waits for more.

    ``previous``: the members of the round before; ``dead``: pods whose heartbeats have stopped; ``waited``: seconds
    since the round began. Pods that were members and live come first. Spares take the seats of those that do not.
    """
    joined = registrations.joined.keys() - set(dead)
    expected = {pod for pod in previous if pod not in registrations.left and pod not in dead}
    if not expected <= joined:
        return None
    if size.elastic:
        is_first = not previous
        enough = size.nodes if is_first and waited <= FIRST_ROUND_SECONDS else size.least
        return sorted(joined)[: size.most] if len(joined) >= enough else None
    if len(joined) < size.nodes:
        return None
    if not previous and waited <= FIRST_ROUND_SECONDS and not joined >= set(range(size.nodes)):
        return None
    candidates = [*sorted(expected), *sorted(joined - expected)]
    return sorted(candidates[: size.nodes])


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
