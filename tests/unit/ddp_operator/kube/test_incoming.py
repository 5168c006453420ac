"""Responses of the API server with resources of any size, before they are decoded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.size import MAX_BYTES
from ddp_operator.features import SCHEMA
from ddp_operator.kube.incoming import LARGE, OMITTED, limit_event, limit_response
from tests.support.builders import profile, resource, template, trainer

LISTS = {"template": {"a": [[]] * 400_000}}
MAPS = {"template": {"a": [{}] * 20_000}}
SCRIPT = {"template": template(trainer(args=["x,[" * 400_000])), "checkpoint": {"path": "/c"}}
FITS = {"template": template(trainer(args=[",[{" * 30_000]))}


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("spec", "path"), [(LISTS, "spec"), (MAPS, "spec.template.a"), (SCRIPT, "spec")], ids=["lists", "maps", "script"]
)
async def test_oversize_spec_becomes_its_reason(spec: dict[str, Any], path: str) -> None:
    limited = await limit_response(dump(resource(**{**spec, "nodes": 2})))
    assert len(limited) < 2000
    short = json.loads(limited)
    assert short["spec"]["nodes"] == 2
    assert ("checkpoint" in short["spec"]) == ("checkpoint" in spec)
    with pytest.raises(InvalidManifest, match=r"the limit is 256 KiB|more than 10000 values") as caught:
        parse_resource(short, SCHEMA)
    assert caught.value.errors[0].path == path


@pytest.mark.parametrize(
    ("nested", "reason"),
    [
        ("[" + ",".join(["[" * 200 + "]" * 200] * 3500) + "]", "the limit is 256 KiB"),
        ("[" * 9_000 + "]" * 9_000, "more than 64 levels"),
        ('{"a":' * 9_000 + "1" + "}" * 9_000, "more than 64 levels"),
    ],
    ids=["megabyte", "lists", "maps"],
)
async def test_nested_spec_becomes_its_reason_beside_its_status(
    nested: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", None)  # nothing is searched in Python
    item = {**resource(), "spec": {"suspend": True, "a": "NESTED"}, "status": {"attempt": 1}}
    event = dump({"type": "MODIFIED", "object": item}).replace(b'"NESTED"', nested.encode())
    limited = json.loads(await limit_event(event, brief=True))["object"]
    assert (limited["metadata"]["name"], limited["status"]) == ("train", {"attempt": 1})
    assert limited["spec"]["suspend"] is True
    with pytest.raises(InvalidManifest, match=reason):
        parse_resource(limited, SCHEMA)


async def test_loop_has_a_turn_between_items_of_page() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    item = {**resource(), "spec": {"a": [[]] * 10_000}}
    page = dump({"kind": "DDPTrainingJobList", "metadata": {}, "items": [item] * 9})
    counting = asyncio.create_task(count())
    await limit_response(page)
    counting.cancel()
    assert turns >= 9


async def test_metadata_of_page_lose_managed_fields() -> None:
    metadata = {"name": "a", "managedFields": [{"fieldsV1": {str(n): {} for n in range(LARGE)}}], "labels": {"b": "c"}}
    item = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    page = {"kind": "PartialObjectMetadataList", "items": [item], "metadata": {}}
    [limited] = json.loads(await limit_response(dump(page)))["items"]
    assert limited["metadata"] == {"name": "a", "labels": {"b": "c"}}


@pytest.mark.parametrize("brief", [False, True])
async def test_resources_of_lists_and_events_are_limited(brief: bool) -> None:
    item = resource(**FITS, nodes=2)
    item["metadata"] |= {"managedFields": [{}] * LARGE, "annotations": {"a": "x" * LARGE}}
    expected = {**resource(**FITS), "spec": {"nodes": 2, OMITTED: True} if brief else item["spec"]}
    expected["metadata"]["annotations"] = {}
    listed = {"kind": "DDPTrainingJobList", "metadata": {}, "items": [item, item]}
    assert json.loads(await limit_response(dump(listed), brief=brief))["items"] == [expected, expected]
    event = {"type": "ADDED", "object": item}
    assert json.loads(await limit_event(dump(event), brief=brief)) == {**event, "object": expected}


@pytest.mark.parametrize(
    "message",
    [resource(), profile({"shm": {"a": "x" * 2 * LARGE}}), {"kind": "Job", "spec": "x" * MAX_BYTES}, []],
    ids=["small", "profile", "job", "list"],
)  # fmt: skip
async def test_other_objects_are_unchanged(message: Any) -> None:
    assert json.loads(await limit_response(dump(message), brief=True)) == message


async def test_text_that_is_no_json_is_unchanged() -> None:
    assert await limit_response(b"<" * 2 * LARGE) == b"<" * 2 * LARGE
