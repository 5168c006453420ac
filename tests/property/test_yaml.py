"""Any value that we write is read alike by our reader, by PyYAML and by the rules of YAML 1.2 and go-yaml."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api.documents import load_documents
from ddp_operator.api.yaml_writer import format_documents, format_list
from tests.support.fuzzing import examples, tally
from tests.support.scalars import TEXTS, find_kubectl, list_misread, read_by_kubectl

notations = st.from_regex(r"[-+.]?[0-9][0-9_.:xobeE+-]{0,8}", fullmatch=True) | st.floats(allow_nan=False).map(repr)
indicators = st.text(alphabet="ab1e.-+:_ \n\t#'\"{}[],&*!|>?%@`~=<\\/\u2028\x85\ufeffé😀\u200b\r", max_size=40)
texts = st.one_of(st.text(max_size=60), notations, indicators, st.sampled_from(TEXTS))
values = st.recursive(
    texts | st.booleans() | st.none() | st.integers(-(2**63), 2**63 - 1),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@examples(100)
@given(st.dictionaries(texts, values, min_size=1, max_size=4), st.lists(texts, max_size=6))
def test_any_value_is_read_as_written(written: dict[str, Any], line: list[str]) -> None:
    text = format_documents([{"kind": "A", "value": written}])
    assert load_documents(text) == [{"kind": "A", "value": written}]
    assert yaml.safe_load(text)["value"] == written
    assert yaml.safe_load(format_list(line)) == line
    assert load_documents(f"a: {format_list(line)}\n") == [{"a": line}]
    tally("YAML written")


@examples(100)
@given(texts)
def test_no_text_is_written_as_another_type(text: str) -> None:
    assert list_misread(format_documents([[text]])) == []
    assert list_misread(format_list([text])) == []


@pytest.mark.skipif(find_kubectl() is None, reason="needs kubectl, in PATH or beside the control plane of the tests")
@examples(10)
@given(st.lists(texts, min_size=50, max_size=150, unique=True))
def test_any_text_is_read_by_kubectl_as_written(listed: list[str]) -> None:
    kubectl = find_kubectl()
    assert kubectl is not None
    written = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "list": listed}
    written |= {"keys": {text: text for text in listed}}
    assert read_by_kubectl(kubectl, format_documents([written])) == written
