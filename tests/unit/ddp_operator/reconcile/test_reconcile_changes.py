"""The reconciler when objects change: pods that fail, children that disappear."""

import dataclasses

import pytest

from ddp_operator.api import constants
from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.kubeobjects import parse_time
from tests.support.builders import child_pod, last_words, page, resource
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")
ERROR = last_words(
    "CUDAError", rank=1, podIndex=1, message="RuntimeError: boom", traceback="line 1\nline 2", remedy="do x"
)


async def reconcile_with_late_news_of_pods(
    harness: ReconcilerHarness, before: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run one pass whose watches still show the old pods; direct reads show the new ones."""
    fresh = await harness.observe()

    async def from_cache(key: Key) -> Snapshot:
        return dataclasses.replace(fresh, pods=before.pods)

    async def from_server(key: Key) -> Snapshot:
        return fresh

    monkeypatch.setattr(harness.cluster, "observe", from_cache)
    monkeypatch.setattr(harness.cluster, "fetch", from_server)
    await harness.reconcile()


class TestFailedPods:
    async def test_failed_pod_is_found_after_outage_if_job_is_observed_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness = await ReconcilerHarness().train()
        before = await harness.observe()
        harness.end_pod(1, constants.EXIT_RETRYABLE)
        harness.clock.advance(61)  # no watch reports it
        await reconcile_with_late_news_of_pods(harness, before, monkeypatch)
        failure = present(harness.status.last_failure)
        assert (harness.status.attempt, failure.pod_index, failure.exit_code) == (2, 1, constants.EXIT_RETRYABLE)

    async def test_success_counts_all_pods_if_job_is_observed_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        before = await harness.observe()
        for node in (0, 1):
            harness.end_pod(node)
        harness.clock.advance(1)
        await reconcile_with_late_news_of_pods(harness, before, monkeypatch)
        assert (harness.status.phase, harness.status.nodes.succeeded) == ("Succeeded", 2)

    async def test_next_attempt_starts_with_cause_in_status(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
        await harness.settle()
        failure = present(harness.status.last_failure)
        assert (failure.attempt, failure.rank, failure.pod_index, failure.category) == (1, 1, 1, "CUDAError")
        assert (failure.message, failure.traceback, failure.remedy) == ("RuntimeError: boom", "line 1\nline 2", "do x")
        assert (harness.status.attempt, harness.status.counts.counted) == (2, 1)
        assert harness.state("Restarting") == ("True", "GroupRestart")
        assert harness.status.phase == "Restarting"

    async def test_hang_with_action_fail_ends_job_if_all_ranks_wait(self) -> None:
        for secondary_ones in ((False, True), (True, True)):
            harness = await ReconcilerHarness().train(TRAINING)
            for node, secondary in enumerate(secondary_ones):
                words = last_words("Hang", rank=node, podIndex=node, secondary=secondary, message="no step for 300 s")
                harness.tell_end(node, constants.EXIT_USER_ERROR, words)
            await harness.settle()
            assert (harness.status.phase, harness.status.attempt, harness.state("Failed")) == (
                "Failed",
                1,
                ("True", "Hang"),
            )
            failure = present(harness.status.last_failure)
            assert (failure.category, failure.rank) == ("Hang", 0)

    async def test_last_failed_job_is_kept_and_older_ones_deleted(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        for attempt in (2, 3):
            harness.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
            await harness.settle()
            assert harness.jobs() == [f"train-{attempt - 1}", f"train-{attempt}"]
            await harness.train(TRAINING)

    async def test_user_error_ends_job_at_once(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        words = last_words("UserError", message="ModuleNotFoundError: No module named 'nothere'", exitCode=2)
        harness.end_pod(0, constants.EXIT_USER_ERROR, words)
        await harness.settle()
        assert (harness.status.phase, harness.status.attempt) == ("Failed", 1)
        assert harness.state("Failed") == ("True", "UserError")
        assert harness.condition("Failed").message.startswith("UserError (rank 0, pod train-1-0-")
        assert harness.condition("Failed").message.endswith("): ModuleNotFoundError: No module named 'nothere'")
        assert harness.events[-2:] == ["FailureUserError", "Failed"]

    async def test_budget_ends_job(self) -> None:
        harness = await ReconcilerHarness(recovery={"maxRestarts": 1}).train(TRAINING)
        harness.end_pod(0, constants.EXIT_RETRYABLE, ERROR)
        await harness.train(TRAINING)
        harness.end_pod(0, constants.EXIT_RETRYABLE, ERROR)
        await harness.settle()
        assert harness.status.phase == "Failed"
        assert harness.state("Failed") == ("True", "RestartBudgetExhausted")
        assert harness.condition("Failed").message.startswith(
            "failed 2 times, recovery.maxRestarts is 1; last: CUDAError"
        )
        assert harness.status.attempt == 2

    @pytest.mark.parametrize("labels", [{}, {"kueue.x-k8s.io/queue-name": "gpu"}], ids=["no queue", "queue"])
    async def test_disrupted_pod_is_replaced_before_backoff_ends(self, labels: dict[str, str]) -> None:
        item = resource(labels=labels, nodes=2)
        harness = await ReconcilerHarness(item).train(TRAINING)
        for index, serial in ((1, 1), (0, 2)):
            meta = harness.pods()[index]["metadata"]
            await harness.cluster.delete("Pod", "default", meta["name"], uid=meta["uid"])
            await harness.settle()
            assert harness.state("Restarting") == ("True", "PodReplacement")
            made = [pod for pod in harness.pods() if pod["status"]["phase"] == "Pending"]
            assert [pod["metadata"]["name"] for pod in made] == [f"train-1-{index}-r{serial}"]
            harness.run_pods()
            harness.clock.advance(11)
            await harness.settle()
            assert (harness.status.phase, harness.status.attempt) == ("Running", 1)
        restarts = harness.status.counts
        last = harness.status.last_restart
        assert (restarts.counted, restarts.total, restarts.replaced) == (0, 0, 2)
        assert last is not None
        assert last.level == "ReplacedPod"
        assert (harness.status.last_failure and harness.status.last_failure.category) == "PodDeleted"
        assert harness.events.count("PodReplacement") == 2

    async def test_pod_killed_soon_after_start_is_left_to_backoff(self) -> None:
        for age, made in ((59, 0), (61, 1)):
            item = resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=2)
            harness = await ReconcilerHarness(item).train(TRAINING)
            born = present(parse_time(harness.pods()[1]["metadata"]["creationTimestamp"]))
            harness.clock.advance(age - (harness.clock() - born).total_seconds())
            harness.end_pod(1, 137)
            await harness.settle()
            assert len([pod for pod in harness.pods() if pod["status"]["phase"] == "Pending"]) == made

    async def test_deleted_service_is_created_again(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.cluster.store.delete(harness.cluster.store.list("Service")[0])
        await harness.settle()
        assert harness.children()["Service"] == ["train"]
        assert (harness.status.phase, harness.status.attempt, len(harness.pods())) == ("Running", 1, 2)

    async def test_living_pods_of_deleted_resource_of_same_name_are_waited_for(self) -> None:
        harness = ReconcilerHarness()
        stray = child_pod(0, "Running", owner="a job that is gone")
        stray["metadata"]["finalizers"] = ["example.com/keep"]
        harness.cluster.add(stray)
        await harness.settle()
        assert harness.jobs() == []
        assert harness.state("Scheduled") == ("False", "WaitingForFormerPods")
