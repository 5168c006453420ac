"""Interface of contract tests to a cluster's pods: run them, end them, read their state."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from ddp_operator.api import constants
from ddp_operator.api.cluster import Cluster, Key, Object, Snapshot
from tests.support import PATIENCE


class ClusterDriver(ABC):
    """One cluster, and actions on it."""

    cluster: Cluster

    def dress(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Job with the additions that its pods need to follow the driver."""
        return dict(job)

    @abstractmethod
    async def add_resource(self, name: str, **spec: Any) -> Object:
        """Store a custom resource, as a user does, and return it as stored."""

    @abstractmethod
    async def run_pod(self, job: str, index: int) -> None:
        """Make the living pod of this index run."""

    @abstractmethod
    async def finish_pod(self, job: str, index: int, *, code: int = 0, message: str = "") -> None:
        """Make the pod's process end with this code, having written this termination message."""

    @abstractmethod
    def announce_port(self, pod: Object, port: int) -> int:
        """Set the port of this machine on which this pod serves. Return the port that the operator uses for it."""

    @abstractmethod
    def unacceptable(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Job with an error that this cluster must refuse."""

    can_hold_pods = True
    """Whether deleted pods may be kept from ending."""

    @abstractmethod
    async def list_whole_pods(self, key: Key) -> list[Object]:
        """Return a resource's pods with all members: a snapshot's have only those that the operator needs."""

    async def let_pods_end(self, allowed: bool) -> None:
        """End deleted pods, or keep them terminating."""
        raise NotImplementedError

    def comparable(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a Job's recorded state that equals a real control plane's."""
        return state

    async def until(self, key: Key, ready: Callable[[Snapshot], Any], event: str) -> Snapshot:
        """Observe until ``ready(snapshot)`` is true and return that snapshot."""
        seen: Snapshot | None = None
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    seen = await self.cluster.observe(key)
                    if seen is not None and ready(seen):
                        return seen
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never happened: {event}; last seen: {seen}") from None


def build_resource(name: str, **spec: Any) -> dict[str, Any]:
    """Return a custom resource that every cluster accepts."""
    container = {"name": "trainer", "image": "x", "command": ["python", "train.py"]}
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"template": {"spec": {"containers": [container]}}, **spec},
    }


@contextmanager
def serve(page: bytes) -> Iterator[int]:
    """Respond to every GET on a port of this machine with ``page``."""

    class EchoHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                self.wfile.write(page)
            except ConnectionError:  # the reader has closed the connection
                pass

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), EchoHandler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def index_of(pod: Object) -> int:
    """Return a pod's completion index."""
    return int(pod["metadata"]["annotations"][constants.ANNOTATION_COMPLETION_INDEX])


def is_alive(pod: Object) -> bool:
    """Return whether a pod has neither ended nor is being deleted."""
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not ended and "deletionTimestamp" not in pod["metadata"]


def living(snapshot: Snapshot) -> dict[int, Object]:
    """Return the living pods by index."""
    return {index_of(pod): pod for pod in snapshot.pods if is_alive(pod)}
