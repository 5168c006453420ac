"""The current attempt as its pods and pod 0's metrics page show it, computed once for every part of the status. Pure.

The steps of ``describe`` read this record: restart accounting, observation, conditions and phase.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from ddp_operator.api.job import JobSize
from ddp_operator.api.status import Condition, LastFailure, Nodes, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.diagnosis import find_disruption
from ddp_operator.decide.observation import Pods, State
from ddp_operator.decide.progress import apply_metrics, record_final_progress
from ddp_operator.decide.waiting import waits_in_queue


@dataclass(frozen=True, slots=True)
class ObservedAttempt:
    """The pods of one attempt and what they report."""

    state: State
    recorded: Status
    """The status that the decision recorded, without the observations of this pass."""
    restart: Fact | None
    """Restarting, if the attempt starts with this pass and replaces a former one."""
    pods: Pods
    size: JobSize
    counts: Nodes
    alive: int
    """Pods that may run a process, those of former attempts included."""
    all_run: bool
    """Whether enough pods run for training."""
    trains_with_fewer: bool
    """Whether an elastic job trains although not all of its pods run."""
    rendezvoused: Condition | None
    """Rendezvoused of the pass before, if it was of this attempt."""
    was_joined: bool
    """Whether the workers of this attempt had joined the rendezvous before."""
    waits_in_queue: bool
    lost: LastFailure | None
    """The loss of the pod that was taken away first."""
    reported: Status
    """The recorded status with the progress and the checkpoint that pods report now."""


def observe_attempt(state: State, status: Status, restart: Fact | None) -> ObservedAttempt:
    """Return the observed attempt of ``status``. ``restart``: why it replaces a former one."""
    job = state.job
    observation = state.observation
    pods = observation.pods_of(status.attempt)
    size = job.size_with(status.attempt_nodes)
    counts = pods.counts(size.nodes)

    same_attempt = status.attempt == job.status.attempt
    rendezvoused = job.status.condition(c.RENDEZVOUSED) if same_attempt else None
    was_joined = c.may_have_joined(rendezvoused)

    trains_with_fewer = restart is None and _trains_with_fewer(state, pods, size, rendezvoused)
    return ObservedAttempt(
        state=state,
        recorded=status,
        restart=restart,
        pods=pods,
        size=size,
        counts=counts,
        alive=sum(pod.alive for pod in pods) + observation.former_alive(status.attempt),
        all_run=trains_with_fewer or _has_all_pods(pods, size, counts),
        trains_with_fewer=trains_with_fewer,
        rendezvoused=rendezvoused,
        was_joined=was_joined,
        waits_in_queue=waits_in_queue(job, observation.job(status.attempt)),
        lost=find_disruption(status.attempt, pods.newest.values()),
        reported=_read_progress(state, status, pods, was_joined=was_joined),
    )


def _has_all_pods(pods: Pods, size: JobSize, counts: Nodes) -> bool:
    if not size.spares:
        return pods.running + counts.succeeded >= size.nodes
    present = {index for index, pod in pods.newest.items() if pod.running or pod.phase == "Succeeded"}
    return c.has_quorum(present, size)


def _trains_with_fewer(state: State, pods: Pods, size: JobSize, rendezvoused: Condition | None) -> bool:
    """Return whether an elastic job trains with fewer pods than nodes. Without a page the last condition counts."""
    elastic = state.spec.elastic
    if elastic is None:
        return False

    running = {pod.index for pod in pods if pod.running and pod.index < size.nodes}
    if 0 not in running or not elastic.min_nodes <= len(running) < size.nodes:
        return False

    page = state.observation.page
    if page is None:
        return rendezvoused is not None and rendezvoused.reason == c.ENOUGH_RANKS_JOINED
    return page.launcher_phase == "Running"


def _read_progress(state: State, status: Status, pods: Pods, *, was_joined: bool) -> Status:
    page = state.observation.page
    if page is not None:
        status = apply_metrics(status, page.values, state.now, page.rates)
    elif not pods and not was_joined:
        # Pods that are deleted make steps and save them until their grace period ends, after the next attempt began.
        former = record_final_progress(status, state.observation.pods_of(status.attempt - 1), state.now)
        status = _copy_progress(status, former)

    if state.spec.suspend:
        status = _copy_progress(status, record_final_progress(status, pods, state.now))
    return status


def _copy_progress(status: Status, source: Status) -> Status:
    return replace(status, progress=source.progress, checkpoint=source.checkpoint)
