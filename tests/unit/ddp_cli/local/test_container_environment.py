"""A container's variables, as the kubelet expands them."""

import base64
from typing import Any

import pytest

from ddp_cli.local.container import NODE_NAME, MissingReference, build_environment, expand, read_data

POD = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"a/b": "label"}, "annotations": {"c": "note"}},
    "spec": {},
}
OBJECTS = {
    ("ConfigMap", "settings"): {"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"LR": "0.1", "1x": ""}},
    ("Secret", "keys"): {
        "kind": "Secret",
        "metadata": {"name": "keys"},
        "data": {"TOKEN": base64.b64encode(b"s3cret").decode()},
        "stringData": {"PLAIN": "text"},
    },
}  # fmt: skip


def build(**container: Any) -> dict[str, str]:
    return build_environment(POD, container, lambda kind, name: OBJECTS.get((kind, name)))


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(NONE)", "$(NONE)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
        ("$$", "$"),
    ],
)
def test_references_are_expanded_like_kubernetes(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expanded


def test_variable_reference_resolves_only_earlier_variables() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)"}, {"name": "C", "value": "3"}]
    assert build(env=env) == {"A": "1", "B": "1$(C)", "C": "3"}


def test_fields_of_pod_are_read() -> None:
    paths = {
        "N": "metadata.name",
        "L": "metadata.labels['a/b']",
        "A": "metadata.annotations['c']",
        "H": "status.hostIP",
        "M": "spec.nodeName",
    }
    env = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in paths.items()]
    assert build(env=env) == {"N": "p", "L": "label", "A": "note", "H": "127.0.0.1", "M": NODE_NAME}


def test_env_from_adds_valid_names_and_env_overrides_it() -> None:
    sources = [{"prefix": "S_", "configMapRef": {"name": "settings"}}, {"secretRef": {"name": "keys"}}]
    result = build(envFrom=sources, env=[{"name": "PLAIN", "value": "$(S_LR)"}])
    assert result["S_LR"] == "0.1"
    assert result["TOKEN"] == "s3cret"
    assert result["PLAIN"] == "0.1"


@pytest.mark.parametrize(
    "container",
    [
        {"envFrom": [{"secretRef": {"name": "missing"}}]},
        {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "missing", "key": "k"}}}]},
    ],
)
def test_missing_secret_is_refused_with_remedy(container: dict[str, Any]) -> None:
    with pytest.raises(MissingReference, match='Secret "missing" is not in the file; add it as another document'):
        build(**container)


def test_missing_key_is_refused_unless_it_is_optional() -> None:
    reference = {"name": "settings", "key": "nothing"}
    with pytest.raises(MissingReference, match='has no key "nothing"'):
        build(env=[{"name": "X", "valueFrom": {"configMapKeyRef": reference}}])
    assert build(env=[{"name": "X", "valueFrom": {"configMapKeyRef": {**reference, "optional": True}}}]) == {}


def test_secret_that_is_not_base64_is_refused() -> None:
    with pytest.raises(MissingReference, match=r"data\.k is not valid base64"):
        read_data({"kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "a"}})
