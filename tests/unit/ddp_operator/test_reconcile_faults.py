"""Whatever call to the cluster is lost, and however often the operator starts anew: the end is the same.

Each scenario is played once undisturbed, then once for every call that a reconcile makes, with that call lost on its
way (the cluster never hears of it) or with its answer lost (it was carried out), and with an operator that remembers
nothing afterwards.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from ddp_operator import constants
from ddp_operator.cluster import ClusterError
from tests.builders import last_words, page
from tests.memory import Faults, World

TRAINING = page(ddp_step=7, ddp_total_steps=10, phase="Running")
ERROR = last_words("CUDAError", rank=1, node=1)

Scenario = Callable[[World, Callable[[], Awaitable[Any]]], Awaitable[None]]


async def create(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await settle()


async def train(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await settle()
    world.run_pods()
    world.cluster.page = TRAINING
    world.clock.advance(11)
    await settle()


async def fail_once(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await train(world, settle)
    world.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
    await train(world, settle)


async def run_out_of_memory(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await train(world, settle)
    world.end_pod(1, 137, reason="OOMKilled")
    await train(world, settle)


async def fail_for_good(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await train(world, settle)
    world.end_pod(0, constants.EXIT_USER_ERROR, last_words("UserError"))
    await settle()


async def resize(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await train(world, settle)
    world.edit(nodes=3)
    await train(world, settle)


async def suspend_and_resume(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await train(world, settle)
    world.edit(suspend=True)
    await settle()
    world.clock.advance(1)
    world.edit(suspend=False)
    await train(world, settle)


async def mend(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    good = world.item["spec"]["template"]
    world.edit(template={"spec": {"containers": [{"name": "trainer", "image": "x"}]}})
    await settle()
    world.edit(template=good)
    await train(world, settle)


async def succeed(world: World, settle: Callable[[], Awaitable[Any]]) -> None:
    await train(world, settle)
    world.end_pod(0)
    world.end_pod(1)
    await settle()


SCENARIOS = (create, train, mend, fail_once, run_out_of_memory, fail_for_good, resize, suspend_and_resume, succeed)
AFTER_TRAIN = {fail_once, run_out_of_memory, fail_for_good, resize, suspend_and_resume, succeed}


def end_of(world: World) -> Any:
    """Return what has to be the same, without what is drawn by lot."""
    jobs = [
        (job["metadata"]["name"], job["spec"]["completions"], job["spec"]["suspend"])
        for job in world.cluster.store.list("Job")
    ]
    status = msgspec.json.encode(world.status).decode()
    return re.sub(r"(train-\d+-\d+)-\w{5}", r"\1", status), world.children(), jobs, len(world.pods())


async def play(scenario: Scenario, number: int, *, before: bool) -> tuple[World, int]:
    """Play a scenario with the fault in its ``number``-th call (0: none); return how many calls it took."""
    world = World()
    faults = Faults(world.cluster, number, before=before)

    async def settle() -> None:
        for _ in range(30):
            changes = world.cluster.changes
            world.restart_operator(faults)
            try:
                requeue = await world.reconcile()
            except ClusterError:
                continue
            if changes == world.cluster.changes and requeue != 0:
                return
        raise AssertionError(f"no rest after call {number}: {world.cluster.calls[-12:]}")

    await scenario(world, settle)
    return world, faults.count


@pytest.mark.parametrize("before", [True, False], ids=["request lost", "answer lost"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_any_lost_call_leads_to_the_same_end(scenario: Scenario, before: bool) -> None:
    undisturbed, calls = await play(scenario, 0, before=before)
    assert calls > 3
    wanted = end_of(undisturbed)
    # What begins with `train` loses only calls that come after it: the others are that scenario's own.
    done = (await play(train, 0, before=before))[1] if scenario in AFTER_TRAIN else 0
    assert done < calls
    for number in range(done + 1, calls + 1):
        world, _ = await play(scenario, number, before=before)
        assert end_of(world) == wanted, f"after losing call {number} of {calls}"
        assert max(map(world.events.count, set(world.events)), default=0) <= max(
            map(undisturbed.events.count, set(undisturbed.events)), default=0
        ), "an event was said twice"


async def test_comparison_can_fail() -> None:
    once, _ = await play(fail_once, 0, before=True)
    never, _ = await play(train, 0, before=True)
    assert end_of(once) != end_of(never)


@pytest.mark.parametrize("before", [True, False], ids=["request lost", "answer lost"])
async def test_time_to_live_survives_the_loss_of_its_deletion(before: bool) -> None:
    world = World(ttlSecondsAfterFinished=5)
    await world.train()
    world.end_pod(0)
    world.end_pod(1)
    await world.settle()
    world.clock.advance(5)
    world.restart_operator(Faults(world.cluster, 2, before=before))  # observe, delete
    with pytest.raises(ClusterError, match="delete_resource"):
        await world.reconcile()
    await world.settle()
    assert world.raw is None
