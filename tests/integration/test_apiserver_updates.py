"""Random changes of stored jobs: a real API server accepts exactly those that the rules accept offline."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api.cel import check_rules
from ddp_operator.api.constants import KIND, PLURAL
from ddp_operator.api.crd import build_crd
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.resources import path
from tests.property.conftest import tell_what_was_tried  # noqa: F401 - a fixture
from tests.support.builders import resource, template, trainer
from tests.support.control_plane import ControlPlane
from tests.support.fuzzing import examples, tally
from tests.support.standin import ClusterActors
from tests.support.strategies import FULL, RICH, mutated

from .test_apiserver_manifests import as_kubectl_sends, taken

pytestmark = pytest.mark.apiserver
RESOURCE = build_crd(SCHEMA)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
LEAST = resource("least")
MOST = resource(
    "most",
    **FULL["spec"],
    elastic={"minNodes": 1, "maxNodes": 4},
    watchdog={"stallSeconds": 100},
    preflight={"mode": "Warn", "checks": ["dns", "allreduce"]},
    scheduling={"placement": "Pack", "topologyKey": "zone"},
    networkPolicy={"enabled": True, "metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]},
    pendingDeadlineSeconds=60,
    successPolicy="RankZero",
)
BASES = {"least": LEAST, "most": MOST, "rich": resource("rich", nodes=2, template=RICH)}
STATUSES: dict[str, Any] = {
    "new": None,
    "rejected": {"phase": "Rejected", "attempt": 0},
    "told": {"phase": "Rejected"},
    "placed": {"phase": "Pending", "attempt": 1},
    "running": {"phase": "Running", "attempt": 1, "firstRunTime": "2026-11-20T12:00:00Z"},
    "ended": {"phase": "Succeeded", "attempt": 3, "completionTime": "2026-11-20T13:00:00Z"},
}
VALUES: dict[str, tuple[Any, ...]] = {
    "nodes": (1, 2, 3, 5),
    "procPerNode": ("auto", "gpu", 1, 2),
    "elastic": ({"minNodes": 1, "maxNodes": 4}, {"minNodes": 1, "maxNodes": 8}, {"minNodes": 1}),
    "suspend": (True, False),
    "template": (
        template(),
        RICH,
        template(trainer(image="example.com/train:2")),
        template(tolerations=[]),
        {},
        {"": ""},
        {"spec": None},
        {"metadata": RICH["metadata"]},
        template() | {"": ""},
        template() | {"metadata": None},
        template(metadata={}),
        template(metadata={"labels": {"a": "b"}}),
        template(metadata={"annotations": {"a": "b"}}),
        RICH | {"metadata": {"": RICH["metadata"]["labels"], "annotations": {"c": "d"}}},
        {"spec": {"a": 1}},
    ),
    "rendezvous": ({}, {"port": 29400}, {"port": 29401}, {"backend": "c10d", "joinTimeoutSeconds": 600}),
    "sharedMemory": (None, "8Gi", "8192Mi"),
    "recovery": ({}, {"maxRestarts": 9}, {"inPlaceRestarts": 0, "countDisruptions": True}),
    "watchdog": ({}, {"stallSeconds": 100}, {"stallSeconds": 101}, {"action": "Report"}),
    "preflight": ({}, {"mode": "Fail"}, {"mode": "Warn", "checks": ["dns", "allreduce"]}, {"checks": []}),
    "checkpoint": ({}, {"path": "/ckpt"}, {"path": "/ckpt", "claimName": "c", "graceSeconds": 120}),
    "metrics": (
        {},
        {"port": 9400},
        {"port": 9401},
        {"logPatterns": ["(?P<step>[0-9]+)"]},
        {"logPatterns": ["(?P<epoch>[0-9]+)"], "epochs": 3},
    ),
    "scheduling": ({}, {"gang": "None"}, {"placement": "Pack", "topologyKey": "zone"}),
    "networkPolicy": (
        {},
        {"enabled": False},
        {"enabled": True},
        {"enabled": True, "egressCidrs": ["10.0.0.0/8"]},
        {"enabled": True, "metricsFrom": [{"podSelector": {}}]},
        {"enabled": True, "metricsFrom": [{"ipBlock": {}}]},
        {"enabled": True, "metricsFrom": [{"podSelector": {"": ""}}]},
        {"enabled": True, "metricsFrom": [{"": {}}]},
    ),
    "activeDeadlineSeconds": (60, 61),
    "idle": ({"minutes": 9}, {"minutes": 9, "action": "Report"}, {"minutes": 9, "action": "Suspend"}),
    "pendingDeadlineSeconds": (60, 61),
    "ttlSecondsAfterFinished": (0, 60),
    "successPolicy": ("AllNodes", "RankZero"),
    "cleanPodPolicy": ("All", "Running", "None"),
    "securityProfile": ("Default", "Restricted"),
}
"""Members of a spec that stay unchanged, so that only the changed member matters. Some equal the default."""


@st.composite
def changed(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with one to three members set or removed."""
    new = copy.deepcopy(base)
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3, unique=True)):
        if draw(st.booleans()) or name not in new["spec"]:
            new["spec"][name] = draw(st.sampled_from(VALUES[name]))
        else:
            del new["spec"][name]
    return new


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return the name of a stored job, and its requested new version."""
    base = draw(st.sampled_from(sorted(BASES)))
    status = draw(st.sampled_from(sorted(STATUSES)))
    any_change = changed(BASES[base]) | mutated(BASES[base], outside=("spec", "template"))
    return f"{base}-{status}", draw(any_change)


@dataclass(frozen=True)
class UpdateServer:
    """A separate event loop, the API server's default namespace, and the objects stored in it, by name."""

    runner: asyncio.Runner
    actors: ClusterActors
    stored: dict[str, dict[str, Any]] = field(repr=False)


