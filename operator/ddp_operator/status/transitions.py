"""What the step from one status to the next is worth: Events, and what the operator's own metrics count. Pure.

Two statuses are compared, so that a repeated pass is silent and adds nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from msgspec.structs import replace

from ddp_operator.api.crd import print_columns
from ddp_operator.api.status import Status
from ddp_operator.cluster import Event
from ddp_operator.failures import describe_failure, describe_restart
from ddp_operator.launcher.failure_table import CATEGORIES, CUDA, UNKNOWN
from ddp_operator.status import conditions as c
from ddp_operator.status.kueue import QUEUE_REASONS
from ddp_operator.status.replacement import describe_replacement
from ddp_operator.status.usage import purposes

RECOVERY_LEVELS: Final = ("process", "pod", "group")
NO_FAILURE: Final = "None"
"""Category of a restart that no failure caused: a change of size, a disruption without a cause that is known."""
RESTART_CATEGORIES: Final = (NO_FAILURE, *CATEGORIES)
STAGES: Final = ("rendezvous", "first_step")

_WARNINGS: Final = frozenset((*c.BLOCKING, c.UNREACHABLE)) - {c.QUOTA_PENDING}


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure was found."""

    category: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """Training was started again, on one of the three levels."""

    level: Literal["process", "pod", "group"]
    category: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Reached:
    """The first attempt got so far, in so many seconds since it was started or resumed."""

    stage: Literal["rendezvous", "first_step"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has succeeded or failed for good."""

    result: Literal["Succeeded", "Failed"]


@dataclass(frozen=True, slots=True)
class Used:
    """GPUs were held for it: Productive, Waiting, or a cause of ``status.usage.lost``. ``profile``: empty for none."""

    purpose: str
    gpu_seconds: int
    profile: str = ""


@dataclass(frozen=True, slots=True)
class Blamed:
    """A failure of a job that holds GPUs was the node's, as the job reports: it was lost, its GPU failed, or it was
    left for its conditions."""

    node: str


Transition = Failed | Restarted | Reached | Ended | Used | Blamed


def find_transitions(old: Status, new: Status, now: datetime) -> tuple[Transition, ...]:
    """Return what happened between two statuses of one job."""
    return tuple(_transitions(old, new, now))


def _transitions(old: Status, new: Status, now: datetime) -> Iterator[Transition]:
    category = NO_FAILURE
    if new.last_failure is not None and new.last_failure != old.last_failure:
        category = new.last_failure.category if new.last_failure.category in CATEGORIES else UNKNOWN.name
        yield Failed(category)
    cause = UNKNOWN.name if category == NO_FAILURE else category
    again = new.restarts.in_place - old.restarts.in_place
    if again > 0:
        yield Restarted("process", cause, again)
    if new.attempt > max(1, old.attempt):
        yield Restarted("group", category, new.attempt - max(1, old.attempt))
    elif new.restarts.replaced > old.restarts.replaced:
        yield Restarted("pod", cause)
    if new.attempt == 1:
        yield from _reached(old, new, now)
    for result in (c.SUCCEEDED, c.FAILED):
        if new.is_true(result) and not old.is_true(result):
            yield Ended("Succeeded" if result == c.SUCCEEDED else "Failed")
    nodes = {name: None for name in new.failed_nodes if name not in old.failed_nodes}
    if category == CUDA.name and new.last_failure is not None and new.last_failure.node_name:
        nodes[new.last_failure.node_name] = None
    if _holds_gpus(old) or _holds_gpus(new):
        yield from map(Blamed, nodes)
    before, profile = purposes(old.usage), new.profile.name if new.profile is not None else ""
    for purpose, seconds in purposes(new.usage).items():
        if seconds > before.get(purpose, 0):  # steps that are repeated were productive before
            yield Used(purpose, seconds - before.get(purpose, 0), profile)


def _holds_gpus(status: Status) -> bool:
    return status.usage is not None and status.usage.gpus > 0


def _reached(old: Status, new: Status, now: datetime) -> Iterator[Reached]:
    start = new.start_time
    if start is None:
        return
    seconds = max(0.0, (now - start).total_seconds())
    # A pod that is replaced waits for its peers anew: only the first time counts.
    again = any(restarts.in_place or restarts.replaced for restarts in (old.restarts, new.restarts))
    joined = new.is_true(c.RENDEZVOUSED) and not old.is_true(c.RENDEZVOUSED)
    if joined and not again and old.progress is None:
        yield Reached("rendezvous", seconds)
    if old.progress is None and new.progress is not None and new.progress.step:
        yield Reached("first_step", seconds)


def is_minor_change(old: Status, new: Status) -> bool:
    """Tell whether two statuses differ only in counts of pods, messages and figures, and in no column that is printed.

    Such a change can wait: a big job would else write one for each pod, and `kubectl get -w` repeat a line.
    """
    if _states(old) != _states(new) or print_columns(old) != print_columns(new):
        return False
    same = {name: getattr(old, name) for name in ("nodes", "conditions", "goodput", "stragglers", "usage")}
    if old.progress is not None and new.progress is not None:  # the first one is news
        same["progress"] = old.progress
    return replace(new, **same) == old


def _states(status: Status) -> list[tuple[str, str, str, int, str]]:
    return [
        # What a queue says is asked for seldom, and is what the job's owner waits for.
        (one.type, one.status, one.reason, one.observed_generation, one.message * (one.reason in QUEUE_REASONS))
        for one in status.conditions
    ]


_TOLD: Final = (
    *(c.SUSPENDED, c.INPUTS_READY, c.SCHEDULED, c.RENDEZVOUSED, c.IDLE, c.NODES_HEALTHY, c.UPLOADED),
    *(c.DISTRIBUTED, c.SUCCEEDED, c.FAILED),
)


def transition_events(old: Status, new: Status, limit: int | None = None) -> tuple[Event, ...]:
    """Return the events for the step from one status to the next, in the order in which things happened.

    ``limit``: recovery.maxRestarts.
    """
    return tuple(_events(old, new, limit))


def _events(old: Status, new: Status, limit: int | None) -> Iterator[Event]:
    accepted = new.condition(c.ACCEPTED)
    before = old.condition(c.ACCEPTED)
    if accepted and accepted.status != "True" and (before is None or before.message != accepted.message):
        yield Event("Warning", accepted.reason, accepted.message)
    if new.last_failure is not None and new.last_failure != old.last_failure:
        failure = new.last_failure
        text = f"attempt {failure.attempt}: {describe_failure(failure)}"
        yield Event("Warning", f"Failure{failure.category}", text[:1000])
    if new.attempt == old.attempt and new.restarts.in_place > old.restarts.in_place:
        counted = new.restarts.counted > old.restarts.counted
        which = f"restart {new.restarts.used} of {limit}" if counted else "restart, not counted"
        which += ", in the same pods"
        cause = new.last_failure if new.last_failure != old.last_failure else None
        yield Event("Normal", c.RESTARTED_IN_PLACE, describe_restart(which, cause, new.checkpoint))
    if new.attempt == old.attempt and new.restarts.replaced > old.restarts.replaced:
        cause = new.last_failure if new.last_failure != old.last_failure else None
        yield Event("Normal", c.POD_REPLACEMENT, describe_replacement(new, cause))
    if new.attempt != old.attempt or new.attempt_nodes != old.attempt_nodes:
        restarting = new.condition(c.RESTARTING)
        if old.attempt == 0:
            yield Event("Normal", "Started", f"attempt 1 with {new.attempt_nodes} nodes as Job {new.job_name}")
        elif restarting is not None:
            yield Event("Normal", restarting.reason, restarting.message)
    yield from _stalls(old, new)
    for kind in _TOLD:
        now, then = new.condition(kind), old.condition(kind)
        if now is None or (then is not None and then.status == now.status and now.status == "True"):
            continue
        if then is not None and (then.status, then.reason) == (now.status, now.reason):
            continue
        if kind in (c.DISTRIBUTED, c.NODES_HEALTHY, c.UPLOADED):
            if now.status == "False":
                yield Event("Warning", now.reason, now.message)
            elif kind == c.UPLOADED and then is not None:
                yield Event("Normal", now.reason, now.message)
        elif now.status == "True":
            yield Event("Warning" if kind in (c.FAILED, c.IDLE) else "Normal", kind, now.message or now.reason)
        elif kind in (c.INPUTS_READY, c.SCHEDULED) and now.reason in _WARNINGS:
            yield Event("Warning", now.reason, now.message)
        elif kind == c.SUSPENDED and then is not None and then.status == "True":
            yield Event("Normal", "Resumed", "spec.suspend is false")


def _stalls(old: Status, new: Status) -> Iterator[Event]:
    """Return what is to be said of steps that stop or go on, and of a pod that does not report any more."""
    then, now = old.condition(c.PROGRESSING), new.condition(c.PROGRESSING)
    if now is None:
        return
    said = then.message if then is not None and then.reason == c.STALLED else None
    if now.reason == c.STALLED and said != now.message:
        yield Event("Warning", c.STALLED, now.message)
    elif said is not None and now.status == "True":
        yield Event("Normal", c.TRAINING, "training is making progress again")
    if now.reason in (c.NODE_NOT_READY, c.WAITING_FOR_PEERS) and (then is None or then.reason != now.reason):
        yield Event("Warning" if now.reason == c.NODE_NOT_READY else "Normal", now.reason, now.message)
