"""A job whose pods get GPUs by resource claims: they are counted once, before any object is created."""

from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.claims import CLAIM_KIND, CLAIM_TEMPLATE_KIND
from ddp_pod.contract.plan import decode_plan
from tests.support.builders import Json, claiming, gpu_claim, profile, resource, template
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

FOUR = {"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 4}}
ALL = {"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}}


def harness_of(*requests: Json, kind: str = CLAIM_TEMPLATE_KIND, **spec: Any) -> ReconcilerHarness:
    """Return a job that claims GPUs by an object with these requests; without requests the object does not exist."""
    harness = ReconcilerHarness(nodes=2, **{"template": claiming({"name": "gpus"}, kind=kind), **spec})
    if requests:
        harness.cluster.add(gpu_claim(*requests, kind=kind))
    return harness


def change_claim(harness: ReconcilerHarness, *requests: Json) -> None:
    """Replace the template that the job names by another object, or delete it."""
    result = present(harness.cluster.store.get(CLAIM_TEMPLATE_KIND, "default", "h100"))
    harness.cluster.store.delete(result)
    if requests:
        harness.cluster.add(gpu_claim(*requests))


def processes(harness: ReconcilerHarness) -> int:
    """Return the number of processes that the pods of the newest Job start."""
    *_, job = harness.cluster.store.list("Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (text,) = (item["value"] for item in container["env"] if item["name"] == constants.ENV_LAUNCHER_CONFIG)
    return decode_plan(text).nproc_per_node


def claimed(harness: ReconcilerHarness) -> int | None:
    claims = harness.status.claims
    return None if claims is None else claims.gpus


class TestCounted:
    @pytest.mark.parametrize("kind", [CLAIM_KIND, CLAIM_TEMPLATE_KIND])
    @pytest.mark.parametrize("asked", ["auto", "gpu"])
    async def test_process_is_started_for_each_gpu(self, kind: str, asked: str) -> None:
        harness = await harness_of(FOUR, kind=kind, procPerNode=asked).settle()
        assert (processes(harness), claimed(harness)) == (4, 4)

    async def test_claims_are_counted_before_first_object(self) -> None:
        harness = harness_of(FOUR)
        await harness.reconcile()
        assert (harness.cluster.calls, harness.requeue) == ([f"get {CLAIM_TEMPLATE_KIND}", "status"], 0)

    async def test_running_pods_keep_claims(self) -> None:
        harness = await harness_of(FOUR).train()
        assert present(harness.status.usage).gpus == 8

    async def test_profile_may_set_claims(self) -> None:
        own = template({"name": "trainer", "command": ["python", "own.py"]})
        harness = ReconcilerHarness(resource(template=own, profileRef={"name": "gpu"}))
        harness.cluster.add(profile({"template": claiming({"name": "gpus"})}))
        harness.cluster.add(gpu_claim(FOUR))
        assert processes(await harness.settle()) == 4

    async def test_job_without_claims_reads_nothing(self) -> None:
        harness = await ReconcilerHarness().train()
        assert not [call for call in harness.cluster.calls if call.startswith("get ")]
        assert harness.status.claims is None


class TestKept:
    async def test_count_is_kept_for_later_attempts_with_changed_template(self) -> None:
        harness = await harness_of(FOUR).train()
        calls = len(harness.cluster.calls)
        change_claim(harness, ALL)
        harness.restart_operator()
        harness.end_pod(0, constants.EXIT_RETRYABLE)
        await harness.train()
        assert (harness.status.attempt, processes(harness), claimed(harness)) == (2, 4, 4)
        assert f"get {CLAIM_TEMPLATE_KIND}" not in harness.cluster.calls[calls:]

    async def test_while_first_pods_wait(self) -> None:
        harness = await harness_of(FOUR).settle()
        change_claim(harness)
        harness.restart_operator()
        await harness.train()
        assert (harness.status.phase, claimed(harness)) == ("Running", 4)

    async def test_though_start_was_lost(self) -> None:
        harness = await harness_of(FOUR).settle()
        assert harness.raw is not None
        kept = harness.raw["status"]["claims"]
        harness.cluster.store.change(harness.raw, status={"claims": kept})  # the write of attempt 1 was lost
        change_claim(harness)
        harness.restart_operator()
        await harness.settle()
        assert (harness.status.attempt, claimed(harness)) == (1, 4)

    async def test_changed_claims_are_counted_again_before_first_pod(self) -> None:
        harness = await harness_of(FOUR).settle()
        harness.cluster.add(gpu_claim({**FOUR, "exactly": {**FOUR["exactly"], "count": 2}}, name="half"))
        harness.edit(template=claiming({"name": "gpus"}, name="half"))
        await harness.settle()
        assert (processes(harness), claimed(harness)) == (2, 2)
        harness.edit(template=template())
        await harness.settle()
        assert (processes(harness), claimed(harness)) == (1, None)

    async def test_started_job_without_count_continues_without(self) -> None:
        harness = await harness_of(FOUR).train()
        assert harness.raw is not None
        status = {name: value for name, value in harness.raw["status"].items() if name != "claims"}
        harness.cluster.store.change(harness.raw, status=status)  # as an older operator has left it
        harness.restart_operator()
        await harness.settle()
        assert (harness.status.phase, claimed(harness)) == ("Running", None)


class TestClaimWaits:
    @pytest.mark.parametrize("kind", [CLAIM_KIND, CLAIM_TEMPLATE_KIND])
    async def test_missing_claim_delays_job(self, kind: str) -> None:
        harness = await harness_of(kind=kind).settle()
        assert (harness.status.phase, harness.status.reason) == ("Pending", "ResourceClaimNotFound")
        assert (harness.jobs(), harness.requeue) == ([], 10.0)
        message = harness.condition("Accepted").message
        assert message.startswith(
            f"spec.template.spec.resourceClaims[0].resourceClaim{kind[13:]}Name: {kind} h100 does"
        )
        harness.cluster.add(gpu_claim(FOUR, kind=kind))
        await harness.settle()
        assert (harness.state("Accepted"), processes(harness)) == (("True", "Valid"), 4)

    async def test_missing_read_permission_delays_job(self) -> None:
        harness = harness_of(FOUR)
        harness.cluster.hidden = True
        await harness.settle()
        assert (harness.state("Accepted"), harness.requeue) == (("False", "Forbidden"), 10.0)
        message = harness.condition("Accepted").message
        assert "grant the operator get on it (docs/security.md), or set spec.procPerNode to a number" in message
        harness.cluster.hidden = False
        await harness.settle()
        assert processes(harness) == 4

    async def test_missing_read_permission_is_ignored_with_explicit_processes(self) -> None:
        harness = harness_of(FOUR, procPerNode=3)
        harness.cluster.hidden = True
        await harness.settle()
        assert (processes(harness), claimed(harness)) == (3, 0)

    async def test_uncountable_claim_needs_explicit_number(self) -> None:
        harness = await harness_of(ALL).settle()
        assert (harness.status.phase, harness.status.reason, harness.jobs()) == ("Rejected", "InvalidSpec", [])
        assert "requests All devices; set spec.procPerNode to a number" in harness.condition("Accepted").message
        harness.edit(procPerNode=8)
        await harness.settle()
        assert (processes(harness), claimed(harness)) == (8, 8)

    async def test_waiting_pods_keep_claims_until_edited_claim_exists(self) -> None:
        harness = await harness_of(FOUR).settle()
        (before,) = harness.cluster.store.list("Job")
        harness.edit(template=claiming({"name": "gpus"}, name="later"))
        await harness.settle()
        assert harness.state("Accepted") == ("False", "ResourceClaimNotFound")
        assert harness.cluster.store.list("Job") == [before]
        assert harness.requeue is not None
        harness.cluster.add(gpu_claim({**FOUR, "exactly": {**FOUR["exactly"], "count": 2}}, name="later"))
        await harness.settle()
        assert (harness.state("Accepted"), processes(harness)) == (("True", "Valid"), 2)


@pytest.mark.parametrize(("asked", "words"), [(8, "is more than the 4 GPUs"), ("cpu", "4 GPUs in")])
async def test_claimed_gpus_bound_processes_like_limits(asked: Any, words: str) -> None:
    harness = await harness_of(FOUR, procPerNode=asked).settle()
    assert (harness.status.phase, harness.jobs()) == ("Rejected", [])
    assert words in harness.condition("Accepted").message


async def test_gpus_of_limits_and_claims_add_up() -> None:
    made = claiming({"name": "gpus"}, resources={"limits": {"nvidia.com/gpu": "2"}})
    harness = await harness_of(FOUR, template=made).train()
    assert processes(harness) == 6
    assert present(harness.status.usage).gpus == 12
