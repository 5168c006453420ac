"""Writes docs/api.md from the resource's schema and rules: ``python -m ddp_operator.api.reference > docs/api.md``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.api.crd import build_crd, build_resource_schema
from ddp_operator.api.rules import RULES

_HEAD: Final = f"""\
# The resource `{constants.KIND}`

<!-- Generated from operator/ddp_operator/api by `make generate`. Do not edit. -->

`apiVersion: {constants.API_VERSION}`, in a namespace; for kubectl also {" and ".join(constants.SHORT_NAMES)}.
`kubectl explain ddp.spec` says the same in a cluster. A field that is not here is refused, by name. Numbers with a
fraction are strings in `status`, and times are RFC 3339 in UTC, as in all of Kubernetes' own resources.

The scale subresource is `spec.nodes`: `kubectl scale ddp/NAME --replicas=4` and a HorizontalPodAutoscaler work on it.
"""


def write_reference() -> str:
    """Return the page."""
    properties = build_resource_schema()["properties"]
    lines = [_HEAD]
    for part, title in (("spec", "What you write"), ("status", "What the operator writes")):
        lines += [f"## {part}", "", f"{title}.", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(*entry) for entry in _walk(properties[part], part)]
        lines.append("")
    lines += ["## Rules", "", "Beyond types and choices; `kubectl apply` and `ddp render` refuse in these words.", ""]
    lines += ["| where | refusal |", "|---|---|"]
    for rule in RULES:
        where = (rule.at + rule.field).strip(".")
        lines.append(f"| `{where}` | {_cell(rule.message)} |")
    lines += ["", "## Columns of `kubectl get ddp`", "", "| column | field |", "|---|---|"]
    for column in build_crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        wide = " (`-o wide`)" if column.get("priority") else ""
        lines.append(f"| {column['name'].upper()}{wide} | `{column['jsonPath'].strip('.')}` |")
    return "\n".join(lines) + "\n"


def _walk(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield every field with its schema, and whether it must be given."""
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}"
        yield below, field, name in schema.get("required", ())
        yield from _walk(field, below)
        if "properties" in field.get("items", {}):
            yield from _walk(field["items"], f"{below}[]")


def _row(path: str, schema: Mapping[str, Any], required: bool) -> str:
    default = "required" if required else ""
    if "default" in schema and schema.get("type") != "object":
        default = f"`{json.dumps(schema['default'])}`"
    return f"| `{path}` | {_type(schema)} | {default} | {_cell(schema.get('description', ''))} |"


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    kind = str(schema.get("type", "object"))
    return f"{kind} ({schema['format']})" if "format" in schema else kind


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(write_reference())
