"""The status of an attempt: the stored part of the pods' messages, the named failure, and the counts."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import (
    Condition,
    LastFailure,
    RestartCounts,
    Status,
)
from ddp_operator.decide import conditions as c
from ddp_operator.decide.state import Decision
from ddp_operator.reading.objects import view_pod
from tests.support.builders import NOW, child_job, child_pod, last_words, page
from tests.support.decisions import RUNNING, STARTED, present, run_pass

TRAINING = page(step=7, total_steps=70, steps=7, step_seconds=7, phase="Running")


def run(*pods: Any, **more: Any) -> Decision:
    observed = {name: more.pop(name) for name in ("failures_in_place", "nodes") if name in more}
    return run_pass(*pods, observed=observed, **more)


def condition(kind: str, status: Any, reason: str) -> Condition:
    return Condition(type=kind, status=status, reason=reason, last_transition_time=NOW)


def in_place(message: str, seconds: float, restarts: int = 1) -> Any:
    """Return the report of a running pod about a failure after which its workers were restarted."""
    words = last_words("CUDAError", message=message, time=NOW.timestamp() + seconds, restarts=restarts)
    pod = view_pod(child_pod(1, "Failed", code=82, message=words))
    return ((pod, pod.termination),)


class TestReportedFailure:
    @pytest.mark.parametrize(
        ("attempt", "seconds", "detail"),
        [(1, -10, "known"), (1, 0, "in place"), (1, 10, "in place"), (2, -10, "in place")],
    )
    def test_latest_in_place_failure_is_recorded(self, attempt: int, seconds: float, detail: str) -> None:
        known = LastFailure(attempt=1, category="UserError", message="known", time=NOW)
        restarts = RestartCounts(total=attempt - 1)
        status = replace(STARTED, attempt=attempt, job_name=f"train-{attempt}", last_failure=known)
        status = status.remember(restarts=restarts)
        pods = [child_pod(index, attempt=attempt) for index in range(2)]
        decision = run(*pods, status=status, jobs=[child_job(attempt)], failures_in_place=in_place("in place", seconds))
        assert present(decision.status.last_failure).message == detail

    def test_in_place_failure_of_former_attempt_is_ignored(self) -> None:
        failed = child_pod(0, "Failed", code=82, message=last_words("UserError", message="the end"))
        jobs = [child_job(conditions={"Failed": "why"})]
        decision = run(failed, jobs=jobs, failures_in_place=in_place("before", 99))
        assert decision.status.attempt == 2
        assert present(decision.status.last_failure).message == "the end"


class TestRestarts:
    def test_in_place_restarts_are_maximum_of_all_pods(self) -> None:
        status = STARTED.remember(restarts=RestartCounts(in_place=3, in_place_before=2))
        ends = [child_pod(i, "Succeeded", message=last_words(restarts=n)) for i, n in enumerate((1, 4))]
        decision = run(*ends, status=status, jobs=[child_job(conditions={"Complete": ""})])
        assert decision.status.counts.in_place == 6


@pytest.mark.parametrize(
    ("failures", "attempt", "container", "seconds"),
    [(1, 1, "fetch", 10), (2, 1, "fetch", 20), (4, 1, "fetch", 80), (4, 1, "", 0), (4, 0, "fetch", 0)],
)
def test_start_delay_doubles_with_each_init_container_failure(
    failures: int, attempt: int, container: str, seconds: float
) -> None:
    cause = LastFailure(attempt=attempt, category="UserError", container=container)
    made = RestartCounts(total=1, counted=1, used=1, without_progress=failures)
    status = replace(STARTED, attempt=2, attempt_time=NOW, last_failure=cause).remember(restarts=made)
    jobs = [child_job(conditions={"Failed": ""})]
    waiting = run(status=status, jobs=jobs, seconds=0)
    assert bool(waiting.actions) is (seconds == 0)
    if seconds:
        assert waiting.requeue_after == seconds
        assert run(status=status, jobs=jobs, seconds=seconds).actions


def test_suspended_job_waits_for_former_pods() -> None:
    status = replace(STARTED, attempt=2, job_name="train-2")
    decision = run(child_pod(0), child_pod(0, attempt=2), status=status, jobs=[child_job(), child_job(2)], suspend=True)
    result = present(decision.status.condition(c.SUSPENDED))
    assert result.message == "2 pods are terminating gracefully"


class TestCheckpointsInAStore:
    STORE = {"path": "/ckpt", "url": "s3://bucket/digits"}
    NEWEST = {"bytes": 9, "step": 40, "time": 1.7e9}
    BEFORE = page(step=70, checkpoint_step=60, uploads={"bytes": 9}, phase="Running")
    UPLOADED = page(step=70, checkpoint_step=60, uploads=NEWEST, phase="Running")
    PROBLEM = {"problem": "OSError: 503 Slow Down"}
    FAILING = page(step=70, checkpoint_step=60, uploads=NEWEST | PROBLEM, phase="Running")

    def decide(self, text: str, status: Status = STARTED) -> Decision:
        return run(*RUNNING, text=text, status=status, checkpoint=self.STORE)

    def test_checkpoint_with_url_is_uploaded_checkpoint(self) -> None:
        assert self.decide(self.BEFORE).status.checkpoint is None
        saved = present(self.decide(self.UPLOADED).status.checkpoint)
        assert saved.step == 40
