"""Planted states of a job, and the texts of `kubectl get`, `kubectl describe` and `ddp why` that describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from ddp_cli.view.why import explain_why
from ddp_operator.api.columns import render_columns
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import CheckpointStatus, Condition, Progress, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.decide import decide
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.state import AT_ONCE
from tests.support.builders import NOW, child_job, child_pod, decode, job, observe

JOB = child_job()
NO_HOOKS = Hooks()
_MOST_PASSES = 6


def condition(kind: str, status: Any, reason: str, message: str = "", *, age: int = 600) -> Condition:
    since = NOW - timedelta(seconds=age)
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=since)


TRAINING = Status(
    phase="Running",
    attempt=1,
    job_name="train-1",
    start_time=NOW - timedelta(hours=1),
    attempt_time=NOW - timedelta(hours=1),
    first_run_time=NOW - timedelta(hours=1),
    progress=Progress(step=40, total_steps=100),
    checkpoint=CheckpointStatus(step=30),
    conditions=(
        condition(c.ACCEPTED, "True", c.VALID),
        condition(c.SUSPENDED, "False", c.NOT_SUSPENDED),
        condition(c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED, "2/2 pods scheduled"),
        condition(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED, "2/2 pods joined the rendezvous"),
        condition(c.PROGRESSING, "True", c.TRAINING, "training is making progress"),
        condition(c.RESTARTING, "False", c.NOT_RESTARTING),
    ),
).remember(nodes=2)
JOINING = replace(
    TRAINING,
    progress=None,
    checkpoint=None,
    conditions=(
        *TRAINING.conditions[:3],
        condition(c.RENDEZVOUSED, "False", c.WAITING_FOR_WORKERS, "2/2 pods running", age=20),
        condition(c.PROGRESSING, "False", c.NO_STEP_YET, age=20),
        condition(c.RESTARTING, "False", c.NOT_RESTARTING),
    ),
)
PODS = (child_pod(0, age=3000), child_pod(1, age=3000, status={"podIP": "10.0.0.2"}))


@dataclass(frozen=True)
class Planted:
    """An observed state, and parts of the texts that describe it; ``never``: what no text may contain."""

    pods: Sequence[Mapping[str, Any]]
    get: str
    describe: Sequence[str]
    why: Sequence[str]
    never: Sequence[str] = ()
    page: str = ""
    jobs: Sequence[Mapping[str, Any]] = (JOB,)
    status: Status = TRAINING
    spec: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    seconds: float = 10.0


def settle(planted: Planted, hooks: Hooks = NO_HOOKS) -> tuple[Status, list[str]]:
    """Return the status after the passes that the state needs, and the messages of the Events."""
    now = NOW + timedelta(seconds=planted.seconds)
    status = planted.status
    messages: list[str] = []
    for _ in range(_MOST_PASSES):
        typed = job(status=status, **{"nodes": 2, **planted.spec})
        parsed = decode(planted.page) if planted.page else None
        seen = observe(typed, planted.jobs, planted.pods, parsed, **planted.answers)
        decision = decide(typed, seen, now, hooks=hooks.observe(typed, {}))
        messages += [event.message for event in list_transition_events(status, decision.status)]
        status = decision.status
        if decision.requeue_after != AT_ONCE:
            break
    return status, messages


def check(planted: Planted, hooks: Hooks = NO_HOOKS) -> None:
    status, messages = settle(planted, hooks)
    get = " ".join(str(cell) for cell in render_columns(status) if cell is not None)
    describe = "\n".join([*messages, *(f"{part.reason}: {part.message}" for part in status.conditions)])
    created = format_time(NOW - timedelta(hours=1))
    raw = {"metadata": {"name": "train", "creationTimestamp": created}, "status": msgspec.to_builtins(status)}
    why = str(explain_why(raw, planted.events, NOW + timedelta(seconds=planted.seconds)))

    assert planted.get in get
    for text in planted.describe:
        assert text in describe
    for text in planted.why:
        assert text in why
    for text in planted.never:
        assert text not in f"{get}\n{describe}\n{why}"
