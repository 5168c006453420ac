"""One tenant's jobs at the limits of size, and a job of another tenant, in front of a real operator's process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from ddp_operator.api.constants import KIND
from tests.support import PATIENCE
from tests.support.builders import resource
from tests.support.control_plane import free_ports
from tests.support.hostile_jobs import (
    ATTACKER,
    NESTED,
    NESTED_LISTS,
    BuildSpec,
    build_longest_script,
    build_nested,
    build_script,
)
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors, StandIn

JOBS = 120


@pytest.fixture
def operator(server: StandIn, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator's process, whose Lease lives long enough to renew it on any busy machine."""
    server.add("Namespace", {"metadata": {"name": ATTACKER}, "spec": {}})
    server.insert(NESTED, NESTED_LISTS)
    (port,) = free_ports(1)
    env = {"DDP_OPERATOR_LEASE_SECONDS": "60"}
    kubeconfig = server.write_kubeconfig(tmp_path, "operator")
    with OperatorProcess(kubeconfig, tmp_path / "operator.log", port=port, env=env, warm=True) as process:
        yield process


def submit(server: StandIn, count: int, build: BuildSpec) -> list[str]:
    """Create the attacker's jobs, and return their names."""
    names = [f"hostile-{number}" for number in range(count)]
    for number, name in enumerate(names):
        server.add(KIND, resource(name, namespace=ATTACKER, **build(number)))
    return names


def count_answered(server: StandIn) -> int:
    """Return the number of the attacker's jobs with a status."""
    return sum("status" in job for job in server.list(KIND, ATTACKER))


def read_page(operator: OperatorProcess, name: str) -> str:
    """Return a page of the operator."""
    with urlopen(f"{operator.url}/{name}", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def renewal(server: StandIn) -> tuple[str, str, int]:
    """Return when the Lease was renewed, its holder and the number of its transitions."""
    lease = server.get("Lease", "ddp-operator")
    assert lease is not None
    return lease["spec"]["renewTime"], lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]


@pytest.mark.parametrize(
    "build", [build_script, build_longest_script, build_nested], ids=["scripts", "longest-scripts", "events"]
)
async def test_other_tenant_starts_before_backlog_of_one_is_done(
    server: StandIn, operator: OperatorProcess, actors: ClusterActors, build: BuildSpec
) -> None:
    before = renewal(server)
    submit(server, JOBS, build)
    await actors.create(resource("ordinary"))
    await actors.child_job("ordinary-1")
    if build is build_script:
        assert count_answered(server) < JOBS / 2
    assert await asyncio.to_thread(read_page, operator, "healthz") == "ok\n"
    await actors.until(lambda: renewal(server)[0] > before[0], "a renewal of the Lease")
    assert renewal(server)[1:] == before[1:]
