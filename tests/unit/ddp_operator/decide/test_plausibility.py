"""A status that another client has replaced, beside a Job that trains."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddp_operator.api.status import STATE_VERSION
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

LATER = "2036-11-20T12:00:00Z"


def end(true: str) -> list[dict[str, str]]:
    """Return the terminal conditions, of which one is True."""
    facts = {"reason": "CrashLoop", "message": "", "lastTransitionTime": "2026-11-20T12:00:00Z"}
    return [{"type": kind, "status": str(kind == true), **facts} for kind in ("Succeeded", "Failed")]


FINISHED = end("Failed")


def put_status(harness: ReconcilerHarness, status: Any, *, whole: bool) -> None:
    raw = present(harness.raw)
    merged = status if whole else msgspec.to_builtins(harness.status) | status
    harness.cluster.store.change(raw, status=merged)


def counts(used: int, total: int = 0, **others: int) -> dict[str, Any]:
    restarts = {"used": used, "counted": used, "total": total, "free": 0, **others}
    return {"operatorState": {"version": STATE_VERSION, "restarts": restarts}}


@pytest.mark.parametrize(
    "status",
    [
        {"attempt": 99},
        {"attempt": 99, **counts(98, 98)},
        {"attempt": 99, "jobName": "train-99", **counts(98, 98)},
        {"attempt": 2, "jobName": "train-2", **counts(1, 1)},
        {"attempt": 0},
        {"attempt": -3},
        {"operatorState": {"version": STATE_VERSION, "nodes": 7}},
        counts(3),
        counts(3, total=3),
        {"attempt": 99, "conditions": FINISHED, "phase": "Failed", "completionTime": "2026-11-20T12:00:00Z"},
        {"conditions": FINISHED, "phase": "Failed", **counts(0, 7)},
        {"conditions": FINISHED, "phase": "Failed"},
        {"conditions": FINISHED, "phase": "Failed", "completionTime": "2016-11-20T12:00:00Z"},
        {"conditions": end("Succeeded"), "phase": "Succeeded", "completionTime": LATER},
    ],
    ids=str,
)
@pytest.mark.parametrize("whole", [False, True], ids=["members", "whole"])
async def test_replaced_status_neither_ends_healthy_attempt_nor_counts(status: dict[str, Any], whole: bool) -> None:
    harness = ReconcilerHarness()
    await harness.train()
    pods = {pod["metadata"]["uid"] for pod in harness.pods()}
    if whole and "attempt" not in status:
        status = {"attempt": 1, **status}

    put_status(harness, status, whole=whole)
    await harness.settle()
    for _ in range(3):
        harness.clock.advance(11)
        await harness.settle()

    assert harness.jobs() == ["train-1"]
    assert {pod["metadata"]["uid"] for pod in harness.pods()} == pods
    after = harness.status
    assert (after.attempt, after.job_name, after.phase, after.completion_time) == (1, "train-1", "Running", None)
    assert (after.counts.all, after.counts.used, after.counts.counted) == (0, 0, 0)


async def test_counts_of_replaced_status_are_those_of_existing_job() -> None:
    harness = ReconcilerHarness(recovery={"maxRestarts": 9})
    await harness.train()
    harness.end_pod(0, 82)
    await harness.settle()
    for pod in harness.pods(1):
        harness.cluster.end(pod, 137)
    harness.clock.advance(30)
    await harness.train()
    assert (harness.status.attempt, harness.status.counts.used) == (2, 1)
    put_status(harness, {"attempt": 99}, whole=False)
    await harness.settle()
    assert (harness.status.attempt, harness.status.counts.used, harness.jobs()) == (2, 1, ["train-1", "train-2"])


async def test_announced_attempt_replaces_healthy_one() -> None:
    harness = ReconcilerHarness()
    await harness.train()
    harness.edit(nodes=3)
    await harness.settle()
    assert harness.status.attempt == 2
    assert "delete train-1" in harness.cluster.calls
