"""Transitions of a job, to count and to log, from one status to the next. Pure.

A repeated pass has equal statuses, so it counts nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.doubts import find_doubts
from ddp_operator.decide.job_events import find_new_failure
from ddp_operator.decide.purposes import list_purposes
from ddp_pod.contract.failure_table import CATEGORIES, CUDA, UNKNOWN

RECOVERY_LEVELS: Final = ("process", "pod", "group")
NO_FAILURE: Final = "None"
"""Category of a restart without a failure: a resize, a disruption of unknown cause."""
RESTART_CATEGORIES: Final = (NO_FAILURE, *CATEGORIES)
STAGES: Final = ("rendezvous", "first_step")
_MAX_LOGGED: Final = 300


@dataclass(frozen=True, slots=True)
class Failed:
    """A new failure."""

    category: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """Training was restarted on one of the three levels."""

    level: Literal["process", "pod", "group"]
    category: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Reached:
    """The first attempt reached a stage, seconds after it was started or resumed."""

    stage: Literal["rendezvous", "first_step"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has succeeded or failed."""

    result: Literal["Succeeded", "Failed"]


@dataclass(frozen=True, slots=True)
class Used:
    """GPUs held for a purpose: Productive, Waiting, or a cause of ``status.usage.lost``. ``profile`` may be empty."""

    purpose: str
    gpu_seconds: int
    profile: str = ""


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """A node caused a failure of a job with GPUs: it was lost, its GPU failed, or the job left it as unhealthy."""

    node: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """A job has succeeded, but may not have trained as intended."""

    reason: str


Transition = Doubted | Failed | Restarted | Reached | Ended | Used | NodeFailed


def find_transitions(old: Status, new: Status, now: datetime) -> tuple[Transition, ...]:
    """Return the transitions between two statuses of one job."""
    return tuple(_iterate_transitions(old, new, now))


def _iterate_transitions(old: Status, new: Status, now: datetime) -> Iterator[Transition]:
    category = _find_failure_category(old, new)
    if category != NO_FAILURE:
        yield Failed(category)
    yield from _list_restarts(old, new, category)
    if new.attempt == 1:
        yield from _list_stages(old, new, now)
    for result in (c.SUCCEEDED, c.FAILED):
        if new.is_true(result) and not old.is_true(result):
            yield Ended("Succeeded" if result == c.SUCCEEDED else "Failed")
            yield from (Doubted(condition.reason) for condition in find_doubts(new))
    yield from _list_failed_nodes(old, new, category)
    yield from _list_usage(old, new)


def describe_end(metadata: Mapping[str, Any], old: Status, new: Status) -> dict[str, object]:
    """Return what a log line states about a job that has ended. ``old``: the status before; it still has the GPUs."""
    failure = new.last_failure if new.phase == "Failed" else None
    end = new.condition(c.FAILED if new.phase == "Failed" else c.SUCCEEDED)
    start = new.start_time
    ended = new.completion_time
    return {
        "event": "JobEnded",
        **{name: metadata[name] for name in ("namespace", "name", "uid")},
        "phase": new.phase,
        "reason": end.reason if end is not None else "",
        "category": failure.category if failure is not None else "",
        "message": (end.message if end is not None else "")[:_MAX_LOGGED],
        "node": failure.node_name if failure is not None else "",
        "attempts": new.attempt,
        "restarts": new.counts.all,
        "seconds": round((ended - start).total_seconds()) if start and ended else 0,
        "step": new.progress.step if new.progress is not None else None,
        "checkpointStep": new.checkpoint.step if new.checkpoint is not None else None,
        "pods": new.nodes.desired,
        "gpus": old.usage.gpus if old.usage is not None else 0,
        "gpuSeconds": new.usage.gpu_seconds if new.usage is not None else 0,
        "queue": (metadata.get("labels") or {}).get(KUEUE_QUEUE_LABEL, ""),
    }


def _find_failure_category(old: Status, new: Status) -> str:
    failure = find_new_failure(old, new)
    if failure is None:
        return NO_FAILURE
    return failure.category if failure.category in CATEGORIES else UNKNOWN.name


def _list_restarts(old: Status, new: Status, category: str) -> Iterator[Restarted]:
    cause = UNKNOWN.name if category == NO_FAILURE else category
    in_place = new.counts.own_in_place - old.counts.own_in_place
    if in_place > 0:
        yield Restarted("process", cause, in_place)
    if new.attempt > max(1, old.attempt):
        yield Restarted("group", category, new.attempt - max(1, old.attempt))
    elif new.counts.replaced > old.counts.replaced:
        yield Restarted("pod", cause)


def _list_failed_nodes(old: Status, new: Status, category: str) -> Iterator[NodeFailed]:
    if not (_holds_gpus(old) or _holds_gpus(new)):
        return
    nodes = {name: None for name in new.failed_nodes if name not in old.failed_nodes}
    if category == CUDA.name and new.last_failure is not None and new.last_failure.node_name:
        nodes[new.last_failure.node_name] = None
    yield from map(NodeFailed, nodes)


def _list_usage(old: Status, new: Status) -> Iterator[Used]:
    before = list_purposes(old.usage)
    profile = new.profile.name if new.profile is not None else ""
    for purpose, seconds in list_purposes(new.usage).items():
        spent = seconds - before.get(purpose, 0)
        if spent > 0:  # repeated steps were productive before
            yield Used(purpose, spent, profile)


def _holds_gpus(status: Status) -> bool:
    return status.usage is not None and status.usage.gpus > 0


def _list_stages(old: Status, new: Status, now: datetime) -> Iterator[Reached]:
    start = new.start_time
    if start is None or new.dev is not None:  # each run of `ddp dev` reaches them
        return
    seconds = max(0.0, (now - start).total_seconds())
    # Pods join again after a restart; only the first time counts.
    restarted = any(counts.in_place or counts.replaced for counts in (old.counts, new.counts))
    joined = new.is_true(c.RENDEZVOUSED) and not old.is_true(c.RENDEZVOUSED)
    if joined and not restarted and old.progress is None:
        yield Reached("rendezvous", seconds)
    if old.progress is None and new.progress is not None and new.progress.step:
        yield Reached("first_step", seconds)
