"""Drives the stand-in API server, to which the cluster speaks through the operator's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from ddp_operator.cluster import Object
from ddp_operator.kube.cluster import KubeCluster
from tests.support.standin.actors import ClusterActors
from tests.support.standin.running import StandIn

from .base import ClusterDriver, build_resource


class ApiServerDriver(ClusterDriver):
    """Acts as users and kubelets do: through the API."""

    def __init__(self, api: ClusterActors) -> None:
        self.api = api
        self.cluster = KubeCluster(api.client)

    async def add_resource(self, name: str, **spec: Any) -> Object:
        """Create it as a user does."""
        return await self.api.create(build_resource(name, **spec))

    async def run_pod(self, job: str, index: int) -> None:
        """Do what the scheduler and its kubelet do."""
        await self.api.run_pod(job, index, node="node-1")

    async def finish_pod(self, job: str, index: int, *, code: int = 0, message: str = "") -> None:
        """Do what its kubelet does."""
        await self.api.finish_pod(job, index, exit_code=code, message=message)

    def announce_port(self, pod: Object, port: int) -> int:
        """Do nothing: such a pod's address is this machine."""
        return port

    def unacceptable(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Give it a field that no API server knows."""
        spoiled = deepcopy(dict(job))
        spoiled["spec"]["template"]["spec"]["nodeSelectr"] = {"a": "b"}
        return spoiled


@asynccontextmanager
async def open_standin(folder: Path) -> AsyncIterator[ApiServerDriver]:
    """Start a stand-in and a client of it."""
    with StandIn() as server:
        async with ClusterActors(server.write_kubeconfig(folder)) as api:
            driver = ApiServerDriver(api)
            try:
                yield driver
            finally:
                await driver.cluster.close()
