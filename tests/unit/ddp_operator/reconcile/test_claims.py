"""A job whose pods get GPUs by resource claims, which its procPerNode counts."""

from tests.support.builders import claiming
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness


async def test_stated_processes_are_the_gpus_of_a_claiming_pod() -> None:
    harness = await ReconcilerHarness(nodes=2, template=claiming(), procPerNode=4).train()
    assert present(harness.status.usage).gpus == 8


async def test_count_in_the_status_of_a_former_version_is_ignored() -> None:
    harness = await ReconcilerHarness(nodes=2, template=claiming(), procPerNode=4).train()
    assert harness.raw is not None
    harness.cluster.store.change(harness.raw, status={**harness.raw["status"], "claims": {"gpus": 8, "digest": "a"}})
    harness.restart_operator()
    await harness.settle()
    assert (harness.status.phase, present(harness.status.usage).gpus) == ("Running", 8)
    assert harness.state("Accepted") == ("True", "Valid")
