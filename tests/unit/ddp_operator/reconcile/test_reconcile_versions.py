"""Jobs and children of other versions of the operator."""

import dataclasses
from typing import Any

import pytest

from ddp_operator.api.cluster import Snapshot
from ddp_operator.manifests import children
from tests.support.builders import page
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")


class TestOtherVersion:
    async def test_running_job_of_other_version_continues_without_unknown_fields(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rollback of the operator alone, then of the definition, which changes no resource's version."""
        harness = await ReconcilerHarness().train(TRAINING)
        harness.edit(futureField=1)
        await harness.reconcile()
        words = harness.condition("Accepted").message
        assert "; the CRD ddptrainingjobs.ddp-operator.dev in the cluster does not match this operator" in words
        assert "failures, suspension and resizing are not handled" in words
        assert (harness.status.phase, harness.requeue, harness.jobs()) == ("Running", 300, ["train-1"])

        async def fetch(key: Any) -> Snapshot:
            snapshot = await harness.observe()
            spec = {name: value for name, value in snapshot.resource["spec"].items() if name != "futureField"}
            return dataclasses.replace(snapshot, resource={**snapshot.resource, "spec": spec})

        monkeypatch.setattr(harness.cluster, "fetch", fetch)
        harness.clock.advance(300)
        await harness.reconcile()
        assert harness.state("Accepted") == ("True", "Valid")

    async def test_finished_job_of_other_version_is_unchanged(self) -> None:
        harness = await ReconcilerHarness(nodes=1).train(TRAINING)
        harness.end_pod(0)
        await harness.settle()
        harness.edit(futureField=1)
        version = harness.version
        await harness.reconcile()
        assert (harness.status.phase, harness.version) == ("Succeeded", version)

    @pytest.mark.parametrize("stage", ["suspended", "starting", "training"])
    async def test_deleted_launcher_of_older_operator_keeps_training(
        self, monkeypatch: pytest.MonkeyPatch, stage: str
    ) -> None:
        harness = ReconcilerHarness()
        await (harness.train(TRAINING) if stage == "training" else harness.settle())
        if stage == "suspended":
            harness.edit(suspend=True)
            await harness.settle()
        newer = children.Launcher("# newer", b"", "f" * 64)
        monkeypatch.setattr(children, "load_launcher", lambda features: newer)
        [config_map] = harness.cluster.store.list("ConfigMap")
        [before] = harness.cluster.store.list("Job")
        await harness.settle()
        assert [item["metadata"]["uid"] for item in harness.cluster.store.list("Job")] == [before["metadata"]["uid"]]
        harness.cluster.store.delete(config_map)
        for _ in range(3):
            await harness.settle()
            harness.clock.advance(1)
        if stage == "suspended":
            assert harness.cluster.store.list("Job") == []
            harness.edit(suspend=False)
            await harness.settle()
        [after] = harness.cluster.store.list("Job")
        kept = stage == "training"
        assert (after["metadata"]["uid"] == before["metadata"]["uid"]) is kept
        made = [] if kept else ["ddp-launcher-ffffffffffff"]
        assert harness.children()["ConfigMap"] == made
        assert (harness.status.attempt, harness.status.counts.total) == (1, 0)
