"""Decisions of one pass for tests: what is observed of a job, and what the decision records."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

from ddp_operator.api.status import Condition, Status
from ddp_operator.decide.decide import decide
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.state import Decision, Refusal
from tests.support.builders import NOW, Json, child_job, child_pod, decode, job, observe

T = TypeVar("T")

STARTED = Status(attempt=1, job_name="train-1", start_time=NOW).remember(nodes=2)
RUNNING = (child_pod(0), child_pod(1))


def present(value: T | None) -> T:
    """Return a value that the test requires."""
    assert value is not None
    return value


def run_pass(
    *pods: Json,
    status: Status = STARTED,
    jobs: Any = None,
    text: Any = "",
    seconds: float = 1,
    refusal: Refusal | None = None,
    observed: Mapping[str, Any] | None = None,
    hooks: Hooks | None = None,
    **spec: Any,
) -> Decision:
    """Return the decision about a job of two nodes, ``seconds`` after NOW.

    ``jobs``: by default that of attempt 1; ``text``: the report of pod 0; ``observed``: further observations;
    ``hooks``: of features.
    """
    typed = job(status=status, **{"nodes": 2, **spec})
    page = decode(text) if text else None
    seen = observe(typed, [child_job()] if jobs is None else jobs, pods, page, **(observed or {}))
    now = NOW + timedelta(seconds=seconds)
    return decide(typed, seen, now, refusal=refusal, hooks=(hooks or Hooks()).observe(typed, {}))


def read_condition(decision: Decision, kind: str) -> Condition:
    """Return a condition that the decision sets."""
    return present(decision.status.condition(kind))


def read_state(decision: Decision, kind: str) -> tuple[str, str]:
    """Return status and reason of a condition that the decision sets."""
    condition = read_condition(decision, kind)
    return condition.status, condition.reason
