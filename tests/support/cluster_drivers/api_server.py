"""Driver of an API server, the stand-in or a real one, through the operator's client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from ddp_cli.local.job_controller import decide_job
from ddp_operator.api.cluster import Key, Object
from ddp_operator.api.constants import KIND, LABEL_JOB_NAME
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.resources import path
from tests.support.control_plane import ControlPlane
from tests.support.standin.actors import ClusterActors
from tests.support.standin.running import StandIn

from .base import ClusterDriver, build_resource


class ApiServerDriver(ClusterDriver):
    """Acts as users and kubelets do: through the API."""

    def __init__(self, api: ClusterActors, standin: StandIn | None = None) -> None:
        self.api = api
        self.cluster = KubeCluster(api.client)
        self._standin = standin

    async def let_pods_end(self, allowed: bool) -> None:
        """Switch the simulated kubelets on or off."""
        self.api.kubelet_works = allowed
        if self._standin is not None:
            self._standin.end_pods(allowed)

    async def add_resource(self, name: str, **spec: Any) -> Object:
        """Create the resource as a user does."""
        return await self.api.create(build_resource(name, **spec))

    async def list_whole_pods(self, key: Key) -> list[Object]:
        """List the objects at the API server."""
        return await self.api.list("Pod")

    async def run_pod(self, job: str, index: int) -> None:
        """Act as the scheduler and its kubelet."""
        await self.api.run_pod(job, index, node="node-1")

    async def finish_pod(self, job: str, index: int, *, code: int = 0, message: str = "") -> None:
        """Act as its kubelet."""
        await self.api.finish_pod(job, index, exit_code=code, message=message)

    def announce_port(self, pod: Object, port: int) -> int:
        """Do nothing: such a pod's address is this machine."""
        return port

    def unacceptable(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Add a field that no API server knows."""
        spoiled = deepcopy(dict(job))
        spoiled["spec"]["template"]["spec"]["nodeSelectr"] = {"a": "b"}
        return spoiled


@asynccontextmanager
async def open_standin(folder: Path, *, backoff: float = 0.0) -> AsyncIterator[ApiServerDriver]:
    """Start a stand-in and a client of it."""
    with StandIn() as server:
        server.controllers.job_controller = partial(decide_job, backoff=backoff)
        async with ClusterActors(server.write_kubeconfig(folder)) as api:
            driver = ApiServerDriver(api, server)
            try:
                yield driver
            finally:
                await driver.cluster.close()


@asynccontextmanager
async def open_control_plane(plane: ControlPlane) -> AsyncIterator[ApiServerDriver]:
    """Use a real control plane, whose nodes have no kubelet: the driver acts as the kubelets."""
    async with ClusterActors(plane.admin) as api, api.kubelet():
        driver = ApiServerDriver(api)
        try:
            yield driver
        finally:
            await driver.cluster.close()
            await _empty(api)


async def _empty(api: ClusterActors) -> None:
    """Delete the objects of a test in its namespace, so that the next test can use the same names."""
    for kind in (KIND, "Job", "Pod", "Service", "ConfigMap"):
        own = {} if kind == KIND else {"labelSelector": LABEL_JOB_NAME}
        await api.client.request(
            "DELETE", path(kind, api.namespace), params=own, body={"propagationPolicy": "Background"}
        )
    for kind in (KIND, "Job", "Pod"):

        async def is_empty(kind: str = kind) -> bool:
            return not await api.list(kind)

        await api.until(is_empty, f"the end of every {kind}")
