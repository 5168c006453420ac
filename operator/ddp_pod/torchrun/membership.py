"""Which pods are the members of a rendezvous round. Pure: pod 0 decides by it, and publishes the result."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..base.pod import AwakeClock

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
