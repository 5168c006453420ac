"""What a pod knows of its peers, which it probes: a record that the launcher serves beside its report."""

from dataclasses import dataclass
from typing import Final

from .records import items, number

PEER_WITNESSES: Final = 3
"""Pods that probe a pod."""


MOST_HINTS: Final = 8
"""Silent pods of which one pod tells its readers, beside those that it probes."""


def choose_peer_steps(pods: int) -> tuple[int, ...]:
    """Return the distances from a pod's index to those of the pods that it probes, in a job with so many pods.

    They are far apart: a switch may take pods with neighbouring indexes.
    """
    steps = {1, max(2, pods // 3), max(3, 2 * pods // 3)}
    return tuple(sorted(step for step in steps if step < pods))


@dataclass(frozen=True)
class PeerContact:
    """A peer that has answered a pod's probes. ``silent_seconds``: since it last did; None: it answers."""

    pod: int = number(default=0)
    silent_seconds: float | None = number(1e9)


@dataclass(frozen=True)
class PeerReport:
    """What one pod knows of its peers, which the launcher serves at ``/peers``. ``pod``: its own index.

    ``contacts``: the peers that it probes; ``hints``: pods that others have told it are silent.
    """

    pod: int = number(default=0)
    contacts: tuple[PeerContact, ...] = items(PEER_WITNESSES)
    hints: tuple[int, ...] = items(MOST_HINTS)
