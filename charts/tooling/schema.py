"""Print ``values.schema.json``: closed, so that a mistyped key is refused with its name instead of being ignored.

``python -m charts.tooling.schema`` prints it; ``make generate`` writes it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from charts.tooling.values import Value, read_values

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def build_schema(values: list[Value]) -> dict[str, Any]:
    """Return the schema of these values. Objects without keywords hold the keys that the file shows, and no others."""
    root: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart ddp-operator",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
    }
    for value in values:
        parent = root
        for name in value.path[:-1]:
            parent = parent["properties"][name]
        parent["properties"][value.path[-1]] = _node(value)
    return root


def _node(value: Value) -> dict[str, Any]:
    node: dict[str, Any] = {"description": value.text} if value.text else {}
    node["type"] = TYPES[type(value.default)]
    if value.is_group:
        # `global` is Helm's own: a chart above this one adds further keys to it.
        node |= {"additionalProperties": value.path == ("global",), "properties": {}}
    else:
        node |= {"default": value.default}
    return node | value.keywords


def render_schema() -> str:
    """Return the file: a line a value, so that a change is read at a glance."""
    return _lines(build_schema(read_values()), 0) + "\n"


def _lines(node: dict[str, Any], depth: int) -> str:
    """Return an object: on one line, unless it holds named properties of its own."""
    if "properties" not in node or "default" in node:
        return json.dumps(node, ensure_ascii=False)
    space = " " * (depth + 1)
    rows = []
    for key, entry in node.items():
        if key == "properties":
            inner = [f"{space} {json.dumps(name)}: {_lines(child, depth + 2)}" for name, child in entry.items()]
            rows.append(f'{space}"properties": {{\n' + ",\n".join(inner) + f"\n{space}}}")
        else:
            rows.append(f"{space}{json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}")
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    sys.stdout.write(render_schema())