@pytest.fixture(scope="module")
def server(plane: ControlPlane) -> Iterator[UpdateServer]:
    """An API server with a job for every base and status."""

    async def store(actors: ClusterActors) -> dict[str, dict[str, Any]]:
        for base, manifest in BASES.items():
            for word, status in STATUSES.items():
                name = f"{base}-{word}"
                await actors.create(manifest | {"metadata": {"name": name}})
                if status is not None:
                    await actors.patch(KIND, name, {"status": status}, "status")
        return {item["metadata"]["name"]: item for item in await actors.list(KIND) if "-" in item["metadata"]["name"]}

    with asyncio.Runner() as runner:
        actors = ClusterActors(plane.admin)
        yield UpdateServer(runner, actors, runner.run(store(actors)))
        for base in BASES:
            for word in STATUSES:
                runner.run(actors.delete(KIND, f"{base}-{word}"))
        runner.run(actors.client.close())


async def refusal(actors: ClusterActors, name: str, raw: Any) -> str:
    """Return why the API server refuses a new version of a job, or None."""
    params = {"dryRun": "All", "fieldValidation": "Strict"}
    try:
        await actors.client.request("PUT", path(KIND, "default", name), params=params, body=raw)
    except ResponseError as error:
        if error.status not in (400, 422):
            raise
        return str(error) or "refused"
    return ""


def prune(value: Any, schema: dict[str, Any], keep: tuple[str, ...] = ()) -> None:
    """Remove nulls, as an API server does."""
    if isinstance(value, dict) and "properties" in schema:
        for name in schema["properties"]:
            if value.get(name, "") is None and name not in keep:
                del value[name]
        for name, child in schema["properties"].items():
            if name in value:
                prune(value[name], child)


def default(value: Any, schema: dict[str, Any]) -> None:
    """Fill in the defaults of the schema."""
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                default(value[name], child)


def taken_for(old: dict[str, Any], raw: dict[str, Any]) -> bool:
    """Return whether the rules accept this change of a stored job offline."""
    if not taken(raw):
        return False
    new = copy.deepcopy(raw)
    prune(new, RESOURCE, keep=("metadata",))
    default(new, RESOURCE)
    new.pop("status", None)
    return not check_rules(new | ({"status": old["status"]} if "status" in old else {}), SCHEMA, old)


@examples(300)
@given(change=changes())
def test_api_server_accepts_offline_valid_changes(server: UpdateServer, change: tuple[str, dict[str, Any]]) -> None:
    name, raw = change
    if not isinstance(raw.get("status") or {}, dict) or raw.get("kind") != KIND:
        return  # the API server drops the status that a user writes; another kind has another path
    old = server.stored[name]
    raw = as_kubectl_sends(raw | {"metadata": {"name": name, "resourceVersion": old["metadata"]["resourceVersion"]}})
    message = server.runner.run(refusal(server.actors, name, raw))
    assert taken_for(old, raw) == (not message), message or "the API server takes it"
    tally(f"update held against a real API server, which {'refused' if message else 'took'} it")


@pytest.mark.parametrize("field", ["template", "networkPolicy"])
def test_fixed_field_accepts_no_other_value(server: UpdateServer, field: str) -> None:
    for base in BASES:
        old = server.stored[f"{base}-running"]
        for value in VALUES[field]:
            raw = old | {"spec": old["spec"] | {field: value}}
            message = server.runner.run(refusal(server.actors, f"{base}-running", raw))
            assert taken_for(old, raw) == (not message), f"{field} {value}: {message or 'the API server takes it'}"


