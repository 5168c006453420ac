"""The reconciler beside other writers: edits, deletions and errors of the API server during a pass."""

from typing import Any

import pytest

from ddp_operator.api.cluster import Event, Key
from ddp_operator.api.cluster_errors import ClusterError
from tests.support.builders import page
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")


async def test_edit_during_pass_schedules_pass_soon() -> None:
    harness = await ReconcilerHarness().settle()
    harness.run_pods()
    original = harness.cluster.read_report

    async def read_report(pod: Any, port: int) -> bytes | None:
        harness.edit(ttlSecondsAfterFinished=5)
        return await original(pod, port)

    harness.cluster.read_report = read_report  # type: ignore[method-assign]
    requeue = present(await harness.reconcile())
    assert 0 < requeue <= 1


async def test_failed_event_post_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ReconcilerHarness()

    async def lose(resource: Any, event: Event) -> None:
        raise ClusterError("events are down")

    monkeypatch.setattr(harness.cluster, "emit", lose)
    await harness.reconcile()
    assert (harness.status.attempt, harness.jobs()) == (1, ["train-1"])


async def test_ttl_removed_during_pass_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await ReconcilerHarness(ttlSecondsAfterFinished=100).train(TRAINING)
    harness.end_pod(0)
    harness.end_pod(1)
    await harness.settle()
    delete = harness.cluster.delete_resource

    async def delete_after_an_edit(key: Key, **precondition: Any) -> None:
        harness.edit(ttlSecondsAfterFinished=None)
        await delete(key, **precondition)

    monkeypatch.setattr(harness.cluster, "delete_resource", delete_after_an_edit)
    harness.clock.advance(100)
    await harness.reconcile()
    monkeypatch.undo()
    await harness.settle()
    assert harness.raw is not None
    assert harness.jobs() == ["train-1"]


async def test_memory_of_finished_job_is_dropped() -> None:
    harness = await ReconcilerHarness().train(TRAINING)
    assert harness.key in harness.reconciler._memory
    harness.end_pod(0)
    harness.end_pod(1)
    await harness.settle()
    assert harness.status.phase == "Succeeded"
    assert harness.key not in harness.reconciler._memory
