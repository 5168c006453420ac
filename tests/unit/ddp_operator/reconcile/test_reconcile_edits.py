"""A job that is edited, suspended or resumed, and the end of its deadline."""

from typing import Any

import pytest

from ddp_operator.api import constants
from tests.support.builders import page, resource, template, trainer
from tests.support.decisions import present
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

    async def test_changed_queue_is_set_on_waiting_job_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = await ReconcilerHarness(resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=1)).settle()
        job = harness.cluster.store.list("Job")[0]
        harness.cluster.store.change(job, spec={**job["spec"], "suspend": True})
        asked = []

        async def kueue_object(kind: str, namespace: str, name: str) -> Any:
            asked.append(name)
            return {"metadata": {"name": name}, "spec": {"stopPolicy": "Hold"}}

        async def workloads_of(item: Any) -> Any:
            return ({"metadata": {"name": "w"}},)

        monkeypatch.setattr(harness.cluster, "kueue_object", kueue_object)
        monkeypatch.setattr(harness.cluster, "workloads_of", workloads_of)
        harness.clock.advance(100)
        await harness.settle()
        held = present(harness.status.condition("Scheduled"))
        assert held.message.endswith("LocalQueue gpu is stopped (spec.stopPolicy is Hold)")
        assert harness.raw is not None
        harness.cluster.store.change(harness.raw, meta={"labels": {"kueue.x-k8s.io/queue-name": "other"}})
        await harness.settle()
        assert harness.cluster.store.list("Job")[0]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "other"
        harness.clock.advance(5)  # the Job controller has just reported that it is suspended
        await harness.settle()
        assert asked == ["gpu", "other"]


class TestDeadline:
    async def test_largest_deadline_and_ttl_are_computable(self) -> None:
        year = 366 * 24 * 3600
        harness = await ReconcilerHarness(activeDeadlineSeconds=year, ttlSecondsAfterFinished=year).train(TRAINING)
        harness.end_pod(0)
        harness.end_pod(1)
        await harness.settle()
        assert harness.requeue == year
