"""Requests to drain pods: which are followed, and what their requesters read in the published schemas."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from ddp_operator.api.cluster import Key
from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.constants import KIND
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.drains.requests import (
    _ABSENCE,
    EVICTION_RESPONDER,
    HEARTBEAT,
    MOST,
    DrainWatch,
    add_responder,
)
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.startup_checks import OPTIONAL, PERMISSIONS
from ddp_operator.manifests.children import build_children
from tests.support.builders import NOW, child_pod, job, resource
from tests.support.drain_requests import SCHEMA, SOURCE, build_drain_request, build_eviction
from tests.support.odd_objects import list_odd_shapes, list_paths

REQUESTS = "/apis/nvsentinel.nvidia.com/v1alpha1/namespaces/nvsentinel/drainrequests"
EVICTIONS = "/apis/lifecycle.k8s.io/v1alpha1/evictions"
PODS = "/api/v1/namespaces/default/pods"
JOB = Key("default", "train")
OWN = "train-1-1-abcde"
WHO = "DrainRequest nvsentinel/drain-node-a-42: GPU 3: XID 79"
ABSENT = ResponseError(404)
FORBIDDEN = ResponseError(403, {"message": "may not list"})


class FakeApi:
    """An API server whose lists and pods a test sets. ``patches``: the written statuses, each checked."""

    def __init__(self, **lists: Any) -> None:
        self.answers: dict[str, Any] = {REQUESTS: lists.get("requests", []), EVICTIONS: lists.get("evictions", ABSENT)}
        self.calls: list[str] = []
        self.patches: list[Any] = []

    async def request(self, method: str, path: str, *, kind: str, **options: Any) -> Any:
        self.calls.append(f"{method} {path}")
        if method == "PATCH":
            return self._patch(path, options["body"])
        answer = self.answers.get(path, ABSENT)
        if isinstance(answer, Exception):
            raise answer
        return {"items": answer} if isinstance(answer, list) else answer

    def _patch(self, path: str, body: Mapping[str, Any]) -> Any:
        name = path.split("/")[-2]
        items = [item for answer in self.answers.values() if isinstance(answer, list) for item in answer]
        item = next(item for item in items if item["metadata"]["name"] == name)
        assert body["metadata"] == {"resourceVersion": item["metadata"]["resourceVersion"]}
        changed = item | {"status": (item.get("status") or {}) | body["status"]}
        if item["kind"] == "Eviction":
            kubernetes_validate.validate(changed, "1.37", strict=True)
        else:
            jsonschema.validate(changed, SCHEMA)
        self.patches.append(body["status"])
        item.update(copy.deepcopy(changed))
        return item


class Watched:
    """A watch of requests over a cache with one job of two pods."""

    def __init__(self, **lists: Any) -> None:
        self.api = FakeApi(**lists)
        self.store = ObjectCache()
        self.store.apply(KIND, resource() | {"metadata": resource()["metadata"] | {"resourceVersion": "1"}})
        for index in (0, 1):
            self.show(child_pod(index))
        self.changed: list[Key] = []
        self.now = NOW
        self.watch = DrainWatch(
            self.api,  # type: ignore[arg-type]
            self.store,
            (),
            self.changed.append,
            source=SOURCE,
            condition="DrainComplete",
            clock=lambda: self.now,
        )

    def show(self, pod: Any, version: int = 1) -> None:
        self.store.apply("Pod", pod | {"metadata": pod["metadata"] | {"resourceVersion": str(version)}})

    async def read(self) -> Mapping[str, str]:
        await self.watch.read()
        await self.watch.report()
        return self.watch.list_departures(JOB)


def condition(watched: Watched) -> tuple[str, str, str]:
    (written,) = watched.api.answers[REQUESTS][0]["status"]["conditions"]
    assert written["type"] == "DrainComplete"
    return written["status"], written["reason"], written["message"]


async def test_drain_request_is_followed_and_done_when_no_named_pod_remains() -> None:
    watched = Watched(requests=[build_drain_request(OWN, "gone")])
    assert await watched.read() == {OWN: WHO}
    assert watched.changed == [JOB]
    assert condition(watched) == ("False", "Draining", f"these training pods save and move: default/{OWN}")
    assert await watched.read() == {OWN: WHO}
    assert (len(watched.api.patches), watched.changed) == (1, [JOB])
    watched.show(child_pod(1, "Failed", code=85), version=2)
    assert await watched.read() == {}
    assert condition(watched) == ("True", "Drained", "no named pod runs on the node")
    calls = len(watched.api.calls)
    await watched.read()
    assert watched.api.calls[calls:] == [f"GET {REQUESTS}"], "nothing is done about a request that is done"


@pytest.mark.parametrize(
    ("pod", "waits"),
    [
        ({"spec": {"nodeName": "node-a"}, "status": {"phase": "Running"}}, True),
        ({"spec": {"nodeName": "node-a"}, "status": {"phase": "Succeeded"}}, False),
        ({"spec": {"nodeName": "node-b"}, "status": {"phase": "Running"}}, False),
        (FORBIDDEN, True),
        (ABSENT, False),
    ],
    ids=["runs", "ended", "runs elsewhere", "may not be read", "deleted"],
)
async def test_drain_request_waits_for_pods_of_other_owners(pod: Any, waits: bool) -> None:
    watched = Watched(requests=[build_drain_request("web-0")])
    watched.api.answers[f"{PODS}/web-0"] = pod
    assert await watched.read() == {}
    assert condition(watched)[0] == ("False" if waits else "True")
    assert ("does not move pods of other owners: default/web-0" in condition(watched)[2]) is waits


async def test_reads_of_foreign_pods_are_limited() -> None:
    watched = Watched(requests=[build_drain_request(*(f"web-{number}" for number in range(2 * MOST)))])
    await watched.read()
    assert sum(call.startswith(f"GET {PODS}") for call in watched.api.calls) == MOST
    assert condition(watched)[0] == "False"
    assert len(condition(watched)[2]) <= 1024


@pytest.mark.parametrize("node", ["node-b", ""])
async def test_drain_request_moves_no_pod_of_another_node(node: str) -> None:
    watched = Watched(requests=[build_drain_request(OWN)])
    pod = child_pod(1)
    pod["spec"]["nodeName"] = node
    watched.show(pod, version=2)
    watched.api.answers[f"{PODS}/{OWN}"] = pod
    assert await watched.read() == {}
    assert condition(watched) == ("True", "Drained", "no named pod runs on the node")


@pytest.mark.parametrize("pods", [{"../secrets": ["a"]}, {"default": ["../secrets/a"]}, {"default": ["a?b=c"]}])
async def test_drain_request_with_invalid_names_causes_no_read(pods: Any) -> None:
    watched = Watched(requests=[build_drain_request(podsToDrain=pods)])
    assert await watched.read() == {}
    assert "the request is invalid" in condition(watched)[2]
    assert [call for call in watched.api.calls if call.startswith("GET")] == [f"GET {REQUESTS}", f"GET {EVICTIONS}"]


@pytest.mark.parametrize("kind", ["requests", "evictions"])
async def test_odd_requests_are_left_out(kind: str) -> None:
    good = build_drain_request(OWN) if kind == "requests" else build_eviction(OWN, f"uid-{OWN}")
    status = {"conditions": [{"type": "DrainComplete", "status": "False", "message": "m"}]}
    odd = good | {"status": status} if kind == "requests" else good
    parts = [path for path in list_paths(odd) if path not in ("metadata", "metadata.name", "metadata.namespace")]
    items = []
    for number, (_, item) in enumerate(list_odd_shapes(odd, parts, 28)):
        item["metadata"]["name"] = f"odd-{number}"
        items.append(item)
    watched = Watched(**{kind: [*items[:200], good]})

    async def accept(*_: Any) -> None:
        """Write nothing: the schemas of the fake server refuse odd objects."""

    watched.watch._write_status = accept  # type: ignore[method-assign]
    assert OWN in await watched.read()


async def test_invalid_drain_request_names_fields() -> None:
    invalid = build_drain_request(node="")
    invalid["metadata"]["name"] = "empty"
    watched = Watched(requests=[invalid, build_drain_request(OWN)])
    assert await watched.read() == {OWN: WHO}
    (written,) = watched.api.patches[0]["conditions"]
    assert written["status"] == "False"
    assert "the request is invalid" in written["message"]
    assert "nodeName" in written["message"]


async def test_active_responder_reports_heartbeats_and_completion() -> None:
    watched = Watched(evictions=[build_eviction(OWN, f"uid-{OWN}")])
    assert await watched.read() == {OWN: "eviction requested by node-maintenance.example.com/drain"}
    own, evictor = sorted(watched.api.patches[0]["responders"], key=lambda responder: len(responder), reverse=True)
    assert (own["name"], own["startTime"], own["heartbeatTime"]) == (
        EVICTION_RESPONDER,
        "2026-11-20T11:59:00Z",
        "2026-11-20T12:00:00Z",
    )
    assert len(evictor) == 1, "the responder of Kubernetes is unchanged"
    for seconds, patches in ((HEARTBEAT.total_seconds() - 1, 1), (HEARTBEAT.total_seconds(), 2)):
        watched.now = NOW + timedelta(seconds=seconds)
        assert await watched.read()
        assert len(watched.api.patches) == patches
    watched.store.remove("Pod", child_pod(1))
    assert await watched.read() == {}
    assert {"completionTime"} <= {name for responder in watched.api.patches[-1]["responders"] for name in responder}
    await watched.read()
    assert len(watched.api.patches) == 3


@pytest.mark.parametrize("state", ["Inactive", "Interrupted", "Canceled", "Completed"])
async def test_inactive_responder_does_nothing(state: str) -> None:
    watched = Watched(evictions=[build_eviction(OWN, f"uid-{OWN}", state)])
    assert await watched.read() == {}
    assert watched.api.patches == []


async def test_canceled_eviction_is_forgotten() -> None:
    watched = Watched(evictions=[build_eviction(OWN, f"uid-{OWN}")])
    assert await watched.read()
    watched.api.answers[EVICTIONS] = []
    assert await watched.read() == {}
    assert watched.changed == [JOB, JOB]


async def test_definition_of_drain_requests_is_created_after_operator_starts(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(requests=ABSENT)
    for _ in range(3):
        assert await watched.read() == {}
    assert caplog.text.count("requests to drain pods are not followed") == 1
    watched.api.answers[REQUESTS] = [build_drain_request(OWN)]
    assert await watched.read() == {OWN: WHO}


@pytest.mark.parametrize("answer", [ABSENT, FORBIDDEN])
async def test_kind_that_is_not_served_or_allowed_is_asked_for_rarely(
    answer: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(evictions=answer)
    for _ in range(2 * _ABSENCE):
        await watched.read()
    assert watched.api.calls.count(f"GET {EVICTIONS}") == 2
    assert not watched.watch.serves_evictions
    assert ("may not list" in caplog.text) == (answer is FORBIDDEN)
    watched.api.answers[EVICTIONS] = []
    await watched.read()
    assert watched.watch.serves_evictions
    watched.api.answers[EVICTIONS] = answer
    await watched.read()
    assert not watched.watch.serves_evictions


async def test_eviction_of_former_pod_of_same_name_is_completed() -> None:
    watched = Watched(evictions=[build_eviction(OWN, "former")])
    assert await watched.read() == {}
    assert "completionTime" in watched.api.patches[0]["responders"][0]


async def test_requests_are_kept_while_list_fails() -> None:
    watched = Watched(requests=[build_drain_request(OWN)])
    await watched.read()
    watched.api.answers[REQUESTS] = ClusterError("timeout")
    assert await watched.read() == {OWN: WHO}
    assert watched.changed == [JOB]


@pytest.mark.parametrize("gang", [False, True])
async def test_responder_is_in_pods_if_api_server_serves_evictions(gang: bool) -> None:
    manifest = build_children(job(nodes=2), attempt=1, nodes=2)[-1]
    if gang:
        manifest["spec"]["template"]["spec"]["schedulingGroup"] = {"podGroupName": "train-1"}
    sent = add_responder(manifest)
    kubernetes_validate.validate(sent, "1.37", strict=True)
    responders = sent["spec"]["template"]["spec"].get("evictionResponders")
    assert responders == (None if gang else [{"name": EVICTION_RESPONDER, "priority": 10000}])
    assert "evictionResponders" not in manifest["spec"]["template"]["spec"]
    if not gang:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(sent, "1.36", strict=True)

    watched = Watched(evictions=[] if not gang else ABSENT)
    await watched.read()
    cluster = KubeCluster(watched.api, hooks=Hooks(services={"drains": watched.watch}))  # type: ignore[arg-type]
    bodies: list[Any] = []

    async def request(method: str, path: str, *, body: Any, **options: Any) -> Any:
        bodies.append(body)
        return {"metadata": {}}

    watched.api.request = request  # type: ignore[assignment,method-assign]
    await cluster.create(manifest)
    assert (bodies == [sent]) is True
    await cluster.close()


def test_permissions_are_optional() -> None:
    assert {"Eviction", "Eviction/status"} <= OPTIONAL & set(PERMISSIONS)
