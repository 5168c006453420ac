"""Real Kopf against a stand-in that breaks calls: the cluster reaches the same final state after every fault."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml

from ddp_operator.api.constants import EXIT_RETRYABLE, KIND, PLURAL
from ddp_operator.decide import decide
from ddp_operator.kube import resync
from ddp_operator.manager import handlers
from ddp_operator.reconcile import executor, workqueue
from tests.support.builders import job_manifest
from tests.support.counts import read_counts
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn

# Every call that writes, and how often it fails in a row.
WRITES = {
    ("create", "services"): 2,
    ("create", "configmaps"): 2,
    ("create", "secrets"): 2,
    ("create", "jobs"): 3,
    ("update", f"{PLURAL}/status"): 2,
}
FAULTS: tuple[Any, ...] = (409, 429, 500, "drop", "lost answer", "timeout")


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten failures in a row take half a second here instead of a minute."""
    monkeypatch.setattr(workqueue, "LAST_BACKOFF", 0.05)
    monkeypatch.setattr(handlers.EndlessBackoff, "__iter__", lambda self: itertools.repeat(0.05))


async def run_to_the_end(actors: ClusterActors, name: str = "digits") -> dict[str, Any]:
    for index in (0, 1):
        await actors.run_pod(f"{name}-1", index)
    await actors.phase(name, "Running")
    for index in (0, 1):
        await actors.finish_pod(f"{name}-1", index)
    return await actors.phase(name, "Succeeded")


async def all_watches(server: StandIn, actors: ClusterActors) -> None:
    """Wait until all six kinds are watched: earlier there is no connection to cut."""
    await actors.until(lambda: server.watch_count() == 6, "six watches")


@pytest.mark.parametrize("fault", FAULTS)
async def test_failure_of_any_write_is_recovered(
    server: StandIn, actors: ClusterActors, start: Start, fault: Any
) -> None:
    start(call_timeout=1.0)
    times = dict.fromkeys(WRITES, 1) if fault == "timeout" else dict(WRITES)  # each one costs a second
    if fault == "lost answer":
        times |= {("create", "jobs"): 1, ("create", "services"): 1}  # they exist, and the watches report them
    broken = [
        server.faults.add(fault, verb=verb, resource=resource, times=count, retry_after=0)
        for (verb, resource), count in times.items()
    ]
    await actors.create(job_manifest())
    await actors.until(lambda: len(server.list("ConfigMap")) == 1, "the launcher, without which no pod starts")
    await actors.until(lambda: len(server.list("Service")) == 1, "the Service, without which no ranks meet")
    done = await run_to_the_end(actors)
    assert [rule.hits for rule in broken] == list(times.values())
    assert done["status"]["attempt"] == 1
    assert read_counts(done["status"])["total"] == 0
    assert [len(server.list(kind)) for kind in ("Service", "Secret", "ConfigMap", "Job")] == [1, 1, 1, 1]


