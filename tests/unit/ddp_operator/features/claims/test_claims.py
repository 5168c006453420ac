"""Jobs that write their checkpoints to the same claim or URL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_cli.view.why import explain_why
from ddp_operator.api import constants
from ddp_operator.api.cluster import Key
from ddp_operator.api.resources import claim_of
from ddp_operator.decide.claims import exclusive_claim, refuse_second
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.claims import FEATURE
from tests.support.builders import NOW, job, page, resource
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

CHECKPOINT = {"path": "/ckpt", "claimName": "weights"}
TRAINING = page(step=7, phase="Running")


def another(phase: str = "", attempt: int = 0, *, created: str = "", uid: str = "another") -> dict[str, Any]:
    item = resource("first", checkpoint=CHECKPOINT)
    item["metadata"] |= {"uid": uid, "creationTimestamp": created}
    return item | {"status": {"phase": phase, "attempt": attempt}}


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        (another("Running", 1, created="z"), True),
        (another("Suspended", 1, created="z"), True),
        (another("Succeeded", 1), False),
        (another("Failed", 2), False),
        (another("Rejected"), False),
        (another(created="2026-11-20T11:59:59Z"), True),
        (another(created="2026-11-20T12:00:01Z"), False),
        (another("Running", 1, uid="own"), False),
    ],
    ids=["runs", "suspended", "succeeded", "failed", "rejected", "older", "younger", "itself"],
)
def test_claim_of_started_or_older_job_is_refused(other: dict[str, Any], refused: bool) -> None:
    mine = replace(job(checkpoint=CHECKPOINT), uid="own", created="2026-11-20T12:00:00Z")
    assert (refuse_second(mine, "weights", [other]) is not None) is refused


def test_checkpoint_url_is_exclusive_like_claim() -> None:
    store = {"path": "/ckpt", "url": "s3://bucket/digits"}
    mine = replace(job(checkpoint=store), uid="own", created="2026-11-20T12:00:00Z")
    refusal = refuse_second(mine, "s3://bucket/digits", [another("Running", 1) | {}])
    assert exclusive_claim(mine) == "s3://bucket/digits"
    assert refusal is not None
    assert "spec.checkpoint.url: job first (Running) writes its checkpoints to s3://bucket/digits" in refusal.message
    assert "give each job a separate folder" in refusal.message
    assert claim_of(resource("x", checkpoint=store)) == "s3://bucket/digits"


class TestSecondJob:
    async def harness(self, **checkpoint: Any) -> ReconcilerHarness:
        harness = await ReconcilerHarness(hooks=Hooks((FEATURE,)), checkpoint=CHECKPOINT).train(TRAINING)
        harness.cluster.add(resource("second", checkpoint=CHECKPOINT | checkpoint))
        harness.key = Key("default", "second")
        return await harness.settle()

    async def test_second_job_starts_when_first_job_has_ended(self) -> None:
        harness = await self.harness()
        assert harness.state("Accepted") == ("False", "ClaimInUse")
        assert harness.status.phase == "Pending", "it waits, and `ddp watch` follows it"
        assert "job train (Running) writes its checkpoints to claim weights" in harness.condition("Accepted").message
        assert (harness.jobs(), harness.requeue) == (["train-1"], 30)
        assert harness.raw is not None
        assert "starts automatically" in explain_why(harness.raw, (), NOW).todo
        first = present(harness.cluster.store.get(constants.KIND, "default", "train"))
        harness.cluster.store.change(first, status=first["status"] | {"phase": "Succeeded"})
        await harness.settle()
        assert harness.state("Accepted") == ("True", "Valid")
        assert "second-1" in harness.jobs()

    async def test_shared_claim_starts_both_jobs(self) -> None:
        harness = await self.harness(shared=True)
        assert harness.jobs() == ["train-1", "second-1"]

    async def test_started_job_is_not_refused(self) -> None:
        harness = await self.harness(shared=True)
        harness.edit(checkpoint=CHECKPOINT)
        await harness.settle()
        assert harness.state("Accepted") == ("True", "Valid")
