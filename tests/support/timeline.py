"""A job over time, pass by pass."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ddp_operator.api.status import (
    Status,
)
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.decide import decide
from ddp_operator.decide.hooks import Feature, Hooks
from ddp_operator.decide.purposes import list_purposes
from tests.support.builders import NOW, child_job, child_pod, decode, job, observe, page, template, trainer

GPUS = template(trainer(resources={"limits": {"nvidia.com/gpu": 4}}))


class JobTimeline:
    """A job of two pods with four GPUs each, pass by pass."""

    def __init__(self, **spec: Any) -> None:
        self.status = Status()
        self.spec = {"template": GPUS, **spec}
        self.hooks = Hooks()
        self.actions: list[Any] = []
        self.requeue: float | None = None
        self.at = NOW

    def later(self, seconds: float, *pods: Any, text: str = "", jobs: Any = None) -> dict[str, int]:
        """Run passes this many seconds after the last, until one changes nothing. Return the use of the GPUs."""
        self.at += timedelta(seconds=seconds)
        self.actions = []
        for _ in range(5):
            before = self.status
            typed = job(status=before, nodes=2, **self.spec)
            attempts = [child_job(n) for n in range(1, before.attempt + 1)] if jobs is None else jobs
            result = decode(text) if text else None
            seen = observe(typed, attempts, pods, result)
            hooks = Hooks((*self.hooks.features, STALLS)).observe(typed, {})
            decision = decide(typed, seen, self.at, hooks=hooks)
            self.status = decision.status
            self.requeue = decision.requeue_after
            self.actions += decision.actions
            if self.status == before:
                break
            text = text if self.status.attempt == before.attempt else ""
        return list_purposes(self.status.usage)


def pods(phase: str = "Running", *, attempt: int = 1, **changes: Any) -> list[Any]:
    """Return both pods of such a job."""
    return [child_pod(index, phase, attempt=attempt, **changes) for index in range(2)]


def training(step: int, made: int, **values: Any) -> str:
    """Return the report of a job that trains, after this step and this number of steps."""
    return page(phase="Running", step=step, steps=made, **values)


def explain_stall(attempt: ObservedAttempt, fact: Fact) -> Fact:
    """Report a stall as a feature does, by the age of the last heartbeat alone."""
    page = attempt.state.observation.page
    is_late = page is not None and (page.stall.heartbeat_age or 0.0) >= 100
    return (
        Fact(c.PROGRESSING, "False", other_reasons.STALLED, "no step")
        if is_late and fact.type == c.PROGRESSING
        else fact
    )


STALLS = Feature("stalls-by-age", "stable", "x.md", explain=explain_stall)
