"""`ddp drill --lose-node`: what a lost node costs a job, and what its return does. Pure.

Nothing in a pod can imitate a lost node: the operator counts a pod as lost only if its node's kubelet is silent too. So
a person cuts the node off, and the drill measures from the last step before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ddp_cli.features.drill.recovery import MeasuredRecovery, Sample, measure

_RECORD_SECONDS: Final = 60.0
"""How long after the next step the node may be declared lost: a spare is faster than that."""

_SETTLE_SECONDS: Final = 15.0
"""Within which the operator counts the restart. A node is used again a minute after its return at the earliest."""


class ChosenPod(NamedTuple):
    """The pod whose node is cut off."""

    name: str
    uid: str
    node: str


class JobFacts(NamedTuple):
    """What a job's status states. ``silent``: the reason, if it names a lost contact; ``avoided``: nodes.

    ``restarts``: all of them; ``counted``: those against maxRestarts; ``uids``: of the pods of the chosen index.
    """

    silent: str = ""
    avoided: tuple[str, ...] = ()
    attempt: int = 1
    restarts: int = 0
    counted: int = 0
    uids: frozenset[str] = frozenset()


class Sighting(NamedTuple):
    """A sample of rank 0, or the status of the job, at a moment (seconds of the reader's clock)."""

    time: float
    sample: Sample | None = None
    facts: JobFacts | None = None


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """The loss of a node. Seconds from the last step before; None: not within the time of the drill."""

    pod: ChosenPod
    reason: str
    named: float
    lost: float | None
    recovery: MeasuredRecovery | None
    counted: bool


@dataclass(frozen=True, slots=True)
class NodeReturn:
    """The return of the node, seconds after the recovery. ``restarts``: since then; ``left``: the lost pod exists."""

    seconds: float
    restarts: int
    left: bool


class _Marks:
    """When the status first named the loss, and declared it."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.reason = ""
        self.named: float | None = None
        self.lost: float | None = None
        self.facts = JobFacts()

    def note(self, moment: float, facts: JobFacts) -> None:
        """Note what the status states."""
        self.facts = facts
        is_avoided = self._node in facts.avoided
        if is_avoided and self.lost is None:
            self.lost = moment
        if (facts.silent or is_avoided) and self.named is None:
            self.named = moment
            self.reason = facts.silent or "NodeLost"


def await_loss(
    sightings: Iterator[Sighting], pod: ChosenPod, before: Sample, timeout: float, clock: Callable[[], float]
) -> NodeLoss | None:
    """Measure the loss of a pod's node; None: the status has named none in time. ``before``: a sample with steps."""
    marks = _Marks(pod.node)
    first: JobFacts | None = None
    last = before
    until = clock() + timeout
    for sighting in sightings:
        if sighting.facts is not None:
            first = first or sighting.facts
            marks.note(sighting.time, sighting.facts)
        if sighting.sample is not None and _has_advanced(last, sighting.sample):
            last = sighting.sample
        if marks.named is not None or sighting.time > until:
            break
    if marks.named is None or first is None:
        return None

    end = marks.named + timeout
    samples = (sighting.sample for sighting in _follow(sightings, marks, end) if sighting.sample is not None)
    recovery = measure(last, last.time, samples)
    if recovery is not None and marks.lost is None:
        _await_declaration(_follow(sightings, marks, clock() + _RECORD_SECONDS), marks)
    return NodeLoss(
        pod,
        marks.reason,
        named=marks.named - last.time,
        lost=None if marks.lost is None else marks.lost - last.time,
        recovery=recovery,
        counted=marks.facts.counted > first.counted,
    )


def await_return(
    sightings: Iterator[Sighting], loss: NodeLoss, timeout: float, clock: Callable[[], float]
) -> NodeReturn | None:
    """Wait until the job no longer avoids the node; None: it still does after the time."""
    start = clock()
    settled: JobFacts | None = None
    for sighting in sightings:
        facts = sighting.facts
        if facts is not None and (settled is None or sighting.time < start + _SETTLE_SECONDS):
            settled = facts
        if facts is not None and settled is not None and loss.pod.node not in facts.avoided:
            restarts = facts.restarts - settled.restarts
            return NodeReturn(sighting.time - start, restarts, left=loss.pod.uid in facts.uids)
        if sighting.time > start + timeout:
            break
    return None


def judge(loss: NodeLoss, back: NodeReturn | None) -> str:
    """Return the verdict on a loss, and on the return of the node."""
    recovery = loss.recovery
    if recovery is None:
        return "training did not resume; `ddp why` has the reason"
    faults = []
    if recovery.steps_lost:
        faults.append("steps were repeated: checkpoint.memory keeps them (docs/checkpoints.md)")
    if loss.counted:
        faults.append("the restart was counted against maxRestarts")
    if back is not None and back.restarts > 0:
        faults.append("the job restarted again until the node was back")
    if back is not None and back.left:
        faults.append(f"pod {loss.pod.name} still exists")
    return "; ".join(["recovered", *faults])


def _has_advanced(last: Sample, sample: Sample) -> bool:
    return sample.step is not None and (last.step is None or sample.step > last.step)


def _await_declaration(sightings: Iterator[Sighting], marks: _Marks) -> None:
    for _ in sightings:
        if marks.lost is not None:
            return


def _follow(sightings: Iterator[Sighting], marks: _Marks, end: float) -> Iterator[Sighting]:
    """Yield what is seen up to a moment, after the status in it is noted."""
    for sighting in sightings:
        if sighting.time > end:
            return
        if sighting.facts is not None:
            marks.note(sighting.time, sighting.facts)
        yield sighting
