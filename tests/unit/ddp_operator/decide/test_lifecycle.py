"""Deadlines, the pods that must succeed, the acknowledgement of a suspension, and the objects that remain."""

from datetime import timedelta
from functools import partial
from typing import Any

from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Status
from ddp_operator.decide.state import Decision
from ddp_operator.manifests.children import build_children
from tests.support.builders import NOW, child_job, child_pod, job, last_words, page
from tests.support.decisions import present, run_pass
from tests.support.fake_cluster import ReconcilerHarness

STARTED = Status(attempt=1, job_name="train-1", start_time=NOW, attempt_time=NOW).remember(nodes=2)
TRAINING = page(step=7, total_steps=10, checkpoint_step=5, phase="Running")


run = partial(run_pass, status=STARTED)


def queued(**changes: Any) -> Any:
    """Return a Job that Kueue suspended or resumed now."""
    made = child_job(queue="q", written=False, **changes)
    now = {"type": "Suspended", "status": str(made["spec"]["suspend"]), "lastTransitionTime": format_time(NOW)}
    made["status"]["conditions"] = made["status"]["conditions"] or [now]
    return made


def condition(decision: Decision, kind: str) -> tuple[str, str, str]:
    result = present(decision.status.condition(kind))
    return result.status, result.reason, result.message


class TestPendingDeadline:
    WAITING = child_pod(1, "Pending", status={"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU."}
    ]})  # fmt: skip

    def test_pending_deadline_fails_job_with_last_obstacle(self) -> None:
        waiting = run(child_pod(0), self.WAITING, pendingDeadlineSeconds=60, seconds=50)
        assert (waiting.status.phase, waiting.requeue_after) == ("Pending", 10)
        ended = run(child_pod(0), self.WAITING, status=waiting.status, pendingDeadlineSeconds=60, seconds=60)
        assert condition(ended, "Failed")[:2] == ("True", "PendingDeadlineExceeded")
        assert condition(ended, "Failed")[2] == (
            "not all pods were running within pendingDeadlineSeconds (60); last: 1/2 pods scheduled"
        )

    def test_pending_deadline_names_unpullable_image(self) -> None:
        waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
        pod = child_pod(1, "Pending", node="n", status={"containerStatuses": [waiting]})
        failure = present(run(child_pod(0), pod, pendingDeadlineSeconds=60, seconds=60).status.last_failure)
        assert (failure.category, failure.pod_index, failure.message) == ("ImagePull", 1, "no such image")

    def test_pending_deadline_ends_once_all_pods_have_run(self) -> None:
        for pods in ((child_pod(0), child_pod(1)), (child_pod(0), child_pod(1, "Succeeded"))):
            assert run(*pods, pendingDeadlineSeconds=60, seconds=999).status.phase == "Running"

    def test_pending_deadline_restarts_with_attempt_and_resumption(self) -> None:
        failed = child_pod(0, "Failed", code=82, message=last_words("CUDAError"))
        second = run(failed, status=STARTED, pendingDeadlineSeconds=60, seconds=500).status
        assert second.attempt_time == NOW + timedelta(seconds=500)
        assert run(status=second, jobs=(), pendingDeadlineSeconds=60, seconds=559).status.phase == "Restarting"
        assert run(status=second, jobs=(), pendingDeadlineSeconds=60, seconds=560).status.phase == "Failed"
        suspended = run(jobs=[child_job(suspend=True)], suspend=True, pendingDeadlineSeconds=60, seconds=999).status
        assert suspended.phase == "Suspended"
        resumed = run(jobs=[child_job(suspend=True)], status=suspended, pendingDeadlineSeconds=60, seconds=1000)
        assert resumed.status.attempt_time == NOW + timedelta(seconds=1000)
        assert resumed.requeue_after == 60

    def test_pending_deadline_restarts_on_requeue_and_admission(self) -> None:
        """After an hour, a job that has trained is not failed because it must wait again."""
        hour = format_time(NOW - timedelta(hours=1))
        old = replace(STARTED, start_time=hour, attempt_time=hour)
        for waits in (queued(suspend=True), queued()):  # preempted now, or admitted now
            assert run(jobs=[waits], status=old, pendingDeadlineSeconds=60, seconds=59).requeue_after == 1
            ended = run(jobs=[waits], status=old, pendingDeadlineSeconds=60, seconds=60)
            assert condition(ended, "Failed")[1] == "PendingDeadlineExceeded"

    def test_pending_deadline_can_be_set_while_pending(self) -> None:
        assert run(child_pod(0), self.WAITING, seconds=999).status.phase == "Pending"
        assert run(child_pod(0), self.WAITING, pendingDeadlineSeconds=60, seconds=999).status.phase == "Failed"


