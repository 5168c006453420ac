"""What we write is read alike by PyYAML, kubectl, YAML 1.2 and our own reader."""

from __future__ import annotations

import importlib.util
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import yaml

from ddp_operator.api import yaml_writer
from ddp_operator.api.documents import load_documents
from ddp_operator.api.yaml_writer import format_documents, format_list, format_text
from tests.support.scalars import TEXTS, find_kubectl, list_misread, read_by_kubectl

Json = dict[str, Any]

VALUES = [0, -5, 2**53, 2**63 - 1, 0.5, 5e-05, 1e-06, 1e20, True, False, None]


def build_object(texts: tuple[str, ...]) -> Json:
    """Return an object that has the texts as values and keys of mappings, and as items of nested lists."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a"},
        "data": {f"key-{index}": text for index, text in enumerate(texts)},
        "keys": {text: index for index, text in enumerate(texts)},
        "nested": [[text, {"value": text, text: [text]}] for text in texts],
    }


@pytest.fixture(params=[True, False], ids=["libyaml", "pure Python"])
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module with libyaml, and without it."""
    if not request.param:
        monkeypatch.delattr(yaml, "CSafeDumper", raising=False)
    assert yaml_writer.__spec__ is not None
    module = importlib.util.module_from_spec(yaml_writer.__spec__)
    yaml_writer.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_texts_are_read_as_written(writer: ModuleType) -> None:
    written = build_object(TEXTS)
    text = writer.format_documents([written])
    assert load_documents(text) == [written]
    assert yaml.safe_load(text) == written
    assert list_misread(writer.format_documents([{"a": [*TEXTS]}])) == []


def test_texts_at_ends_of_documents_are_read_as_written(writer: ModuleType) -> None:
    written = [{"kind": "A", "text": text} for text in TEXTS]
    text = writer.format_documents(written)
    assert load_documents(text) == written
    assert list(yaml.safe_load_all(text)) == written


def test_texts_on_one_line_are_read_as_written() -> None:
    text = f"a: {format_list(TEXTS)}\n"
    assert text.count("\n") == 1
    assert load_documents(text) == [{"a": [*TEXTS]}]
    assert yaml.safe_load(text) == {"a": [*TEXTS]}
    assert list_misread(text) == []


@pytest.mark.skipif(find_kubectl() is None, reason="needs kubectl, in PATH or beside the control plane of the tests")
def test_texts_and_numbers_are_read_by_kubectl_as_written() -> None:
    kubectl = find_kubectl()
    assert kubectl is not None
    written = build_object(TEXTS) | {"values": VALUES}
    assert read_by_kubectl(kubectl, format_documents([written])) == written
    head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
    assert read_by_kubectl(kubectl, f"{head}list: {format_list(TEXTS)}\n")["list"] == [*TEXTS]


def test_numbers_are_read_as_written() -> None:
    written = [{"a": VALUES}]
    assert load_documents(format_documents(written)) == written
    assert yaml.safe_load(format_documents(written)) == written[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.py", "train.py"), ("--lr", "--lr"), ("./data/x y", "./data/x y"), ("nvidia.com/gpu", "nvidia.com/gpu"),
        ("64Gi", "64Gi"), ("500m", "500m"), ("5e-05", "'5e-05'"), ("0.2.0", "'0.2.0'"), ("On", "'On'"),
        ("a: b", "'a: b'"), ("", "''"), ("a\nb\n", "|\n  a\n  b"), ("a\u200bb", '"a\\u200bb"'), ("a\x1bb", '"a\\eb"'),
    ],
)  # fmt: skip
def test_words_and_quantities_are_bare_and_lines_a_block(text: str, expected: str) -> None:
    assert format_documents([{"a": text}]) == f"a: {expected}\n"


def test_words_of_a_list_are_bare() -> None:
    words = ["python", "-m", "a.b", "OMP=1", "run a.py", "1e5", "[x]", "a ", "é"]
    assert format_list(words) == '[python, -m, a.b, OMP=1, run a.py, "1e5", "[x]", "a ", "é"]'
    assert format_text("yes") == '"yes"'


def test_keys_keep_their_order_and_values_are_repeated_instead_of_aliases() -> None:
    shared = {"b": 1}
    assert format_documents([MappingProxyType({"z": shared, "a": (shared,)}), {"c": 2}]) == (
        "z:\n  b: 1\na:\n- b: 1\n---\nc: 2\n"
    )
