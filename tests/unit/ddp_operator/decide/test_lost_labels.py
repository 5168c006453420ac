"""Children without their labels: when the operator searches for them, and the state of the job meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from ddp_operator.api.cluster import ClusterError, Refused
from ddp_operator.api.constants import JOB_TRACKING_FINALIZER
from ddp_operator.api.status import Status
from ddp_operator.decide.refusals import may_have_lost_labels
from tests.support.builders import child_job, child_pod, job, observe, page
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, phase="Running")
TYPED = job(status=Status(attempt=1, attempt_nodes=2, job_name="train-1"), nodes=2)


def counted(active: int) -> Any:
    made = child_job()
    return made | {"status": {"active": active}}


def uncounted(index: int) -> Any:
    made = child_pod(index, "Failed", code=1)
    return made | {"metadata": made["metadata"] | {"finalizers": [JOB_TRACKING_FINALIZER]}}


class TestMayHaveLostLabels:
    @pytest.mark.parametrize(
        ("jobs", "pods", "doubt"),
        [
            ([], [], False),
            ([counted(2)], [child_pod(0), child_pod(1)], False),
            ([counted(2)], [child_pod(0)], True),
            ([counted(1)], [child_pod(0), child_pod(1, "Succeeded")], False),
            ([counted(2)], [child_pod(0), child_pod(1, owner="another")], True),
            ([counted(2)], [child_pod(0), uncounted(1)], False),
            ([counted(2)], [child_pod(0), child_pod(1, "Failed", code=1)], True),
            ([], [child_pod(0)], True),
            ([], [child_pod(0, deleting=True)], False),
            ([], [child_pod(0, "Failed", code=1)], False),
            ([], [child_pod(0, attempt=7)], False),
        ],
        ids=[
            "nothing",
            "all",
            "a pod",
            "one is over",
            "a stranger's",
            "backing off",
            "counted",
            "the Job",
            "stops",
            "over",
            "another attempt",
        ],
    )
    def test_job_with_unlisted_active_pods_may_have_lost_labels(self, jobs: Any, pods: Any, doubt: bool) -> None:
        assert may_have_lost_labels(TYPED, observe(TYPED, jobs, pods)) is doubt


class Thief:
    """Hides pod 1, and returns it to a search (``error``: the search fails)."""

    def __init__(
        self, harness: ReconcilerHarness, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
    ) -> None:
        self.harness = harness
        self.error = error
        self.asked = 0
        self.taken = True
        self.observe = harness.cluster.observe
        monkeypatch.setattr(harness.cluster, "observe", self._observe)
        monkeypatch.setattr(harness.cluster, "fetch", self._observe)
        monkeypatch.setattr(harness.cluster, "restore_labels", self._reclaim)

    async def _observe(self, key: Any) -> Any:
        result = present(await self.observe(key))
        pods = tuple(pod for pod in result.pods if not (self.taken and "-1-1-" in pod["metadata"]["name"]))
        return replace(result, pods=pods)

    async def _reclaim(self, owner: str, namespace: str, name: str, labels: Any) -> bool:
        self.asked += 1
        assert (name, labels["ddp-operator.dev/attempt"]) == ("train-1", "1")
        if self.error is not None:
            raise self.error
        self.taken = False
        return True


class TestRestoreLabels:
    async def test_labels_of_training_pod_are_restored_before_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        thief = Thief(harness, monkeypatch)
        events = len(harness.events)
        await harness.reconcile()
        assert (thief.asked, harness.status.phase, harness.events[events:]) == (1, "Running", [])
        await harness.reconcile()
        assert thief.asked == 1

    @pytest.mark.parametrize("error", [ClusterError("away"), Refused("no", reason="Forbidden")])
    async def test_refused_restore_is_tried_again_every_ten_seconds(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        thief = Thief(harness, monkeypatch, error)
        for _ in range(11):
            await harness.reconcile()
            harness.clock.advance(1)
        assert (thief.asked, harness.status.phase, harness.jobs()) == (2, "Restarting", ["train-1"])
        assert harness.requeue is not None

    async def test_new_pods_are_not_searched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = await ReconcilerHarness().settle()
        harness.run_pods()
        thief = Thief(harness, monkeypatch)
        await harness.reconcile()
        assert thief.asked == 0
        harness.clock.advance(2)
        await harness.reconcile()
        assert thief.asked == 1
