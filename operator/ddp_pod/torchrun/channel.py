"""The messages between the launcher and torchrun's agent, and the agent's end of their channel.

A class whose docstring names a reply is a request, sent as a ``Request``: the agent waits for the reply. Services and
features have messages of their own; what the supervisor does not know it gives to the services.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.pod import Pod
from ..contract.failure_record import Failure
from ..failures.collective_places import RankPlace


class AgentRequest(NamedTuple):
    """A request to the fork server for an agent. ``command``: of a rank; ``restarts``: of the workers so far.

    ``restarts_left``: how many more the pod's own failures may cause.
    """

    pod: Pod
    command: list[str]
    restarts: int
    restarts_left: int


class Request(NamedTuple):
    """The agent waits for the reply to ``asked``."""

    asked: Any


class Started(NamedTuple):
    """The agent runs. ``server``: the process that forks its ranks, or the agent itself."""

    pid: int
    server: int


class StoreStarted(NamedTuple):
    """The agent has forked the rendezvous store."""

    pid: int


class PhaseEntered(NamedTuple):
    """The agent has entered one of LAUNCHER_PHASES."""

    phase: str


class RanksFinished(NamedTuple):
    """All ranks of this pod have exited with 0, and the agent waits for those of other pods."""


class EndsNeeded(NamedTuple):
    """Ranks of this pod have exited with 0, and peers may still need them. The reply has their RankEnds."""

    local_ranks: Sequence[int]


class RoundJoined(NamedTuple):
    """The pod has joined a round. The reply is whether its ranks may start."""

    restarts: int
    explained: bool


class RanksFailed(NamedTuple):
    """Ranks have ended before the training. ``has_ended_peers``: whether all ranks of another pod have exited with 0.

    ``step``: of the run, as pod 0 has shared it; ``interrupted``: whether a stop request or a change of the group may
    have ended them; ``peers``: where ranks of other pods have lost a peer. The reply is a Verdict.
    """

    failures: Sequence[Failure]
    has_ended_peers: bool
    step: float | None
    interrupted: bool = False
    peers: Sequence[RankPlace] = ()


class Verdict(NamedTuple):
    """Whether the ranks restart in this pod, and whether this pod knows why they failed."""

    restart: bool
    knows_cause: bool


class Restarting(NamedTuple):
    """The ranks restart. ``has_cause``: whether a pod knows why. The reply is the delay in seconds."""

    has_cause: bool
    step: float | None


class Release(NamedTuple):
    """From the launcher: the master is reachable and the checkpoints are ready."""
