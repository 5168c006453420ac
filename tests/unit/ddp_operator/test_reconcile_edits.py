"""What becomes of a job whose template is edited before and after its first pod has run."""

from tests.builders import template, trainer
from tests.memory import World


class TestEditBeforeAnyPodHasRun:
    async def test_makes_the_job_anew_from_the_new_template(self) -> None:
        world = await World().settle()
        world.edit(template=template(trainer(image="corrected")))
        await world.settle()
        world.clock.advance(1)
        await world.settle()
        [child] = world.cluster.store.list("Job")
        assert child["metadata"]["name"] == "train-1"
        assert child["spec"]["template"]["spec"]["containers"][0]["image"] == "corrected"
        assert (world.status.attempt, world.status.first_run_time) == (1, None)

    async def test_of_what_the_job_does_not_carry_keeps_the_job(self) -> None:
        world = await World().settle()
        [before] = world.cluster.store.list("Job")
        world.edit(ttlSecondsAfterFinished=5)
        await world.settle()
        assert [one["metadata"]["uid"] for one in world.cluster.store.list("Job")] == [before["metadata"]["uid"]]

    async def test_that_comes_when_pods_run_leaves_them_alone(self) -> None:
        world = await World().settle()
        [before] = world.cluster.store.list("Job")
        world.run_pods()
        world.edit(template=template(trainer(image="late")))
        await world.settle()
        assert [one["metadata"]["uid"] for one in world.cluster.store.list("Job")] == [before["metadata"]["uid"]]
        assert world.status.first_run_time is not None
