"""What the step from one status to the next adds to the operator's own metrics. Pure; a repeated pass adds nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from msgspec.structs import replace

from ddp_operator.api.crd import print_columns
from ddp_operator.api.status import Status
from ddp_operator.launcher.failure_table import CATEGORIES, UNKNOWN
from ddp_operator.status import conditions as c

RECOVERY_LEVELS: Final = ("process", "pod", "group")
NO_FAILURE: Final = "None"
"""Category of a restart that no failure caused: a change of size, a disruption without a cause that is known."""
RESTART_CATEGORIES: Final = (NO_FAILURE, *CATEGORIES)
STAGES: Final = ("rendezvous", "first_step")


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


Transition = Failed | Restarted | Reached | Ended


def find_transitions(old: Status, new: Status, now: datetime) -> tuple[Transition, ...]:
    """Return what happened between two statuses of one job."""
    return tuple(_transitions(old, new, now))


def _transitions(old: Status, new: Status, now: datetime) -> Iterator[Transition]:
    failed = new.last_failure is not None and new.last_failure != old.last_failure
    category = _known(new.last_failure.category) if failed and new.last_failure is not None else NO_FAILURE
    if failed:
        yield Failed(category)
    again = new.restarts.in_place - old.restarts.in_place
    if again > 0:
        yield Restarted("process", category if failed else UNKNOWN.name, again)
    if new.attempt > max(1, old.attempt):
        yield Restarted("group", category, new.attempt - max(1, old.attempt))
    elif new.restarts.replaced > old.restarts.replaced:
        yield Restarted("pod", category if failed else UNKNOWN.name)
    if new.attempt == 1:
        yield from _reached(old, new, now)
    for result in (c.SUCCEEDED, c.FAILED):
        if new.is_true(result) and not old.is_true(result):
            yield Ended("Succeeded" if result == c.SUCCEEDED else "Failed")


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


def _known(category: str) -> str:
    return category if category in CATEGORIES else UNKNOWN.name


def is_minor_change(old: Status, new: Status) -> bool:
    """Tell whether two statuses differ only in counts of pods, messages and figures, and in no column that is printed.

    Such a change can wait: a big job would else write one for each pod, and `kubectl get -w` repeat a line.
    """
    if _states(old) != _states(new) or print_columns(old) != print_columns(new):
        return False
    same = {name: getattr(old, name) for name in ("nodes", "conditions", "goodput", "stragglers")}
    if old.progress is not None and new.progress is not None:  # the first one is news
        same["progress"] = old.progress
    return replace(new, **same) == old


def _states(status: Status) -> list[tuple[str, str, str, int]]:
    return [(found.type, found.status, found.reason, found.observed_generation) for found in status.conditions]
