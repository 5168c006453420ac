"""A job that is edited, suspended or resumed, and the end of its deadline."""

from ddp_operator.api import constants
from tests.support.builders import page, template, trainer
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")


class TestEditBeforeAnyPodHasRun:
    async def test_of_template_recreates_job(self) -> None:
        harness = await ReconcilerHarness().settle()
        harness.edit(template=template(trainer(image="corrected")))
        await harness.settle()
        harness.clock.advance(1)
        await harness.settle()
        [child] = harness.cluster.store.list("Job")
        assert child["metadata"]["name"] == "train-1"
        assert child["spec"]["template"]["spec"]["containers"][0]["image"] == "corrected"
        assert (harness.status.attempt, harness.status.first_run_time) == (1, None)


class TestEdit:
    async def test_changed_nodes_start_uncounted_attempt(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.edit(nodes=4)
        await harness.settle()
        assert (harness.status.attempt, harness.status.attempt_nodes, harness.jobs()) == (2, 4, ["train-2"])
        assert (harness.status.counts.counted, harness.status.counts.free) == (0, 1)
        assert harness.state("Restarting") == ("True", "Resized")
        await harness.train(TRAINING)
        assert (harness.status.phase, len(harness.pods())) == ("Running", 4)

    async def test_suspension_stops_pods_and_resumption_continues_attempt(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.cluster.still.obedient = False
        harness.edit(suspend=True)
        await harness.settle()
        assert harness.state("Suspended") == ("False", "Stopping")
        assert harness.status.phase == "Running"
        for pod in harness.pods():
            harness.cluster.end(pod, constants.EXIT_PREEMPTED)
        await harness.settle()
        assert (harness.status.phase, harness.state("Suspended")) == ("Suspended", ("True", "SuspendedBySpec"))
        assert harness.pods() == []
        harness.clock.advance(1)
        harness.edit(suspend=False)
        harness.cluster.still.obedient = True
        await harness.train(TRAINING)
        assert (harness.status.phase, harness.status.attempt, harness.jobs()) == ("Running", 1, ["train-1"])
        assert harness.status.counts.total == 0
        assert [e for e in harness.events if e in ("Suspended", "Resumed")] == ["Suspended", "Resumed"]

    async def test_deadlines_of_suspended_job_schedule_no_pass(self) -> None:
        harness = await ReconcilerHarness(activeDeadlineSeconds=600, pendingDeadlineSeconds=600).train(TRAINING)
        harness.edit(suspend=True)
        await harness.settle()
        assert (harness.status.phase, harness.requeue) == ("Suspended", None)


class TestDeadline:
    async def test_largest_deadline_and_ttl_are_computable(self) -> None:
        year = 366 * 24 * 3600
        harness = await ReconcilerHarness(activeDeadlineSeconds=year, ttlSecondsAfterFinished=year).train(TRAINING)
        harness.end_pod(0)
        harness.end_pod(1)
        await harness.settle()
        assert harness.requeue == year
