"""Inputs are fetched before any pod with GPUs exists, and one condition reports their errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_cli.view.why import explain_why
from ddp_operator.api.cluster import Object
from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.kubeobjects import parse_quantity, utc_now
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.inputs import FEATURE
from tests.support.builders import Json, page, template, trainer
from tests.support.fake_cluster import ReconcilerHarness

ONE = {"url": "https://example.com/set/data.bin?token=secret", "mountPath": "/data", "claimName": "data"}
TWO = {"name": "model", "url": "hf://team/model", "mountPath": "/model", "claimName": "data"}


def harness(*inputs: Json, **spec: Any) -> ReconcilerHarness:
    return ReconcilerHarness(hooks=Hooks((FEATURE,)), inputs=list(inputs or (ONE,)), **spec)


def words(*reports: Json, **more: Any) -> str:
    """Return a termination message."""
    return json.dumps({"version": 1, "inputs": list(reports), **more})


FETCHED = {"name": "data.bin", "phase": "Fetched", "bytes": 200_000_000, "totalBytes": 200_000_000, "etag": '"v1"'}


def impose_minimum(h: ReconcilerHarness, monkeypatch: pytest.MonkeyPatch, least: str) -> None:
    """Refuse pods with containers that request less memory, as a LimitRange does."""
    create = h.cluster.create

    async def check(manifest: Object, *, dry_run: bool = False) -> Object:
        containers = manifest["spec"]["containers"] if manifest["kind"] == "Pod" else []
        if any(parse_quantity(item["resources"]["requests"]["memory"]) < parse_quantity(least) for item in containers):
            raise Refused(f"minimum memory usage per Container is {least}", reason="Forbidden")
        return await create(manifest, dry_run=dry_run)

    monkeypatch.setattr(h.cluster, "create", check)


async def fetch(h: ReconcilerHarness, *reports: Json) -> None:
    """Make the fetching pod succeed."""
    await h.settle()
    h.run_pods()
    h.cluster.end(h.pods()[0], 0, words(*(reports or (FETCHED,)), category=""))
    await h.settle()


class TestBeforeThePods:
    async def test_training_starts_after_inputs_are_fetched(self) -> None:
        h = await harness().settle()
        assert h.jobs() == ["train-inputs"]
        assert h.status.attempt == 0
        await fetch(h)
        assert h.jobs() == ["train-1"]
        assert h.state("InputsReady") == ("True", "Fetched")
        [item] = h.status.inputs
        assert (item.phase, item.bytes) == ("Fetched", 200_000_000)
        assert item.place.startswith("claim:data/ddp-inputs/data.bin-")

    async def test_training_job_is_validated_first_and_once(self) -> None:
        h = await harness().settle()
        asked = [call for call in h.cluster.calls if call.startswith("dry-run")]
        assert asked[0] == "dry-run Job"
        h.run_pods()
        await h.settle()
        assert [call for call in h.cluster.calls if call.startswith("dry-run")] == asked

    async def test_refused_job_fetches_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        h = harness()

        async def refuse(manifest: Object, *, dry_run: bool = False) -> Object:
            raise Refused("quota", reason="Forbidden")

        monkeypatch.setattr(h.cluster, "create", refuse)
        await h.settle()
        assert (h.status.phase, h.jobs()) == ("Rejected", [])

    @pytest.mark.parametrize(
        ("least", "requests"),
        [("256Mi", {"cpu": "250m", "memory": "256Mi"}), ("1Gi", {"cpu": "1", "memory": "2Gi"}),
         ("4Gi", {"cpu": "250m", "memory": "256Mi"})],
        ids=["small pod", "pod of template", "no pod"],
    )  # fmt: skip
    async def test_fetch_pod_has_smallest_requests_that_limit_range_admits(
        self, monkeypatch: pytest.MonkeyPatch, least: str, requests: Json
    ) -> None:
        limits = {"cpu": "1", "memory": "2Gi", "nvidia.com/gpu": "1"}
        h = harness(template=template(trainer(resources={"limits": limits})))
        impose_minimum(h, monkeypatch, least)
        await h.settle()
        [job] = h.cluster.store.list("Job")
        assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"] == requests

    async def test_fetch_pod_requests_no_gpu_and_no_queue(self) -> None:
        gpus = trainer(resources={"limits": {"nvidia.com/gpu": "8"}})
        item = harness(template=template(gpus)).item | {}
        item["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
        h = await ReconcilerHarness(item, Hooks((FEATURE,))).settle()
        [job] = h.cluster.store.list("Job")
        assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]
        assert "nvidia.com/gpu" not in json.dumps(job["spec"])


class TestInputProgress:
    async def test_is_in_condition_and_explanation(self) -> None:
        h = await harness(ONE, TWO).settle()
        h.run_pods()
        reports = [
            {"name": "data.bin", "phase": "Fetching", "bytes": 120_000_000, "totalBytes": 200_000_000},
            {"name": "model", "phase": "Pending", "totalBytes": 50_000_000},
        ]
        h.cluster.page = page(inputs=reports)
        h.clock.advance(60)
        await h.settle()
        condition = h.condition("InputsReady")
        assert (condition.status, condition.reason) == ("False", "FetchingInputs")
        assert condition.message == "fetching inputs: 120 MB of 250 MB, 0/2 complete"
        assert (h.status.phase, h.status.reason) == ("Pending", "FetchingInputs")
        assert h.raw is not None
        why = explain_why(h.raw, [], h.clock())
        assert "before it requests GPUs (FetchingInputs): fetching inputs: 120 MB of 250 MB" in str(why)

    async def test_unresponsive_server_is_reported_during_retries(self) -> None:
        h = await harness().settle()
        h.run_pods()
        report = {"name": "data.bin", "phase": "Fetching", "bytes": 5, "reason": "Unreachable", "message": "no route"}
        h.cluster.page = page(inputs=[report])
        h.clock.advance(60)
        await h.settle()
        assert h.state("InputsReady") == ("False", "Unreachable")
        assert h.condition("InputsReady").message == "fetching inputs: 5 bytes; input data.bin: no route"
        assert "Unreachable" in h.events

    async def test_malformed_page_is_ignored(self) -> None:
        h = await harness().settle()
        h.run_pods()
        h.cluster.page = page(inputs=[{"name": 5}, 7])
        h.clock.advance(60)
        await h.settle()
        assert h.state("InputsReady") == ("False", "FetchingInputs")


class TestFailures:
    @pytest.mark.parametrize(
        "reason", ["NotFound", "AccessDenied", "ChecksumMismatch", "NoSpace", "NotWritable", "Unsupported"]
    )
    async def test_permanent_error_ends_job_before_training(self, reason: str) -> None:
        h = await harness().settle()
        h.run_pods()
        report = {"name": "data.bin", "phase": "Failed", "reason": reason, "message": "it is so"}
        message = words(report, category="UserError", message="input data.bin: it is so", remedy="do this")
        h.cluster.end(h.pods()[0], 81, message)
        await h.settle()
        assert (h.status.phase, h.status.reason, h.status.attempt) == ("Failed", reason, 0)
        assert h.state("InputsReady") == ("False", reason)
        assert h.state("Failed") == ("True", reason)
        assert h.condition("Failed").message == "input data.bin: it is so; do this"
        assert h.jobs() == ["train-inputs"]
        assert h.raw is not None
        assert "(" + reason + "): input data.bin: it is so" in str(explain_why(h.raw, [], utc_now()))

    async def test_transient_error_gets_further_pods(self) -> None:
        h = await harness().settle()
        report = {"name": "data.bin", "phase": "Failed", "reason": "Unreachable", "message": "no route"}
        message = words(report, category="Unknown", message="input data.bin: no route")
        for _ in range(4):
            assert h.status.phase == "Pending"
            h.run_pods()
            h.cluster.end(h.pods()[0], 82, message)
            h.clock.advance(400)
            h.cluster.settle()
            await h.settle()
        assert (h.status.phase, h.status.reason) == ("Failed", "Unreachable")
        assert h.jobs() == ["train-inputs"]


class TestChanges:
    async def test_suspended_job_fetches_after_resumption(self) -> None:
        h = await harness(suspend=True).settle()
        assert (h.status.phase, h.jobs()) == ("Suspended", [])
        h.edit(suspend=False)
        await fetch(h)
        assert h.jobs() == ["train-1"]

    async def test_suspension_ends_fetch_and_resumption_restarts_it(self) -> None:
        h = await harness().settle()
        h.run_pods()
        h.edit(suspend=True)
        await h.settle()
        assert (h.status.phase, h.jobs(), h.pods()) == ("Suspended", [], [])
        h.edit(suspend=False)
        await fetch(h)
        assert h.jobs() == ["train-1"]

    async def test_corrected_url_is_fetched_instead(self) -> None:
        h = await harness().settle()
        h.run_pods()
        h.edit(inputs=[TWO])
        await h.settle()
        assert [item.name for item in h.status.inputs] == ["model"]
        assert "hf://team/model" in json.dumps(h.pods()[0]["spec"])
        await fetch(h, {"name": "model", "phase": "Fetched", "bytes": 7})
        assert h.jobs() == ["train-1"]