async def test_unavailable_webhook_is_reported_and_retried(
    server: StandIn, actors: ClusterActors, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SERVER_PATIENCE", 0.3)
    monkeypatch.setattr(decide, "RECHECK_REFUSAL", 0.1)
    start()
    words = 'Internal error occurred: failed calling webhook "audit.example.com": connection refused'
    server.faults.add(500, verb="create", resource="jobs", times=1_000_000, message=words)
    await actors.create(job_manifest())
    report = await actors.resource("digits", lambda resource: resource.get("status", {}).get("conditions"))
    (accepted,) = [entry for entry in report["status"]["conditions"] if entry["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"], report["status"]["phase"]) == ("Unknown", "ServerError", "Pending")
    assert words in accepted["message"]
    server.faults.clear()
    done = await run_to_the_end(actors)
    assert read_counts(done["status"])["total"] == 0
    assert [event["reason"] for event in server.list("Event")].count("ServerError") == 1


async def test_deleted_shared_child_is_recreated(server: StandIn, actors: ClusterActors, start: Start) -> None:
    """The watches report it: no comparison with lists is due within the test."""
    start()
    await actors.create(job_manifest())
    for index in (0, 1):
        await actors.run_pod("digits-1", index)
    [launcher] = [item["metadata"]["name"] for item in server.list("ConfigMap")]
    for kind, name in (("Service", "digits"), ("ConfigMap", launcher)):
        server.remove(kind, name)
        event = f"{kind} {name} is made anew beside the running Job"
        await actors.until(lambda kind=kind, name=name: actors.get(kind, name), event)
    server.remove("Service", "digits")
    server.remove("ConfigMap", launcher)
    # The next attempt must not rely on the earlier objects.
    await actors.finish_pod("digits-1", 1, exit_code=EXIT_RETRYABLE)
    await actors.child_job("digits-2")
    assert (len(server.list("Service")), len(server.list("ConfigMap"))) == (1, 1)


async def test_failed_event_post_blocks_nothing(server: StandIn, actors: ClusterActors, start: Start) -> None:
    start()
    fault = server.faults.add(500, verb="create", resource="events", times=1_000_000)
    await actors.create(job_manifest())
    await run_to_the_end(actors)
    assert fault.hits
    assert server.list("Event") == []


async def test_conflicting_status_is_read_again(server: StandIn, actors: ClusterActors, start: Start) -> None:
    start()
    await actors.create(job_manifest())
    await actors.child_job("digits-1")
    for number in range(5):
        await actors.patch(KIND, "digits", {"metadata": {"labels": {"round": str(number)}}})
    done = await run_to_the_end(actors)
    assert done["metadata"]["labels"] == {"round": "4"}


async def test_interrupted_watches_resume_at_their_version(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    start()
    await actors.create(job_manifest())
    await actors.child_job("digits-1")
    await all_watches(server, actors)
    before = len(server.calls)
    server.cut_watches()
    await run_to_the_end(actors)
    since = server.calls[before:]
    assert ("watch", "jobs", 200) in since
    assert [call for call in since if call[:2] in (("list", "jobs"), ("list", PLURAL))] == []


@pytest.mark.parametrize("status", [403, 429, 503, "drop"])
async def test_refused_watch_is_restarted(server: StandIn, actors: ClusterActors, start: Start, status: Any) -> None:
    start()
    await actors.create(job_manifest())
    await actors.child_job("digits-1")
    await all_watches(server, actors)
    fault = server.faults.add(status, verb="watch", resource="pods", times=2, retry_after=0)
    server.cut_watches()
    await actors.until(lambda: fault.hits == 2, "refused watches")
    await run_to_the_end(actors)


async def test_deletions_missed_in_new_listing_are_found(
    server: StandIn, actors: ClusterActors, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resync, "NUDGE_DELAY", 0.1)
    operator = start().operator
    for name in ("stays", "goes"):
        await actors.create(job_manifest(name))
        await actors.run_pod(f"{name}-1", 0)
    await all_watches(server, actors)
    refused = server.faults.add(503, verb="watch", times=1_000_000)
    server.cut_watches()
    await actors.until(lambda: server.watch_count() == 0 and refused.hits >= 3, "all watches to be down")
    await actors.delete(KIND, "goes")
    await actors.until(lambda: len(server.list("Job")) == 1, "garbage collection")
    server.compact()
    server.faults.clear()
    await actors.until(lambda: len(operator.store.entries(KIND)) == 1, "the end of the ghost")
    await actors.until(lambda: len(operator.store.entries("Job")) == 1, "the end of its Job")
    await run_to_the_end(actors, "stays")


async def test_silent_watches_are_helped_out(
    server: StandIn, actors: ClusterActors, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resync, "GRACE", 0.2)
    start(resync_interval=1.0)
    await actors.create(job_manifest())
    await actors.run_pod("digits-1", 0)
    await all_watches(server, actors)
    server.freeze_watches()
    await run_to_the_end(actors)
    server.thaw_watches()


async def test_expiring_tokens_are_renewed_during_work(
    server: StandIn, actors: ClusterActors, start: Start, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kopf reads its credentials again when it opens a watch and they have expired; then it closes the other ones."""
    # Kopf leaves a session open if a request fails in one that has expired meanwhile: longer than a request.
    monkeypatch.setattr("ddp_operator.kube.credentials.TOKEN_LIFE", timedelta(seconds=2))
    tokens: list[str | None] = []
    open_session = handlers.open_kopf_session

    def open_recorded(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
        tokens.append(info.token)
        return open_session(info)

    monkeypatch.setattr(handlers, "open_kopf_session", open_recorded)
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"][0]["user"]["tokenFile"] = "token"
    kubeconfig.write_text(yaml.safe_dump(config))
    (kubeconfig.parent / "token").write_text("first")
    start()
    await actors.create(job_manifest())
    for number in range(2):
        (kubeconfig.parent / "token").write_text(f"token {number}")
        await actors.patch(KIND, "digits", {"metadata": {"labels": {"round": str(number)}}})
        while f"token {number}" not in tokens:
            await asyncio.sleep(0.2)
            server.cut_watches()  # it reads them when it opens one, if they have expired by then
    await run_to_the_end(actors)


async def test_api_server_outage_fails_no_job(server: StandIn, actors: ClusterActors, start: Start) -> None:
    start(call_timeout=0.5)
    await actors.create(job_manifest())
    await actors.run_pod("digits-1", 0)
    await all_watches(server, actors)
    away = server.faults.add("drop", verb="watch", times=1_000_000)
    server.cut_watches()
    await actors.until(lambda: away.hits >= 6, "watches that fail")
    # Users and kubelets had a connection meanwhile, so the operator has much to write after its watches return.
    await actors.run_pod("digits-1", 1)
    await actors.create(job_manifest("meanwhile"))
    written = (("create", "jobs"), ("update", f"{PLURAL}/status"))
    broken = [
        server.faults.add(503, verb=verb, resource=resource, times=6, retry_after=0) for verb, resource in written
    ]
    away.times = 0
    await actors.until(lambda: [fault.hits for fault in broken] == [6, 6], "writes that fail")
    for name in ("digits", "meanwhile"):
        done = await run_to_the_end(actors, name)
        assert (done["status"]["attempt"], read_counts(done["status"])["total"]) == (1, 0)


async def test_foreign_deletion_of_jobs_and_pods_is_recovered(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    start()
    await actors.create(job_manifest())
    await actors.run_pod("digits-1", 0)
    (job,) = server.list("Job")
    await actors.delete("Job", "digits-1")

    async def new_job() -> bool:
        results = server.list("Job")
        return len(results) == 1 and results[0]["metadata"]["uid"] != job["metadata"]["uid"]

    await actors.until(new_job, "another Job")