class TestActiveDeadline:
    HOUR = replace(STARTED, start_time=NOW - timedelta(hours=1))

    def test_active_deadline_excludes_time_in_queue(self) -> None:
        waits = [queued(suspend=True)]
        for seconds in (1, 9999):
            decision = run(jobs=waits, status=self.HOUR, activeDeadlineSeconds=50, seconds=seconds)
            assert (decision.status.phase, condition(decision, "Scheduled")[1]) == ("Pending", "QuotaPending")
        admitted = [queued(status={"startTime": format_time(NOW)})]
        running = run(child_pod(0), child_pod(1), jobs=admitted, status=self.HOUR, activeDeadlineSeconds=50, seconds=49)
        assert running.status.phase == "Running"
        ended = run(child_pod(0), child_pod(1), jobs=admitted, status=self.HOUR, activeDeadlineSeconds=50, seconds=50)
        assert condition(ended, "Failed")[1] == "DeadlineExceeded"


class TestSuccessPolicy:
    def test_rank_zero_policy_succeeds_with_pod_0(self) -> None:
        pods = child_pod(0, "Succeeded"), child_pod(1)
        decision = run(*pods, successPolicy="RankZero")
        assert condition(decision, "Succeeded")[:2] == ("True", "RankZeroSucceeded")
        assert run(*pods).status.phase == "Running"

    def test_peer_failure_after_success_of_rank_0_is_not_counted(self) -> None:
        pods = child_pod(0, "Succeeded"), child_pod(1, "Failed", code=86, message=last_words("NCCL", secondary=True))
        failing = child_job(conditions={"FailureTarget": "x"})
        assert run(*pods, jobs=[failing], successPolicy="RankZero").status.phase == "Succeeded"

    def test_success_of_another_pod_is_not_enough(self) -> None:
        assert run(child_pod(0), child_pod(1, "Succeeded"), successPolicy="RankZero").status.phase == "Running"

    def test_success_policy_is_set_on_job(self) -> None:
        jobs = [build_children(job(**spec), attempt=1, nodes=2)[-1] for spec in ({}, {"successPolicy": "RankZero"})]
        assert "successPolicy" not in jobs[0]["spec"]
        assert jobs[1]["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}

    async def test_rank_zero_success_stops_peers(self) -> None:
        harness = await ReconcilerHarness(successPolicy="RankZero").train(TRAINING)
        harness.end_pod(0)
        await harness.settle()
        assert (harness.status.phase, harness.pods(1)) == ("Succeeded", [])


class TestSuspendedJob:
    async def suspend(self, *messages: Any, **spec: Any) -> ReconcilerHarness:
        harness = await ReconcilerHarness(**spec).train(TRAINING)
        harness.cluster.still.obedient = False
        harness.edit(suspend=True)
        await harness.settle()
        for index, message in enumerate(messages):
            harness.end_pod(index, constants.EXIT_PREEMPTED, message)
            await harness.settle()
        return harness

    async def test_suspended_message_names_checkpoint(self) -> None:
        saved = last_words(progress={"step": 9.0, "checkpointStep": 9.0})
        harness = await self.suspend(saved, saved)
        assert harness.status.checkpoint is not None
        assert (harness.status.checkpoint.step, harness.status.checkpoint.time) == (9, harness.clock.now)
        assert present(harness.status.progress).step == 9
        assert harness.condition("Suspended").message == (
            "spec.suspend is true; set it to false to resume from the checkpoint of step 9"
        )
        expected = [event for event in harness.cluster.events if event.reason == "Suspended"]
        assert ["the checkpoint of step 9" in event.message for event in expected] == [True]

    async def test_suspended_message_counts_lost_steps(self) -> None:
        harness = await self.suspend("", "")
        assert harness.condition("Suspended").message.endswith("from the checkpoint of step 5; 2 later steps are lost")

    async def test_suspended_message_without_checkpoints_names_no_loss(self) -> None:
        steps = page(step=7, phase="Running")
        harness = await ReconcilerHarness().train(steps)
        harness.edit(suspend=True)
        await harness.settle()
        assert harness.condition("Suspended").message.endswith(
            "to resume; the last step was 7, and the script reports no checkpoints"
        )
