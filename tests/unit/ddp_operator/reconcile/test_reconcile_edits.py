"""A job that is edited, suspended or resumed, and the end of its deadline."""

from typing import Any

import pytest

from ddp_operator.api import constants
from tests.support.builders import last_words, page, resource, template, trainer
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")
ERROR = last_words(
    "CUDAError", rank=1, podIndex=1, message="RuntimeError: boom", traceback="line 1\nline 2", remedy="do x"
)


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

    async def test_edit_of_operator_only_field_keeps_job(self) -> None:
        harness = await ReconcilerHarness().settle()
        [before] = harness.cluster.store.list("Job")
        harness.edit(ttlSecondsAfterFinished=5)
        await harness.settle()
        assert [job["metadata"]["uid"] for job in harness.cluster.store.list("Job")] == [before["metadata"]["uid"]]

    async def test_edit_after_start_keeps_pods(self) -> None:
        harness = await ReconcilerHarness().settle()
        [before] = harness.cluster.store.list("Job")
        harness.run_pods()
        harness.edit(template=template(trainer(image="late")))
        await harness.settle()
        assert [job["metadata"]["uid"] for job in harness.cluster.store.list("Job")] == [before["metadata"]["uid"]]
        assert harness.status.first_run_time is not None


class TestEdit:
    async def test_changed_nodes_start_uncounted_attempt(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.edit(nodes=4)
        await harness.settle()
        assert (harness.status.attempt, harness.status.attempt_nodes, harness.jobs()) == (2, 4, ["train-2"])
        assert (harness.status.restarts.counted, harness.status.restarts.free) == (0, 1)
        assert harness.state("Restarting") == ("True", "Resized")
        await harness.train(TRAINING)
        assert (harness.status.phase, len(harness.pods())) == ("Running", 4)

    async def test_resize_waits_until_old_pods_have_saved(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.cluster.still.obedient = False
        harness.edit(nodes=3)
        await harness.settle()
        assert harness.jobs() == []
        assert harness.condition("Scheduled").message == "waiting for 2 pods of the previous attempt to terminate"
        for pod in harness.pods(1):
            harness.cluster.end(pod, constants.EXIT_PREEMPTED)
        await harness.settle()
        assert harness.jobs() == ["train-2"]

    async def test_resize_before_first_pod_creates_no_pods_of_old_size(self) -> None:
        harness = ReconcilerHarness()
        await harness.reconcile()
        harness.edit(nodes=3)
        await harness.settle()
        assert [len(harness.pods(attempt)) for attempt in (1, harness.status.attempt)] == [0, 3]

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
        assert harness.status.restarts.total == 0
        assert [e for e in harness.events if e in ("Suspended", "Resumed")] == ["Suspended", "Resumed"]

    async def test_suspended_from_start_runs_no_pod(self) -> None:
        harness = await ReconcilerHarness(suspend=True).settle()
        assert (harness.status.phase, harness.jobs(), harness.pods()) == ("Suspended", [], [])
        assert harness.requeue is None

    async def test_deadlines_of_suspended_job_schedule_no_pass(self) -> None:
        harness = await ReconcilerHarness(activeDeadlineSeconds=600, pendingDeadlineSeconds=600).train(TRAINING)
        harness.edit(suspend=True)
        await harness.settle()
        assert (harness.status.phase, harness.requeue) == ("Suspended", None)

    async def test_nodes_changed_while_suspended_take_effect_on_resume(self) -> None:
        harness = await ReconcilerHarness(suspend=True).settle()
        harness.edit(nodes=3)
        await harness.settle()
        assert (harness.status.phase, harness.pods()) == ("Suspended", [])
        harness.edit(suspend=False)
        await harness.settle()
        assert len(harness.pods()) == 3

    async def test_failure_while_suspended_is_judged_on_resume(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
        harness.edit(suspend=True)
        await harness.settle()
        assert (harness.status.attempt, harness.status.phase) == (1, "Suspended")
        harness.edit(suspend=False)
        await harness.settle()
        assert (harness.status.attempt, harness.status.restarts.counted) == (2, 1)

    async def test_queued_job_stays_suspended(self) -> None:
        item = resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=1)
        harness = ReconcilerHarness(item)
        await harness.settle()
        job = harness.cluster.store.list("Job")[0]
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
        harness.cluster.store.change(job, spec={**job["spec"], "suspend": True})
        await harness.settle()
        assert not [call for call in harness.cluster.calls if call.startswith("patch")]

    async def test_changed_queue_is_set_on_waiting_job_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = await ReconcilerHarness(resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=1)).settle()
        job = harness.cluster.store.list("Job")[0]
        harness.cluster.store.change(job, spec={**job["spec"], "suspend": True})
        asked = []

        async def local_queue(namespace: str, name: str) -> Any:
            asked.append(name)
            return {"metadata": {"name": name}, "spec": {"stopPolicy": "Hold"}}

        async def workloads_of(item: Any) -> Any:
            return ({"metadata": {"name": "w"}},)

        monkeypatch.setattr(harness.cluster, "local_queue", local_queue)
        monkeypatch.setattr(harness.cluster, "workloads_of", workloads_of)
        harness.clock.advance(100)
        await harness.settle()
        held = harness.status.condition("Scheduled")
        assert held is not None
        assert held.message.endswith("LocalQueue gpu is stopped (spec.stopPolicy is Hold)")
        assert harness.raw is not None
        harness.cluster.store.change(harness.raw, meta={"labels": {"kueue.x-k8s.io/queue-name": "other"}})
        await harness.settle()
        assert harness.cluster.store.list("Job")[0]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "other"
        harness.clock.advance(5)  # the Job controller has just reported that it is suspended
        await harness.settle()
        assert asked == ["gpu", "other"]


class TestDeadline:
    async def test_ends_job_and_stops_its_pods(self) -> None:
        harness = await ReconcilerHarness(activeDeadlineSeconds=60).train(TRAINING)
        assert harness.requeue is not None
        assert harness.requeue <= 49
        harness.clock.advance(49)
        await harness.settle()
        assert harness.state("Failed") == ("True", "DeadlineExceeded")
        assert (harness.pods(1), harness.jobs()) == ([], ["train-1"])

    async def test_counts_from_latest_resumption(self) -> None:
        harness = await ReconcilerHarness(activeDeadlineSeconds=60).train(TRAINING)
        harness.edit(suspend=True)
        await harness.settle()
        harness.clock.advance(3600)
        await harness.settle()
        harness.edit(suspend=False)
        await harness.train(TRAINING)
        assert harness.status.phase == "Running"
        harness.clock.advance(60)
        await harness.settle()
        assert harness.status.phase == "Failed"

    async def test_largest_deadline_and_ttl_are_computable(self) -> None:
        year = 366 * 24 * 3600
        harness = await ReconcilerHarness(activeDeadlineSeconds=year, ttlSecondsAfterFinished=year).train(TRAINING)
        harness.end_pod(0)
        harness.end_pod(1)
        await harness.settle()
        assert harness.requeue == year
