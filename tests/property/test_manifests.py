"""``parse_manifest`` refuses exactly what the CRD's own schema and rules refuse, and never raises anything else."""

import copy
import functools
from typing import Any

import jsonschema
import pytest
import yaml
from cel_expr_python import cel
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client import V1ObjectMeta

from ddp_cli.client.validation import check_manifest
from ddp_operator.api.crd import build_crd
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_manifest
from tests.support.fuzzing import examples, tally
from tests.support.strategies import FULL, RICH, json, mutated

SCHEMA = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
METADATA = set(V1ObjectMeta.attribute_map.values())


def api_server_takes(raw: dict[str, Any]) -> bool:
    """An API server's decision, written from the CRD alone: prune nulls, default, schema, unknown fields, CEL."""
    stored = copy.deepcopy(raw)
    metadata = stored.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        return False
    if not metadata.keys() <= METADATA or not isinstance(metadata.get("namespace"), str | None):
        return False
    if any(metadata.get(part) is not None and not is_string_map(metadata[part]) for part in ("labels", "annotations")):
        return False
    prune(stored, SCHEMA, keep=("metadata",))
    default(stored, SCHEMA)
    if unknown(stored, SCHEMA) or not VALIDATOR.is_valid(stored) or not ints_fit(stored, SCHEMA):
        return False
    return all(holds(node, value) for node, value in walk(stored, SCHEMA))


def is_string_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(member, str) for member in value.values())


def prune(value: Any, schema: dict[str, Any], keep: tuple[str, ...] = ()) -> None:
    if isinstance(value, dict) and "properties" in schema:
        for name in schema["properties"]:
            if value.get(name, "") is None and name not in keep:
                del value[name]
        for name, child in schema["properties"].items():
            if name in value:
                prune(value[name], child)


def default(value: Any, schema: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                default(value[name], child)


def unknown(value: Any, schema: dict[str, Any]) -> bool:
    if schema.get("x-kubernetes-preserve-unknown-fields") or not isinstance(value, dict):
        return False
    known = schema.get("properties", {})
    if not known:
        return False  # metadata
    return any(name not in known or unknown(member, known[name]) for name, member in value.items())


def ints_fit(value: Any, schema: dict[str, Any]) -> bool:
    """JSON numbers beyond 64 bits become floats in Go, and int-or-string is neither a float nor a boolean."""
    if schema.get("x-kubernetes-int-or-string"):
        whole = isinstance(value, float) and value.is_integer()
        return (
            isinstance(value, str)
            or whole
            or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)
        )
    if isinstance(value, int) and schema.get("type") == "integer":
        return abs(value) < 2**63
    if isinstance(value, dict):
        return all(
            ints_fit(value[name], child) for name, child in schema.get("properties", {}).items() if name in value
        )
    if isinstance(value, list) and "items" in schema:
        return all(ints_fit(item, schema["items"]) for item in value)
    return True


def walk(value: Any, schema: dict[str, Any]) -> Any:
    yield schema, value
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name in value:
                yield from walk(value[name], child)


@functools.cache
def program(text: str) -> Any:
    return cel.NewEnv(variables={"self": cel.Type.DYN}).compile(text)


def holds(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, dict):
        # Rules check only the presence of these.
        value = {name: {} if name in ("template", "spec", "status") else member for name, member in value.items()}
    elif isinstance(value, float):
        value = int(value)
    texts = [rule["rule"] for rule in schema.get("x-kubernetes-validations", []) if "oldSelf" not in rule["rule"]]
    return all(program(text).eval(data={"self": value}).value() is True for text in texts)


def taken(raw: Any) -> bool:
    try:
        parse_manifest(yaml.safe_dump(raw, allow_unicode=True))
    except InvalidManifest:
        return False
    return True


@examples(150)
@given(mutated(FULL, outside=("spec", "template")))
def test_schema_refuses_exactly_what_crd_refuses(raw: Any) -> None:
    if raw.get("apiVersion") != FULL["apiVersion"] or raw.get("kind") != FULL["kind"]:
        assert not taken(raw)
    elif not isinstance(raw.get("status") or {}, dict):
        return  # the API server drops a status from a user
    else:
        assert taken(raw) == api_server_takes(raw)
    tally("manifest held against the CRD")


@examples(100)
@given(mutated(FULL | {"spec": FULL["spec"] | {"template": RICH}}))
def test_any_manifest_is_rendered_or_refused_with_message(raw: Any) -> None:
    try:
        message = yaml.safe_dump_all(check_manifest(yaml.safe_dump(raw, allow_unicode=True)).children)
    except InvalidManifest as error:
        message = str(error)
    assert 0 < len(message) < 500_000  # with the launcher, whose ConfigMap may have 1 MiB
    tally("manifest rendered")


def test_oracle_accepts_full_manifest_and_refuses_invalid_ones() -> None:
    assert api_server_takes(FULL)
    for member, value in (("nodes", 0), ("nodes", "2"), ("node", 1), ("rendezvous", {"port": 9400})):
        assert not api_server_takes(FULL | {"spec": FULL["spec"] | {member: value}})


@given(st.text(max_size=60) | st.text(alphabet="{}[]:,&*!|>-? \n\t#'\"%@ab1", max_size=40) | json.map(yaml.safe_dump))
def test_any_text_is_refused_with_message(text: str) -> None:
    with pytest.raises(InvalidManifest):
        parse_manifest(text)
