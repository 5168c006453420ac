"""Any manifest and any text is rendered or refused; ``test_apiserver_manifests`` compares with an API server."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddp_cli.client.validation import check_manifest
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.features import SCHEMA
from tests.support.fuzzing import examples, tally
from tests.support.strategies import FULL, RICH, json, mutated


@examples(100)
@given(mutated(FULL | {"spec": FULL["spec"] | {"template": RICH}}))
def test_any_manifest_is_rendered_or_refused_with_message(raw: Any) -> None:
    try:
        message = yaml.safe_dump_all(check_manifest(yaml.safe_dump(raw, allow_unicode=True)).children)
    except InvalidManifest as error:
        message = str(error)
    assert 0 < len(message) < 550_000  # with the launcher, whose ConfigMap may have 1 MiB
    tally("manifest rendered")


@given(st.text(max_size=60) | st.text(alphabet="{}[]:,&*!|>-? \n\t#'\"%@ab1", max_size=40) | json.map(yaml.safe_dump))
def test_any_text_is_refused_with_message(text: str) -> None:
    with pytest.raises(InvalidManifest):
        parse_manifest(text, SCHEMA)
