"""Fixtures of the tests with a running operator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ddp_operator.manager.settings import Settings
from tests.support.running_operator import RunningOperator, Start
from tests.support.standin import ClusterActors, StandIn


@pytest.fixture
def server() -> Iterator[StandIn]:
    """A stand-in API server with the CRD installed."""
    with StandIn() as standin:
        yield standin


@pytest.fixture
def kubeconfig(server: StandIn, tmp_path: Path) -> Path:
    """A kubeconfig for the stand-in."""
    return server.write_kubeconfig(tmp_path)


@pytest_asyncio.fixture
async def actors(kubeconfig: Path) -> AsyncIterator[ClusterActors]:
    """Users and kubelets."""
    async with ClusterActors(kubeconfig) as cluster_actors:
        yield cluster_actors


@pytest.fixture
def start(kubeconfig: Path) -> Iterator[Start]:
    """Start an operator, or another one after the first was stopped. At the end, stop those that still run."""
    with ExitStack() as stack:

        def begin(*, call_timeout: float = 120.0, **settings: Any) -> RunningOperator:
            expected: dict[str, Any] = {"kubeconfig": str(kubeconfig), "health_port": 0} | settings
            operator = RunningOperator(Settings(**expected)).start()
            stack.enter_context(operator)
            # The operator repeats a call that timed out, except its checks at the start: shorten the timeout after
            # them.
            operator.operator.client._timeout = call_timeout
            return operator

        yield begin
