"""Refusals: children without labels, resources that cannot be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ddp_operator.api import constants
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.constants import JOB_TRACKING_FINALIZER
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import RestartCounts, Status
from ddp_operator.decide.refusals import may_have_lost_labels, report_unreadable
from ddp_operator.kube.cache import ObjectCache
from tests.support.builders import NOW, Json, child_job, child_pod, job, observe, page, resource
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, phase="Running")


def test_cache_finds_resources_by_exact_claim() -> None:
    store = ObjectCache()
    elsewhere = {"managedBy": "kueue.x-k8s.io/multikueue"}
    for name, claim, spec in (("weights", "other", {}), ("two", "weights", {}), ("three", "weights", elsewhere)):
        item = resource(name, checkpoint={"path": "/weights", "claimName": claim}, **spec)
        item["metadata"] |= {"uid": name, "resourceVersion": "1"}
        store.apply(constants.KIND, item)
    assert [result["metadata"]["name"] for result in store.resources_on_claim("default", "weights")] == ["two"]
    assert list(store.resources_on_claim("other", "weights")) == []
    [resources_on_claim] = store.resources_on_claim("default", "weights")
    assert set(resources_on_claim) == {"metadata", "status"}, "a spec may have a megabyte"


TYPED = job(status=Status(attempt=1, job_name="train-1").remember(nodes=2), nodes=2)


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


ERROR = InvalidManifest([FieldError("spec.x", "is unknown")])


def stored(**status: object) -> Json:
    return {"metadata": {"generation": 4}, "status": status}


@pytest.mark.parametrize(
    ("status", "phase", "unattended"),
    [({}, "Rejected", False), ({"attempt": 2, "phase": "Running"}, "Running", True)],
)
def test_unreadable_running_job_continues_and_new_job_is_rejected(status: Json, phase: str, unattended: bool) -> None:
    old, new = report_unreadable(stored(**status), ERROR, NOW)
    assert old.remember(restarts=RestartCounts()) == msgspec.convert(status, Status)
    assert new.phase == phase
    accepted = present(new.condition("Accepted"))
    assert (accepted.status, accepted.reason) == ("False", "VersionMismatch")
    assert accepted.observed_generation == new.observed_generation == 4
    assert ("the job's pods keep running" in accepted.message) is unattended


def test_job_that_has_ended_keeps_its_status() -> None:
    ended = {"type": "Succeeded", "status": "True", "reason": "AllNodesSucceeded"}
    ended["lastTransitionTime"] = format_time(NOW)
    old, new = report_unreadable(stored(phase="Succeeded", attempt=1, conditions=[ended]), ERROR, NOW)
    assert old == new
    assert old.phase == "Succeeded"


@pytest.mark.parametrize("result", [{}, {"status": None}, {"status": {"phase": 5}}, {"metadata": {}}])
def test_unreadable_status_is_treated_as_empty(result: Json) -> None:
    old, new = report_unreadable(result, ERROR, NOW)
    assert (old, new.phase) == (Status(), "Rejected")