def test_job_of_older_schema_can_still_be_changed(server: UpdateServer, plane: ControlPlane) -> None:
    """A job was stored when templates were not validated; a change must satisfy the present rules."""

    async def scenario() -> None:
        crd = build_crd(SCHEMA)
        crd["metadata"]["name"] = f"{PLURAL}.older.example.com"
        crd["spec"]["group"] = "older.example.com"
        del crd["spec"]["names"]["categories"]
        strict = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["template"]
        lax = copy.deepcopy(crd)
        properties = lax["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        properties["template"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(lax))
        plane.kubectl("wait", "--for=condition=Established", f"crd/{PLURAL}.older.example.com")
        where = f"/apis/older.example.com/v1alpha1/namespaces/default/{PLURAL}"
        call = server.actors.client.request
        bare = resource("bare", template={"": ""}) | {"apiVersion": "older.example.com/v1alpha1"}
        await server.actors.until(lambda: takes(call("POST", where, body=bare)), "the definition")
        started = bare | {"metadata": {"name": "started"}}
        await call("POST", where, body=started)
        await patch(f"{where}/started/status", {"status": STATUSES["running"]})

        plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(crd))
        second = bare | {"metadata": {"name": "other"}}

        async def refused() -> bool:
            return not await takes(call("POST", where, body=second, params={"dryRun": "All"}))

        await server.actors.until(refused, "the newer definition")
        assert "spec" in strict["required"]
        for name in ("bare", "started"):
            await patch(f"{where}/{name}", {"spec": {"nodes": 3}, "metadata": {"labels": {"a": "b"}}})
            await patch(f"{where}/{name}/status", {"status": {"phase": "Rejected"}})
        await patch(f"{where}/bare", {"spec": {"template": template()}})
        with pytest.raises(ResponseError, match="template can't be changed once the job has started"):
            await patch(f"{where}/started", {"spec": {"template": template()}})

    async def patch(where: str, change: dict[str, Any]) -> None:
        await server.actors.client.request("PATCH", where, body=change, content_type="application/merge-patch+json")

    server.runner.run(scenario())
    plane.kubectl("delete", "crd", f"{PLURAL}.older.example.com")


FORMER: dict[str, Any] = {
    "shm": {"sizeLimit": "8Gi"},
    "network": {"require": True, "transports": ["IB"]},
    "preflight": {"minMegabytesPerSecond": 5},
    "scheduling": {"priorityClassName": "high"},
    "checkpoint": {"path": "/c", "memory": {"interval": 5}},
    "code": {"digest": "1" * 64, "claimName": "a", "path": "b", "commit": "2" * 40, "dirty": True},
    "inputs": [{"url": "https://host/file", "mountPath": "/data", "nodeCache": {"path": "/cache"}}],
    "tracking": {"tensorboard": {"path": "/tb"}},
}
"""Members of the release before."""


def test_job_keeps_former_fields_and_is_read_in_new_form(server: UpdateServer, plane: ControlPlane) -> None:
    group = "former.example.com"

    async def scenario() -> None:
        crd = build_crd(SCHEMA)
        crd["metadata"]["name"] = f"{PLURAL}.{group}"
        crd["spec"]["group"] = group
        del crd["spec"]["names"]["categories"]
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(crd))
        plane.kubectl("wait", "--for=condition=Established", f"crd/{PLURAL}.{group}")
        where = f"/apis/{group}/v1alpha1/namespaces/default/{PLURAL}"
        call = server.actors.client.request
        old = resource("old", **FORMER) | {"apiVersion": f"{group}/v1alpha1"}
        await server.actors.until(lambda: takes(call("POST", where, body=old)), "the definition")

        bad = resource("bad", network={"profile": "ib"}, shm={"sizeLimit": "50%"})
        with pytest.raises(ResponseError) as error:
            await call("POST", where, body=bad | {"apiVersion": f"{group}/v1alpha1"})
        assert "spec.shm.sizeLimit" in str(error.value) or "apply deploy/profiles" in str(error.value)

        merge = {"content_type": "application/merge-patch+json"}
        await call("PATCH", f"{where}/old", body={"spec": {"suspend": True, "nodes": 3}}, **merge)
        await call("PATCH", f"{where}/old/status", body={"status": STATUSES["running"]}, **merge)
        await call("PATCH", f"{where}/old", body={"spec": {"suspend": False}}, **merge)
        stored = await call("GET", f"{where}/old")
        assert {name: stored["spec"][name] for name in FORMER} == FORMER
        assert parse_resource(stored, SCHEMA).spec.shared_memory == "8Gi"

    try:
        server.runner.run(scenario())
    finally:
        plane.kubectl("delete", "crd", f"{PLURAL}.{group}")


async def takes(call: Awaitable[Any]) -> bool:
    """Return whether an API server accepts a call. While the path is unknown, it does not."""
    try:
        await call
    except ResponseError as error:
        if error.status not in (404, 422):
            raise
        return False
    return True
