"""What the rules and the parser say about the fields of features."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ddp_operator.api.cel import check_rules
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.schema import KERNEL, Schema
from ddp_operator.decide.hooks import Feature, build_schema
from tests.support.builders import Json, resource
from tests.support.decisions import present

ENDED = {"attempt": 1, "firstRunTime": "2026-11-20T12:00:00Z", "completionTime": "2026-11-20T13:00:00Z"}
RUNS = {"attempt": 1, "firstRunTime": "2026-11-20T12:00:00Z"}


def store(schema: Schema, name: str = "train", **spec: Any) -> Json:
    """Return a resource in the form in which the API server evaluates a rule."""
    raw = resource(name, **{"nodes": 1, "suspend": False} | spec)
    return dict(parse_manifest(yaml.safe_dump(raw), schema).written)


def change(item: Json, path: str, value: Any) -> Json:
    """Return a resource with another value at a path."""
    changed = copy.deepcopy(item)
    *folders, last = path.split(".")
    node = changed
    for name in folders:
        node = node.setdefault(name, {})
    node[last] = value
    return changed


def list_refused(item: Json, schema: Schema, old: Json | None = None) -> list[str]:
    """Return the paths that the rules refuse."""
    return [error.path for error in check_rules(item, schema, old)]


def check_fields(
    feature: Feature, good: Mapping[str, Sequence[Any]], bad: Mapping[str, Sequence[Any]], others: Sequence[Json] = ()
) -> None:
    """Check the rules of a feature: each refuses one of ``bad`` by its path, and none refuses ``good``.

    Both have the values by path; the kernel alone must refuse each good one as unknown. ``others``: resources that
    rules over several fields refuse.
    """
    schema = build_schema((feature,))
    base = store(schema, checkpoint={"path": "/ckpt"})
    messages = {error.message for item in others for error in check_rules(item, schema)}
    for path, values in bad.items():
        for value in values:
            errors = check_rules(change(base, path, value), schema)
            assert path in [error.path for error in errors], (path, value)
            messages |= {error.message for error in errors}
    assert {rule.message for rule in present(feature.fields).rules} <= messages

    for path, values in good.items():
        for value in values:
            item = change(base, path, value)
            assert list_refused(item, schema) == [], (path, value)
            parse_resource(item, schema)
            assert "unknown field" in str(_refuse_by_kernel(item))


def list_fixed(feature: Feature, path: str, before: Any, after: Any) -> list[bool]:
    """Return whether a change is refused: of a running job, and of an ended one."""
    schema = build_schema((feature,))
    results = []
    for status in (RUNS, ENDED):
        old = change(store(schema), path, before) | {"status": status}
        results.append(bool(list_refused(change(old, path, after), schema, old)))
    return results


def _refuse_by_kernel(item: Json) -> InvalidManifest | None:
    try:
        parse_resource(item, KERNEL)
    except InvalidManifest as error:
        return error
    return None
