"""Which pods an elastic job's rendezvous waits for, and which it takes for dead."""

from __future__ import annotations

from typing import Any

from .clock import AwakeClock

FREE_RESTARTS = 100  # in place and after losing a peer, in an elastic job: more than that is no accident
_FIRST_CALL_SECONDS = 30.0  # how long an elastic job waits for its first pods once there are enough to begin
_GONE_SECONDS = 1.0  # after which a pod that shows no sign of life is not waited for when the others meet again


class RendezvousQuorum:
    """When an elastic job's pods have met: whom to wait for, and for how long.

    torchrun knows a least and a greatest number. In between it waits a fixed time, too short for the first start and
    too long for every other. We know better: at first the pods that were asked for, later those that were there.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._known: set[Any] = set()
        self._since: tuple[int, float] = (-1, 0.0)
        self._free = 0

    def start_round(self, state: Any) -> None:
        """Note who is there before this pod leaves the round that it was in."""
        self._known = {*state.participants, *state.wait_list} if state.complete else set()

    def take_free_restart(self) -> bool:
        """Take one of the free restarts. Returns whether there was one."""
        self._free += 1
        return self._free <= FREE_RESTARTS

    def decide(self, state: Any, node: Any, least: int, now: float) -> bool | None:
        """Return whether the round is complete now; None: as torchrun sees it. Times are of a monotonic clock."""
        if state.complete or node not in state.participants or len(state.participants) < least:
            return None
        if self._since[0] != state.round:
            self._since = (state.round, now)
        waited = now - self._since[1]
        if state.round == 0:
            return True if len(state.participants) >= self._nodes else None if waited > _FIRST_CALL_SECONDS else False
        missing = self._known - set(state.participants)
        if not self._known or (missing and waited <= _GONE_SECONDS):
            return None
        return True if all(one not in state.last_heartbeats for one in missing) else None


class Heartbeats:
    """Whose heartbeats have ended, as far as this pod has been there to see.

    torchrun goes by the time in the store: where that, or a busy machine, has held up everybody for long enough, the
    first to get on takes all others for dead and meets without them, while they train on: two groups, one checkpoint.
    So a pod counts as dead only when its last heartbeat was seen, and seen again, for as long as torchrun waits.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._clock = AwakeClock(patience / 3, now)
        self._seen: dict[Any, tuple[Any, float]] = {}

    def live_nodes(self, beats: dict[Any, Any], now: float) -> list[Any]:
        """Take in the last heartbeat of each pod; return those that may live. ``now`` is of a monotonic clock."""
        time_ = self._clock.tick(now)
        before, self._seen = self._seen, {}
        for node, beat in beats.items():
            same = node in before and before[node][0] == beat
            self._seen[node] = before[node] if same else (beat, time_)
        return [node for node, (_, since) in self._seen.items() if time_ - since < self._patience]
