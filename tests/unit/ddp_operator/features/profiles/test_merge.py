"""Merging as Kubernetes merges a pod template; ``test_apiserver_profiles.py`` compares with a real API server."""

import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from ddp_operator.features.profiles.merge import ALTERNATIVES, MERGE_KEYS, merge


def merged_lists(version: str) -> dict[str, set[tuple[str, bool]]]:
    """Return the lists of a pod template that Kubernetes merges by their names: key, and whether with retainKeys."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{version}.0-local"
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    results: dict[str, set[tuple[str, bool]]] = {}

    def walk(schema: dict[str, Any], seen: frozenset[str]) -> None:
        reference = schema.get("$ref", "").rpartition("/")[2]
        if reference:
            if reference not in seen and not reference.endswith("ObjectMeta"):
                walk(definitions[reference], seen | {reference})
            return
        for name, member in schema.get("properties", {}).items():
            key = member.get("x-kubernetes-patch-merge-key")
            if key:
                results.setdefault(name, set()).add((key, "retainKeys" in member["x-kubernetes-patch-strategy"]))
            walk(member, seen)
        if isinstance(schema.get("items"), dict):
            walk(schema["items"], seen)

    walk({"$ref": "/io.k8s.api.core.v1.PodTemplateSpec"}, frozenset())
    return results


@pytest.mark.parametrize("version", ["1.31", "1.36"])
def test_merge_keys_are_those_of_kubernetes(version: str) -> None:
    result = merged_lists(version)
    assert {name: {key for key, _ in keys} for name, keys in result.items()} == {
        name: {key} for name, key in MERGE_KEYS.items()
    }
    retained = {name for name, keys in result.items() if any(retain for _, retain in keys)}
    assert retained | {"env"} == set(ALTERNATIVES)


def pod(**members: Any) -> dict[str, Any]:
    return {"template": {"spec": members}}


CASES: dict[str, tuple[Any, Any, Any]] = {
    "maps": ({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}, "d": 1}),
    "null": ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
    "other lists": (pod(tolerations=[{"key": "a"}]), pod(tolerations=[{"key": "b"}]), pod(tolerations=[{"key": "b"}])),
    "items": (
        pod(containers=[{"name": "a", "image": "1", "args": ["x"]}, {"name": "b"}]),
        pod(containers=[{"name": "a", "image": "2"}]),
        pod(containers=[{"name": "a", "image": "2", "args": ["x"]}, {"name": "b"}]),
    ),
    "order": (
        pod(containers=[{"name": "a"}, {"name": "b"}, {"name": "c"}]),
        pod(containers=[{"name": "x"}, {"name": "b", "image": "1"}]),
        pod(containers=[{"name": "x"}, {"name": "a"}, {"name": "b", "image": "1"}, {"name": "c"}]),
    ),
    "another source of a volume": (
        pod(volumes=[{"name": "v", "emptyDir": {"medium": "Memory"}}]),
        pod(volumes=[{"name": "v", "hostPath": {"path": "/v"}}]),
        pod(volumes=[{"name": "v", "hostPath": {"path": "/v"}}]),
    ),
    "the same source of a volume": (
        pod(volumes=[{"name": "v", "emptyDir": {"medium": "Memory"}}]),
        pod(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]),
        pod(volumes=[{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]),
    ),
    "another source of a variable": (
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "value": "1"}]},
    ),
    "$patch: delete": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "A", "$patch": "delete"}]},
        {"env": [{"name": "B", "value": "2"}]},
    ),
    "$patch: delete of what is not there": ({}, {"env": [{"name": "A", "$patch": "delete"}]}, {"env": []}),
    "$patch: replace of a list": (
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"$patch": "replace"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "B", "value": "2"}]},
    ),
    "$patch: replace of a map": ({"a": {"b": 1}}, {"a": {"$patch": "replace", "c": 1}}, {"a": {"c": 1}}),
    "no items": ({"env": "x"}, {"env": [{"name": "A"}]}, {"env": [{"name": "A"}]}),
    "items without their key": ({"env": [{"name": "A"}]}, {"env": [{"value": "1"}]}, {"env": [{"value": "1"}]}),
}


@pytest.mark.parametrize("case", CASES)
def test_merge_keeps_both_inputs(case: str) -> None:
    base, own, expected = copy.deepcopy(CASES[case])
    assert merge(base, own) == expected
    assert (base, own) == CASES[case][:2]
    assert merge(merge(base, own), own) == expected
