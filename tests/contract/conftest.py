"""The clusters that must fulfil one contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.cluster_drivers import ClusterDriver, open_control_plane, open_local, open_standin
from tests.support.traces import PATIENCE, PATIENCE_HERE, Trace

CLUSTERS = ("local", "standin", pytest.param("control-plane", marks=pytest.mark.apiserver))


@pytest_asyncio.fixture(params=CLUSTERS)
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ClusterDriver]:
    """Each implementation of a cluster, the last of them a real control plane."""
    async with open_cluster(request, tmp_path) as opened:
        yield opened


def open_cluster(
    request: pytest.FixtureRequest, folder: Path, *, backoff: float = 0.0
) -> AbstractAsyncContextManager[ClusterDriver]:
    """Open the cluster that the test's parameter names; ``backoff``: seconds that our Job controllers wait."""
    if request.param == "local":
        return open_local(folder, backoff=backoff)
    if request.param == "standin":
        return open_standin(folder, backoff=backoff)
    plane = request.getfixturevalue("plane")
    if not plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS has no kube-controller-manager, which makes a Job's pods")
    return open_control_plane(plane)


@pytest.fixture
def trace(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Trace]]:
    """Open recordings; ``--record-traces`` replaces them and uses only a real control plane."""
    record = request.config.getoption("--record-traces")
    real = request.node.get_closest_marker("apiserver") is not None
    if record and not real:
        pytest.skip("only a real control plane is recorded")
    server = request.getfixturevalue("plane").version if record else None
    opened: list[Trace] = []

    def open_trace(name: str) -> Trace:
        opened.append(Trace(name, server=server, patience=PATIENCE if real else PATIENCE_HERE))
        return opened[-1]

    yield open_trace
    for result in opened:
        result.close()
