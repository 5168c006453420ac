"""Several operators in separate processes at one API server: one leads, and another one succeeds it."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from ddp_operator.api.constants import KIND, PLURAL
from tests.support import PATIENCE
from tests.support.builders import job_manifest
from tests.support.control_plane import free_ports
from tests.support.counts import read_counts
from tests.support.operator_process import MODULE, OperatorProcess
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn

from .test_operator_start import assert_one_line, run

LEASE_SECONDS = 4
"""Short enough to wait for it in a test. A busy machine may fail to renew it: tests that use it allow for that."""
LONG_LEASE_SECONDS = 60
"""Long enough to renew it on any busy machine."""
WRITING = ("create", "update", "patch", "delete")
JOBS = 12

StartAs = Callable[..., OperatorProcess]


@pytest.fixture
def start_as(server: StandIn, tmp_path: Path) -> Iterator[StartAs]:
    """Start an operator process under a name that identifies its calls."""
    with ExitStack() as stack:

        def begin(name: str, lease_seconds: int = LEASE_SECONDS, workers: int = 16) -> OperatorProcess:
            (port,) = free_ports(1)
            env = {
                "DDP_OPERATOR_LEASE_SECONDS": str(lease_seconds),
                "DDP_OPERATOR_IDENTITY": name,
                "DDP_OPERATOR_WORKERS": str(workers),
            }
            kubeconfig = server.write_kubeconfig(tmp_path, name)
            return stack.enter_context(
                OperatorProcess(kubeconfig, tmp_path / f"{name}.log", port=port, env=env, warm=True)
            )

        yield begin


def holder(server: StandIn) -> str:
    lease = server.get("Lease", "ddp-operator")
    return str(lease and lease["spec"]["holderIdentity"])


def writes(server: StandIn, user: str) -> list[tuple[str, str, int]]:
    """Return an operator's writes except those to its Lease."""
    return [call for call in server.calls_of(user) if call[0] in WRITING and call[1] != "leases"]


def page(operator: OperatorProcess) -> str:
    """Return an operator's own metrics."""
    with urlopen(f"{operator.url}/metrics", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def lost(operator: OperatorProcess) -> int:
    """Wait for an operator that must end without a signal, and return its exit code."""
    process = operator.process
    operator.process = None
    assert process is not None
    return process.wait(PATIENCE)


async def all_run(server: StandIn, actors: ClusterActors) -> None:
    """Make every job run, and check that nothing was created twice."""
    for number in range(JOBS):
        for index in (0, 1):
            await actors.run_pod(f"job{number}-1", index)
    for number in range(JOBS):
        done = await actors.phase(f"job{number}", "Running")
        assert done["status"]["attempt"] == 1
        assert read_counts(done["status"])["total"] == 0
    for kind, count in (("Service", JOBS), ("ConfigMap", 1), ("Job", JOBS)):
        await actors.until(lambda kind=kind, count=count: len(server.list(kind)) == count, f"{count} of {kind}")
        made = [write for write in server.writes if write[0] == "create" and write[1] == f"{kind.lower()}s"]
        assert len(made) == count


async def test_standby_takes_over_when_leader_exits(server: StandIn, actors: ClusterActors, start_as: StartAs) -> None:
    first, second = (start_as(name, LONG_LEASE_SECONDS) for name in ("first", "second"))
    assert holder(server) == "first"
    await actors.create(job_manifest("job0"))
    await actors.child_job("job0-1")
    assert "on standby: first holds lease" in second.log
    assert writes(server, "second") == []
    assert "watch" not in {call[0] for call in server.calls_of("second")}
    assert "\nddp_operator_leader 0.0" in await asyncio.to_thread(page, second)
    first.stop()
    assert holder(server) in ("", "second")
    for number in range(1, JOBS):
        await actors.create(job_manifest(f"job{number}"))
    await all_run(server, actors)
    assert holder(server) == "second"
    # A standby ends as fast.
    third = start_as("third", LONG_LEASE_SECONDS)
    third.stop()
    assert holder(server) == "second"


async def test_leader_that_was_frozen_wakes_up_silent_and_ends(
    server: StandIn, actors: ClusterActors, start_as: StartAs
) -> None:
    first = start_as("first", workers=1)
    second = start_as("second")
    assert first.process is not None
    for number in range(JOBS):
        await actors.create(job_manifest(f"job{number}"))
    await actors.until(lambda: len(server.list("Job")) >= 2, "two Jobs")
    first.process.send_signal(signal.SIGSTOP)
    try:
        await actors.until(lambda: holder(server) == "second", "the second one takes over")
        await all_run(server, actors)
        # Every pending call has arrived by now.
        before = writes(server, "first")
        for number in range(JOBS):
            await actors.delete(KIND, f"job{number}")  # an event that would cause a pass
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert lost(first) == 1
    after = writes(server, "first")
    assert after[: len(before)] == before
    assert len(after) <= len(before) + 1  # its worker may have been stopped between the fence and the call
    assert "lost leadership" in first.log
    assert "Traceback" not in first.log
    assert holder(server) == "second"
    assert "lost leadership" not in second.log


async def test_leader_without_renewal_writes_nothing_and_continues_afterwards(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    running = start(lease_seconds=3)
    leader = running.operator.leader
    assert leader is not None
    broken = server.faults.add(500, resource="leases", times=1_000_000)
    await actors.until(lambda: not leader.leads, "the fence")
    before = len(server.writes)
    await actors.create(job_manifest())
    await actors.until(lambda: running.operator.store.entry(KIND, "default", "digits"), "the news has come")
    registry = running.operator.metrics.registry
    name = "ddp_operator_reconcile_errors_total"
    await actors.until(lambda: registry.get_sample_value(name, {"cause": "Cluster"}), "a reconcile that may not write")
    assert len(server.writes) == before + 1  # the user's own
    server.faults.clear()
    await actors.child_job("digits-1")
    assert broken.hits > 0
    assert not running.lost.is_set()


async def test_lease_taken_by_another_holder_ends_operator(
    server: StandIn, actors: ClusterActors, start: Start
) -> None:
    running = start(lease_seconds=3)

    def take(lease: dict[str, dict[str, str]]) -> None:
        lease["spec"]["holderIdentity"] = "somebody else"

    server.change("Lease", "ddp-operator", take)
    await actors.until(running.lost.is_set, "the operator is told to end")
    await actors.create(job_manifest())
    running.stop()
    assert server.list("Job") == []
    assert holder(server) == "somebody else"


def test_operators_with_different_leases_run_in_parallel(server: StandIn, start: Start) -> None:
    start(lease_name="one")
    start(lease_name="two")
    assert {lease["metadata"]["name"] for lease in server.list("Lease")} == {"one", "two"}


def test_missing_permission_for_kind_of_feature_is_named(server: StandIn, kubeconfig: Path) -> None:
    server.allow(lambda name: name["resource"] != "networkpolicies")
    done = run(MODULE, KUBECONFIG=str(kubeconfig))
    assert_one_line(done, "get, list, watch, create networkpolicies.networking.k8s.io in all namespaces")


def test_missing_permission_for_lease_is_named(server: StandIn, kubeconfig: Path) -> None:
    server.allow(lambda name: name["resource"] != "leases")
    done = run(MODULE, KUBECONFIG=str(kubeconfig))
    assert_one_line(done, "get, create, update, delete leases.coordination.k8s.io in namespace default")
    assert re.search(r"permissions are missing: [^;]*\. Bind", done.stdout)
    assert PLURAL not in done.stdout
