"""Responses of the API server with resources of any size, before they are decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.size import MAX_BYTES
from ddp_operator.kube.incoming import LARGE, limit_response
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
def test_oversize_spec_becomes_its_reason(spec: dict[str, Any], path: str) -> None:
    limited = limit_response(dump(resource(**{**spec, "nodes": 2})))
    assert len(limited) < 2000
    short = json.loads(limited)
    assert short["spec"]["nodes"] == 2
    assert ("checkpoint" in short["spec"]) == ("checkpoint" in spec)
    with pytest.raises(InvalidManifest, match=r"the limit is 256 KiB|more than 10000 values") as caught:
        parse_resource(short)
    assert caught.value.errors[0].path == path


@pytest.mark.parametrize("as_text", [False, True])
def test_resources_of_lists_and_events_are_limited(as_text: bool) -> None:
    item = resource(**FITS)
    item["metadata"] |= {"managedFields": [{}] * LARGE, "annotations": {"a": "x" * LARGE}}
    expected = {**resource(**FITS), "spec": dump(item["spec"]).decode() if as_text else item["spec"]}
    expected["metadata"]["annotations"] = {}
    listed = {"kind": "DDPTrainingJobList", "metadata": {}, "items": [item, item]}
    for message, found in ((listed, lambda answer: answer["items"][1]), ({"object": item}, lambda x: x["object"])):
        answer = json.loads(limit_response(dump(message), specs_as_text=as_text))
        assert found(answer) == expected


@pytest.mark.parametrize(
    "message",
    [resource(), profile({"shm": {"a": "x" * MAX_BYTES}}), {"object": {"kind": "Job", "spec": "x" * MAX_BYTES}}, []],
    ids=["small", "profile", "job", "list"],
)  # fmt: skip
def test_other_objects_are_unchanged(message: Any) -> None:
    assert json.loads(limit_response(dump(message), specs_as_text=True)) == message


def test_text_that_is_no_json_is_unchanged() -> None:
    assert limit_response(b"<" * 2 * LARGE) == b"<" * 2 * LARGE
