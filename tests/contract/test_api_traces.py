"""Recorded responses of a real API server, mostly refusals: the stand-in returns the same."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import kopf
import pytest
import pytest_asyncio

from ddp_operator.api.cluster import Event
from ddp_operator.api.constants import KIND
from ddp_operator.kube.credentials import login
from ddp_operator.kube.events import build_event
from ddp_operator.kube.resources import kind_of, path
from tests.support.cluster_drivers.base import build_resource
from tests.support.standin import StandIn
from tests.support.traces import Trace

NAMESPACE = "traces"
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FIELD_ERROR = re.compile(r"(: (Invalid value|Required value|Not found|Forbidden|strict decoding error)).*", re.DOTALL)
STRICT = {"fieldValidation": "Strict"}
DRY = {"dryRun": "All"} | STRICT
MERGE = "application/merge-patch+json"


class Request(NamedTuple):
    """One request; the path is relative to the namespace's, or starts with a slash."""

    method: str
    kind: str
    name: str | None = None
    body: Any = None
    params: Mapping[str, str] = {}
    content_type: str = "application/json"
    subresource: str | None = None
    namespace: str = NAMESPACE
    user: str | None = None
    again: bool = False
    """Whether it is repeated until the answer is the recorded one."""

    def __str__(self) -> str:
        where = "/".join(filter(None, (self.kind, self.name, self.subresource)))
        words = [f"{key}={value}" for key, value in self.params.items()]
        body = [json.dumps(self.body, sort_keys=True)] if self.body is not None else []
        return " ".join((self.method, where, *words, *([f"as {self.user}"] if self.user else []), *body))


def config_map(name: str = "c", **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **metadata}, "data": {"a": "1"}}


def pod(name: str = "p", **spec: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "train:1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 7, **spec},
    }


def job(name: str = "j", *, template: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    made = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train:1"}], **(template or {})}
    usual = {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "suspend": True}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": usual | {"template": {"spec": made}} | spec,
    }


