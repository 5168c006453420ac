"""The CustomResourceDefinition: current, structural, and consistent with the parser."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml

from ddp_operator.api.crd import build_crd, render_crd
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.api.structural import document_of
from ddp_operator.features import SCHEMA
from tests.support.builders import resource

CRD = build_crd(SCHEMA)
[VERSION] = CRD["spec"]["versions"]
RESOURCE = VERSION["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


class TestCrdFile:
    def test_fits_into_annotation_of_kubectl_apply(self) -> None:
        assert len(render_crd(CRD).encode()) < 262_144 / 2


class TestStructure:
    def test_schema_has_only_structural_keywords(self) -> None:
        forbidden = {"$ref", "anyOf", "oneOf", "allOf", "not", "$defs", "definitions", "additionalProperties", "title"}
        assert [(path, sorted(forbidden & set(node))) for path, node in nodes(RESOURCE) if forbidden & set(node)] == []

    def test_every_node_has_type(self) -> None:
        peers = ("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")
        assert [p for p, n in nodes(RESOURCE) if "type" not in n and not any(n.get(name) for name in peers)] == []

    def test_no_two_objects_are_taken_for_equal_that_only_have_as_many_members(self) -> None:
        """An API server's == compares only the members in the schema, and of others only their number."""
        objects = [(path, node) for path, node in nodes(RESOURCE["properties"]["spec"]) if node.get("type") == "object"]
        assert [p for p, n in objects if "properties" not in n or "x-kubernetes-preserve-unknown-fields" in n] == []

    def test_every_field_of_spec_is_described(self) -> None:
        spec = RESOURCE["properties"]["spec"]
        assert [path for path, node in nodes(spec) if "description" not in node and not path.endswith("[]")] == []

    @pytest.mark.parametrize("column", VERSION["additionalPrinterColumns"], ids=lambda column: column["name"])
    def test_column_shows_field_that_exists(self, column: dict[str, Any]) -> None:
        if column["jsonPath"].startswith(".metadata"):
            return
        node = RESOURCE
        for name in column["jsonPath"].strip(".").split("."):
            node = node["properties"][name]
        assert node["type"] == column["type"]

    @pytest.mark.parametrize("path", ["scale.statusReplicasPath", "scale.labelSelectorPath", "scale.specReplicasPath"])
    def test_scale_paths_exist(self, path: str) -> None:
        node = RESOURCE
        for name in VERSION["subresources"]["scale"][path.split(".")[1]].strip(".").split("."):
            node = node["properties"][name]


def apply_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """An API server's defaulting by a schema, written independently of the parser."""
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = msgspec.json.decode(msgspec.json.encode(child["default"]))
            if name in value:
                apply_defaults(value[name], child)
    return value


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"nodes": 3, "recovery": {}},
        {"recovery": {"maxRestarts": 0}, "rendezvous": {"backend": "static"}},
        {"checkpoint": {"path": "/c"}, "sharedMemory": "1Gi"},
        {"checkpoint": {"path": "/c", "graceSeconds": 0}, "metrics": {"port": 9000}},
    ],
)
def test_defaults_of_schema_are_those_of_parser(spec: dict[str, Any]) -> None:
    raw = resource(**spec)
    manifest = parse_manifest(yaml.safe_dump(raw), SCHEMA)
    stored = apply_defaults(yaml.safe_load(yaml.safe_dump(raw)), {"properties": {"spec": document_of(SCHEMA.spec)}})
    assert manifest.resource["spec"] == stored["spec"]
    assert msgspec.convert(stored["spec"], SCHEMA.spec) == manifest.job.spec


def test_api_server_fills_in_no_field_but_number_of_nodes_and_suspend() -> None:
    """With a default in the schema, the fields that a job leaves to its profile would look like its own.

    An operator that is rolled back would also refuse every job for a new field that no user has set.
    """
    results = {path[1:] for path, schema in nodes(RESOURCE["properties"]["spec"]) if "default" in schema}
    assert results == {"nodes", "suspend"}
