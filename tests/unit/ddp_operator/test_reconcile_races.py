"""The reconcile while others write: edits, deletions and errors of the API server in the midst of a pass."""

from typing import Any

import pytest

from ddp_operator.cluster import AlreadyExists, ClusterError, Event, Key, Unable
from tests.builders import page
from tests.memory import World

TRAINING = page(ddp_step=7, ddp_total_steps=10, ddp_loss=0.5, phase="Running")


async def test_edit_during_a_pass_is_met_by_another_pass_soon() -> None:
    world = await World().settle()
    world.run_pods()
    original = world.cluster.scrape

    async def scrape(pod: Any, port: int) -> str | None:
        world.edit(ttlSecondsAfterFinished=5)
        return await original(pod, port)

    world.cluster.scrape = scrape  # type: ignore[method-assign]
    requeue = await world.reconcile()
    assert requeue is not None
    assert 0 < requeue <= 1


async def test_event_that_cannot_be_posted_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def lose(resource: Any, event: Event) -> None:
        raise ClusterError("events are down")

    monkeypatch.setattr(world.cluster, "emit", lose)
    assert await world.reconcile() == 0.0
    await world.settle()
    assert world.jobs() == ["train-1"]


async def test_time_to_live_that_is_taken_away_during_the_pass_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await World(ttlSecondsAfterFinished=100).train(TRAINING)
    world.end_pod(0)
    world.end_pod(1)
    await world.settle()
    delete = world.cluster.delete_resource

    async def delete_after_an_edit(key: Key, **precondition: Any) -> None:
        world.edit(ttlSecondsAfterFinished=None)
        await delete(key, **precondition)

    monkeypatch.setattr(world.cluster, "delete_resource", delete_after_an_edit)
    world.clock.advance(100)
    await world.reconcile()
    monkeypatch.undo()
    await world.settle()
    assert world.raw is not None
    assert world.jobs() == ["train-1"]


async def test_own_child_that_is_being_deleted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await World().settle()
    [ours] = world.cluster.store.list("Service")
    world.cluster.store.delete(ours)
    leaving = {**ours, "metadata": {**ours["metadata"], "deletionTimestamp": "2026-11-20T12:00:00Z"}}

    async def find_taken(manifest: Any, *, dry_run: bool = False) -> None:
        raise AlreadyExists(leaving)

    monkeypatch.setattr(world.cluster, "create", find_taken)
    # No event tells of the end of a Service, so the pass itself asks for another one.
    requeue = await world.reconcile()
    assert requeue is not None
    assert 0 < requeue <= 1
    monkeypatch.undo()
    await world.settle()
    assert world.children()["Service"] == ["train"]


async def test_two_single_errors_of_the_api_server_long_apart_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await World().train(TRAINING)
    create, failures = world.cluster.create, [1]

    async def fail_once(manifest: Any, *, dry_run: bool = False) -> None:
        if manifest["kind"] == "Service" and failures:
            failures.pop()
            raise Unable("Service train: etcdserver: request timed out")
        await create(manifest, dry_run=dry_run)

    monkeypatch.setattr(world.cluster, "create", fail_once)
    for _ in range(2):
        [service] = world.cluster.store.list("Service")
        world.cluster.store.delete(service)
        await world.settle()
        assert world.children()["Service"] == ["train"]
        failures.append(1)
        world.clock.advance(3600)
    assert "ServerError" not in world.events


async def test_nothing_is_remembered_of_a_finished_job() -> None:
    world = await World().train(TRAINING)
    assert world.key in world.reconciler._memory
    world.end_pod(0)
    world.end_pod(1)
    await world.settle()
    assert world.status.phase == "Succeeded"
    assert world.key not in world.reconciler._memory
