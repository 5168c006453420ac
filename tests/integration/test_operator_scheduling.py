"""PodGroups and NetworkPolicies as objects on an API server."""

from __future__ import annotations

import pytest

from ddp_operator.api.constants import KIND
from ddp_operator.reconcile import reconciler
from tests.support.builders import job_manifest
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn
from tests.support.standin.resources import Kind

VOLCANO = Kind("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups")


async def refusal(actors: ClusterActors) -> tuple[str, str]:
    resource = await actors.resource("digits", lambda result: result.get("status", {}).get("conditions"))
    (accepted,) = [entry for entry in resource["status"]["conditions"] if entry["type"] == "Accepted"]
    assert accepted["status"] == "False"
    return accepted["reason"], accepted["message"]


async def test_gang_of_missing_scheduler_is_refused(server: StandIn, actors: ClusterActors, start: Start) -> None:
    start()
    await actors.create(job_manifest(scheduling={"gang": "Volcano"}))
    reason, words = await refusal(actors)
    assert reason == "InvalidSpec"
    remedy = "install that scheduler or set gang: None"
    assert f"the cluster does not serve PodGroups of scheduling.volcano.sh/v1beta1; {remedy}" in words
    assert server.list("Job") == []


async def test_gang_without_role_reports_server_message(server: StandIn, actors: ClusterActors, start: Start) -> None:
    server.serve(VOLCANO)
    server.faults.add(403, verb="create", resource="podgroups", times=1_000_000)
    start()
    await actors.create(job_manifest(scheduling={"gang": "Volcano"}))
    assert (await refusal(actors))[0] == "Forbidden"
    assert server.list("Job") == []


@pytest.mark.parametrize("enabled", [True, False])
async def test_job_needs_at_most_four_creations(
    server: StandIn, actors: ClusterActors, start: Start, enabled: bool
) -> None:
    start()
    await actors.create(job_manifest(networkPolicy={"enabled": enabled}))
    for index in (0, 1):
        await actors.run_pod("digits-1", index)
    await actors.phase("digits", "Running")
    own = ("services", "configmaps", "jobs", "networkpolicies")
    assert len([write for write in server.writes_of(*own) if write[0] == "create"]) == 3 + enabled


async def test_pods_of_large_job_share_status_writes(
    server: StandIn, actors: ClusterActors, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "MINOR_INTERVAL", 3600.0)  # on any machine the second is not over
    start()
    nodes = 20
    await actors.create(job_manifest(nodes=nodes))
    await actors.child_job("digits-1")
    before = len(server.calls)
    for index in range(nodes):
        await actors.run_pod("digits-1", index)
    await actors.phase("digits", "Running")
    written = [call for call in server.calls[before:] if call[:2] == ("update", "ddptrainingjobs/status")]
    assert len(written) < nodes / 2  # without the pause between them, one for each pod and more
    # Delayed changes are also written once their time has come.
    monkeypatch.setattr(reconciler, "MINOR_INTERVAL", 0.1)
    await actors.patch(KIND, "digits", {"metadata": {"labels": {"a": "b"}}})
    await actors.resource("digits", lambda resource: resource["status"]["nodes"].get("ready") == nodes)


async def test_job_of_foreign_manager_gets_no_child_and_no_status(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    start()
    await actors.create(job_manifest("theirs", managedBy="example.com/dispatcher"))
    await actors.create(job_manifest("ours", managedBy="ddp-operator.dev/ddp-operator"))
    await actors.child_job("ours-1")  # a later job: by now the operator has handled the other one
    theirs = await actors.get(KIND, "theirs")
    assert theirs is not None
    assert "status" not in theirs
    assert [job["metadata"]["name"] for job in server.list("Job")] == ["ours-1"]