def container(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", "image": "train:1"} | fields]}


def resource(**spec: Any) -> dict[str, Any]:
    made = build_resource("r", **spec)
    del made["metadata"]["namespace"]
    return made


def create(body: Mapping[str, Any], **options: Any) -> Request:
    return Request("POST", kind_of(body), None, body, **options)


def patch(kind: str, name: str, body: Any, **options: Any) -> Request:
    return Request("PATCH", kind, name, body, content_type=MERGE, **options)


def delete(kind: str, name: str, **body: Any) -> Request:
    return Request("DELETE", kind, name, {"propagationPolicy": "Background"} | body)


def read(kind: str, name: str) -> Request:
    return Request("GET", kind, name, again=True)


OLD = {"resourceVersion": "1"}
OTHER = {"uid": "another"}
SCENARIOS: dict[str, tuple[Request, ...]] = {
    "what-is-not-there": (
        Request("GET", "ConfigMap", "none"),
        Request("GET", KIND, "none"),
        patch("Job", "none", {"spec": {"suspend": True}}),
        patch(KIND, "none", {"status": {}}, subresource="status"),
        delete("Job", "none"),
        create(config_map(), namespace="none"),
        create(job(), namespace="none"),
    ),
    "conflicts": (
        create(config_map()),
        create(config_map()),
        create(config_map(), params=DRY),
        Request("PUT", "ConfigMap", "c", config_map(**OLD)),
        patch("ConfigMap", "c", {"metadata": OLD}),
        patch("ConfigMap", "c", {"metadata": OTHER}),
        patch("ConfigMap", "c", {"metadata": OTHER | OLD}),
        delete("ConfigMap", "c", preconditions=OTHER),
        delete("ConfigMap", "c", preconditions=OLD),
        create(resource()),
        create(resource()),
        patch(KIND, "r", {"metadata": OLD, "status": {"phase": "Running"}}, subresource="status"),
        patch(KIND, "r", {"metadata": OLD, "spec": {"suspend": True}}),
        delete(KIND, "r", preconditions=OTHER),
    ),
    "jobs-that-are-refused": (
        *(
            create(job(**changes), params=DRY)
            for changes in (
                {"template": container(image="")},
                {"template": container(name="Not A Name")},
                {"template": container(imagee="x")},
                {"template": container(volumeMounts=[{"name": "none", "mountPath": "/x"}])},
                {"template": {"restartPolicy": "Always"}},
                {"template": {"containers": []}},
                {"template": {"nodeSelectr": {"a": "b"}}},
            )
        ),
        create(job(), params=STRICT),
        patch("Job", "j", {"spec": {"template": {"spec": {"restartPolicy": "OnFailure"}}}}),
        patch("Job", "j", {"spec": {"completions": 3}}),
        patch("Job", "j", {"spec": {"completions": 3, "parallelism": 3}}),
    ),
    "resources-that-are-refused": (
        *(
            create(resource(**changes), params=DRY)
            for changes in (
                {"nodes": 0},
                {"nodes": "two"},
                {"nodez": 2},
                {"template": {"spec": {}}},
                {"rendezvous": {"port": 80}},
            )
        ),
        create(resource()),
        patch(KIND, "r", {"spec": {"nodes": 0}}),
        patch(KIND, "r", {"spec": {"replicas": 9000}}, subresource="scale"),
        patch(KIND, "r", {"status": {"attempt": "one"}}, subresource="status"),
        patch(KIND, "r", {"status": {"attempt": 1, "unknown": 2}}, subresource="status"),
    ),
    "finalizers": (
        create(config_map(finalizers=["example.org/hold"])),
        delete("ConfigMap", "c"),
        read("ConfigMap", "c"),
        delete("ConfigMap", "c"),
        patch("ConfigMap", "c", {"metadata": {"finalizers": ["example.org/hold", "example.org/more"]}}),
        patch("ConfigMap", "c", {"data": {"b": "2"}}),
        patch("ConfigMap", "c", {"metadata": {"finalizers": None}}),
        read("ConfigMap", "c"),
    ),
    "deleted-pods": (
        create(pod("unbound", schedulerName="nobody")),
        delete("Pod", "unbound"),
        read("Pod", "unbound"),
        create(pod("bound", nodeName="node-0")),
        delete("Pod", "bound"),
        read("Pod", "bound"),
        delete("Pod", "bound", gracePeriodSeconds=0),
        read("Pod", "bound"),
    ),
    "what-nobody-may": tuple(
        request._replace(user="nobody")
        for request in (
            Request("GET", "Pod"),
            Request("GET", "Node", "node-0"),
            Request("GET", "ConfigMap", "c"),
            create(config_map()),
            create(job()),
            patch("Job", "j", {"spec": {"suspend": True}}),
            patch(KIND, "r", {"status": {}}, subresource="status"),
            delete(KIND, "r"),
            Request("GET", KIND, params={"watch": "true"}),
        )
    ),
    "events": (
        create(build_event(resource() | {"metadata": {"name": "r", "namespace": NAMESPACE, "uid": "1"}},
                           Event("Normal", "Started", "attempt 1"), datetime(2026, 1, 2, tzinfo=UTC), 7)),
        Request("GET", "Event", params={"fieldSelector": "involvedObject.name=r,involvedObject.kind=DDPTrainingJob"}),
        Request("GET", "Event", params={"fieldSelector": "involvedObject.name=another"}),
        create({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "reason": "Nothing",
                "involvedObject": {"kind": "Pod", "name": "p", "namespace": "elsewhere"}}),
        create({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "reason": "Nothing"}),
    ),
}  # fmt: skip


class TracedServer:
    """A client of one API server."""

    def __init__(self, session: aiohttp.ClientSession, info: kopf.ConnectionInfo) -> None:
        self._session = session
        self._info = info

    async def ask(self, request: Request) -> dict[str, Any]:
        """Return the status and the body without values that differ in each run."""
        status, body = await self.send(request)
        return {"status": status, "body": without_chance(body)}

    async def send(self, request: Request) -> tuple[int, Any]:
        """Return the status and the body, or the events of a watch."""
        if request.kind == "Namespace":
            where = f"/api/v1/namespaces/{request.name or ''}".rstrip("/")
        else:
            namespace = None if request.kind == "Node" else request.namespace
            where = path(request.kind, namespace, request.name, request.subresource)
        headers = dict(self._info.as_http_headers()) | {"Content-Type": request.content_type}
        async with self._session.request(
            request.method,
            self._info.server.rstrip("/") + where,
            params=dict(request.params),
            data=None if request.body is None else json.dumps(request.body),
            headers=headers | ({"Impersonate-User": request.user} if request.user else {}),
            ssl=self._info.as_ssl_context() if self._info.server.startswith("https:") else True,
        ) as answer:
            lines = [json.loads(line) async for line in answer.content if line.strip()]
        return answer.status, lines if answer.status == 200 and "watch" in request.params else lines[0]

    async def watch(self, **params: str) -> Any:
        """Return the events of a watch of ConfigMaps that ends after a second."""
        asked = {"watch": "1", "timeoutSeconds": "1"} | params
        return (await self.send(Request("GET", "ConfigMap", params=asked)))[1]


def without_chance(body: Any) -> Any:
    """Return the parts of a response that the operator reads, without UIDs, versions and times.

    Of a list of field errors only the first field and the type of its error count: the rest is prose.
    """
    if body.get("kind") == "Status":
        text = re.sub(r"(?<=in record \()\d+(?=\))", "N", UID.sub("UID", body.get("message", "")))
        text = FIELD_ERROR.sub(r"\1", text.replace("is invalid: [", "is invalid: "))
        return {"status": body["status"], "reason": body.get("reason"), "message": text}
    if "items" in body:
        return [without_chance(item | {"kind": body["kind"].removesuffix("List")}) for item in body["items"]]
    kind = body["kind"]
    meta = body["metadata"]
    name = re.sub(r"^(j-\d-)\w+$", r"\1*", meta.get("name", ""))
    owners = [[owner["kind"], owner["name"], owner.get("controller")] for owner in meta.get("ownerReferences") or ()]
    results = {"kind": kind, "name": name, "deleted": "deletionTimestamp" in meta, "owners": owners}
    results["finalizers"] = meta.get("finalizers")
    if kind in ("Job", KIND):
        results["generation"] = meta["generation"]
    if kind in ("Pod", "Namespace"):
        results |= {"phase": body["status"].get("phase"), "grace": meta.get("deletionGracePeriodSeconds")}
    return {key: value for key, value in results.items() if value not in (None, [], {})}


@pytest_asyncio.fixture(params=["standin", pytest.param("control-plane", marks=pytest.mark.apiserver)])
async def api(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TracedServer]:
    """The stand-in and a real API server, each with a namespace for the recording."""
    async with AsyncExitStack() as stack:
        if request.param == "standin":
            standin = stack.enter_context(StandIn())
            standin.controllers.dead_nodes.add("node-0")  # the recorded control plane has no kubelet there
            kubeconfig = standin.write_kubeconfig(tmp_path)
        else:
            kubeconfig = request.getfixturevalue("plane").admin
        session = await stack.enter_async_context(aiohttp.ClientSession())
        traced_server = TracedServer(session, await login(str(kubeconfig)))
        await traced_server.send(create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
        yield traced_server
        if request.param != "standin":
            await empty(traced_server)


async def empty(api: TracedServer) -> None:
    """Delete the namespace, with all that holds it, and wait until its name is free."""
    await api.send(Request("DELETE", "Namespace", NAMESPACE, {}))
    while (await api.send(Request("GET", "Namespace", NAMESPACE)))[0] != 404:
        for kind in ("Job", "Pod", "ConfigMap", KIND):
            for item in (await api.send(Request("GET", kind)))[1].get("items", ()):
                name = item["metadata"]["name"]
                await api.send(patch(kind, name, {"metadata": {"finalizers": None}}))
                await api.send(delete(kind, name, gracePeriodSeconds=0))
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_requests_match_recorded_responses(api: TracedServer, name: str, trace: Callable[[str], Trace]) -> None:
    recorded = trace(f"api/{name}")
    for request in SCENARIOS[name]:
        if request.again:
            await recorded.step(str(request), partial(api.ask, request))
        else:
            recorded.answer(str(request), await api.ask(request))


async def test_watches_match_recording(api: TracedServer, trace: Callable[[str], Trace]) -> None:
    recorded = trace("api/watches")
    _, first = await api.send(create(config_map()))
    await api.send(patch("ConfigMap", "c", {"data": {"a": "2"}}))
    await api.send(delete("ConfigMap", "c"))
    await api.send(create(config_map("d")))
    version = {"resourceVersion": first["metadata"]["resourceVersion"]}
    for words, params in (("from the creation on", version), ("from what there is", {})):
        events = [[event["type"], without_chance(event["object"])] for event in await api.watch(**params)]
        recorded.answer(words, [event for event in events if event[1]["name"] in ("c", "d")])
