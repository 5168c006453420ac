"""The actors around the operator: users who apply manifests, and kubelets that run pods. For any API server."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.constants import ANNOTATION_COMPLETION_INDEX, KIND, TRAINER_CONTAINER
from ddp_operator.kube.client import ApiClient, ResponseError
from ddp_operator.kube.credentials import login
from ddp_operator.kube.resources import path
from tests.support import PATIENCE

Object = dict[str, Any]

NODE = "node-0"
FINISHED = ("Succeeded", "Failed")
POLL = 0.02


class ClusterActors:
    """Acts on one namespace of an API server, as its administrator."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.namespace = namespace
        self.kubelet_works = True
        """Whether ``kubelet`` ends deleted pods."""
        self.client = ApiClient(lambda: login(str(kubeconfig)), qps=10_000, burst=10_000)

    async def __aenter__(self) -> ClusterActors:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()
        await asyncio.sleep(0.01)  # a transport that was cut off closes in the loop's next rounds

    # Users

    async def create(self, manifest: Mapping[str, Any]) -> Object:
        """Create an object in the namespace, as ``kubectl create``."""
        kind = str(manifest["kind"])
        created: Object = await self.client.request("POST", path(kind, self.namespace), body=manifest)
        return created

    async def get(self, kind: str, name: str) -> Object | None:
        """Return an object, or None."""
        try:
            result: Object = await self.client.request("GET", path(kind, self.namespace, name))
        except ResponseError as exc:
            if exc.status == 404:
                return None
            raise
        return result

    async def list(self, kind: str, selector: str = "") -> list[Object]:
        """Return the objects of a kind in the namespace."""
        params = {"labelSelector": selector} if selector else {}
        answer = await self.client.request("GET", path(kind, self.namespace), params=params)
        head = {"apiVersion": answer["apiVersion"], "kind": kind}
        return [head | item for item in answer["items"]]

    async def watch(self, kind: str) -> AsyncIterator[Object]:
        """Yield the existing objects of a kind, and then each written state, endlessly."""
        info = await self.client.connect()
        secure = info.as_ssl_context() if info.server.startswith("https:") else True
        endless = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secure), read_bufsize=1 << 22) as session,
            session.get(
                info.server.rstrip("/") + path(kind, self.namespace),
                params={"watch": "true"},
                headers=info.as_http_headers(),
                timeout=endless,
            ) as answer,
        ):
            answer.raise_for_status()
            async for line in answer.content:
                yield json.loads(line)["object"]

    async def patch(self, kind: str, name: str, patch: Mapping[str, Any], subresource: str | None = None) -> Object:
        """Merge-patch an object."""
        patched: Object = await self.client.request(
            "PATCH",
            path(kind, self.namespace, name, subresource),
            body=patch,
            content_type="application/merge-patch+json",
        )
        return patched

    async def delete(self, kind: str, name: str, **options: Any) -> None:
        """Delete an object, as ``kubectl delete --wait=false``."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", **options}
        try:
            await self.client.request("DELETE", path(kind, self.namespace, name), body=body)
        except ResponseError as exc:
            if exc.status != 404:
                raise

    async def until(self, probe: Callable[[], Any], event: str) -> Any:
        """Call ``probe`` until it returns something true, and return that."""
        last: Any = None
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    answer = probe()
                    last = await answer if inspect.isawaitable(answer) else answer
                    if last:
                        return last
                    await asyncio.sleep(POLL)
        except TimeoutError:
            raise AssertionError(f"never happened: {event}; last seen: {last!r}") from None

    async def resource(self, name: str, ready: Callable[[Object], Any] = bool, event: str = "") -> Object:
        """Return the custom resource as soon as ``ready(resource)`` is true."""

        async def probe() -> Object | None:
            result = await self.get(KIND, name)
            return result if result is not None and ready(result) else None

        try:
            last: Object = await self.until(probe, event or f"{name} as wanted")
        except AssertionError as exc:
            raise AssertionError(f"{exc}; it is {await self.get(KIND, name)}") from None
        return last

    async def phase(self, name: str, phase: str) -> Object:
        """Wait for a phase of the custom resource."""
        return await self.resource(
            name, lambda resource: resource.get("status", {}).get("phase") == phase, f"phase {phase}"
        )

    async def gone(self, kind: str, name: str) -> None:
        """Wait until an object does not exist."""

        async def probe() -> bool:
            return await self.get(kind, name) is None

        await self.until(probe, f"the end of {kind} {name}")

    async def child_job(self, name: str) -> Object:
        """Wait for a Job to exist."""

        async def probe() -> Object | None:
            return await self.get("Job", name)

        result: Object = await self.until(probe, f"Job {name}")
        return result

    # Kubelets

    async def pod(self, job: str, index: int) -> Object:
        """Return the living pod of a Job's index, as soon as there is one."""

        async def probe() -> Object | None:
            pods = await self.list("Pod", f"batch.kubernetes.io/job-name={job}")
            return next((pod for pod in pods if _index(pod) == index and _lives(pod)), None)

        result: Object = await self.until(probe, f"a pod {index} of Job {job}")
        return result

    async def run_pod(self, job: str, index: int, *, ip: str = "127.0.0.1", node: str = NODE) -> Object:
        """Make a pod run, as scheduler and kubelet would."""
        pod = await self.pod(job, index)
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            await self.bind(name, node)
        return await self.patch("Pod", name, {"status": running(pod, ip)}, "status")

    async def finish_pod(self, job: str, index: int, *, exit_code: int = 0, message: str = "") -> Object:
        """Make a pod's container end with an exit code and a termination message."""
        pod = await self.pod(job, index)
        now = _now()
        ended: Object = {
            "exitCode": exit_code,
            "reason": "Error" if exit_code else "Completed",
            "startedAt": now,
            "finishedAt": now,
        }
        if message:
            ended["message"] = message
        status = {
            "phase": "Failed" if exit_code else "Succeeded",
            "conditions": [
                {"type": kind, "status": "False", "reason": "PodFailed" if exit_code else "PodCompleted",
                 "lastTransitionTime": now, "lastProbeTime": None}
                for kind in ("ContainersReady", "Ready")
            ],
            "containerStatuses": [_container(pod, {"terminated": ended}, ready=False)],
        }  # fmt: skip
        return await self.patch("Pod", pod["metadata"]["name"], {"status": status}, "status")

    async def bind(self, pod: str, node: str) -> None:
        """Put a pod on a node, unless a real scheduler was quicker."""
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            await self.client.request("POST", path("Pod", self.namespace, pod, "binding"), body=binding)
        except ResponseError as exc:
            if exc.status != 409:
                raise

    async def end_deleted_pods(self) -> None:
        """Remove deleted pods that wait for their kubelet, as it does after their processes have ended."""
        for pod in await self.list("Pod"):
            meta = pod["metadata"]
            if not meta.get("deletionTimestamp") or not pod["spec"].get("nodeName"):
                continue
            with suppress(ResponseError):  # gone meanwhile
                if pod["status"].get("phase") not in FINISHED:
                    await self.patch("Pod", meta["name"], {"status": killed(pod, _now())}, "status")
                await self.delete("Pod", meta["name"], gracePeriodSeconds=0, preconditions={"uid": meta["uid"]})

    @asynccontextmanager
    async def kubelet(self) -> AsyncIterator[None]:
        """Remove deleted pods continuously. An unexpected error fails the test instead of stopping this silently."""
        task = asyncio.create_task(self._end_deleted_pods_continuously())
        try:
            yield
        finally:
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Exception):
            raise result

    async def _end_deleted_pods_continuously(self) -> None:
        while True:
            if self.kubelet_works:
                with suppress(ClusterError, ResponseError):  # a slow API server: the next turn repeats the calls
                    await self.end_deleted_pods()
            await asyncio.sleep(0.1)


def running(pod: Object, ip: str) -> Object:
    """Return the status of a pod that runs and is ready."""
    now = _now()
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": now,
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": now, "lastProbeTime": None}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": [_container(pod, {"running": {"startedAt": now}}, ready=True)],
    }


def killed(pod: Object, now: str) -> Object:
    """Return the status of a pod whose processes were ended by SIGKILL after its grace time."""
    status: Object = {"phase": "Failed"}
    if pod["status"].get("containerStatuses"):
        ended = {"exitCode": 137, "reason": "Error", "startedAt": now, "finishedAt": now}
        status["containerStatuses"] = [_container(pod, {"terminated": ended}, ready=False)]
    return status


def _container(pod: Object, state: Object, *, ready: bool) -> Object:
    containers = pod["spec"]["containers"]
    spec = next((item for item in containers if item["name"] == TRAINER_CONTAINER), containers[0])
    return {
        "name": spec["name"],
        "image": spec["image"],
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "started": ready,
        "state": state,
    }


def _index(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(ANNOTATION_COMPLETION_INDEX, -1))


def _lives(pod: Object) -> bool:
    finished = pod.get("status", {}).get("phase") in FINISHED
    return "deletionTimestamp" not in pod["metadata"] and not finished


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
