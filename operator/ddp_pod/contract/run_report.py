"""What decisions read in the report of a pod. ``report`` adds what only features read."""

from dataclasses import dataclass, field
from typing import Final

from .failure_record import Failure
from .names import LAUNCHER_PHASES, STALLED_STATES
from .progress import RankProgress, Uploads
from .records import choice, items, number, text

REPORT_VERSION: Final = 2
REPORT_LIMIT: Final = 1 << 17
"""Bytes of a report."""
RUN_RESULTS: Final = ("Succeeded", "Failed", "Stopped")
"""How a run of `ddp dev` can end; Stopped: the user ended it."""
_NOT_JOINED: Final = ("Starting", "WaitingForMaster", "Rendezvous")


@dataclass(frozen=True)
class StalledRank:
    """What a rank of a stalled pod does."""

    rank: int = 0
    state: str = choice(STALLED_STATES, STALLED_STATES[-1])
    what: str = text(200)

    @property
    def order(self) -> int:
        """The place of its state among STALLED_STATES: ranks for which their peers wait come first."""
        return STALLED_STATES.index(self.state)


@dataclass(frozen=True)
class Stall:
    """Missing steps and heartbeats of a pod.

    ``heartbeat_age``: time since a rank last made progress; ``seconds``: for how long the ranks have made no step, only
    while they make none; ``awaited``: what a rank does for which its peers wait, or in which collectives all of them
    wait for each other, before that counts as a stall.
    """

    hangs: int = number(default=0)
    heartbeat_age: float | None = number(1e9)
    seconds: float | None = number(1e9)
    ranks: tuple[StalledRank, ...] = items(8)
    awaited: str = text(400)


@dataclass(frozen=True)
class DevRun:
    """The newest run of a job of `ddp dev`. Times are Unix seconds."""

    run: int = number(default=0)
    """Its number. 0: no run yet, because the code of the former attempt is lost."""
    digest: str = text(64)
    """Of the archive's tar; empty: the image's own code."""
    started: float | None = number(4e9)
    ended: float | None = number(4e9)
    """None while it runs."""
    result: str = choice(RUN_RESULTS)
    """Empty while it runs."""
    failure: Failure | None = None
    """The root cause among the pods."""
    release_at: float | None = number(4e9)
    """When the pods end unless another run starts."""


@dataclass(frozen=True)
class RunReport:
    """What one pod reports of its ranks and their restarts."""

    version: int = REPORT_VERSION
    phase: str = choice(LAUNCHER_PHASES)
    restarts: int = number(default=0)
    """How often the workers were restarted in the same pods."""
    restart_step: float | None = None
    """The step of the run at the last restart."""
    ranks: tuple[RankProgress, ...] = items(256)
    stall: Stall = field(default_factory=Stall)
    uploads: Uploads | None = None
    unreachable: str = text()
    """What the pod cannot reach: pod 0 before training, or peers."""
    step_hint: str = text(500)
    """Why no step of the script is visible, and the remedy."""
    last_failure: Failure | None = None
    """The failure before the last restart of the workers."""
    dev: DevRun | None = None
    """Only of pod 0 of a job with spec.dev."""
    faults: int = number(default=0)
    """How often a part of the launcher failed that training does not need; the pod's log has the first of each."""

    @property
    def joining(self) -> bool:
        """True while the launcher waits for the other pods, before the first step or after a restart."""
        return self.phase in _NOT_JOINED
