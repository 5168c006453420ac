"""Driver of the local cluster, whose pods are small Python processes controlled through a file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from ddp_cli.local.local_cluster import LocalCluster
from ddp_operator.api import constants
from ddp_operator.api.cluster import Key, Object

from .base import ClusterDriver, build_resource

# Starts in milliseconds, so that a whole suite of such pods costs less than one `import torch`.
POD_SCRIPT = """
import json, os, sys, time
order = os.path.join(os.environ["ORDERS"], os.environ["JOB_COMPLETION_INDEX"])
while not os.path.exists(order):
    time.sleep(0.01)
with open(order) as stream:
    said = json.load(stream)
os.unlink(order)
with open(os.environ["TERMINATION_LOG"], "w") as stream:
    stream.write(said["message"])
sys.exit(said["code"])
"""


class LocalClusterDriver(ClusterDriver):
    """Acts by writing files that the pods read."""

    can_hold_pods = False

    def __init__(self, folder: Path, backoff: float) -> None:
        self.folder = folder
        self.local = self.cluster = LocalCluster(folder / "run", folder / "claims", backoff=backoff)

    def comparable(self, state: dict[str, Any]) -> dict[str, Any]:
        """Leave out finished pods: here a deleted pod disappears at once, and stays visible for a while."""
        return state | {"pods": [pod for pod in state["pods"] if pod["phase"] == "Running" and not pod["deleted"]]}

    def dress(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Give its containers the controlled program."""
        dressed = deepcopy(dict(job))
        orders = self._orders(dressed["metadata"]["name"])
        orders.mkdir(parents=True, exist_ok=True)
        for container in dressed["spec"]["template"]["spec"]["containers"]:
            container["command"] = ["python", "-S", "-c", POD_SCRIPT]
            container["env"] = [
                {"name": "ORDERS", "value": str(orders)},
                {"name": "TERMINATION_LOG", "value": "/dev/termination-log"},
            ]
        return dressed

    async def add_resource(self, name: str, **spec: Any) -> Object:
        """Store the resource."""
        return self.local.add(build_resource(name, **spec))

    async def list_whole_pods(self, key: Key) -> list[Object]:
        """Return the pods of the snapshot: here they are complete."""
        snapshot = await self.cluster.observe(key)
        return list(snapshot.pods) if snapshot is not None else []

    async def run_pod(self, job: str, index: int) -> None:
        """Do nothing: pods run from the start."""

    async def finish_pod(self, job: str, index: int, *, code: int = 0, message: str = "") -> None:
        """Write the order atomically."""
        order = self._orders(job) / str(index)
        temporary = order.with_suffix(".tmp")
        temporary.write_text(json.dumps({"code": code, "message": message}))
        temporary.replace(order)

    def announce_port(self, pod: Object, port: int) -> int:
        """Write the port down as the pod's launcher does."""
        (self.folder / "run" / "pods" / pod["metadata"]["name"] / "metrics-port").write_text(str(port))
        return constants.DEFAULT_METRICS_PORT

    def unacceptable(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Add a volume that only a cluster has."""
        spoiled = deepcopy(dict(job))
        spoiled["spec"]["template"]["spec"]["volumes"] = [{"name": "x", "nfs": {"server": "s", "path": "/"}}]
        return spoiled

    def _orders(self, job: str) -> Path:
        return self.folder / "orders" / job


@asynccontextmanager
async def open_local(folder: Path, *, backoff: float = 0.0) -> AsyncIterator[LocalClusterDriver]:
    """Open a local cluster and end all of its pods afterwards."""
    driver = LocalClusterDriver(folder, backoff)
    try:
        yield driver
    finally:
        await driver.local.close()
