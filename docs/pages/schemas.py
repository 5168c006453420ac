"""Writes deploy/schemas, JSON Schemas of our kinds for editors: ``python -m docs.pages.schemas DDPTrainingJob``."""

from __future__ import annotations

import json
import sys
from typing import Any

from ddp_operator.api.constants import API_VERSION
from ddp_operator.features import build_definitions


def build_editor_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of what a user writes of a kind."""
    schema = build_definitions()[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    head = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind}, "status": {"type": "object"}}
    schema["properties"] |= {name: part for name, part in head.items() if name in schema["properties"]}
    schema["required"] = ["apiVersion", "kind", "metadata", *schema["required"]]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": kind, **to_json_schema(schema)}


def to_json_schema(schema: Any) -> Any:
    """Return a structural OpenAPI v3 schema as JSON Schema. Unknown fields are errors, unless the schema keeps them."""
    if not isinstance(schema, dict):
        return schema
    result = {
        name: {key: to_json_schema(value) for key, value in part.items()}
        if name == "properties"
        else to_json_schema(part)
        for name, part in schema.items()
        if not name.startswith("x-kubernetes-") and name != "nullable"
    }
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    elif schema.get("nullable"):
        result["type"] = [schema["type"], "null"]
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


if __name__ == "__main__":
    print(json.dumps(build_editor_schema(sys.argv[1]), indent=1, ensure_ascii=False))
